"""Checks a worker's machine before the worker asks to join: the run's storage, packages and clock.

It does not import torch, so that a machine without torch can report that.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from orchestrator import __version__
from orchestrator.checkpoint.points.run_file import RUN_FILE, read_run
from orchestrator.errors import MachineError, OrchestratorError, StorageError
from orchestrator.records.membership import MachineProof, Unfit
from orchestrator.storage.files import Storage
from orchestrator.storage.open import PROBE

# With another version of one of these, a worker may train something else, or not understand the others.
COMPARED = ("torch", "transformers", "tokenizers")
STORAGE, PACKAGES = "machine.storage", "machine.packages"


def packages_here() -> dict[str, str]:
    """The versions that must be equal on all machines of a run, without packages that are not installed."""
    found = {"orchestrator": __version__}
    for name in COMPARED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def require_packages(wanted: Mapping[str, str], here: Mapping[str, str]) -> None:
    """Raises `MachineError` if a package of the driver has another version `here`, or is missing.

    The builds of a version (`2.5.1+cu124`, `2.5.1+cpu`) may differ.
    """
    differ = [
        f"{name} {here.get(name, 'is not installed')} (the driver has {theirs})"
        for name, theirs in wanted.items()
        if here.get(name, "").partition("+")[0] != theirs.partition("+")[0]
    ]
    if differ:
        raise MachineError(
            f"this machine has other packages than the driver: {', '.join(differ)}; install the driver's "
            "versions on it",
            code=PACKAGES,
        )


def require_storage(storage: Storage, run_id: str, ask: Callable[[MachineProof], Unfit | None]) -> None:
    """Raises `MachineError` if `storage` is not the run's on this machine, or cannot be written.

    Also raises it if the coordinator, which `ask` queries, finds the machine unfit. Writes nothing before
    run.json was read: an empty folder in place of a missing mount stays empty. `run_id`: that of run.json;
    "": the run has none.
    """
    run = read_run(storage)
    if run is None:
        raise MachineError(
            f"{storage.root} has no {RUN_FILE} on this machine, but the driver sees the run there; mount the "
            "run's storage on it",
            code=STORAGE,
        )
    if run_id and run.id != run_id:
        raise MachineError(
            f"{storage.root} holds another run on this machine ({RUN_FILE} has id {run.id}, the run has "
            f"{run_id}); mount the run's storage on it",
            code=STORAGE,
        )
    folder, token = f"{PROBE}{secrets.token_hex(8)}", secrets.token_hex(16)
    probe = f"{folder}/probe"
    try:
        storage.create(probe, token.encode())
        verdict = ask(MachineProof(probe=probe, token=token, unix_s=time.time()))
    except StorageError as error:
        raise MachineError(
            f"{storage.root} cannot be written on this machine: {error}; give the worker's user the right to "
            "write there",
            code=STORAGE,
        ) from error
    finally:
        with suppress(OrchestratorError):
            storage.delete_folder(folder)
    if verdict is not None:
        raise MachineError(verdict.text, code=verdict.code)
