"""The files of attempts: claims, what each inherits, how it ended, its heartbeat, its generations' starts.

It determines which process may claim which number (membership rules 6 to 12). It does not choose the parent.

The starts of generations have sealed copies: `generations/a0003-g0007.json` (membership rule 2). A point is
worth what is known of its history, and its generation's start is the link. The journal has every start,
durably, before a member learns of the generation. The copy is written later, before the first COMMIT that
depends on it. So it costs a re-forming nothing, and a damaged journal makes no whole point unusable.

`AllEnded` determines whether the processes that could write for an attempt have ended, on this machine. For
processes of other machines the answer is no. It ends none.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from orchestrator.cluster.machine import Process, has_ended, this_process
from orchestrator.errors import BusyError, FencedError, LaterFormatError, OrchestratorError, StorageError
from orchestrator.history.claims.claims import ORIGIN, Claim, ClaimParent, GenerationId, GenerationStart
from orchestrator.history.claims.liveness import (
    Busy,
    Free,
    Heartbeat,
    RunObservation,
    Watch,
    heartbeat_of,
    judge,
)
from orchestrator.history.claims.segments import journal_folder
from orchestrator.json_form import LaterSealError, SealError, decode, encode, seal, unseal
from orchestrator.storage.files import Storage
from orchestrator.storage.parallel import at_once
from orchestrator.storage.store import Listed

ATTEMPTS, JOURNAL = "attempts", "journal"
START, FORK, RESUME, REWIND, RESTARTED = "start", "fork", "resume", "rewind", "coordinator_restarted"
UNREADABLE = "unreadable"  # `why` of a claim that is taken, but whose content is damaged
WATCH_S = 0.25
_CLAIM_NAME = re.compile(r"(\d{4,})\.json")
_PARENT_NAME = re.compile(r"\d{4,}\.parent\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """How an attempt ended.

    `outcome` is done, stopped or failed. `reason` explains it. `ended` is a time for display, `run_id` is
    that of run.json. `by` is the cause ("": not known, or written by an earlier version). `lines` is the
    least number of lines of the attempt's journal (0: not known).
    """

    attempt: int
    outcome: str
    reason: str
    ended: str
    run_id: str = ""
    by: str = ""
    lines: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableFile:
    """An attempt's file whose content is damaged. It must be reported to the user."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} is not as it was written: {self.reason}"


