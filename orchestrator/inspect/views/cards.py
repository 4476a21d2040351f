"""Cards: tables about a run. One declaration makes a route, a panel of the page and a DataFrame of each.

To add a card, write a function that returns its rows, and add a `Card` to `CARDS`. An installed package adds
cards by entry points of the group `orchestrator.cards`, each of which is a `Card`. docs/howto/cards.md has an
example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal, get_args

from orchestrator.errors import ConfigError, RefusedError
from orchestrator.inspect.views.facts.facts import Facts

GROUP = "orchestrator.cards"
# How a value is shown: text as it is, a whole number, a large number in short (tokens), seconds as a
# duration, bytes, seconds since 1970 (UTC) as a time, a share from 0 to 1 in percent.
Kind = Literal["text", "number", "count", "seconds", "bytes", "time", "share"]
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

    `rows` is called with the facts of a run (`facts.Facts`) and the current time (seconds since 1970, on the
    scale of the journal's times), in the page's server and in notebooks. It returns a row for each line, with
    a JSON value (None: not known) for each column. It must not read the user's code or data, and should take
    milliseconds.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Callable[[Facts, float], Iterable[Row]]


def _group_rows(facts: Facts, now: float) -> Iterable[Row]:
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


@cache
def all_cards() -> tuple[Card, ...]:
    """The cards of this package and of installed ones.

    Raises `ConfigError` for an entry point that cannot be loaded or is no card, and for a name that two
    cards have.
    """
    found = {card.name: card for card in CARDS}
    for entry in entry_points(group=GROUP):
        try:
            card = entry.load()
        except Exception as error:  # another package's module may raise anything
            raise ConfigError(
                f"the card {entry.name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}; "
                "correct or uninstall the package that adds it",
                code="user_code.card_failed",
            ) from error
        _require_card(entry.name, card, found)
        found[card.name] = card
    return tuple(found.values())


def card_named(name: str) -> Card:
    """The card of this name. Raises `RefusedError` if there is none, and as `all_cards`."""
    cards = all_cards()
    for card in cards:
        if card.name == name:
            return card
    raise RefusedError(
        f"there is no card {name}; there are {', '.join(card.name for card in cards)}", code="card.unknown"
    )


def card_document(card: Card, facts: Facts, now: float) -> dict[str, Any]:
    """A card as the page gets it: its declaration and its rows."""
    names = [column.name for column in card.columns]
    return {
        **declared(card),
        "rows": [{name: row.get(name) for name in names} for row in card.rows(facts, now)],
    }


def declared(card: Card) -> dict[str, Any]:
    """The declaration of a card as plain JSON values."""
    columns = [
        {"name": column.name, "label": column.label, "kind": column.kind, "meaning": column.meaning}
        for column in card.columns
    ]
    return {"name": card.name, "title": card.title, "columns": columns}


def _require_card(name: str, card: Any, known: Mapping[str, Card]) -> None:
    if not isinstance(card, Card):
        why = f"a {type(card).__name__}, expected an orchestrator.inspect.views.cards.Card"
    elif card.name in known:
        why = f"a second card of the name {card.name}"
    elif wrong := [column.name for column in card.columns if column.kind not in get_args(Kind)]:
        why = f"a card whose column {wrong[0]} has no kind of {', '.join(get_args(Kind))}"
    else:
        return
    raise ConfigError(f"the entry point {name} of {GROUP} is {why}", code="user_code.no_card")
