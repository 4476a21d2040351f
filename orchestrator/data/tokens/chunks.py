"""Tokenizes a block of documents into chunks, in a tokenizer process or in any process with a stream.

It is a pure function of (task, files, tokenizer, settings) and may be repeated at any time.
`planning.encoders` determines the encoder of each document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from orchestrator.data.common.settings import CHECK_ONE_IN, StreamSettings
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.records.content import (
    FIELD_SETTINGS,
    BadContentError,
    BadRecordError,
    Described,
    Document,
    WrongFieldError,
    bare,
)
from orchestrator.data.sources.windows import OrderedWindow, TextRun, Window, read_windows
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.chunk_writer import ChunkWriter, unencodable
from orchestrator.data.tokens.encoder import GIGATOKEN, Encoder, Pieces, UnencodableTextError, difference_text
from orchestrator.data.tokens.loss_mask import Masked, MaskedEncoder
from orchestrator.data.tokens.tokenizer_files import TokenizerModel
from orchestrator.data.tokens.transforms import Output, Transforms, first_difference, utf8_size
from orchestrator.errors import BadDocumentError, DataError, DataIdentityError
from orchestrator.planning.encoders import EncoderChoice, EncoderSpan, Place, encoder_at
from orchestrator.records.tokens import BAD, EMPTY, FILTERED, HELD_OUT, PIECE, TokenChunk, WindowTask

# Records are processed in runs of about this many bytes, the size of a call of the encoder.
_RUN_BYTES = 1 << 20
_NEW_RUN = "in a new run (another run.name; a run keeps its own)"
_ACCEPTED = "and continue with resume.accept_changed=true"
# Called with the decoded bytes of a window that is skipped; returns whether to continue.
Passed = Callable[[int], bool]


def tokenize_block(
    task: WindowTask,
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
    passed: Passed = lambda _: True,
) -> Iterator[TokenChunk]:
    """The chunks of the block that `task` names, from its window, record, output and piece on, in order.

    Earlier windows are read, earlier records ordered, and neither is parsed or tokenized. The last chunk of
    every window, even of an empty one, is marked. `passed` is called with the decoded bytes of each window
    before the task's: they may take an hour and give no chunk. If it returns False, the iteration ends.
    Raises `BadDocumentError` (under `stop`) and `DataError` with the place, and `DataIdentityError` if the
    task's window, record or piece does not exist.
    """
    windows = read_windows(plan, settings, task.epoch, task.block)
    yield from tokenize_windows(task, windows, plan, encoders, settings, passed)


def tokenize_windows(
    task: WindowTask,
    windows: Iterator[Window],
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
    passed: Passed,
) -> Iterator[TokenChunk]:
    """The chunks of these windows of the block that `task` names; see `tokenize_block`."""
    seen = None
    for window in windows:
        if window.number < task.window:
            if not passed(sum(int(part.records.sizes.sum()) for part in window.parts)):
                return
            continue
        seen = window.number
        first = task if seen == task.window else replace(task, window=seen, record=0, output=0, piece=0)
        yield from tokenize_window(first, window, plan, encoders, settings)
    if seen is None:
        raise _absent(task, "the block has fewer windows")


def tokenize_window(
    task: WindowTask, window: Window, plan: SourcePlan, encoders: Encoders, settings: StreamSettings
) -> Iterator[TokenChunk]:
    """The chunks of the window that `task` names, from its record and piece on, in order.

    The last one is marked. Raises as `tokenize_block`.
    """
    assert window.number == task.window, f"window {window.number} is not that of {task}"
    ordered = OrderedWindow(window, plan, settings, task.epoch)
    yield from tokenize_records(task, window, ordered, plan, encoders, settings)


def tokenize_records(
    task: WindowTask,
    window: Window,
    ordered: OrderedWindow,
    plan: SourcePlan,
    encoders: Encoders,
    settings: StreamSettings,
) -> Iterator[TokenChunk]:
    """The chunks of a window whose records are already ordered; see `tokenize_window`."""
    writer = ChunkWriter(task, window.number, window.last, settings, plan.manifest)
    if task.record and task.record >= len(ordered):
        raise _absent(task, f"window {window.number} has {len(ordered)} records")
    records = _Records(writer, ordered, settings, encoders)
    position = task.record
    while position < len(ordered):
        encoder = encoders.at(task.source, (task.epoch, task.block, window.number, position))
        if not writer.encodes_with(encoder):
            yield from writer.encode_with(encoder)
        run = records.run_from(position)
        if run is not None:
            yield from records.add_run(position, run)
        else:
            yield from records.add(position)
        position += 1 if run is None else len(run)
    yield from writer.finish()


def _absent(task: WindowTask, found: str) -> DataIdentityError:
    output = f"document {task.output} of it, " if task.output else ""
    return DataIdentityError(
        f"the cursor names block {task.block} of source {task.source} in epoch {task.epoch}, window "
        f"{task.window}, record {task.record}, {output}piece {task.piece}, but {found}; "
        "the data are not those that the run was started with",
        code="resume.cursor_mismatch",
    )


class _Records:
    """Converts the records of a window to entries of its chunks, from the place of the writer's task on."""

    def __init__(
        self, writer: ChunkWriter, window: OrderedWindow, settings: StreamSettings, encoders: Encoders
    ) -> None:
        self._writer, self._window, self._settings, self._encoders = writer, window, settings, encoders
        self._task = writer.task
        refs = settings.transforms.get(writer.task.source)
        self._transforms = Transforms(refs) if refs else None
        # whether each record is its document; checked for each record
        self._as_they_are = window.takes_all and self._transforms is None

    def add(self, position: int) -> Iterable[TokenChunk]:
        """Adds the entries of one record. Yields the chunks that become full.

        The entries are the pieces of its document or documents, or one that is only counted (empty, bad,
        dropped, held out). A blank line has none.
        """
        window = self._window
        try:
            if not self._as_they_are:
                return self._add_by_rule(position)
            document = window.document(position)
        except BadRecordError as error:
            return self._add_bad(position, error)
        except DataError as error:
            raise type(error)(f"{window.place(position)}: {error}", code=error.code) from error
        return self._add_document(position, document, window.size(position))

    def run_from(self, position: int) -> TextRun | None:
        """The records from a position on for one call of `add_run`. None: the record must be added alone."""
        inside = position == self._task.record and self._task.piece
        if inside or not self._as_they_are or not self._encoders.is_one:
            return None
        return self._window.texts(position, _RUN_BYTES, CHECK_ONE_IN)

    def add_run(self, position: int, run: TextRun) -> Iterator[TokenChunk]:
        """The same as `add` for each of these records, the first of which is at `position`."""
        encoder, settings = self._writer.encoder, self._settings
        special = encoder.count_special_each(run.texts)
        alone = (run.sizes > settings.piece_bytes) | ~np.fromiter(map(bool, run.texts), np.bool_, len(run))
        if encoder.choice.name == GIGATOKEN:
            alone |= run.sampled
        if settings.special_tokens_in_text == "stop":
            alone |= special > 0
        begin = 0
        for stop in [*np.flatnonzero(alone).tolist(), len(run)]:
            if begin < stop:
                here = slice(begin, stop)
                origins = run.files[here], run.places[here]
                yield from self._writer.add_texts(position + begin, origins, run.texts[here], special[here])
            if stop < len(run):
                yield from self.add(position + stop)
            begin = stop + 1

    def _add_by_rule(self, position: int) -> Iterable[TokenChunk]:
        """Adds a record that may be held out, or transformed."""
        window, self._writer.output = self._window, 0
        held_out = not window.takes_all and window.is_held_out(position)
        if held_out and not self._settings.held_out:
            return self._add_held_out(position)
        if self._settings.held_out and not held_out:
            return ()
        document = window.described(position)
        if document is None or self._transforms is None:
            return self._add_document(position, bare(document), window.size(position))
        return self._add_outputs(position, self._transformed(position, document, self._transforms))

    def _add_held_out(self, position: int) -> Iterable[TokenChunk]:
        """Adds a held-out record, unless it is blank. Readers of the hold-out report whether it is bad."""
        with suppress(BadRecordError):
            if self._window.document(position) is None:
                return ()
        self._writer.add(position, self._window.origin(position), HELD_OUT)
        return self._writer.full_chunks()

    def _transformed(
        self, position: int, document: Document | Described, transforms: Transforms
    ) -> list[Output]:
        """The results of the transforms for a record. Some are computed twice, to verify that they are the
        same.
        """
        window, seed = self._window, self._window.seed(position)
        found = transforms.outputs(document, seed)
        if not window.is_sampled(position, CHECK_ONE_IN):
            return found
        again = window.described(position)
        assert again is not None, "it was a document just now"
        if (difference := first_difference(found, transforms.outputs(again, seed))) is not None:
            raise DataError(
                f"data.transforms returned two different results for this record and one seed: {difference}; "
                "a transform may depend only on its document and its seed, not on a clock, a counter or its "
                f"own random generator. Repair it {_NEW_RUN}",
                code="user_code.nondeterministic",
            )
        return found

    def _add_outputs(self, position: int, outputs: Sequence[Output]) -> Iterator[TokenChunk]:
        """Adds the documents of a record, from the task's on."""
        task, writer = self._task, self._writer
        first = task.output if position == task.record else 0
        if first and first >= len(outputs):
            raise _absent(task, f"the transforms make {len(outputs)} documents of that record")
        for number, output in enumerate(outputs[first:], start=first):
            writer.output = number
            if output is None:
                writer.add(position, self._window.origin(position), FILTERED)
                yield from writer.full_chunks()
            elif isinstance(output, BadRecordError):
                yield from self._add_bad(position, output, ", or let the transform drop it (return None),")
            else:
                yield from self._add_document(position, output, utf8_size(output))

    def _add_document(self, position: int, document: Document | None, size: int) -> Iterator[TokenChunk]:
        """Adds a document. `size` bounds the UTF-8 of a text."""
        if document is None:
            return
        writer, window, settings, task = self._writer, self._window, self._settings, self._task
        here = position == task.record and writer.output == task.output
        first_piece = task.piece if here else 0
        if not isinstance(document, str):
            yield from self._add_masked(position, document, first_piece)
            return
        origin = window.origin(position)
        if not document:
            writer.add(position, origin, EMPTY)
            yield from writer.full_chunks()
            return
        pieces = Pieces(document, size, settings.piece_bytes)
        del document  # a large document is held once, as its pieces
        if first_piece >= len(pieces):
            raise _absent(task, f"that document has {len(pieces)} pieces")
        encoder, check = writer.encoder, self._is_checked(position)
        for number in range(first_piece, len(pieces)):
            piece = pieces[number]
            special = encoder.count_special(piece)
            self._judge_special(special, position)
            if check:
                self._check(position, piece)
            last = number == len(pieces) - 1
            if writer.has_masked:
                yield from writer.texts_only()
            writer.add(position, origin, PIECE, piece, number, last, special)
            if writer.is_full:
                yield from writer.full_chunks()

    def _add_masked(
        self, position: int, document: Masked, first_piece: int
    ) -> Iterator[TokenChunk]:
        """Adds a document that is partly trained. A document without targets is counted as empty."""
        writer, window, settings, task = self._writer, self._window, self._settings, self._task
        loss, ends = settings.loss.get(task.source, "assistant"), (settings.bos_id, settings.eos_id)
        encoder = self._encoders.masked(writer.encoder)
        try:
            masked = encoder.encode(document, loss, ends, settings.piece_bytes)
        except UnencodableTextError as error:
            raise unencodable(window.place(position), error) from error
        except DataError as error:
            raise type(error)(f"{window.place(position)}: {error}", code=error.code) from error
        except UnrenderableError as error:
            yield from self._add_bad(position, error)
            return
        if self._is_checked(position):
            at_once = settings.piece_bytes
            self._add_difference(position, lambda: encoder.difference(document, loss, ends, at_once))
        origin, pieces = window.origin(position), masked.pieces
        self._judge_special(masked.special_texts, position)
        if not pieces:
            writer.add(position, origin, EMPTY)
            yield from writer.full_chunks()
            return
        if first_piece >= len(pieces):
            raise _absent(task, f"that document has {len(pieces)} pieces")
        for number in range(first_piece, len(pieces)):
            last = number == len(pieces) - 1
            # special texts of the whole document are counted with its last piece, as the document itself is
            special = masked.special_texts if last else 0
            yield from writer.add_masked(position, origin, pieces[number], number, last, special)
            yield from writer.full_chunks()

    def _add_bad(
        self, position: int, error: BadContentError, other_way: str = ""
    ) -> Iterator[TokenChunk]:
        """Adds a bad record. `other_way` is another remedy in a new run, for the message."""
        reason = f"{self._window.place(position)}: {error}"
        if self._settings.on_bad_document == "stop":
            setting = FIELD_SETTINGS[self._window.content.kind]
            fields = f"{setting} or " if isinstance(error, WrongFieldError) else ""
            how = f"{self._window.in_place(position)}, {_ACCEPTED}"
            raise BadDocumentError(
                f"{reason}; set {fields}data.on_bad_document=skip{other_way} {_NEW_RUN}, or fix the document "
                f"{how}",
                code=error.error_code,
                reason_code=error.code,
            ) from None
        self._writer.add(position, self._window.origin(position), BAD, reason=reason)
        return self._writer.full_chunks()

    def _judge_special(self, special: int, position: int) -> None:
        if special and self._settings.special_tokens_in_text == "stop":
            raise DataError(
                f"{self._window.place(position)}: the text contains {special} special tokens of the "
                f"tokenizer; set data.special_tokens_in_text=text {_NEW_RUN}, or remove them "
                f"{self._window.in_place(position)}, {_ACCEPTED}",
                code="data.special_tokens",
            )

    def _is_checked(self, position: int) -> bool:
        """Whether both libraries encode the documents of the record."""
        choice = self._writer.encoder.choice
        return choice.name == GIGATOKEN and self._window.is_sampled(position, CHECK_ONE_IN)

    def _check(self, position: int, text: str) -> None:
        """Schedules a comparison with `tokenizers`. The stream keeps its own encoder's ids."""
        encoder = self._writer.encoder

        def difference() -> str | None:
            ids, expected = encoder.encode([text])[0], encoder.encode_reference([text])[0]
            return None if np.array_equal(ids, expected) else difference_text(text, ids, expected)

        self._add_difference(position, difference)

    def _add_difference(self, position: int, difference: Callable[[], str | None]) -> None:
        place, choice = self._window.place(position), self._writer.encoder.choice

        def check() -> str | None:
            try:
                found = difference()
            except UnencodableTextError as error:
                return f"{place}: tokenizers cannot encode {error.reason}"
            return None if found is None else f"{place}: {choice}: {found}"

        self._writer.check_later(check)


