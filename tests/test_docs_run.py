"""Every ```sh and ```python block of README and docs/ is run: in order, in one folder per document.

The folder has `jobs/`, a small corpus that says it is the sample corpus, and the project's `configs/` as
tests/small_configs.py makes them; `cluster.address: null` joins the tests' Ray. A comment before a block says
what a reader sees from the text:

- `<!-- not run: REASON -->`: it cannot run here; `NOT_RUN` has all of these.
- `<!-- in a terminal of its own -->`: the blocks after it run meanwhile, until the next of its kind.
- `<!-- once it says: TEXT -->`: the block is run when that terminal has shown TEXT.
- `<!-- exit code N -->`: it ends so, not with 0.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from orchestrator.data.sample_corpus import MARKER, VERSION, CorpusReport
from orchestrator.json_form import encode
from tests.conftest import TOKENIZER_VOCAB
from tests.small_configs import write_small_configs

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("ray")]
ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240.0
FENCE = re.compile(r"^((?:<!--.*?-->\n)*)```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# the run that how-tos begin with is made once: this block then finds a copy of it, done
COMMON_RUN = "orchestrator train configs/small.yaml train.max_steps=60\n"
# run by tests/test_docs_alone.py, beside those on the Ray cluster: nothing in them needs one
ALONE = (
    "docs/howto/cards.md",
    "docs/howto/formats.md",
    "docs/howto/mix-sources.md",
    "docs/howto/own-loop.md",
    "docs/howto/transforms.md",
)
# what the blocks that no test can run here begin with
NOT_RUN = {
    "README.md": ["make quickstart"],
    "docs/commands.md": ["orchestrator dashboard runs"],
    "docs/dashboard.md": ["orchestrator dashboard runs"],
    "docs/howto/clusters.md": [
        "export RAY_AUTH_MODE=token",
        "export RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1",
        "torchrun --nproc-per-node",
    ],
    "docs/howto/own-loop.md": ["import lightning", "import json\n\nimport orchestrator\nfrom torchtitan"],
    "docs/howto/spot-machines.md": ["orchestrator doctor runs", "#!/bin/bash\n#SBATCH"],
    "docs/storage.md": ["pip install -e '.[remote]'"],
    "docs/tutorial.md": ["python3 -m venv .venv"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of a document, and what the comments before it say."""

    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        """Why it is not run."""
        return next((note[8:].strip() for note in self.notes if note.startswith("not run:")), None)

    @property
    def exit_code(self) -> int:
        """How it must end."""
        return next((int(note[10:]) for note in self.notes if note.startswith("exit code ")), 0)

    @property
    def own_terminal(self) -> bool:
        """Whether it goes on while the next blocks run."""
        return "in a terminal of its own" in self.notes

    @property
    def once(self) -> str | None:
        """What the other terminal shows before it is run."""
        return next((note[13:].strip() for note in self.notes if note.startswith("once it says:")), None)


def blocks(path: Path) -> list[Block]:
    return [
        Block(
            language=language,
            text=text,
            notes=tuple(note.strip() for note in re.findall(r"<!--(.*?)-->", notes)),
        )
        for notes, language, text in FENCE.findall(path.read_text())
    ]


DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if blocks(path)]
NAMES = {path.relative_to(ROOT).as_posix(): path for path in DOCUMENTS}


@pytest.mark.parametrize("name", NAMES)
def test_no_block_of_commands_escapes_the_reader(name: str) -> None:
    text = NAMES[name].read_text()
    fences = re.findall(r"^[ \t>]*```[ \t]*(?:sh|bash|shell|console|python|py)\b", text, re.MULTILINE)
    assert len(fences) == len(blocks(NAMES[name]))
    known = r"not run: .+|in a terminal of its own|once it says: .+|exit code \d+"
    unknown = [note for block in blocks(NAMES[name]) for note in block.notes if not re.fullmatch(known, note)]
    assert unknown == []


def test_the_blocks_that_are_not_run_are_those_of_the_list() -> None:
    for name, path in NAMES.items():
        marked = [block.text for block in blocks(path) if block.reason is not None]
        listed = NOT_RUN.get(name, [])
        assert len(marked) == len(listed), name
        assert all(text.startswith(words) for text, words in zip(marked, listed, strict=True)), name
    assert NOT_RUN.keys() <= NAMES.keys()


