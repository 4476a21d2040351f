"""Cards: tables about a run. One declaration makes a route, a panel of the page and a DataFrame of each.

To add a card, write a function that returns its rows, and add a `Card` to `CARDS`. An installed package adds
cards by entry points of the group `orchestrator.cards`, each of which is a `Card`. docs/howto/cards.md has an
example.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, get_args

from orchestrator.errors import OrchestratorError, RefusedError
from orchestrator.inspect.views.facts.facts import RunFacts

GROUP = "orchestrator.cards"
# How a value is shown: text as it is, a whole number, a large whole number in short (tokens), a decimal,
# seconds as a duration, bytes, seconds since 1970 (UTC) as a time, a share from 0 to 1 in percent.
Kind = Literal["text", "number", "count", "decimal", "seconds", "bytes", "time", "share"]
_WHOLE = ("number", "count", "bytes")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,60}")
_UNITS: Mapping[str, str] = {"seconds": "s", "bytes": "bytes", "time": "UTC", "share": "share"}

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of a card. `name` is its key in rows and in the DataFrame, `label` its head on the page.

    `meaning` is a few words for who does not know it.
    """

    name: str
    label: str
    kind: Kind
    meaning: str

    @property
    def unit(self) -> str:
        """The unit of the values; empty for text and numbers."""
        return _UNITS.get(self.kind, "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A table about a run. `name` is part of its address, `title` its head on the page.

    `rows` is called with the facts of a run (`facts.RunFacts`) and the current time (seconds since 1970, on
    the scale of the journal's times), in the page's server and in notebooks. It returns a row for each line,
    with a value of the column's kind (None: not known) for each column, and no others. It must not read the
    user's code or data, and should take milliseconds: the other views of the run wait.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Callable[[RunFacts, float], Iterable[Row]]


def _group_rows(facts: RunFacts, now: float) -> Iterable[Row]:
    """The groups of workers, newest first."""
    end = {number: written.last for number, written in facts.columns.attempts.items()}
    begins = [generation for generation in facts.columns.generations if generation.start is not None]
    for at in range(len(begins) - 1, -1, -1):
        generation = begins[at]
        start = generation.start
        assert start is not None, "only these were taken"
        after = begins[at + 1].t if at + 1 < len(begins) and begins[at + 1].id[0] == start.attempt else None
        until = after if after is not None else end.get(start.attempt)
        began = generation.t or None
        yield {
            "attempt": start.attempt,
            "generation": start.generation,
            "began": began,
            "lasted_s": None if began is None or until is None else max(0.0, until - began),
            "workers": start.world_size,
            "global_batch_size": start.global_batch_size,
            "seq_len": start.seq_len,
            "steps": sum(stop - first for first, stop in generation.ranges),
            "cause": start.cause or "not known",
        }


GROUPS = Card(
    name="groups",
    title="Groups of workers",
    columns=(
        Column(name="attempt", label="Attempt", kind="number", meaning="the claim under which it trained"),
        Column(name="generation", label="Group", kind="number", meaning="counted within the attempt"),
        Column(name="began", label="Began", kind="time", meaning="when the coordinator had formed it"),
        Column(name="lasted_s", label="Lasted", kind="seconds", meaning="until the next group or the end"),
        Column(name="workers", label="Workers", kind="number", meaning="that trained together"),
        Column(name="global_batch_size", label="Batch", kind="number", meaning="samples of a step"),
        Column(name="seq_len", label="Sequence", kind="number", meaning="tokens of a sample"),
        Column(name="steps", label="Steps", kind="count", meaning="that it has trained, lost ones too"),
        Column(name="cause", label="Why it was formed", kind="text", meaning="what ended the group before"),
    ),
    rows=_group_rows,
)
CARDS: tuple[Card, ...] = (GROUPS,)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedCard:
    """An entry point that adds no card. `reason` says why, and what to do."""

    name: str
    reason: str


@cache
def all_cards() -> tuple[Card | FailedCard, ...]:
    """The cards of this package, then those of installed ones by name. A process loads them once."""
    found: dict[str, Card | FailedCard] = {card.name: card for card in CARDS}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        card = _loaded(entry, found)
        found[card.name] = card
    return tuple(found.values())


def _loaded(entry: EntryPoint, known: Mapping[str, Card | FailedCard]) -> Card | FailedCard:
    failed = f"{entry.name} ({entry.value})"
    try:
        card = entry.load()
    except Exception as error:  # noqa: BLE001  another package's module may raise anything
        why = f"cannot be loaded: {type(error).__name__}: {error}"
        return FailedCard(name=failed, reason=f"{why}; correct or uninstall the package that adds it")
    if wrong := _wrong(card, known):
        return FailedCard(name=failed, reason=f"{wrong}; correct or uninstall the package that adds it")
    assert isinstance(card, Card), "anything else is wrong"
    return card


def _wrong(card: Any, known: Mapping[str, Card | FailedCard]) -> str:
    """Why the object of an entry point is no card; empty if it is one."""
    if not isinstance(card, Card):
        return f"it is of type {type(card).__name__}, expected orchestrator.inspect.views.cards.Card"
    names = [column.name for column in card.columns]
    if not _NAME.fullmatch(card.name):
        return f"its name is {card.name!r}, expected at most 60 letters, digits, '.', '_' and '-'"
    if card.name in known:
        return f"there is another card of the name {card.name}"
    if len({*names}) < len(names):
        return f"it has two columns of one name: {', '.join(names)}"
    if wrong := [column for column in card.columns if column.kind not in get_args(Kind)]:
        kinds = ", ".join(get_args(Kind))
        return f"its column {wrong[0].name} has the kind {wrong[0].kind!r}, expected {kinds}"
    return ""


def card_named(name: str) -> Card:
    """The card of this name. Raises `RefusedError` if there is none."""
    cards = all_cards()
    for card in cards:
        if card.name == name and isinstance(card, Card):
            return card
    raise RefusedError(
        f"there is no card {name}; there are {', '.join(card.name for card in cards)}", code="card.unknown"
    )


def card_rows(card: Card, facts: RunFacts, now: float) -> list[dict[str, Any]]:
    """The rows of a card, with a value of its column's kind (or None) for each column.

    Raises `CardError`, which names the card, if its function fails or returns anything else.
    """
    kinds = {column.name: column.kind for column in card.columns}
    found: list[dict[str, Any]] = []
    try:
        for row in card.rows(facts, now):
            if row.keys() != kinds.keys():
                raise TypeError(f"a row has the columns {sorted(row)}, declared are {sorted(kinds)}")
            for name, kind in kinds.items():
                _require_kind(name, kind, row[name])
            found.append(dict(row))
    except Exception as error:  # another package's function may raise anything
        raise CardError(
            f"the card {card.name} failed at row {len(found) + 1}: {type(error).__name__}: {error}; correct "
            "the function of its rows"
        ) from error
    return found


class CardError(OrchestratorError):
    """The function of a card's rows failed."""

    code = "user_code.card_failed"


def _require_kind(name: str, kind: Kind, value: Any) -> None:
    if value is None or (kind == "text" and isinstance(value, str)):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind == "text" or not is_number or (kind in _WHOLE and value != int(value)):
        what = "a whole number" if kind in _WHOLE else "a text" if kind == "text" else "a finite number"
        raise TypeError(f"{name} is {value!r}, expected {what} or None (its kind is {kind})")


def card_documents(facts: RunFacts, now: float) -> list[dict[str, Any]]:
    """Every card as the page gets it. One that fails has its `error` and no rows."""
    found = []
    for card in all_cards():
        if isinstance(card, FailedCard):
            empty = {"title": card.name, "columns": [], "rows": []}
            found.append({"name": card.name, **empty, "error": card.reason})
            continue
        try:
            found.append(card_document(card, facts, now))
        except CardError as error:
            found.append({**declared(card), "rows": [], "error": str(error)})
    return found


def card_document(card: Card, facts: RunFacts, now: float) -> dict[str, Any]:
    """A card as the page gets it: its declaration and its rows. Raises `CardError`."""
    return {**declared(card), "rows": card_rows(card, facts, now), "error": ""}


def declared(card: Card) -> dict[str, Any]:
    """The declaration of a card as plain JSON values."""
    columns = [
        {"name": column.name, "label": column.label, "kind": column.kind, "meaning": column.meaning}
        for column in card.columns
    ]
    return {"name": card.name, "title": card.title, "columns": columns}
