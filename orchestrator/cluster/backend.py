"""The back end of our Ray Train runs: it does nothing, but lets a worker be replaced alone.

Ray Train sends it to the workers, so this file is apart from code that only the controller's side loads.
"""

from __future__ import annotations

from typing import Any

from ray.train.backend import Backend, BackendConfig

from orchestrator.cluster.shield import outlive_sigterm


class _InPlaceBackend(Backend):
    """Sets up no process group; says that a worker may be replaced alone."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """See Ray's `Backend`. What this executes runs in the main thread of each worker."""
        del backend_config
        worker_group.execute(outlive_sigterm)


class InPlaceConfig(BackendConfig):
    """Ray reads the class of the backend here."""

    backend_cls = property(lambda self: _InPlaceBackend)
    backend = "none"  # Ray's trainer for torch asks which process group to set up
