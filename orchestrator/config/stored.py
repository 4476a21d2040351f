"""Configurations as points and journal keep them: flat, in the fields of the version that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.data_sections import SourceConfig
from orchestrator.config.field_rules import json_default


def in_todays_fields(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration that any version has stored, under the names and values of this one; a field that
    did not exist then is left out (it had what is its default now), one of a source has that default.
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
    """A flat configuration (`section.field`) as sections and fields."""
    sections: dict[str, dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    return sections
