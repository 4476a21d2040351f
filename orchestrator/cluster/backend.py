"""The back end of our Ray Train runs: none, but a worker of it may be replaced alone.

Ray Train hands it to the workers, so it stands apart from what only the controller's side loads.
"""

from __future__ import annotations

from ray.train.backend import Backend, BackendConfig


class _InPlaceBackend(Backend):
    """Sets up no process group; says that a worker may be replaced alone."""

    has_replica_groups = True


class InPlaceConfig(BackendConfig):
    """Ray asks for the class of the backend here."""

    backend_cls = property(lambda self: _InPlaceBackend)
    backend = "none"  # Ray's trainer for torch asks which process group to set up