class ClaimFiles:
    """Claims of one run. Every method may raise `StorageError`; then nothing was decided."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    # ---------------------------------------------------------------------- reading
    def claim_numbers(self) -> list[int]:
        """The numbers that are taken, ascending."""
        return sorted(_numbers(self.storage.list(ATTEMPTS)))

    def newest_claim(self) -> Claim | None:
        """The claim with the highest number, None if there is none."""
        numbers = self.claim_numbers()
        return self.read_claim(numbers[-1]) if numbers else None

    def claims(self) -> tuple[Claim, ...]:
        """All claims by number."""
        return tuple(at_once(self.storage, self.read_claim, self.claim_numbers()))

    def read_claim(self, number: int) -> Claim:
        """The claim `number`.

        A claim whose content is damaged still counts as taken: its launch and host are empty, its `why` is
        `unreadable`.
        """
        try:
            found = decode(Claim, unseal(self.storage.read(_claim_path(number))), _claim_path(number))
        except FileNotFoundError:
            found = None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            found = None
        if found is None or found.number != number:
            return Claim(number=number, launch="", why=UNREADABLE, host="", created="")
        return found

    def read_parent(self, number: int) -> ClaimParent | UnreadableFile | None:
        """What claim `number` inherits. None while there is no such file.

        A claim without a readable file has no descendants.
        """
        path = _parent_path(number)
        try:
            found = decode(ClaimParent, unseal(self.storage.read(path)), path)
            if found.attempt != number:
                raise SealError(f"it is that of attempt {found.attempt}")
            return found
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            reason = f"{error}; what this attempt trained is continued by none"
            return UnreadableFile(path=path, reason=reason)

    def parents(self) -> tuple[tuple[ClaimParent, ...], tuple[UnreadableFile, ...]]:
        """The readable parent files by number, and the unreadable ones.

        Unreadable files must be reported to the user: their attempts are cut off.
        """
        found = at_once(self.storage, self.read_parent, self.claim_numbers())
        return (
            tuple(parent for parent in found if isinstance(parent, ClaimParent)),
            tuple(parent for parent in found if isinstance(parent, UnreadableFile)),
        )

    def attempt_files(self) -> list[str]:
        """The names of all claims and parent files.

        None of them is rewritten or deleted, so what was read between two equal lists existed together at one
        moment.
        """
        names = self.storage.list(ATTEMPTS)
        return [name for name in names if _CLAIM_NAME.fullmatch(name) or _PARENT_NAME.fullmatch(name)]

    def next_claim_exists(self, number: int) -> bool:
        """Whether the claim after `number` is taken.

        Checked by name, before anything is acknowledged or deleted (rule 7).
        """
        return self.storage.exists(_claim_path(number + 1))

    def read_end(self, number: int) -> AttemptEnd | None:
        """How attempt `number` ended; None if it recorded no end, or if the record is another run's."""
        try:
            end = decode(AttemptEnd, unseal(self.storage.read(_end_path(number))), _end_path(number))
        except FileNotFoundError:
            return None
        except OrchestratorError as error:
            if isinstance(error, StorageError):
                raise
            return None
        return end if end.run_id == self.read_claim(number).run_id else None

    # ---------------------------------------------------------------------- writing
    def claim(
        self,
        number: int,
        launch: str,
        why: str,
        host: str,
        run_id: str = "",
        process: Process | None = None,
    ) -> Claim:
        """Claims attempt `number`. Of all processes that try, one succeeds.

        Afterwards list the points, then call `write_parent`; never in the opposite order. `why` is start,
        fork, resume, rewind or coordinator_restarted. `process` is the claiming process, by default this one.
        Raises `BusyError` if a start command lost the race for the number. A restarted coordinator may only
        follow a claim of its own launch; otherwise `FencedError` is raised and it must end its launch (rule
        8).
        """
        newest = self.newest_claim()
        taken = newest.number if newest else 0
        if why == RESTARTED and (newest is None or newest.launch != launch):
            raise FencedError(
                f"attempt {taken} belongs to {f'launch {newest.launch}' if newest else 'no launch'}, "
                f"this is launch {launch}; "
                "another launch has taken the run over, so this one ends"
            )
        if taken >= number:
            raise _lost(self.storage.root, number, newest, launch, why)
        assert number == taken + 1, f"claims are numbered without gaps: {number} cannot follow {taken}"
        # a restarted coordinator, which claims here, may run elsewhere
        by = (process or this_process()) if why != RESTARTED else Process("", 0, "")
        claim = Claim(
            number=number,
            launch=launch,
            why=why,
            host=host,
            created=now_text(),
            pid=by.pid,
            machine=by.machine,
            pid_start=by.start,
            run_id=run_id,
        )
        if not self.storage.create(_claim_path(number), seal(encode(claim))):
            raise _lost(self.storage.root, number, self.read_claim(number), launch, why)
        return claim

    def write_parent(self, parent: ClaimParent) -> None:
        """Writes what the claim inherits, once. Raises `StorageError` if it is already written."""
        if not self.storage.create(_parent_path(parent.attempt), seal(encode(parent))):
            raise StorageError(
                f"{_parent_path(parent.attempt)} exists already, but an attempt's parent "
                "is written once; run the command again",
                code="history.parent_exists",
            )

    def write_end(
        self, number: int, outcome: str, reason: str, run_id: str = "", by: str = "", lines: int = 0
    ) -> None:
        """Records that attempt `number` ended, so that the next start need not watch it.

        A second call changes nothing. `by`: the cause. `lines`: of its journal that are durable.
        """
        end = AttemptEnd(
            attempt=number,
            outcome=outcome,
            reason=reason,
            ended=now_text(),
            run_id=run_id,
            by=by,
            lines=lines,
        )
        self.storage.create(_end_path(number), seal(encode(end)))

    def heartbeat(self, number: int) -> Heartbeat:
        """The heartbeat of attempt `number`: call `beat` about every 2 s while the attempt lives."""
        return heartbeat_of(self.storage, f"{ATTEMPTS}/{number:04d}.heartbeat")

    def start_heartbeat(self, number: int) -> Heartbeat:
        """The heartbeat of the process that claims attempt `number`, from the claim on.

        The coordinator has its own, which may begin much later.
        """
        return heartbeat_of(self.storage, f"{ATTEMPTS}/{number:04d}.start-heartbeat")

    # ---------------------------------------------------------------------- busy
    def watch_busy(
        self,
        seconds: float,
        clock: Callable[[], float],
        wait: Callable[[float], None],
        is_dead: Callable[[Claim], bool] = lambda claim: False,
        watch_s: float = WATCH_S,
    ) -> Free | Busy:
        """Whether a launch is active on the run.

        Calls `history.claims.liveness.judge` with observations of the newest attempt's end record, journal
        and heartbeats, every `watch_s` after `wait(watch_s)`, on this process's own `clock` (seconds).
        `is_dead`: whether all processes that could write for it are known to have ended.
        """
        watch: Watch | None = None
        known: dict[int, Claim] = {}
        while True:
            verdict = judge(watch, self._look(is_dead, known), clock(), seconds)
            if not isinstance(verdict, Watch):
                return verdict
            watch = verdict
            wait(watch_s)

    def _look(self, is_dead: Callable[[Claim], bool], known: dict[int, Claim]) -> RunObservation:
        """One observation. `known` caches claims, which never change."""
        listed = self.storage.listed(ATTEMPTS)
        number = max(_numbers(found.name for found in listed), default=0)
        if not number:
            return RunObservation(newest=0, over=False, signs=b"")
        newest = known.get(number) or self.read_claim(number)
        if newest.why != UNREADABLE:  # without hard links, it may only be torn for a moment
            known[number] = newest
        said_end = any(f"{ATTEMPTS}/{found.name}" == _end_path(number) for found in listed)
        over = (said_end and self.read_end(number) is not None) or is_dead(newest)
        signs = b"" if over else self.signs_of_life(number, listed)
        return RunObservation(newest=number, over=over, signs=signs)

    def signs_of_life(self, number: int, listed: Sequence[Listed] | None = None) -> bytes:
        """Everything that changes while attempt `number` is alive: two observations differ if it was.

        `listed`: the current content of `attempts/`, if known. One request for each folder, if lists have
        sizes and tags.
        """
        folder, attempt = journal_folder(number), f"{number:04d}."
        found = [(f"{folder}/{each.name}", each) for each in self.storage.listed(folder)]
        listed = self.storage.listed(ATTEMPTS) if listed is None else listed
        found += [(f"{ATTEMPTS}/{each.name}", each) for each in listed if each.name.startswith(attempt)]
        return orjson.dumps([[path, *self._state(path, each)] for path, each in found])

    def _state(self, path: str, listed: Listed) -> tuple[int, str]:
        return (self._size(path), "") if listed.facts is None else (listed.facts.size, listed.facts.tag)

    def _size(self, path: str) -> int:
        try:
            return self.storage.size(path)
        except FileNotFoundError:
            return -1


