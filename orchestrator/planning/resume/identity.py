"""The identity of a run's token stream, and the changes of a configuration that no resume may make.

The identity has contents, versions and settings that may not change unnoticed. It consists of digests, never
files. The data plane computes them, and the store keeps the record in run.json. `differences` compares the
configuration of a point with a new one. `optimizer_change` refuses another optimizer, or has its state begin
anew.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.optimizer_fields import optimizer_text, stateful_key
from orchestrator.config.redaction import redacted
from orchestrator.errors import Refusal
from orchestrator.planning.resume.source_lists import restart_text

if TYPE_CHECKING:
    from orchestrator.config.schema import JobConfig

FORMAT_VERSION = 1

# Fields that define the stream, besides contents and the encoder, which have their own fields below.
STREAM_SETTINGS = (
    "data.shuffle",
    "data.seed",
    "data.bos",
    "data.eos",
    "data.special_tokens_in_text",
    "data.on_bad_document",
    "data.window_bytes",
    "data.fragment_bytes",
    "pack.mode",
)
OF_A_SOURCE = "data.sources."
SOURCE_SETTINGS = ("format", "text_field")
# Additional settings of a source whose content is not text: what its documents are made of.
CONTENT_SETTINGS = {
    "chat": ("content", "messages_field", "loss"),
    "prompt": ("content", "prompt_field", "completion_field", "loss"),
    "preference": ("content", "prompt_field", "chosen_field", "rejected_field"),
}
# The settings for reading a source's files; they may change together with the files.
OF_ITS_FILES = frozenset({*SOURCE_SETTINGS, *(n for of in CONTENT_SETTINGS.values() for n in of)} - {"loss"})
# The settings for processing a source's records: its own, else those of `data`.
RECORD_SETTINGS = ("transforms", "holdout")
OTHER_VERSION, CHANGED_SETTING = "resume.other_version", "resume.changed_setting"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunIdentity:
    """The frozen identity of a run, in run.json.

    `tokenizer` is the name as it was given, for messages only. `tokenizer_digest` is that of its files'
    contents, and decides. The encoder is the first one (`planning.encoders`). `settings` maps dotted paths
    (and `data.sources.<name>.<field>`) to canonical JSON text. `manifests` maps each source's name to the
    digest of its frozen manifest (their order, by which sources are numbered, is in manifest/data.json).
    `transforms` maps the name of each of `data.transforms` to the blake3 of its module's source, and its
    `VERSION`.
    """

    format_version: int
    order_version: int
    tokenizer: str
    tokenizer_digest: str
    encoder_name: str
    encoder_version: str
    settings: dict[str, str]
    manifests: dict[str, str]
    transforms: dict[str, str] = field(default_factory=dict)


def stream_settings(flat: Mapping[str, Any]) -> dict[str, str]:
    """Returns `RunIdentity.settings` for a flat configuration (`JobConfig.flat`)."""
    settings = {name: _canonical(flat[name]) for name in STREAM_SETTINGS}
    if flat["pack.mode"] != "concat":  # `concat` does not use it, and older runs have only `concat`
        settings["pack.long_document"] = _canonical(flat["pack.long_document"])
    for source in flat["data.sources"]:
        for name in (*SOURCE_SETTINGS, *CONTENT_SETTINGS.get(source.get("content", "text"), ())):
            settings[f"data.sources.{source['name']}.{name}"] = _canonical(source[name])
        settings |= _fields_for_transforms(f"data.sources.{source['name']}.", source)
        for name in RECORD_SETTINGS:
            own = source.get(name)
            if value := flat[f"data.{name}"] if own is None else own:  # older runs have none
                settings[f"data.sources.{source['name']}.{name}"] = _canonical(value)
    return settings


def content_settings(kind: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings for reading one source's files, by field name, as far as `values` has them."""
    read = ("format", "text_field") if kind == "text" else ("format", *CONTENT_SETTINGS[kind])
    found = {name: _canonical(values[name]) for name in read if name in values}
    found |= _fields_for_transforms("", values)
    return found if kind == "text" else found | {"content": _canonical(kind)}


