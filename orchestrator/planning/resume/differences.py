"""Compares the configuration of a point with a new one, and finds the changes that no resume may make."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.refusals import Refusal
from orchestrator.planning.resume.identity import CHANGED_SETTING, or_anew

OF_A_SOURCE = "data.sources."
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
        return f"{self.field}: {value_text(self.old)} -> {value_text(self.new)}"


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


def refusals(different: Iterable[Difference], point: str, content_known: bool) -> tuple[Refusal, ...]:
    """Returns a refusal for each difference that no resume may make.

    `point` is its name, or empty without a point. A path names a content. If contents are compared too
    (`content_known`), a different path is not refused.
    """
    subject = f"resume point {point}" if point else "the run"
    return tuple(
        Refusal(
            CHANGED_SETTING,
            f"{subject} was made with {d.field}={value_text(d.old)}, the job asks for {value_text(d.new)}; "
            f"keep {d.field}={value_text(d.old)}, {or_anew(d.field)}or start a new run under another "
            "run.name",
        )
        for d in different
        if d.rule == "same" and not (content_known and is_content(d))
    )


def is_content(difference: Difference) -> bool:
    """Whether only names of contents differ: another path to a tokenizer, or to a source."""
    name = difference.field
    return name == "data.tokenizer" or (name.startswith(OF_A_SOURCE) and name.endswith(".path"))


def with_defaults(old_flat: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the current defaults of fields that did not exist when the point was made."""
    from orchestrator.config.field_rules import field_rules
    from orchestrator.config.stored import in_todays_fields

    defaults = {rule.path: rule.default for rule in field_rules() if not rule.required}
    return {**defaults, **in_todays_fields(old_flat)}


def value_text(value: Any) -> str:
    """Returns a value of the configuration as JSON (null, true); a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