# ------------------------------------------------------------------------------------- running
@pytest.fixture(scope="module")
def programs(warm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with `orchestrator`, and `python` as the documents' reader has it."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "orchestrator"
    command.write_text(f'#!/bin/sh\nexec {warm} -m orchestrator.cli.commands "$@"\n')
    command.chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    return folder


@pytest.fixture(scope="module")
def sample(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' corpus as `orchestrator sample-corpus` would have left it."""
    folder = tmp_path_factory.mktemp("sample") / "corpus"
    shutil.copytree(corpus, folder)
    parts = sorted(folder.glob("*.jsonl"))
    report = CorpusReport(
        version=VERSION,
        source="Python's standard library",
        documents=sum(len(part.read_bytes().splitlines()) for part in parts),
        text_bytes=sum(part.stat().st_size for part in parts),
        skipped_files=0,
        empty_files=0,
        vocab_size=TOKENIZER_VOCAB,
        sizes={part.name: part.stat().st_size for part in parts},
    )
    (folder / MARKER).write_bytes(orjson.dumps(encode(report)))
    return folder


@pytest.fixture
def folder(sample: Path, tmp_path: Path) -> Path:
    """What a document's reader stands in."""
    shutil.copytree(sample, tmp_path / "corpus")
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    write_small_configs(tmp_path / "configs")
    return tmp_path


@pytest.fixture(scope="module")
def common_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `runs/` of `COMMON_RUN` lies once it is made."""
    return tmp_path_factory.mktemp("common") / "runs"


class Terminal:
    """A shell, or Python, with all that it shows in a file; ended with the test."""

    def __init__(self, block: Block, words: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._block, self._words = block, words
        self._shown = folder / f".shown-{len(list(folder.glob('.shown-*')))}"
        with self._shown.open("wb") as file:
            self._process = subprocess.Popen(
                words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def text(self) -> str:
        return self._shown.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it has shown `text`."""
        never = threading.Event()
        for _ in range(int(LIMIT_S / 0.05)):
            if text in self.text():
                return
            assert self._process.poll() is None, f"it has ended and never said {text!r}:\n{self.text()}"
            never.wait(0.05)
        raise AssertionError(f"it never said {text!r}:\n{self.text()}")

    def end(self) -> None:
        """Until it has ended, as the block says."""
        try:
            ended = self._process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self._block.text}has not ended:\n{self.text()}") from None
        assert ended == self._block.exit_code, f"{self._block.text}ended with {ended}:\n{self.text()}"

    def close(self) -> None:
        """Whatever it still does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture
def shells(head: Any, warm: str, programs: Path, folder: Path) -> Iterator[Any]:
    """Starts a block; none is left afterwards."""
    with started(warm, programs, folder, RAY_ADDRESS=head.address) as start:
        yield start


@contextmanager
def started(warm: str, programs: Path, folder: Path, **more: str) -> Iterator[Any]:
    """What starts a block, with these variables; none is left afterwards."""
    path = os.pathsep.join((str(programs), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **more}
    made: list[Terminal] = []

    def start(block: Block) -> Terminal:
        if block.language == "sh":
            words = ["bash", "-euo", "pipefail", "-c", block.text]
        else:
            script = folder / f".block-{len(made)}.py"
            script.write_text(block.text)
            words = [warm, "-X", "forked-with-ray", str(script)]
        made.append(Terminal(block, words, folder, environment))
        return made[-1]

    yield start
    for terminal in made:
        terminal.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ALONE])
@pytest.mark.quick("README.md", "docs/howto/migrate.md", "docs/howto/spot-machines.md")
def test_every_block_of_a_document_does_what_it_says(
    name: str, shells: Any, folder: Path, common_run: Path
) -> None:
    other: Terminal | None = None
    for block in blocks(NAMES[name]):
        if block.reason is not None:
            continue
        if block.text == COMMON_RUN and common_run.exists():
            shutil.copytree(common_run, folder / "runs")
        if block.once is not None:
            assert other is not None, f"{block.text}: there is no other terminal"
            other.wait_for(block.once)
        if block.own_terminal:
            if other is not None:
                other.end()
            other = shells(block)
        else:
            shells(block).end()
        if block.text == COMMON_RUN and not common_run.exists():
            shutil.copytree(folder / "runs", common_run)
    if other is not None:
        other.end()