# --------------------------------------------------------------------------------------- encoders of a stream
class Encoders:
    """The encoders of a stream's past and future documents, each built for its first document."""

    def __init__(
        self, model: TokenizerModel, spans: tuple[EncoderSpan, ...], special_tokens_in_text: str
    ) -> None:
        self._model, self._spans, self._mode = model, spans, special_tokens_in_text
        self._built: dict[EncoderChoice, Encoder] = {}
        self._masked: dict[EncoderChoice, MaskedEncoder] = {}
        self._only: Encoder | None = None  # most runs have one; it is used for each document

    def at(self, source: str, place: Place) -> Encoder:
        """The encoder of the document at `place`. Raises as `Encoder`."""
        if self._only is not None:
            return self._only
        choice = encoder_at(self._spans, source, place)
        if choice not in self._built:
            self._built[choice] = Encoder(self._model, choice, self._mode)
            if len(self._spans) == 1:
                self._only = self._built[choice]
        return self._built[choice]

    @property
    def is_one(self) -> bool:
        """Whether all documents have the same encoder."""
        return len(self._spans) == 1

    def masked(self, encoder: Encoder) -> MaskedEncoder:
        """The encoder of documents with several parts, built on `encoder`, which must be one of these."""
        if encoder.choice not in self._masked:
            self._masked[encoder.choice] = MaskedEncoder(self._model, encoder, self._mode)
        return self._masked[encoder.choice]
