"""Which fields differ between the configuration that a point was made with and a new one, and which of them
no resume may change.

It reads flat configurations, and knows no point but by its name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.planning.identity import or_anew

OF_A_SOURCE = "data.sources."
_CHANGING = ("weight", "max_epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A field whose value is not the point's; `rule` says what a resume may do with it: same, may_change or
    free.
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
    """The fields that differ between two flat configurations, by name; what one of them lacks is None there.

    `rules` maps a dotted path to its resume rule; a field that has none must stay the same. Fields of a
    source are named by it (`data.sources.web.weight`); a source that only one of them has is a field of its
    own (`data.sources.web`), which may change, as may the fields of a source that is `restarted`. The order
    of sources means nothing. Also a `train.precision` that is the weights' own type must stay, for a point's
    weights would have to be rounded.
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
    """The names of a flat configuration's sources."""
    return {each["name"] for each in flat.get("data.sources") or ()}


def _by_source(flat: Mapping[str, Any], both: Collection[str]) -> dict[str, Any]:
    """With each field of the sources that `both` have, and each other source, as a field of its own; a single
    one's weight means nothing.
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


def refusals(different: Iterable[Difference], point: str, content_known: bool) -> tuple[str, ...]:
    """One text for each difference that no resume may make; `point` is its name, or empty without a point.

    A field that names something whose content decides (a path) is not refused when contents are compared too
    (`content_known`).
    """
    subject = f"resume point {point}" if point else "the run"
    return tuple(
        f"{subject} was made with {d.field}={value_text(d.old)}, the job asks for {value_text(d.new)}; "
        f"keep {d.field}={value_text(d.old)}, {or_anew(d.field)}or start a new run under another run.name"
        for d in different
        if d.rule == "same" and not (content_known and is_content(d))
    )


def is_content(difference: Difference) -> bool:
    """Whether only names of contents differ: another path to a tokenizer, or to a source."""
    name = difference.field
    return name == "data.tokenizer" or (name.startswith(OF_A_SOURCE) and name.endswith(".path"))


def with_defaults(old_flat: Mapping[str, Any]) -> dict[str, Any]:
    """A field that did not exist yet when the point was made had what is its default now."""
    from orchestrator.config.field_rules import field_rules
    from orchestrator.config.stored import in_todays_fields

    defaults = {rule.path: rule.default for rule in field_rules() if not rule.required}
    return {**defaults, **in_todays_fields(old_flat)}


def value_text(value: Any) -> str:
    """A value of the configuration as JSON has it (null, true); a text without its quotes."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
