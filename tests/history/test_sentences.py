"""The sentences that a person reads at 3 a.m."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.history import sentences
from orchestrator.records.run_status import (
    CODE,
    DATA,
    EVALUATES,
    PEERS,
    Doing,
    GroupChange,
    GroupMember,
    Held,
    Loss,
    Stall,
)

ONE = GroupMember(rank=1, host="10.0.0.7", pid=22506)
BOOM = "train.objective=mine:loss raised in step 412: RuntimeError: no. Never (/mine.py:3 in loss)"
KILLED = Loss(worker=ONE, reason="killed (SIGKILL)")
CHANGE = GroupChange(
    attempt=1,
    generation=2,
    world_size=1,
    wanted=2,
    step=411,
    step_before=411,
    lost=(KILLED,),
    joined=(),
    paused_s=0.21,
    reason="Connection closed by peer",
    restarted=False,
)
NODE = tuple(
    Loss(worker=GroupMember(rank=rank, host="10.0.0.9", pid=rank), reason="its node died") for rank in (2, 3)
)
CHANGES = {
    "worker 1 (10.0.0.7, pid 22506) lost: killed (SIGKILL) · 1 of 2 left, continuing at step 412 · "
    "paused 0.2 s": CHANGE,
    "2 of 2 workers are ready · starting at step 1": replace(
        CHANGE, world_size=2, lost=(), joined=(ONE,), paused_s=None, step=0, step_before=0, reason=""
    ),
    "worker 1 (10.0.0.7, pid 22506) joined · 2 of 2 workers, continuing at step 412 · paused 0.2 s": replace(
        CHANGE, world_size=2, lost=(), joined=(ONE,)
    ),
    "2 workers on 10.0.0.9 (ranks 2, 3) lost: its node died; worker 1 (10.0.0.7, pid 22506) lost: killed "
    "(SIGKILL) · 1 of 4 left, continuing at step 412 · paused 0.2 s": replace(
        CHANGE, wanted=4, lost=(*NODE, KILLED)
    ),
    "re-formed with 2 of 2 workers (generation 2) after: Connection closed by peer · continuing at step 412 "
    "· paused 0.2 s": replace(CHANGE, world_size=2, lost=()),
    f"{BOOM} · {sentences.NO_CHANGE}": replace(
        CHANGE, world_size=2, lost=(), reason=f"{BOOM} · {sentences.NO_CHANGE}"
    ),
    f"worker 1 (10.0.0.7, pid 22506) failed: {BOOM} · 1 of 2 left, continuing at step 412 · "
    "paused 0.2 s": replace(CHANGE, lost=(Loss(worker=ONE, reason=BOOM),)),
    "the coordinator was restarted (attempt 2) · 2 of 2 workers, continuing at step 412 · "
    "paused 0.2 s": replace(CHANGE, attempt=2, world_size=2, lost=(), restarted=True),
    "worker 1 (10.0.0.7, pid 22506) lost: killed (SIGKILL) · 1 of 2 left, continuing at step 401 · no "
    "remaining worker holds step 411: 11 steps are trained again · paused 0.2 s": replace(CHANGE, step=400),
    "worker 1 (10.0.0.7, pid 22506) lost: killed (SIGKILL) · 1 of 2 left, continuing at step 411 · no "
    "remaining worker holds step 411: 1 step is trained again · paused 0.2 s": replace(CHANGE, step=410),
}


@pytest.mark.parametrize("text", CHANGES)
def test_a_change_of_the_group_is_one_line(text: str) -> None:
    assert sentences.group_change(CHANGES[text]) == text


def test_what_the_end_of_a_run_says_is_not_said_before_of_workers_that_it_ended() -> None:
    end = f"{BOOM}. The state before it is saved as resume point 00000411-a0001-g0001"
    failed, lost = Loss(worker=ONE, reason=sentences.failure("TrainingError", end)), KILLED
    assert sentences.untold([failed, lost], end) == [lost]
    long = Loss(worker=ONE, reason=sentences.first_sentence(f"{BOOM[:-1]}{'x' * 200}"))
    assert sentences.untold([long], f"2 failures\n  {BOOM[:-1]}{'x' * 200}") == []


@pytest.mark.parametrize("part", ["", "held"])
def test_a_metric_that_is_not_finite_is_named_with_its_plug_in_and_what_to_do(part: str) -> None:
    text = sentences.not_finite(["weird"], 7, part, "train.objective=mine:loss")
    assert text.startswith("metric weird of train.objective=mine:loss is not finite")
    assert "step 7" in text
    assert (f"evaluation of {part}" in text) == bool(part)
    assert "correct it" in text
    assert "correct it" not in sentences.not_finite(["loss", "perplexity"], 7, part)


def test_of_several_workers_those_that_were_joining_are_counted_apart() -> None:
    joining = GroupMember(rank=None, host="10.0.0.9", pid=7)
    third, second = (loss.worker for loss in NODE[::-1])
    assert sentences.workers((third, second)) == "2 workers on 10.0.0.9 (ranks 2, 3)"
    assert sentences.workers((third, joining)) == "2 workers on 10.0.0.9 (rank 3, 1 that was joining)"
    assert sentences.workers((joining, joining)) == "2 workers on 10.0.0.9 (2 that were joining)"


def test_below_the_minimum_the_line_says_who_is_gone_and_how_long_the_run_waits() -> None:
    assert sentences.waiting((KILLED,), 2, 600.0) == (
        "worker 1 (10.0.0.7, pid 22506) lost: killed (SIGKILL) · fewer than 2 workers are left · "
        "waiting up to 600 s for a replacement (cluster.wait_s)"
    )
    assert "· no worker is left · waiting" in sentences.waiting((KILLED,), 1, 600.0)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ("T", "its process is stopped (SIGSTOP)"),
        ("D", "its process waits for a disk or a network file system"),
        ("", "its process is gone"),
        (None, "its node does not answer"),
    ],
)
def test_a_worker_that_holds_the_others_up_is_named_with_what_its_process_does(
    state: str | None, why: str
) -> None:
    other = Held(worker=GroupMember(rank=0, host="10.0.0.8", pid=1), state="S")
    seen = Stall(quiet_s=5.24, median_s=0.1, held=(other, Held(worker=ONE, state=state)))
    assert sentences.stall(seen) == [
        f"worker 1 (10.0.0.7, pid 22506) has not answered for 5.2 s: {why} · the others wait for it"
    ]


def at(rank: int, kind: str, state: str = "S") -> Held:
    worker = GroupMember(rank=rank, host=f"10.0.0.{rank}", pid=rank + 1)
    place = "model.py:12 in forward" if kind == CODE else ""
    return Held(worker=worker, state=state, doing=Doing(kind=kind, place=place, since_s=6.0))


def test_a_worker_in_its_own_code_is_named_with_the_line_while_others_wait_for_it() -> None:
    (line,) = sentences.stall(
        Stall(quiet_s=6.0, median_s=0.1, held=(at(0, PEERS), at(1, CODE), at(2, PEERS)))
    )
    assert all(
        text in line for text in ("worker 1 (10.0.0.1, pid 2)", "model.py:12 in forward", "ranks 0, 2")
    )


def test_two_workers_that_wait_for_each_other_are_both_named() -> None:
    (line,) = sentences.stall(Stall(quiet_s=6.0, median_s=0.1, held=(at(0, PEERS), at(1, PEERS))))
    assert all(text in line for text in ("10.0.0.0", "10.0.0.1", "ranks 0, 1"))


def test_of_three_workers_that_wait_for_each_other_the_pair_that_is_cut_off_is_named() -> None:
    held = [at(rank, PEERS) for rank in range(3)]
    cut_off = replace(held[2], doing=Doing(kind=PEERS, place="", since_s=6.0, unreached=(0,)))
    (line,) = sentences.stall(Stall(quiet_s=6.0, median_s=0.1, held=(held[0], held[1], cut_off)))
    assert sentences.worker(held[2].worker) in line
    assert sentences.worker(held[0].worker).removeprefix("worker ") in line
    assert sentences.worker(held[1].worker).removeprefix("worker ") not in line


@pytest.mark.parametrize("kinds", [(CODE, CODE), (PEERS, DATA), (DATA, DATA)])
def test_nobody_is_blamed_while_all_compute_or_wait_for_data(kinds: tuple[str, str]) -> None:
    held = tuple(at(rank, kind) for rank, kind in enumerate(kinds))
    assert sentences.stall(Stall(quiet_s=6.0, median_s=0.1, held=held)) == []


def test_a_long_evaluation_is_named() -> None:
    held = (at(0, EVALUATES), at(1, PEERS))
    assert sentences.stall(Stall(quiet_s=6.0, median_s=0.1, held=held)) == []
    assert sentences.stall(Stall(quiet_s=31.0, median_s=1.0, held=held)) == [
        "no step was finished for 31 s (median 1.0 s) · the workers evaluate"
    ]


def test_a_stopped_process_is_named_before_anything_that_workers_say() -> None:
    (line,) = sentences.stall(Stall(quiet_s=6.0, median_s=0.1, held=(at(0, PEERS), at(1, CODE, "T"))))
    assert "SIGSTOP" in line


def test_where_all_workers_are_gone_nobody_waits_for_them() -> None:
    (line,) = sentences.stall(Stall(quiet_s=5.0, median_s=0.1, held=(Held(worker=ONE, state=""),)))
    assert line.endswith("its process is gone · no worker trains")


@pytest.mark.parametrize("state", ["R", "S", "?"])
def test_where_nobody_is_stopped_one_line_says_so_after_30_s_or_five_median_steps(state: str) -> None:
    held = (Held(worker=ONE, state=state),)
    assert sentences.stall(Stall(quiet_s=29.0, median_s=1.0, held=held)) == []
    assert sentences.stall(Stall(quiet_s=99.0, median_s=20.0, held=held)) == []
    assert sentences.stall(Stall(quiet_s=31.0, median_s=1.0, held=held)) == [
        "no step was finished for 31 s (median 1.0 s) · no worker's process is stopped: they wait for data "
        "or storage, or for each other"
    ]
    assert sentences.stall(Stall(quiet_s=31.0, median_s=1.0, held=held, stopping=True)) == [
        "no step was finished for 31 s (median 1.0 s) · no worker's process is stopped: they wait for data "
        "or storage, or for each other. The run stops when its last state is saved or the save fails; a "
        "second Ctrl-C or SIGTERM stops it at once, without a save"
    ]


RAY = (
    "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system "
    "error. To troubleshoot the problem, check the logs for the dead worker. Lease ID: 05 Node ID: 1d "
    "Worker IP address: 192.0.2.2 Worker port: 34213 Worker PID: 23633 Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file." + " And more." * 50
)
RAYLET = "Raylet is terminated. Termination is unexpected.\n" + "    [state-dump] NodeManager\n" * 20


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (RAY, "Ray: process 23633 on 192.0.2.2 died (SYSTEM_ERROR) ("),
        (RAYLET, "Ray: Raylet is terminated. ("),
        ("x" * 1000, "Ray: " + "x" * (sentences.SCREEN_CHARS - 1) + "… ("),
        ("short", "Ray: short"),
    ],
)
def test_what_ray_says_at_length_is_one_line_that_names_the_file_with_the_rest(text: str, line: str) -> None:
    told = sentences.foreign("Ray", text, "logs/0001-host.log")
    assert told.startswith(line)
    assert "\n" not in told
    assert "\x1b" not in told
    assert told.endswith("more characters in logs/0001-host.log)") == (text != "short")


def test_a_reason_that_quotes_tracebacks_is_short_on_the_screen_and_names_the_file_with_all_of_it() -> None:
    trace = (
        "Traceback (most recent call last):\n" + '  File "x", line 1, in y\n    z()\n' * 50 + "ValueError: y"
    )
    long = f"a.jsonl: line 12: {'x' * 500}; set data.on_bad_document=skip in a new run"
    told = sentences.shortened(f"4 failures after step 7:\n  {trace}\n  {long}", "logs/0001-host.log")
    *before, cut, after = told.splitlines()
    assert before == ["4 failures after step 7:", "  Traceback (most recent call last):", "ValueError: y"]
    assert after == "(all of it in logs/0001-host.log)"
    assert len(cut) == sentences.REASON_CHARS
    assert cut.startswith("  a.jsonl: line 12: xxx"), "where and what"
    assert "xxx…xxx" in cut
    assert cut.endswith("xxx; set data.on_bad_document=skip in a new run"), "what to do"
    assert sentences.shortened("failed: cannot write x", "log") == "failed: cannot write x"


def test_a_worker_that_could_still_speak_is_quoted_with_the_last_line_of_its_traceback() -> None:
    text = 'Traceback (most recent call last):\n  File "x"\nValueError: no such thing\n'
    assert sentences.failure("ValueError", text) == "ValueError: no such thing"
    assert sentences.failure("StorageError", "cannot write x") == "cannot write x"
