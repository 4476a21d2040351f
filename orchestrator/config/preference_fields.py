"""The rules for sources of `content: preference`, whose samples have two rows.

The rules check plain JSON values and return the code and text of a problem.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.problems import show
from orchestrator.records.steps import PREFERENCE

_CONFLICT = "config.conflict"
_Wrong = tuple[str, str]


def sources_problem(sources: list[Any]) -> _Wrong | None:
    """Checks the fields of preferences, and that no other contents are among them."""
    for source in sources:
        found = _source_problem(source) if isinstance(source, dict) else None
        if found is not None:
            return found
    contents = _contents(sources)
    others = [f"{name} ({content})" for name, content in contents.items() if content != PREFERENCE]
    if others and len(others) < len(contents):
        pairs = ", ".join(name for name, content in contents.items() if content == PREFERENCE)
        return (
            _CONFLICT,
            f"has content: preference for {pairs}, whose samples have two rows, and other contents for "
            f"{', '.join(others)}, whose samples have one; train them in runs of their own",
        )
    return None


def _source_problem(source: Mapping[str, Any]) -> _Wrong | None:
    name, content = source.get("name"), source.get("content", "text")
    prompt = source.get("prompt_field", "prompt")
    if content != PREFERENCE:
        if prompt is not None:
            return None
        return (
            _CONFLICT,
            f"has prompt_field=null for {name}, which has content: {content}; null is for content: "
            "preference",
        )
    if source.get("loss", "assistant") != "assistant":
        return (
            _CONFLICT,
            f"has loss={source['loss']} for {name}, which has content: preference, of which the answers are "
            "learnt; leave it out",
        )
    fields = [prompt, source.get("chosen_field", "chosen"), source.get("rejected_field", "rejected")]
    twice = sorted({field for field in fields if field is not None and fields.count(field) > 1})
    if not twice:
        return None
    return (
        "config.duplicate_entry",
        f"names the field {show(twice[0])} twice for {name}; the prompt and both answers lie in fields of "
        "their own",
    )


def packing_problem(mode: str, long_document: str, sources: list[Any]) -> _Wrong | None:
    """Checks that samples of two rows are packed as such."""
    if not _has_preferences(sources):
        return None
    if mode != "pad":
        return (
            _CONFLICT,
            f"is {mode}, and data.sources have content: preference, of which each sample holds one pair; "
            "set it to pad",
        )
    if long_document == "split":
        return (
            _CONFLICT,
            "is pad with pack.long_document=split, and data.sources have content: preference: an answer that "
            "is cut cannot be compared; set pack.long_document to stop or skip",
        )
    return None


def objective_problem(objective: str, sources: list[Any]) -> _Wrong | None:
    """Checks that preferences have an objective of their own."""
    if objective != "causal_lm" or not _has_preferences(sources):
        return None
    return (
        _CONFLICT,
        "is causal_lm, which would learn the rejected answers of content: preference like the chosen ones; "
        "set it to an objective that compares them, such as examples.dpo:dpo "
        "(docs/howto/preference-tuning.md), or train the chosen answers alone with content: prompt",
    )


def eval_parts_problem(parts: Mapping[str, Any], sources: list[Any]) -> _Wrong | None:
    """Checks that the sources of evaluated parts give the objective the samples that it trains on."""
    trains_pairs = _has_preferences(sources)
    for name, part in parts.items():
        own = part.get("sources") if isinstance(part, dict) else None
        if own is None:
            continue
        if (found := sources_problem(own)) is not None:
            return found[0], f"{found[1]} (part {name})"
        if _has_preferences(own) != trains_pairs:
            contents = sorted(set(_contents(own).values())), sorted(set(_contents(sources).values()))
            return (
                _CONFLICT,
                f"has a part {name} of content: {', '.join(contents[0])}, and data.sources have content: "
                f"{', '.join(contents[1])}: one objective cannot take samples of one row and of two; "
                "evaluate the content that is trained",
            )
    return None


def _has_preferences(sources: list[Any]) -> bool:
    return PREFERENCE in _contents(sources).values()


def _contents(sources: list[Any]) -> dict[str, str]:
    given = (source for source in sources if isinstance(source, dict))
    return {str(source.get("name")): source.get("content", "text") for source in given}
