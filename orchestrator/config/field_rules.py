"""Every field of the configuration as a value: its path, default, meaning, and what a resume may do with it.

It also reads the flat configurations that points and journals store, in the fields of the version that wrote
them. As a program it prints the table of docs/configuration.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from orchestrator.config.schema import JobConfig
from orchestrator.config.sections import Rule, SourceConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRule:
    """What a field means and what a resume may do with it. `default` is a JSON value, None if `required`."""

    path: str
    rule: Rule
    doc: str
    default: Any
    required: bool
    expected: str


def field_rules() -> list[FieldRule]:
    """The declaration of every field, in the order and with the paths of `JobConfig.flat`."""
    return [
        _rule(f"{section}.{info.alias or name}", info)
        for section, kind in _sections()
        for name, info in kind.model_fields.items()
    ]


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in JobConfig.model_fields.items():
        assert isinstance(info.annotation, type), f"section {name} is a class"
        yield name, info.annotation


def _rule(path: str, info: FieldInfo) -> FieldRule:
    declared = info.json_schema_extra
    assert isinstance(declared, dict), f"{path} declares its resume rule"
    assert info.description, f"{path} has a docstring"
    required = info.is_required()
    default = None if required else json_default(info)
    rule: Any = declared["resume"]
    return FieldRule(
        path=path,
        rule=rule,
        doc=info.description,
        default=default,
        required=required,
        expected=str(declared["expected"]),
    )


def json_default(info: FieldInfo) -> Any:
    """The default of a field that has one, as a plain JSON value."""
    return json.loads(json.dumps(info.get_default(call_default_factory=True)))


def resume_table() -> str:
    """Every field as a Markdown table: field, default, what a resume may do with it, meaning."""
    words = {"same": "same", "may_change": "may change", "free": "free"}
    lines = ["| field | default | on resume | meaning |", "|---|---|---|---|"]
    for rule in field_rules():
        default = "(required)" if rule.required else f"`{json.dumps(rule.default)}`"
        doc = rule.doc.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| `{rule.path}` | {default} | {words[rule.rule]} | {doc} |")
    return "\n".join(lines)


def in_todays_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a flat configuration that any version has stored to the names and values of this version.

    A field that did not exist then is left out: its current default applied. A new field of a source gets
    that default.
    """
    now = dict(flat)
    weights = now.pop("model.dtype", None)
    if weights is not None:
        now["train.precision"] = {"float32": "float32", "bfloat16": "pure_bf16"}[weights]
    if "data.sources" in now:
        fields = SourceConfig.model_fields.items()
        defaults = {name: json_default(info) for name, info in fields if not info.is_required()}
        now["data.sources"] = [{**defaults, **source} for source in now["data.sources"]]
    return now


def nested(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Converts a flat configuration (`section.field`) to sections and fields."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    return sections


if __name__ == "__main__":
    sys.stdout.write(resume_table() + "\n")
