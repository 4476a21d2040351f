"""What was asked of a launch from outside, and what became of it: a pure machine, and a part of the launch
machine.

It knows neither clock nor storage. A request to save is met by the first resume point that holds all that was
trained when it was heard; what else ends it is the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.history import sentences
from orchestrator.history.request_files import SAVE, STOP, STOP_NOW, Request
from orchestrator.records.steps import StateKey

DONE, REFUSED, FAILED = "done", "refused", "failed"  # what an answer may be
SAVE_AGAIN_S = 5.0  # after a save was given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """What became of a request: `outcome` is done, refused or failed, `text` says it to people; `point` is
    the resume point that meets it, "" where there is none.
    """

    request: int
    what: str
    outcome: str
    text: str
    point: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """Those of the journal's event `request answered`."""
        return asdict(self)


class Requests:
    """The requests to one launch, as one coordinator hears them: by their numbers, each once. `answered` are
    those that an earlier coordinator of the launch has answered; what it has left open is heard again.
    `known` is what this launch can do.

    Guarantees: each request that was heard is answered once, at the latest when the run ends; a save that is
    done names a point at or after the newest state that was known when it was heard.
    """

    def __init__(self, answered: Iterable[int] = (), known: Sequence[str] = (SAVE, STOP, STOP_NOW)) -> None:
        self._answered, self._known = frozenset(answered), known
        self._newest = 0
        self._stops: list[Request] = []
        self._saves: dict[int, StateKey] = {}  # by number: what must be saved
        self._under_way = False  # a save was asked for, and nothing has come of it yet
        self._not_before = float("-inf")

    @property
    def next_number(self) -> int:
        """The number of the request to look for."""
        number = self._newest + 1
        while number in self._answered:
            number += 1
        return number

    def heard(self, request: Request, trained: StateKey | None, saved: StateKey | None) -> Answered | None:
        """The answer to a request, None where it comes later. `trained` is the newest state, `saved` that of
        the newest resume point.
        """
        assert request.number == self.next_number, f"{request.number} is not {self.next_number}"
        self._newest = request.number
        if request.unreadable:
            return _answer(request, REFUSED, f"{request.unreadable}; ask again")
        if request.what not in self._known:
            text = f"{request.what!r} is not known to this launch; it knows: {', '.join(self._known)}"
            return _answer(request, REFUSED, text)
        if request.what != SAVE:
            self._stops.append(request)
            return None
        if trained is None and saved is None:
            return _answer(request, REFUSED, "no step is trained yet, so there is nothing to save")
        if saved is not None and (trained is None or saved >= trained):
            text = f"nothing was trained since resume point {saved.point_name}"
            return _answer(request, DONE, text, saved.point_name)
        assert trained is not None, "else it is answered above"
        self._saves[request.number] = trained
        return None

    def committed(self, key: StateKey) -> list[Answered]:
        """A resume point was committed."""
        self._under_way = False
        met = [number for number, wanted in self._saves.items() if key >= wanted]
        for number in met:
            del self._saves[number]
        name = key.point_name
        return [
            Answered(request=number, what=SAVE, outcome=DONE, text=f"saved as {name}", point=name)
            for number in met
        ]

    def save_given_up(self, now: float) -> None:
        """A save was given up: another one is asked for after `SAVE_AGAIN_S`. `now` is in seconds."""
        self._under_way, self._not_before = False, now + SAVE_AGAIN_S

    def wants_save(self, now: float) -> bool:
        """Whether a save must be asked for now; True once for each."""
        if not self._saves or self._under_way or now < self._not_before:
            return False
        self._under_way = True
        return True

    def ended(self, outcome: str, reason: str) -> list[Answered]:
        """The run has ended."""
        text = reason if outcome == reason else f"{outcome}: {reason}"
        stops = [_answer(stop, FAILED if outcome == "failed" else DONE, text) for stop in self._stops]
        saves = [
            Answered(request=number, what=SAVE, outcome=FAILED, text=f"the run ended before ({text})")
            for number in self._saves
        ]
        self._stops, self._saves = [], {}
        return sorted([*stops, *saves], key=lambda answer: answer.request)


def heard_sentence(request: Request, answer: Answered | None) -> str:
    """What the user of the launch hears of a request, and of its answer where that is given at once."""
    if answer is None:
        return sentences.asked(request.what, request.by)
    return sentences.asked(request.what, request.by, answer.outcome, answer.text)


def _answer(request: Request, outcome: str, text: str, point: str = "") -> Answered:
    return Answered(request=request.number, what=request.what, outcome=outcome, text=text, point=point)
