"""run.json: what a run is, frozen at its first start, and the id that all its files share.

Files beside it with another id belong to another run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.checkpoint.files.manifest import require_known
from orchestrator.checkpoint.node_local.node_folder import run_folder
from orchestrator.errors import (
    ConfigError,
    LaterFormatError,
    OrchestratorError,
    OtherFormatError,
    ResumePointError,
    StorageError,
)
from orchestrator.history.claims.claims import ForkedFrom
from orchestrator.json_form import LaterSealError, decode, unseal
from orchestrator.planning.resume.identity import RunIdentity
from orchestrator.storage.files import Storage

RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """The content of run.json.

    `created` is a time for people. `id` is random, and repeated in every claim, end record, journal line and
    COMMIT of the run. `first_weights` identifies the contents of `model.init_from` (see
    `checkpoint.export.export_files`); empty without it. `weights_by_name`: each first weight of
    `model.config` is drawn by its name, not in the order of the build (`trainer.state.first_weights`).
    `forked_from` is the point with which a fork begins; its first start takes that over.
    """

    format: int
    name: str
    created: str
    identity: RunIdentity
    id: str = ""
    first_weights: str = ""
    weights_by_name: bool = False
    forked_from: ForkedFrom | None = None


def folder_on_nodes(storage: Storage) -> str:
    """Returns the name of the run's folder in node folders (`resume.node_folder`). The run must exist."""
    run = read_run(storage)
    assert run is not None, "a process that writes parts has joined a run"
    return run_folder(run.name, run.id)


def read_run(storage: Storage) -> RunFile | None:
    """Returns the content of run.json; None if there is no such run.

    Raises `ResumePointError` if it is not as it was written, or has a format that this version does not know.
    """
    try:
        content: dict[str, Any] = unseal(storage.read(RUN_FILE))
        found = content.get("format") if isinstance(content, dict) else None
        require_known(found, f"{storage.root}/{RUN_FILE}")
        return decode(RunFile, content, RUN_FILE)
    except FileNotFoundError:
        return None
    except LaterSealError as error:
        raise LaterFormatError(f"{storage.root}/{RUN_FILE} {error}") from error
    except OrchestratorError as error:
        if isinstance(error, StorageError | ConfigError | OtherFormatError):  # it was not read at all
            raise
        raise ResumePointError(
            f"{storage.root}/{RUN_FILE} is damaged: {error}; restore it from a copy. Nothing was decided "
            "from it",
            code="run.damaged_run_file",
        ) from error
