"""A whole attempt, by the real code, while storage fails at each of its calls in turn: nothing short is
published, nothing acknowledged is lost, the error says what to do, and the next attempt goes on.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.points.points import COMMIT
from orchestrator.checkpoint.points.store import RunStore
from orchestrator.errors import OrchestratorError, StorageError
from orchestrator.storage.disk import storage_error
from orchestrator.storage.files import Storage
from orchestrator.storage.local_store import TEMPORARY, LocalStore
from orchestrator.storage.object_store import ObjectStore
from orchestrator.storage.store import Pieces, Store
from tests.checkpoint.samples import no_sleep
from tests.forked import FORKED
from tests.storage.an_attempt import WRITTEN, Promises, an_attempt, broken, short
from tests.storage.crashfs import ModelDisk
from tests.storage.failing import LIMIT_S, FailingAppendingStore, FailingStore, Failure, How
from tests.storage.model_store import ModelBucket, ModelStore
from tests.storage.servers import moto, new_bucket, reach

pytestmark = pytest.mark.xdist_group("forked")

KINDS = ("local", "bucket")
IN_PROCESS = (How.RAISES, How.RAISES_AFTER, How.TORN, How.FULL)


@dataclass
class Run:
    """A run on a store in memory that fails once an attempt is under way."""

    kind: str
    storage: type[Storage] = Storage
    model: type[ModelStore] = ModelStore

    def __post_init__(self) -> None:
        self.disk, self.bucket = ModelDisk(), ModelBucket()
        self.promises = Promises()
        self.below: Store = (
            LocalStore("/run", self.disk, no_sleep) if self.kind == "local" else self.model(self.bucket)
        )
        self.clean = Storage.on(self.below)

    def failing(self, failure: Failure) -> Storage:
        kind = FailingAppendingStore if self.kind == "local" else FailingStore
        return self.storage.on(
            kind(self.below, failure, lambda path, digest: self.promises.tell(WRITTEN, f"{digest} {path}"))
        )

    def attempt(self, failure: Failure) -> list[str]:
        """An attempt under it; all errors that were told."""
        storage = self.failing(failure)
        try:
            return an_attempt(storage, self.promises.tell)
        except OrchestratorError as error:
            return [str(error)]

    def files(self) -> list[str]:
        """What lies in the run, but for what never came to be, and what grows."""
        if self.kind == "local":
            paths = [path for path, data in self.disk.files().items() if data is not None]
        else:
            paths = [f"/{path}" for path in self.bucket.contents()]
        return [
            path.removeprefix("/run/")
            for path in paths
            if TEMPORARY not in path and "/journal/" not in path and "heartbeat" not in path
        ]

    def wrong(self) -> list[str]:
        return [
            *broken(self.clean, self.promises),
            *short(self.clean, self.promises, self.files()),
        ]

    def require_sound(self) -> None:
        """All promises are kept, and another attempt, undisturbed, goes on from there."""
        assert self.wrong() == []
        before = len(self.promises.acknowledged)
        assert self.attempt(Failure(nth=0)) == []
        assert self.wrong() == []
        assert len(self.promises.acknowledged) == before + 3, "the next attempt saves"
        assert RunStore(self.clean).point_names() == self.promises.acknowledged[-1:], "and keeps one point"


def num_calls(kind: str) -> int:
    """Of an attempt that nothing disturbs."""
    failure, run = Failure(nth=0), Run(kind)
    assert run.attempt(failure) == []
    assert len(run.promises.acknowledged) == 3
    run.require_sound()
    return len(failure.calls)


def fail(run: Run, failure: Failure) -> None:
    """An attempt under it, and one after it."""
    told = run.attempt(failure)
    assert failure.struck
    try:
        run.require_sound()
        for text in told:
            assert "; " in text, f"{text!r} does not say what to do"
    except AssertionError as error:
        raise AssertionError(f"call {failure.nth}, {failure.struck}, {failure.how.value}: {error}") from error


@pytest.mark.quick("local")
@pytest.mark.parametrize("kind", KINDS)
def test_no_call_that_fails_tears_or_loses_anything(kind: str) -> None:
    for nth in range(1, num_calls(kind) + 1):
        fail(Run(kind), Failure(nth=nth, how=IN_PROCESS[nth % len(IN_PROCESS)], lasting=nth % 5 == 0))


@pytest.mark.chaos
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("how", IN_PROCESS)
def test_no_call_that_fails_in_any_way_tears_or_loses_anything(kind: str, how: How, lasting: bool) -> None:
    for nth in range(1, num_calls(kind) + 1):
        fail(Run(kind), Failure(nth=nth, how=how, lasting=lasting))


class BelievesInItsLuck(Storage):
    """Planted mistake: whoever hears of an error has created the name all the same."""

    def create(self, path: str, data: bytes) -> bool:
        try:
            return super().create(path, data)
        except StorageError:
            return True


class PublishesWhatCame(ModelStore):
    """Planted mistake: content that breaks off is published, and said to be there."""

    def put(self, path: str, pieces: Pieces, size: int, *, exclusive: bool = False) -> bool:
        came = list[bytes]()
        with suppress(OSError):
            came += map(bytes, pieces())
        return super().put(path, lambda: came, sum(map(len, came)), exclusive=exclusive)


@pytest.mark.parametrize(
    ("planted", "wrong"),
    [
        (Run("local", storage=BelievesInItsLuck), "is lost"),
        (Run("bucket", model=PublishesWhatCame), r"claim 1 is .*ts/0001\.json"),
    ],
)
def test_a_planted_mistake_is_caught(planted: Run, wrong: str) -> None:
    def fail_at_each() -> None:
        for nth in range(1, num_calls(planted.kind) + 1):
            fail(replace(planted), Failure(nth=nth, how=How.TORN))

    with pytest.raises(AssertionError, match=wrong):
        fail_at_each()


# ------------------------------------------------------------------ slow, and somebody else meanwhile
def overtake(kind: str, nth: int) -> bool:
    """One attempt stands in its `nth` call while the next one runs from begin to end. Whether the first one
    won its claim.
    """
    run, failure = Run(kind), Failure(nth=nth, how=How.SLOW)
    first = threading.Thread(target=run.attempt, args=(failure,))
    first.start()
    try:
        assert failure.stands.wait(LIMIT_S)
        assert run.attempt(Failure(nth=0)) == []
    finally:
        failure.go.set()
        first.join(LIMIT_S)
    assert run.wrong() == [], f"call {nth}, {failure.struck}"
    assert run.attempt(Failure(nth=0)) == []
    assert run.wrong() == [], f"call {nth}, {failure.struck}"
    return 2 in run.promises.claimed


@pytest.mark.quick("some calls-bucket")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "every", [7, pytest.param(1, marks=pytest.mark.chaos)], ids=["some calls", "all calls"]
)
def test_who_stands_still_in_any_call_while_the_next_attempt_runs_harms_nothing(
    kind: str, every: int
) -> None:
    won = [overtake(kind, nth) for nth in range(1, num_calls(kind) + 1, every)]
    assert True in won


# ------------------------------------------------------------------ killed
def killed(root: str, nth: int, how: How, told: str, endpoint: dict[str, str]) -> None:
    """In a process of its own: an attempt that tells into the file `told`."""
    os.environ.update(endpoint)
    handle = os.open(told, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def tell(what: str, value: str) -> None:
        os.write(handle, f"{what} {value}\n".encode())

    below = ObjectStore(root, no_sleep) if "://" in root else LocalStore(root, sleep=no_sleep)
    kind = FailingStore if "://" in root else FailingAppendingStore
    storage = Storage.on(
        kind(below, Failure(nth=nth, how=how), lambda path, digest: tell(WRITTEN, f"{digest} {path}"))
    )
    an_attempt(storage, tell)


def kill(root: str, nth: int, how: How, told: Path, endpoint: dict[str, str] | None = None) -> bool:
    """An attempt that is killed there, and what it leaves; False: it came to its end before."""
    process = FORKED.Process(target=killed, args=(root, nth, how, str(told), endpoint or {}))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    storage = Storage.on(ObjectStore(root, no_sleep)) if "://" in root else Storage(root)
    lines = told.read_text().splitlines() if told.exists() else []
    promises = Promises.of((what, value) for what, _, value in (line.partition(" ") for line in lines))
    assert broken(storage, promises) == [], (nth, how)
    assert short(storage, promises, published(storage)) == [], (nth, how)
    assert an_attempt(storage, promises.tell) == []
    assert broken(storage, promises) == [], (nth, how)
    return process.exitcode != 0


def published(storage: Storage, folder: str = "") -> list[str]:
    """The files below it, but for what never came to be, and what grows. A kill may leave a part of a file
    in a save that is never committed.
    """
    if folder.startswith("points/") and folder.count("/") == 1 and not storage.exists(f"{folder}/{COMMIT}"):
        return []
    found = list[str]()
    for name in storage.list(folder):
        path = f"{folder}/{name}" if folder else name
        if storage.list(path):
            found += published(storage, path)
        elif (
            storage.exists(path)
            and TEMPORARY not in path
            and "heartbeat" not in path
            and "journal/" not in path
        ):
            found.append(path)
    return found


KILLS = (How.KILLS, How.KILLS_TORN, How.KILLS_AFTER)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "every", [25, pytest.param(1, marks=pytest.mark.chaos)], ids=["some calls", "all calls"]
)
def test_no_kill_in_any_call_tears_or_loses_anything_on_a_disk(tmp_path: Path, every: int) -> None:
    last = num_calls("local")
    for nth in range(1, last + 1, every):
        for how in KILLS if every == 1 else KILLS[nth % 3 :][:1]:
            assert kill(
                str(tmp_path / f"{nth}{how.name}" / "run"), nth, how, tmp_path / f"{nth}{how.name}.told"
            )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "every", [75, pytest.param(1, marks=pytest.mark.chaos)], ids=["some calls", "all calls"]
)
def test_no_kill_in_any_call_tears_or_loses_anything_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    with moto() as url:
        reach(monkeypatch, url, tmp_path)
        bucket, endpoint = new_bucket(url), {n: v for n, v in os.environ.items() if n.startswith("AWS_")}
        for nth in range(1, num_calls("bucket") + 1, every):
            for how in KILLS[nth % 3 :][:1]:
                name = f"{nth}{how.name}"
                assert kill(f"{bucket}/{name}/run", nth, how, tmp_path / f"{name}.told", endpoint)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_is_told_of_a_failed_write_does_not_say_that_the_run_has_ended(number: int) -> None:
    told = str(storage_error("write", "/runs/r/x", OSError(number, "no")))
    assert "has room" in told
    assert "run again" not in told, "the run tries it again by itself"
