"""Members that were killed or come, and what their launch must have trained."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

from tests.trainer.launch import Launch
from tests.trainer.member import Members, Plan

END = 8


def assert_same_training(launch: Launch, unbroken: Launch) -> None:
    """The history that the last point stands on has every step once, as the unbroken run trained it, and ends
    in the same bits."""
    assert launch.last_point().state_digest == unbroken.last_point().state_digest
    assert launch.last_point().cursor == unbroken.last_point().cursor
    history: dict[int, tuple] = {}
    for record in sorted(launch.records.values(), key=lambda r: r.key):
        history[record.step] = (record.loss, record.grad_norm, record.lr, record.digest)
    expected = {r.step: (r.loss, r.grad_norm, r.lr, r.digest) for r in unbroken.records.values()}
    assert history == expected


def killed(group: Members) -> set[str]:
    return {name for name, process in group.processes.items() if process.exitcode == -signal.SIGKILL}


def let_in(group: Members, name: str, plan: Plan | None = None, held: str = "b") -> None:
    """Starts a member while `held` is held, and lets that go on when the newcomer waits."""
    group.launch.wait_for(lambda: group.launch.held(held) is not None)
    group.start(name, plan)
    group.launch.wait_for(lambda: group.launch.waits(name))
    group.launch.release(held)


def part_writers(pid: int) -> list[int]:
    """The processes beside a member that write parts."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            for child in (task / "children").read_text().split():
                if b"checkpoint.files.part_writer" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found
