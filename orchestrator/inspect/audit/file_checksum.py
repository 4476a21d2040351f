"""The checksums of an epoch made from its files alone: each read whole, in order, and encoded again.

`epoch_checksum` sums up what was trained, in a different way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.records_in_memory import Lines, Values
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.lists.manifest import Manifest
from orchestrator.data.sources.readers import Part, read_files
from orchestrator.data.sources.records.content import BadRecordError, bare
from orchestrator.data.sources.windows import OrderedWindow, Window
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.encoder import Encoder, Pieces
from orchestrator.data.tokens.loss_mask import MaskedEncoder
from orchestrator.data.tokens.transforms import Output, Transforms, utf8_size
from orchestrator.errors import DataError
from orchestrator.inspect.audit.epoch_checksum import EpochChecksum
from orchestrator.planning import order
from orchestrator.planning.encoders import EncoderChoice
from orchestrator.records.tokens import Int32Array

# Documents are encoded in batches of about `_BATCH_CHARACTERS` of text, or of `_BATCH_DOCUMENTS`, which makes
# the fixed cost of a call negligible.
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 1 << 15
_BOM = b"\xef\xbb\xbf"
_Origin = tuple[int, int, int]  # number of the file, place in it, number of the record's document


def checksum_files(
    spec: DataSpec,
    encoder: EncoderChoice,
    source: str | None = None,
    epoch: int = 0,
    files: range | None = None,
    done: Callable[[int], None] = lambda num_bytes: None,
) -> EpochChecksum:
    """An epoch of a source (None: the only one), or of these files of it (by their numbers in the manifest):
    each from its first byte to its last, document by document, encoded by `encoder`. Epochs differ by what
    transforms draw. A bad record is counted, whatever `data.on_bad_document` says. `done` is called with the
    stored bytes of each file that is read. Raises as the stream does where a file cannot be read, or a
    transform fails.
    """
    settings, plan = replace(spec.settings, shuffle="none"), spec.plan_of(source or spec.only_source, epoch)
    whole = Encoder(spec.tokenizer, encoder, settings.special_tokens_in_text)
    sums = _FileSums(whole, settings)
    plain = _PlainTexts(plan, settings, sums)
    others = _Documents(spec, plan, settings, epoch, whole, sums)
    at: int | None = None
    for number, part in enumerate(read_files(plan, settings.accept_changed, files)):
        if at not in (None, part.file):
            done(plan.manifest.files[at].bytes)
        at = part.file
        if plain.takes(part):
            plain.add(part)
        else:
            others.add(Window(number=number, last=False, parts=(part,)))
    if at is not None:
        done(plan.manifest.files[at].bytes)
    return sums.finish()


class _PlainTexts:
    """Records that are plain texts: neither held out nor transformed."""

    def __init__(self, plan: SourcePlan, settings: StreamSettings, sums: _FileSums) -> None:
        source, content = plan.source, plan.manifest.content
        chosen = settings.holdout.get(source) or settings.transforms.get(source) or settings.held_out
        self._all = content.kind == "text" and not chosen
        form = plan.manifest.form
        self._parse, self._drops_bom = form.parser(content), form.drops_bom
        self._sums, self._piece_bytes = sums, settings.piece_bytes

    def takes(self, part: Part) -> bool:
        """Whether a part has such records."""
        return self._all and isinstance(part.records, Lines | Values)

    def add(self, part: Part) -> None:
        """Adds all of a part. Its texts are held at the same time."""
        records = list(part.records)
        if part.place == 0 and self._drops_bom and records and records[0] is not None:
            records[0] = records[0].removeprefix(_BOM)
        texts, kept = self._all_of(records) or self._judged(records)
        places, sizes = part.places[kept].tolist(), part.records.sizes[kept]
        begin = 0
        for large in [*np.flatnonzero(sizes > self._piece_bytes).tolist(), len(texts)]:
            self._sums.add_small(part.file, places[begin:large], texts[begin:large])
            if large < len(texts):
                self._sums.add((part.file, places[large], 0), texts[large], int(sizes[large]))
            begin = large + 1

    def _all_of(self, records: list[Any]) -> tuple[list[str], list[int]] | None:
        """The texts of all records; None if one has none, or an empty one."""
        try:
            found: list[Any] = [self._parse(record) for record in records if record is not None]
        except BadRecordError:
            return None
        return (found, list(range(len(found)))) if len(found) == len(records) and all(found) else None

    def _judged(self, records: list[Any]) -> tuple[list[str], list[int]]:
        """Texts, and the numbers of their records. The other records are counted."""
        texts, kept = list[str](), list[int]()
        for index, record in enumerate(records):
            try:
                text = self._parse(record) if record is not None else None
            except BadRecordError:
                self._sums.bad += 1
                continue
            if isinstance(text, str) and text:
                texts.append(text)
                kept.append(index)
            elif text is not None:
                self._sums.empty += 1
            elif record is None:
                self._sums.bad += 1
        return texts, kept


class _Documents:
    """The documents that records give by their rules: some are held out, transformed, or encoded with a loss
    mask.
    """

    def __init__(
        self,
        spec: DataSpec,
        plan: SourcePlan,
        settings: StreamSettings,
        epoch: int,
        encoder: Encoder,
        sums: _FileSums,
    ) -> None:
        self._plan, self._settings, self._epoch, self._sums = plan, settings, epoch, sums
        self._masked = MaskedEncoder(spec.tokenizer, encoder, settings.special_tokens_in_text)
        self._loss = settings.loss.get(plan.source, "assistant")
        refs = settings.transforms.get(plan.source)
        self._transforms = Transforms(refs) if refs else None
        self._keys = _RecordKeys(settings, plan.manifest, epoch)

    def add(self, of: Window) -> None:
        """Adds all records of a window."""
        sums, ends = self._sums, (self._settings.bos_id, self._settings.eos_id)
        window = OrderedWindow(of, self._plan, self._settings, self._epoch)
        for position in range(len(window)):
            origin = window.origin(position)
            held_out = self._keys.is_held_out(origin)
            seed = self._keys.seed(origin) if self._transforms else 0
            found = _documents(window, position, held_out, self._transforms, seed)
            for output, document in enumerate(found):
                try:
                    if document is None:
                        sums.filtered += 1
                    elif isinstance(document, BadRecordError):
                        sums.bad += 1
                    elif held_out:
                        sums.held_out += 1
                    elif isinstance(document, str) and document:
                        size = window.size(position) if self._transforms is None else utf8_size(document)
                        sums.add((*origin, output), document, size)
                    elif isinstance(document, str):
                        sums.empty += 1
                    else:
                        made = self._masked.encode(document, self._loss, ends, self._settings.piece_bytes)
                        sums.add_tokens((*origin, output), [piece.tokens for piece in made.pieces])
                except UnrenderableError:
                    sums.bad += 1


class _RecordKeys:
    """The decisions on a record by its place, made from the rule itself."""

    def __init__(self, settings: StreamSettings, manifest: Manifest, epoch: int) -> None:
        self._bound = order.holdout_bound(settings.holdout.get(manifest.source, 0))
        self._settings, self._manifest, self._epoch = settings, manifest, epoch

    def is_held_out(self, origin: tuple[int, int]) -> bool:
        if not self._bound:
            return False
        key = order.holdout_key(self._manifest.source, self._manifest.files.path(origin[0]))
        return order.is_held_out(origin[1], key, self._bound)

    def seed(self, origin: tuple[int, int]) -> int:
        path = self._manifest.files.path(origin[0])
        key = order.transform_key(self._settings.seed, self._manifest.source, self._epoch, path)
        return order.record_seed(origin[1], key)


def _documents(
    window: OrderedWindow, position: int, held_out: bool, transforms: Transforms | None, seed: int
) -> Sequence[Output]:
    """The documents of a record; none for a blank line, or of a record that is held out itself."""
    try:
        document = window.described(position)
    except BadRecordError as error:
        return ["" if held_out else error]
    if document is None:
        return []
    if held_out or transforms is None:
        return [bare(document)]
    try:
        return transforms.outputs(document, seed)
    except DataError as error:
        raise type(error)(f"{window.place(position)}: {error}", code=error.code) from error


class _FileSums:
    """The sums over files' documents, which are encoded in batches. A large document is encoded in pieces:
    its tokens are never held as a whole.
    """

    def __init__(self, encoder: Encoder, settings: StreamSettings) -> None:
        self.empty = self.bad = self.filtered = self.held_out = 0
        self._encoder, self._piece_bytes = encoder, settings.piece_bytes
        self._ends = tuple(
            np.empty(0, "<i4") if i is None else np.array([i], "<i4")
            for i in (settings.bos_id, settings.eos_id)
        )
        self._documents = self._places = self._digest = self._num_tokens = 0
        # documents of one piece that are not encoded yet, and their places
        self._texts, self._origins = list[str](), tuple[list[int], list[int], list[int]](([], [], []))
        self._characters = 0

    def add(self, origin: _Origin, text: str, size: int) -> None:
        """Adds a document of a record, of at most `size` bytes."""
        pieces = Pieces(text, size, self._piece_bytes)
        if len(pieces) == 1:
            self._hold(origin[0], [origin[1]], origin[2], [text])
            return
        del text
        hasher, bos, eos = self._begin(origin), *self._ends
        hasher.update(bos.data)
        for piece in pieces:
            ids, _ = self._encoder.encode([piece])
            hasher.update(np.ascontiguousarray(ids, dtype="<i4").data)
            self._num_tokens += len(ids)
        hasher.update(eos.data)
        self._num_tokens += len(bos) + len(eos)
        self._digest += hasher.intdigest()

    def add_small(self, file: int, places: list[int], texts: list[str]) -> None:
        """Adds documents of one piece, the first of their records."""
        for begin in range(0, len(texts), _BATCH_DOCUMENTS):
            here = slice(begin, begin + _BATCH_DOCUMENTS)
            self._hold(file, places[here], 0, texts[here])

    def add_tokens(self, origin: _Origin, pieces: Sequence[Int32Array]) -> None:
        """Adds an encoded document, BOS and EOS included. One without pieces is empty."""
        if not pieces:
            self.empty += 1
            return
        hasher = self._begin(origin)
        for tokens in pieces:
            hasher.update(np.ascontiguousarray(tokens, dtype="<i4").data)
            self._num_tokens += len(tokens)
        self._digest += hasher.intdigest()

    def finish(self) -> EpochChecksum:
        """The sums over all documents."""
        self._encode()
        return EpochChecksum(
            documents=self._documents,
            empty=self.empty,
            bad=self.bad,
            filtered=self.filtered,
            held_out=self.held_out,
            places=self._places % 2**64,
            tokens=self._num_tokens,
            digest=self._digest % 2**64,
        )

    def _begin(self, origin: _Origin) -> xxh3_64:
        """The hash state for a document's tokens."""
        held = np.array(origin if origin[2] else origin[:2], "<i8")
        self._documents += 1
        self._places += xxh3_64_intdigest(held.data)
        return xxh3_64(held.data)

    def _hold(self, file: int, places: list[int], output: int, texts: list[str]) -> None:
        self._texts += texts
        values = [file] * len(texts), places, [output] * len(texts)
        for column, more in zip(self._origins, values, strict=True):
            column.extend(more)
        self._characters += sum(map(len, texts))
        if self._characters >= _BATCH_CHARACTERS or len(self._texts) >= _BATCH_DOCUMENTS:
            self._encode()

    def _encode(self) -> None:
        """Encodes and sums up the held documents. A document's bytes are laid side by side as they are
        hashed, origin first.
        """
        if not self._texts:
            return
        (bos, eos), (ids, lengths) = self._ends, self._encoder.encode(self._texts)
        outputs = np.array(self._origins[2], np.int64)
        origins = np.array(self._origins, "<i8").T.copy().view("<i4")  # (num_documents, 6)
        num_origin = np.where(outputs == 0, 4, 6)
        begins_ids = num_origin + len(bos)
        sizes = begins_ids + lengths + len(eos)
        stops = np.cumsum(sizes)
        begins = stops - sizes
        held, is_id = np.empty(int(stops[-1]), "<i4"), np.ones(int(stops[-1]), np.bool_)
        for word in range(origins.shape[1]):
            has = word < num_origin
            held[begins[has] + word] = origins[has, word]
            is_id[begins[has] + word] = False
        for at, end in ((begins + num_origin, bos), (stops - 1, eos)):
            if len(end):
                held[at], is_id[at] = end[0], False
        held[is_id] = ids
        data = held.view(np.uint8).data
        borders = list(zip((4 * begins).tolist(), (4 * stops).tolist(), strict=True))
        ends = (4 * (begins + num_origin)).tolist()
        self._digest += sum([xxh3_64_intdigest(data[begin:stop]) for begin, stop in borders])
        self._places += sum(
            [xxh3_64_intdigest(data[begin:end]) for (begin, _), end in zip(borders, ends, strict=True)]
        )
        self._documents += len(self._texts)
        self._num_tokens += int((sizes - num_origin).sum())
        self._texts, self._origins, self._characters = [], ([], [], []), 0