def _numbers(names: Iterable[str]) -> Iterator[int]:
    """The numbers of the claims among the names."""
    return (int(match[1]) for match in map(_CLAIM_NAME.fullmatch, names) if match)


def unreadable_claim(number: int) -> UnreadableFile:
    """The report of a claim whose `why` is `unreadable`."""
    return UnreadableFile(
        path=_claim_path(number), reason="nobody knows whose claim it is; its number counts as taken"
    )


def now_text() -> str:
    """The current time in UTC, for display: no decision compares it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _lost(root: str, number: int, holder: Claim | None, launch: str, why: str) -> BusyError | FencedError:
    who = (
        f"launch {holder.launch or 'unknown'} on host {holder.host or 'unknown'}"
        if holder
        else "another launch"
    )
    text = f"attempt {number} of this run was claimed by {who}, this is launch {launch}; "
    if why == RESTARTED:
        return FencedError(text + "this one ends")
    stop = f"`orchestrator stop {shlex.quote(root)}`"
    return BusyError(f"{text}wait until it has ended, or stop it ({stop}), then run the command again")


def _claim_path(number: int) -> str:
    return f"{ATTEMPTS}/{number:04d}.json"


def _parent_path(number: int) -> str:
    return f"{ATTEMPTS}/{number:04d}.parent.json"


def _end_path(number: int) -> str:
    return f"{ATTEMPTS}/{number:04d}.end.json"


class AllEnded:
    """Whether all processes that could write for an attempt are known to have ended.

    They are the driver of its launch, and the process that writes its journal, both of this machine. A dead
    driver is not enough, because its coordinator may live on for a while. An attempt without a journal is not
    known to have ended, because its coordinator may be about to begin.
    """

    def __init__(self, store: ClaimFiles, process_of: Callable[[int], Process | None]) -> None:
        """`process_of`: the process that writes an attempt's journal, None while that is not known."""
        self._store, self._process_of = store, process_of
        self._processes: dict[int, Process] = {}

    def __call__(self, claim: Claim) -> bool:
        """See the class."""
        if claim.number not in self._processes and (found := self._process_of(claim.number)):
            self._processes[claim.number] = found
        process = self._processes.get(claim.number)
        return process is not None and has_ended(*process) and driver_was_killed(self._store, claim)


