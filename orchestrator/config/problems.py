"""Converts pydantic's findings about a configuration to sentences for users.

It checks plain JSON values, so that one invalid field does not hide problems of the others.
"""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from orchestrator.config.redaction import redacted_text
from orchestrator.config.text import Path, Problem, dotted, value_at

_NUMBER = re.compile(r"^[-+]?[0-9.]+([eE][-+]?[0-9]+)?$")
MISSING = "config.missing_key"
# The kinds of pydantic's findings about a number outside of its bounds.
_BOUNDS = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal"})


def describe(error: ValidationError, value: Mapping[str, Any], root: type[BaseModel]) -> Iterator[Problem]:
    """Returns one problem per field that pydantic refused.

    Its text has the value, what is expected, and perhaps "did you mean".
    """
    findings: dict[Path, tuple[list[str], FieldInfo | None]] = {}
    unknown: dict[Path, Path] = {}  # by field: the newest unknown key inside its value
    for finding in error.errors(include_url=False, include_input=False, include_context=False):
        path, info = _field_of(finding["loc"], root)
        findings.setdefault(path, ([], info))[0].append(finding["type"])
        if finding["type"] == "extra_forbidden" and finding["loc"] != path:
            unknown[path] = finding["loc"]
    for path, (kinds, info) in findings.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in findings):
            continue  # a list with invalid entries is also called too short: only the entries are reported
        found = value_at(value, path)
        inside = _unknown_inside(path, unknown[path], info) if path in unknown else None
        if inside is not None:
            yield Problem(path=path, code="config.unknown_key", text=inside)
        elif kinds[0] == "extra_forbidden" and path not in unknown:
            yield Problem(path=path, code="config.unknown_key", text=_unknown(path, root))
        elif kinds[0] == "missing" and not written(value, path):
            yield Problem(path=path, code=MISSING, text=_missing(info))
        elif not _extra(info, "expected") or (path and isinstance(path[-1], int)):
            text = f"is {show(found)}; expected a section with fields"
            yield Problem(path=path, code="config.wrong_type", text=text)
        else:
            yield Problem(path=path, code=_code(kinds, found), text=_refused(found, info))


def _code(kinds: list[str], value: Any) -> str:
    """Returns the code for a refused value, from all of pydantic's findings. A union has one per member."""
    if not _BOUNDS.isdisjoint(kinds):
        return "config.out_of_range"
    # a choice is a text, so the finding does not apply to a value of another type
    others = [kind for kind in kinds if kind != "literal_error" or isinstance(value, str)]
    return "config.wrong_type" if all(kind.endswith("_type") for kind in others) else "config.invalid_value"


def _field_of(loc: Path, root: type[BaseModel]) -> tuple[Path, FieldInfo | None]:
    """Returns the declared field that contains pydantic's location. Deeper parts are e.g. union members."""
    model: type[BaseModel] | None = root
    path: Path = ()
    info: FieldInfo | None = None
    for part in loc:
        if isinstance(part, int) and model is not None and path:
            path = (*path, part)
            continue
        if model is None:
            break
        path = (*path, part)
        info = {(f.alias or name): f for name, f in model.model_fields.items()}.get(str(part))
        model = _class_of(info)
    return path, info


def _class_of(info: FieldInfo | None) -> type[BaseModel] | None:
    """Returns the section class of a field, or of the entries of a tuple."""
    hint: Any = info.annotation if info else None
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
    return hint if isinstance(hint, type) and issubclass(hint, BaseModel) else None


