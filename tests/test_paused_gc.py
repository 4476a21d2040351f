"""Loading rests the garbage collector and leaves it as it was."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest

from orchestrator.paused_gc import paused_gc


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_the_collector_rests_while_loading_and_works_afterwards() -> None:
    with paused_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_loaded_is_not_looked_at_again() -> None:
    gc.unfreeze()
    with paused_gc():
        kept = [[] for _ in range(100)]  # type: ignore[var-annotated]
    assert gc.get_freeze_count() > len(kept)


def test_loading_may_be_nested_and_may_fail() -> None:
    with paused_gc():
        with pytest.raises(ImportError), paused_gc():
            importlib.import_module("no_such_module")
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_the_process_has_switched_off_stays_off() -> None:
    gc.disable()
    with paused_gc():
        pass
    assert not gc.isenabled()
