"""Builds a real corpus and a tokenizer trained on it, from Python's standard library.

A build is complete or absent. The same files give the same corpus, byte for byte.
"""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from orchestrator.errors import DataError, OrchestratorError, RefusedError, StorageError
from orchestrator.json_form import decode, encode

VERSION = 1
NUM_PARTS = 8
VOCAB_SIZE = 8192
END_OF_TEXT = "<|endoftext|>"
# more text takes longer and hardly changes 8,000 tokens
TRAINING_BYTES = 8_000_000
MARKER = "corpus.json"
_TAKEN = "output.folder_taken"
_NOT_TEXT = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReport:
    """The content of a corpus folder; also the content of its `corpus.json`. `sizes` are bytes per part."""

    version: int
    source: str
    documents: int
    text_bytes: int
    skipped_files: int
    empty_files: int
    vocab_size: int
    sizes: dict[str, int]

    def __str__(self) -> str:
        """Two lines for messages."""
        skipped = f"; skipped: {self.skipped_files} not UTF-8 text, {self.empty_files} empty"
        return (
            f"{self.documents:,} documents, {self.text_bytes / 1e6:.1f} MB of text: {self.source}{skipped}\n"
            f"{len(self.sizes)} jsonl files and a tokenizer of {self.vocab_size:,} tokens"
        )


def build_sample_corpus(out: Path, source: Path | None = None) -> CorpusReport:
    """Fills the folder `out` with `part-N.jsonl` (fields `path`, `text`), `tokenizer/` and `corpus.json`.

    Documents are the UTF-8 text files below `source` (None: the `.py` files of this interpreter's standard
    library), in the order of their paths. A complete corpus of the same source is left as it is and reported.
    Raises `RefusedError` if `out` holds anything else, `DataError` if there is no text, `StorageError` if the
    folder cannot be written.
    """
    out = Path(os.path.abspath(out))
    label = "Python's standard library" if source is None else str(source.resolve())
    done = _existing(out, label)
    if done is not None:
        return done
    making = out.parent / f".{out.name}.making-{os.getpid()}"
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        report = _fill(making, label, _documents(source, out))
        # works only on an empty or missing folder: a faster process keeps its corpus
        making.replace(out)
    except OSError as error:
        done = _existing(out, label)
        if done is not None:
            return done
        raise StorageError(
            f"{out}: the corpus cannot be written: {error}; choose another folder", code="storage.failed"
        ) from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return report


def _existing(out: Path, label: str) -> CorpusReport | None:
    """The report of the complete corpus in `out`; None if there is room for one."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    advice = "give another folder, or delete this one"
    try:
        report = decode(CorpusReport, json.loads((out / MARKER).read_text(encoding="utf-8")))
    except (OSError, ValueError, OrchestratorError) as error:
        raise RefusedError(
            f"{out} is not empty and was not made by sample-corpus; {advice}", code=_TAKEN
        ) from error
    if report.source != label:
        raise RefusedError(
            f"{out} holds a corpus of {report.source}, one of {label} was requested; {advice}", code=_TAKEN
        )
    for name, size in report.sizes.items():
        found = (out / name).stat().st_size if (out / name).is_file() else None
        if found != size:
            raise RefusedError(
                f"{out / name} has {found} bytes, it was made with {size}; {advice}", code=_TAKEN
            )
    if not (out / "tokenizer" / "tokenizer.json").is_file():
        raise RefusedError(f"{out}/tokenizer is not complete; {advice}", code=_TAKEN)
    return report


def _documents(source: Path | None, out: Path) -> list[tuple[str, Path]]:
    """(relative path with `/`, file) of every possible document, in the order of the paths."""
    base = Path(sysconfig.get_path("stdlib")) if source is None else source.resolve()
    if not base.is_dir():
        raise DataError(f"{base} is not a folder; give a folder of text files", code="data.not_a_folder")
    found = []
    for folder, folders, names in os.walk(base):
        here = Path(folder)
        # the corpus itself may lie in its source folder
        folders[:] = [n for n in folders if not n.startswith(".") and here / n != out and n not in _NOT_TEXT]
        for name in names:
            wanted = not name.startswith(".") and (source is not None or name.endswith(".py"))
            if wanted and (here / name).is_file():
                path = os.fsencode((here / name).relative_to(base).as_posix())
                found.append((path.decode("utf-8", "backslashreplace"), here / name))
    return sorted(found)


def _fill(folder: Path, label: str, documents: list[tuple[str, Path]]) -> CorpusReport:
    names = [f"part-{part}.jsonl" for part in range(NUM_PARTS)]
    count = text_bytes = skipped = empty = 0
    with ExitStack() as files:
        parts = [files.enter_context((folder / name).open("wb")) for name in names]
        for path, file in documents:
            text = _text(file)
            if text:
                parts[count % NUM_PARTS].write(orjson.dumps({"path": path, "text": text}) + b"\n")
                count += 1
                text_bytes += len(text.encode())
            skipped += text is None
            empty += text == ""
    if not count:
        raise DataError(
            f"no UTF-8 text in the {len(documents)} files of {label}; give a folder of text files",
            code="data.no_text",
        )
    for name in names[count:]:
        (folder / name).unlink()
    names = names[:count]
    report = CorpusReport(
        version=VERSION,
        source=label,
        documents=count,
        text_bytes=text_bytes,
        skipped_files=skipped,
        empty_files=empty,
        vocab_size=train_tokenizer(
            _every(folder, names, -(-text_bytes // TRAINING_BYTES)), VOCAB_SIZE, folder / "tokenizer"
        ),
        sizes={name: (folder / name).stat().st_size for name in names},
    )
    (folder / MARKER).write_text(json.dumps(encode(report), indent=1) + "\n", encoding="utf-8")
    return report


def _text(file: Path) -> str | None:
    """The file's text; None if it is not UTF-8 or contains a NUL, as no text does."""
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error}; fix that or leave the file out", code="data.unreadable_file"
        ) from error
    return None if "\0" in text else text


def _every(folder: Path, names: list[str], nth: int) -> Iterator[str]:
    """The text of every `nth` document of each part: a sample spread over the whole corpus."""
    for name in names:
        with (folder / name).open("rb") as lines:
            for number, line in enumerate(lines):
                if number % nth == 0:
                    yield orjson.loads(line)["text"]


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> int:
    """Trains a byte-level BPE tokenizer (as GPT-2's) on `texts` into `folder`, loadable by `AutoTokenizer`.

    Any text can be encoded, and decodes to itself. Returns the number of tokens: `vocab_size`, or fewer if
    `texts` are too few. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    # the model limits the length: without a value here, transformers warns about long documents
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": 10**9,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return int(tokenizer.get_vocab_size())