def show(value: Any) -> str:
    """Formats a value as a user would write it, without secrets. Texts get quotes."""
    return redacted_text(repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def written(value: Any, path: Path) -> bool:
    """Whether there is a value at `path`, which may be null."""
    around = value_at(value, path[:-1])
    return isinstance(around, dict) and path[-1] in around


def _extra(info: FieldInfo | None, key: str) -> str:
    declared = info.json_schema_extra if info else None
    return str(declared.get(key, "")) if isinstance(declared, dict) else ""


def _missing(info: FieldInfo | None) -> str:
    if info is None or not _extra(info, "expected"):
        return "is missing; it is a section that every job needs"
    return f"is missing; set it to {_extra(info, 'expected')}"


def _refused(value: Any, info: FieldInfo | None) -> str:
    text = f"is {show(value)}; expected {_extra(info, 'expected')}"
    if not isinstance(value, str):
        if type(value) is float and value.is_integer() and abs(value) < 1 << 53:
            return f"{text}; write {int(value)} if that is meant"
        return text
    choices = list(_choices(info.annotation)) if info else []
    close = difflib.get_close_matches(value.lower(), choices, n=1)
    if close:
        return f"{text}; did you mean {close[0]}?"
    if info is not None and {int, float} & set(_members(info.annotation)) and _NUMBER.match(value):
        return f"{text}; write it without quotes"
    if info is not None and bool in _members(info.annotation):
        truth = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false", "n": "false"}
        return f"{text}; write {truth.get(value.lower(), 'true or false, without quotes')}"
    return text


def _members(hint: Any) -> list[Any]:
    return [hint, *typing.get_args(hint)]


def _choices(hint: Any) -> Iterator[str]:
    for member in _members(hint):
        if typing.get_origin(member) is typing.Literal:
            yield from typing.get_args(member)


# The names of our fields in other trainers.
OTHER_NAMES = {
    "learning_rate": "train.lr",
    "peak_lr": "train.lr",
    "min_lr": "train.min_lr_ratio",
    "lr_scheduler_type": "train.schedule",
    "lr_schedule": "train.schedule",
    "scheduler": "train.schedule",
    "grad_clip": "train.max_grad_norm",
    "clip_grad": "train.max_grad_norm",
    "per_device_train_batch_size": "train.micro_batch_size",
    "dtype": "train.precision",
    "torch_dtype": "train.precision",
    "mixed_precision": "train.precision",
    "bf16": "train.precision",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "epochs": "data.num_epochs",
    "num_train_epochs": "data.num_epochs",
    "sequence_length": "pack.seq_len",
    "max_seq_len": "pack.seq_len",
    "max_length": "pack.seq_len",
    "context_length": "pack.seq_len",
    "block_size": "pack.seq_len",
    "world_size": "cluster.num_workers",
    "nproc_per_node": "cluster.num_workers",
    "num_gpus": "cluster.num_workers",
    "save_steps": "resume.every_steps",
    "save_every": "resume.every_steps",
    "save_total_limit": "resume.keep_latest",
}
_FEW = 3
# The fields of older versions.
_GONE: dict[Path, str] = {
    (
        "model",
        "dtype",
    ): "is no longer a field; leave it out for float32 weights. For bfloat16 products set "
    "train.precision=bf16. For weights and moments in bfloat16, which model.dtype=bfloat16 meant, set "
    "train.precision=pure_bf16"
}


def _unknown(path: Path, root: type[BaseModel]) -> str:
    """Returns the text for an unknown field, with similar fields.

    In this order: one that other trainers call so, those of the same section, those elsewhere.
    """
    if path in _GONE:
        return _GONE[path]
    *around, last = path
    known = _known(root)
    section = ".".join("0" if isinstance(part, int) else str(part) for part in around)
    here = dotted(tuple(around))
    names = [p.rpartition(".")[2] for p in known if p.rpartition(".")[0] == section]
    inside = near(str(last), names)
    if str(last) in OTHER_NAMES:
        close = [OTHER_NAMES[str(last)]]
    elif inside:
        close = [dotted((*around, name)) for name in inside]
    else:
        alike = near(str(last), sorted({p.rpartition(".")[2] for p in known}), cutoff=0.8)
        close = [p for p in known if p.rpartition(".")[2] in alike]
    if close:
        return f"is not a known field; did you mean {' or '.join(close)}?"
    what = f"{here} has {', '.join(names)}" if here else f"sections are {', '.join(names)}"
    return f"is not a known field; {what}"


def near(name: str, names: list[str], cutoff: float = 0.6) -> list[str]:
    """Returns those of `names` that contain `name` as a whole word, else the most similar one."""
    by_word = [other for other in names if name == other or f"_{name}_" in f"_{other}_"]
    if 0 < len(by_word) <= _FEW:
        return [name] if name in by_word else by_word
    return difflib.get_close_matches(name, names, n=1, cutoff=cutoff)


def _unknown_inside(path: Path, at: Path, info: FieldInfo | None) -> str | None:
    """Returns the text for an unknown key at `at`, inside the value of the field at `path`.

    None if the value may have several forms.
    """
    members = _members(info.annotation) if info else []
    members += [part for member in members[1:] for part in typing.get_args(member)]
    sections = [each for each in members if isinstance(each, type) and issubclass(each, BaseModel)]
    if len(sections) != 1:
        return None
    names = [field.alias or name for name, field in sections[0].model_fields.items()]
    close = near(str(at[-1]), names)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it takes {', '.join(names)}"
    return f"has the key {'.'.join(map(str, at[len(path) :]))}, which is not known; {hint}"


def _known(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns the dotted path of every field. A field of a list's entries has the path of the first entry."""
    paths = []
    for name, info in model.model_fields.items():
        path = prefix + (info.alias or name)
        inner = _class_of(info)
        into = f"{path}.0." if typing.get_origin(info.annotation) is tuple else f"{path}."
        paths += [path, *(_known(inner, into) if inner else [])]
    return paths