def driver_was_killed(store: ClaimFiles, claim: Claim) -> bool:
    """Whether the launch that made the claim was started on this machine, by a process that has ended."""
    driver = next((c for c in store.claims() if c.launch == claim.launch and c.pid), None)
    if driver is None:
        return False
    if driver.machine:
        return has_ended(driver.machine, driver.pid, driver.pid_start)
    if driver.host != socket.gethostname():  # a claim of a version that stored only this
        return False
    try:
        os.kill(driver.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is alive, and another user's
    return False


GENERATIONS = "generations"
_GENERATION_NAME = re.compile(r"a(\d{4,})-g(\d{4,})\.json")


def seal_starts(storage: Storage, starts: Iterable[GenerationStart], run_id: str) -> None:
    """Makes the sealed copies that do not exist yet. A fork's origin needs none: its claim has it.

    Raises `StorageError`.
    """
    wanted = {_generation_path(start.id): start for start in starts if start.attempt != ORIGIN}
    names = {f"{GENERATIONS}/{name}" for name in storage.list(GENERATIONS)} if wanted else set()

    def create(path: str) -> None:
        storage.create(path, seal({"run_id": run_id, "start": encode(wanted[path])}))

    at_once(storage, create, sorted(wanted.keys() - names))


def sealed_ids(storage: Storage) -> frozenset[GenerationId]:
    """The generations that have a sealed copy. Listed before the journal is read, all of them are in it."""
    names = (match for match in map(_GENERATION_NAME.fullmatch, storage.list(GENERATIONS)) if match)
    return frozenset((int(match[1]), int(match[2])) for match in names)


def read_starts(
    storage: Storage, ids: Collection[GenerationId], run_id: str | None
) -> tuple[GenerationStart, ...]:
    """The starts of these generations, from their sealed copies.

    A copy that is damaged, or another run's, is left out. Raises `LaterFormatError` for one that a later
    version wrote, and `StorageError`.
    """
    found = at_once(storage, lambda id_: _read_start(storage, id_, run_id), sorted(ids))
    return tuple(start for start in found if start is not None)


def _read_start(storage: Storage, id_: GenerationId, run_id: str | None) -> GenerationStart | None:
    path = _generation_path(id_)
    try:
        content = unseal(storage.read(path))
        start = decode(GenerationStart, content["start"], path)
    except LaterSealError as error:
        raise LaterFormatError(f"{storage.root}/{path} {error}") from error
    except StorageError:
        raise
    except (FileNotFoundError, OrchestratorError, KeyError, TypeError):
        return None
    return start if start.id == id_ and run_id in (None, content.get("run_id")) else None


def _generation_path(id_: GenerationId) -> str:
    return f"{GENERATIONS}/a{id_[0]:04d}-g{id_[1]:04d}.json"
