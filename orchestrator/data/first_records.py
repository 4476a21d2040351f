"""Checks each source's first records before a run starts.

The files must hold what `format` and `text_field` state, and the transforms must make documents of them.
Nothing is tokenized. `sources` defines records and why one is bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from orchestrator.data.common.settings import StreamSettings
from orchestrator.data.sources.access.input_file import open_input
from orchestrator.data.sources.lists.fragments import SourcePlan
from orchestrator.data.sources.readers import naming_damage
from orchestrator.data.sources.records.content import (
    BadContentError,
    BadRecordError,
    Content,
    Conversation,
    Described,
    Document,
    Preference,
    Prompted,
    WrongFieldError,
    bare,
)
from orchestrator.data.sources.records.line_records import before_a_start
from orchestrator.data.sources.windows import OrderedWindow, read_windows
from orchestrator.data.spec import DataSpec
from orchestrator.data.tokens.chat_template import UnrenderableError
from orchestrator.data.tokens.loss_mask import no_chat_template, special_tokens
from orchestrator.data.tokens.tokenizer_json import parse
from orchestrator.data.tokens.transforms import Transforms
from orchestrator.errors import ConfigError, DataError

# At most this many records are read in each of this many files, and only from the file's first MiB.
NUM_FILES = 8
NUM_RECORDS = 64
# At most this many documents of a source are transformed.
NUM_TRANSFORMED = 16
# At most this many records of a chat source are rendered.
NUM_RENDERED = 32
UNUSABLE, NOTHING_LEARNT = "data.chat_template_unusable", "data.nothing_learnt"


def check_first_records(spec: DataSpec) -> None:
    """Reads, renders and transforms the first records of each source.

    Raises `ConfigError` if none of a source's first records can be read, whatever `on_bad_document` is. The
    error names the first record and its reason, and for a record without its `text_field` the fields that it
    has. Raises `DataError` if a file cannot be read.

    Takes milliseconds: at most 8 MiB of a source are decoded. A single bad record passes here and is a bad
    document of the stream. For a Parquet file, the format and the column were checked when the files were
    listed, and its values are not read here. A source whose first records are longer than 1 MiB is not
    checked. Of a `text` source, only the lines in the first MiB are checked.

    The first chats of a source's order are rendered. Raises `ConfigError` if the template accepts none of
    them or cannot be used, or if they contain no tokens with loss.

    A source's transforms are called with the first documents of its order, on this machine and with the seeds
    of training. Raises `DataError`, with the place, as they would there.
    """
    for plan in spec.plans:
        _check(plan)
        _require_transform_fields(plan)
        if refs := spec.settings.transforms.get(plan.source):
            _try_transforms(plan, spec.settings, Transforms(refs))
        if plan.manifest.content.messages_at is not None:
            _render_chats(plan, spec)


def _try_transforms(plan: SourcePlan, settings: StreamSettings, transforms: Transforms) -> None:
    window = OrderedWindow(next(read_windows(plan, settings, 0, 0)), plan, settings, 0)
    for position in range(min(NUM_TRANSFORMED, len(window))):
        try:
            document = window.described(position)
            if document is not None:
                transforms.outputs(document, window.seed(position))
        except BadRecordError:
            continue
        except DataError as error:
            raise DataError(
                f"{window.place(position)}: {error}\nNothing was started: this run.name is still free",
                code=error.code,
            ) from error


def _render_chats(plan: SourcePlan, spec: DataSpec) -> None:
    """Renders the first chats of a source as in training."""
    from orchestrator.data.tokens.rendering import Renderer  # jinja2 is loaded only for rendering

    settings, chat = spec.settings, spec.tokenizer.chat
    renderer: Renderer | None = None
    loss = settings.loss.get(plan.source, "assistant")
    parse_special = settings.special_tokens_in_text == "parse"
    bad: tuple[str, BadContentError] | None = None
    num_bad, num_texts, roles, num_learnt = 0, 0, Counter[str](), 0
    for where, found in _first_chats(plan, settings):
        try:
            if isinstance(found, BadRecordError):
                raise found
            if isinstance(found, Prompted):
                num_texts += 1
                continue
            if chat is None:
                raise no_chat_template()
            renderer = renderer or Renderer(chat, special_tokens(parse(spec.tokenizer.model_json)))
            rendered = renderer.render(found, loss, parse_special)
        except (BadRecordError, UnrenderableError) as error:
            bad, num_bad = bad or (where, error), num_bad + 1
        except DataError as error:
            raise ConfigError(f"data.sources {plan.source}: {where}: {error}", code=UNUSABLE) from error
        else:
            roles.update(str(message.get("role")) for message in found.messages)
            num_learnt += bool(rendered.targets)
    if bad is not None and not roles and not num_texts:
        first, reason = bad
        raise ConfigError(
            f"data.sources {plan.source}: {first}: {reason}; none of the first {num_bad} chats can be "
            f"rendered. Repair the records or the template, or set {plan.manifest.content.settings}",
            code=reason.error_code or UNUSABLE,
        ) from reason
    if roles and not num_learnt:
        raise ConfigError(
            f"data.sources {plan.source}: nothing of the first chats is learnt with loss={loss}: their roles "
            f"are {', '.join(sorted(roles))}; the answers need the role assistant and a weight other than 0, "
            "or set loss=all",
            code=NOTHING_LEARNT,
        )


def _first_chats(
    plan: SourcePlan, settings: StreamSettings
) -> Iterator[tuple[str, Conversation | Prompted | BadRecordError]]:
    """(place, document or error) of the first chats of a source's order, after its transforms.

    A preference gives both of its rows.
    """
    window = OrderedWindow(next(read_windows(plan, settings, 0, 0)), plan, settings, 0)
    refs = settings.transforms.get(plan.source)
    transforms = Transforms(refs) if refs else None
    for position in range(min(NUM_RENDERED, len(window))):
        where = window.place(position)
        if not window.takes_all and window.is_held_out(position):
            continue
        try:
            document = window.described(position)
        except BadRecordError as error:
            yield where, error
            continue
        if document is None:
            continue
        outputs = (
            [bare(document)] if transforms is None else transforms.outputs(document, window.seed(position))
        )
        for output in outputs:
            for row in output.rows if isinstance(output, Preference) else (output,):
                if isinstance(row, Conversation | Prompted | BadRecordError):
                    yield where, row


def _require_transform_fields(plan: SourcePlan) -> None:
    """Raises `ConfigError` if a name in `transform_fields` has no value in any of the source's first records.

    The records come from files across the whole source. A wrong name would give None in every record, and a
    filter might silently drop all of them.
    """
    manifest, seen = plan.manifest, 0
    first: tuple[int, str] | None = None  # of the checked records: its file, and its place there
    form, lacks = manifest.form, manifest.content.transform_fields
    if form.says_fields or not lacks:
        return
    num_files = min(NUM_FILES, len(manifest.files))
    for number in (i * len(manifest.files) // num_files for i in range(num_files)):
        for where, found in _read_first(plan, number, manifest.content):
            if isinstance(found, Described):
                seen, first = seen + 1, first or (number, where)
                lacks = tuple(name for name in lacks if found.fields[name] is None)
            if not lacks:
                return
    if first is not None:
        # read the field as a text: the error of a record without it lists the fields that it has
        file, where = first
        said = next(
            found for at, found in _read_first(plan, file, Content(text_field=lacks[0])) if at == where
        )
        raise ConfigError(
            f"data.sources {plan.source}: none of the first {seen:,} records has a value in "
            f"`{'` or `'.join(lacks)}`; {manifest.path(file)}: {where}: {said}. Fix transform_fields (if few "
            "records have the field, put one of them first)",
            code="data.missing_field",
        )


def _read_first(
    plan: SourcePlan, number: int, content: Content
) -> Iterator[tuple[str, Document | Described | BadRecordError | None]]:
    """(place, record or error) of a file's first records."""
    manifest = plan.manifest
    row, path = manifest.files[number], manifest.path(number)
    with naming_damage(path), open_input(manifest.base, row.path) as file:
        for where, attempt in manifest.form.first_records(file, row, content):
            try:
                yield where, attempt()
            except BadRecordError as error:
                yield where, error


def _check(plan: SourcePlan) -> None:
    manifest, seen = plan.manifest, 0
    form = manifest.form
    bad: str | None = None
    wrong: str | None = None
    code: str | None = None
    for number in range(min(NUM_FILES, len(manifest.files))):
        row, path = manifest.files[number], manifest.path(number)
        with naming_damage(path), open_input(manifest.base, row.path) as file, before_a_start():
            for where, attempt in islice(form.first_records(file, row, manifest.content), NUM_RECORDS):
                seen += 1
                try:
                    attempt()
                except BadRecordError as error:
                    text = f"data.sources {plan.source}: {path}: {where}: {error}"
                    bad = bad or text
                    if isinstance(error, WrongFieldError):
                        advice = "" if error.error_code else f". Set {manifest.content.settings}"
                        found = f"{text}{advice}", error.error_code or error.field_code
                        wrong, code = (wrong, code) if wrong else found
                else:
                    return
    if wrong is not None:
        raise ConfigError(wrong, code=code)
    if bad is not None:
        raise ConfigError(
            f"{bad}; none of the first {seen} records can be read: "
            f"is data.sources[].format={manifest.format} right? If it is, repair the files or leave them out",
            code="data.wrong_format",
        )
