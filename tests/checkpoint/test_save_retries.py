"""When another save is tried after one was given up."""

from __future__ import annotations

from orchestrator.checkpoint.commit.pending_save import SaveRetries


def test_saves_that_fail_are_tried_again_ever_later_and_once_each():
    retries, now, waits = SaveRetries(), 0.0, []
    for _ in range(9):
        wait_s = retries.given_up(now)
        assert not retries.due(now + wait_s - 0.1)
        now += wait_s
        assert retries.due(now)
        assert not retries.due(now + 1e6), "one try for each failure"
        waits.append(wait_s)
    assert waits == [5, 10, 20, 40, 80, 160, 320, 320, 320]


def test_a_commit_ends_the_tries():
    retries = SaveRetries()
    retries.given_up(0.0)
    retries.committed()
    assert not retries.due(1e6)
    assert retries.given_up(0.0) == 5, "it begins anew"