def _fields_for_transforms(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Returns nothing if there are none, as in older runs."""
    fields = values.get("transform_fields")
    return {f"{prefix}transform_fields": _canonical(list(fields))} if fields else {}


def compare(old: RunIdentity, new: RunIdentity, accept_changed: bool = False) -> tuple[Refusal, ...]:
    """Returns why a job of identity `new` may not continue the run of identity `old`; empty if it may.

    `accept_changed` (`resume.accept_changed`) accepts changed files (data rule 13), nothing else. The encoder
    may change: `planning.encoders` decides how.
    """
    refusals = list[Refusal]()
    if old.format_version != new.format_version:
        text = (
            f"the run was written in format {old.format_version}, this program writes format "
            f"{new.format_version}; use the version of orchestrator that the run was started with, "
            "or start a new run under another run.name"
        )
        refusals.append(Refusal(OTHER_VERSION, text))
    if old.order_version != new.order_version:
        text = (
            f"the run's document order has version {old.order_version}, this program computes version "
            f"{new.order_version}; use the version of orchestrator that the run was started with, "
            "or start a new run under another run.name"
        )
        refusals.append(Refusal(OTHER_VERSION, text))
    if old.tokenizer_digest != new.tokenizer_digest:
        text = (
            f"the run was started with tokenizer {old.tokenizer} (content {old.tokenizer_digest}), "
            f"the job asks for {new.tokenizer} (content {new.tokenizer_digest}); "
            "keep the tokenizer, or start a new run under another run.name"
        )
        refusals.append(Refusal("resume.changed_tokenizer", text))
    refusals += _compare_settings(old.settings, new.settings)
    refusals += _compare_transforms(old.transforms, new.transforms)
    refusals += _compare_manifests(old.manifests, new.manifests, accept_changed)
    return tuple(refusals)


def _compare_settings(old: Mapping[str, str], new: Mapping[str, str]) -> list[Refusal]:
    return [
        Refusal(
            CHANGED_SETTING,
            f"the run was started with {name}={old.get(name, 'nothing')}, "
            f"the job asks for {new.get(name, 'nothing')}; "
            f"keep the value, {or_anew(name)}or start a new run under another run.name",
        )
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


def or_anew(name: str) -> str:
    """Returns the advice to restart a field's source, for messages.

    Empty for a field that may not change at a restart.
    """
    source, _, of_it = name.removeprefix(OF_A_SOURCE).rpartition(".")
    free = name.startswith(OF_A_SOURCE) and of_it in OF_ITS_FILES
    return f"{restart_text(source)}, " if free else ""


def _compare_transforms(old: Mapping[str, str], new: Mapping[str, str]) -> list[Refusal]:
    """Compares the transforms that both have. The settings list which transforms there are."""
    return [
        Refusal(
            "resume.changed_transform",
            f"the module of the transform {name} had source {old[name]} when the run was started, and has "
            f"{new[name]} now; restore the module, or start a new run under another run.name",
        )
        for name in sorted(old.keys() & new.keys())
        if old[name] != new[name]
    ]


def _compare_manifests(old: Mapping[str, str], new: Mapping[str, str], accept_changed: bool) -> list[Refusal]:
    if old.keys() != new.keys():  # run.json is sorted by keys; their order is in manifest/data.json
        text = (
            f"the run was started with data.sources {sorted(old)}, the job asks for {sorted(new)}; "
            "keep the sources and their names, or start a new run under another run.name"
        )
        return [Refusal("resume.changed_sources", text)]
    return [
        Refusal(
            "data.changed_files",
            f"the files of source {name} have changed: the run's manifest has digest {digest}, "
            f"the files now give {new[name]}; put the files back, {restart_text(name)}, or accept them with "
            "resume.accept_changed=true",
        )
        for name, digest in old.items()
        if digest != new[name] and not accept_changed
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


# --------------------------------------------------------------------------------- changes of a configuration
_CHANGING = ("weight", "max_epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field whose value differs from the point's.

    `rule` defines what a resume may do with it: same, may_change or free.
    """

    field: str
    old: Any
    new: Any
    rule: str

    def __str__(self) -> str:
        old, new = self.shown
        return f"{self.field}: {old} -> {new}"

    @property
    def shown(self) -> tuple[str, str]:
        """Both values for people, without secrets."""
        return value_text(redacted(self.old, self.field)), value_text(redacted(self.new, self.field))

    def parts(self) -> tuple[Difference, ...]:
        """Returns what differs inside the values, by path: `model.lora.rank` of the field `model.lora`.

        For people. Mappings are compared by key, and lists of mappings by entry if they have as many. A
        missing key is None.
        """
        inside = list(_inside(self.field, self.old, self.new))
        return tuple(replace(self, field=path, old=old, new=new) for path, old, new in inside) or (self,)


def _inside(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    pairs: list[tuple[object, Any, Any]]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        pairs = [(key, old.get(key), new.get(key)) for key in sorted({*old, *new})]
    elif _are_sections(old) and _are_sections(new) and len(old) == len(new):
        pairs = [(number, *both) for number, both in enumerate(zip(old, new, strict=True))]
    else:
        yield path, old, new
        return
    for key, before, now in pairs:
        if before != now:
            yield from _inside(f"{path}.{key}", before, now)


def _are_sections(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, Mapping) for each in value)


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    rules: Mapping[str, str],
    restarted: Collection[str] = (),
) -> tuple[Difference, ...]:
    """Returns the fields that differ between two flat configurations, by name. Missing values are None.

    `rules` maps a dotted path to its resume rule. A field without one must stay the same. Fields of a source
    are named by it (`data.sources.web.weight`). A source that only one of them has is a field of its own
    (`data.sources.web`), which may change, as may the fields of a source that is `restarted`. The order of
    sources has no meaning. A `train.precision` that is the weights' own type must also stay, because a
    point's weights would otherwise have to be rounded.
    """
    names = names_of_sources(old), names_of_sources(new)
    both = names[0] & names[1]
    old, new = _by_source(old, both), _by_source(new, both)

    def rule(name: str) -> str:
        if name.startswith(OF_A_SOURCE):
            source, _, of_it = name.removeprefix(OF_A_SOURCE).rpartition(".")
            free = of_it in _CHANGING or name.removeprefix(OF_A_SOURCE) in names[0] ^ names[1]
            anew = source in restarted and of_it != "loss"
            return "may_change" if free or anew else "same"
        pure = name == "train.precision" and "pure_bf16" in (old.get(name), new.get(name))
        return "same" if pure else rules.get(name, "same")

    return tuple(
        Difference(field=name, old=old.get(name), new=new.get(name), rule=rule(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def names_of_sources(flat: Mapping[str, Any]) -> set[str]:
    """Returns the names of a flat configuration's sources."""
    return {each["name"] for each in flat.get("data.sources") or ()}


def _by_source(flat: Mapping[str, Any], both: Collection[str]) -> dict[str, Any]:
    """Makes each field of the sources in `both`, and each other source, a field of its own.

    The weight of a single source has no meaning and is left out.
    """
    found = dict(flat)
    sources = found.pop("data.sources", None) or []
    for each in sources:
        prefix = f"{OF_A_SOURCE}{each['name']}"
        if each["name"] not in both:
            found[prefix] = each["path"]
            continue
        untold = ("name",) if len(sources) > 1 else ("name", "weight")
        found |= {f"{prefix}.{name}": value for name, value in each.items() if name not in untold}
    return found


def refusals(
    different: Iterable[Difference],
    point: str,
    content_known: bool,
    moved: Mapping[str, str] = {},  # noqa: B006  never changed
) -> tuple[Refusal, ...]:
    """Returns a refusal for each value that no resume may change.

    `point` is its name, or empty without a point. A path names a content. If contents are compared too
    (`content_known`), a different path is not refused. `moved`: why the content at the new path of a field is
    another one, empty if it is the same.
    """
    subject = f"resume point {point}" if point else "the run"
    return tuple(
        Refusal(
            CHANGED_SETTING,
            f"{subject} was made with {part.field}={part.shown[0]}, the job asks for "
            f"{part.shown[1]}{_because(moved.get(d.field))}; keep {part.field}={part.shown[0]}, "
            f"{or_anew(d.field)}or start a new run under another run.name",
        )
        for d in different
        for part in d.parts()
        if d.rule == "same" and not (content_known and is_content(d)) and moved.get(d.field) != ""
    )


def _because(why: str | None) -> str:
    return f" ({why})" if why else ""


def is_content(difference: Difference) -> bool:
    """Whether only names of contents differ: another path to a tokenizer, or to a source."""
    name = difference.field
    return name == "data.tokenizer" or (name.startswith(OF_A_SOURCE) and name.endswith(".path"))


def with_defaults(old_flat: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the current defaults of fields that did not exist when the point was made."""
    from orchestrator.config.field_rules import field_rules, in_todays_fields

    defaults = {rule.path: rule.default for rule in field_rules() if not rule.required}
    return {**defaults, **in_todays_fields(old_flat)}


def value_text(value: Any) -> str:
    """Returns a value of the configuration as JSON (null, true); a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


# ------------------------------------------------------------------------------------------ another optimizer
OTHER_OPTIMIZER = "resume.changed_optimizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerChange:
    """Another optimizer than that of the point. `refusal`: None if its state may begin anew."""

    note: str
    refusal: Refusal | None


def optimizer_change(
    old: Mapping[str, Any], job: JobConfig, point: str, num_steps: int
) -> OptimizerChange | None:
    """Compares the optimizer of the job with that of `point`; None: its state is continued.

    `old` is the point's flat configuration with all fields, `num_steps` the number of its optimizer's steps.
    Arguments of a plug-in may also change which state it has; a worker finds that in the tensors.
    """
    new = job.flat()
    if stateful_key(old) == stateful_key(new):
        return None
    before, after = optimizer_text(old), optimizer_text(new)
    refusal = None
    if job.resume.optimizer != "reset":
        refusal = Refusal(
            OTHER_OPTIMIZER,
            f"resume point {point} has the state of the optimizer {before} after {num_steps} steps, the job "
            f"asks for {after}, which cannot continue it; keep train.optimizer and its arguments, or let the "
            "optimizer's state begin anew with resume.optimizer=reset",
        )
    return OptimizerChange(
        note="the optimizer's state begins anew where resume.optimizer=reset: the point has that of "
        f"{before} after {num_steps} steps, the job trains with {after}",
        refusal=refusal,
    )
