"""The disks of a cluster's nodes in a launch (`resume.node_folder`): what its driver reaches, and whether
points can be kept there.
"""

from __future__ import annotations

import secrets

from orchestrator.errors import ResourceError
from orchestrator.launch.needs import gib
from orchestrator.launch.ray_servers import RayServers
from orchestrator.parts.node_storage import NodeStorage
from orchestrator.parts.reached_nodes import ReachedNodes


class NodeDisks:
    """Those that one launch reaches, once its driver is connected to Ray."""

    def __init__(self, folder: str | None) -> None:
        """`folder` is `resume.node_folder`."""
        self._folder = folder
        self._servers = RayServers(secrets.token_hex(4), folder)
        self.nodes = ReachedNodes(self._servers, folder)

    def reached_by(self, storage: NodeStorage) -> None:
        """The parts of points are found there from now on, also such as older launches have written."""
        storage.reach(self.nodes)

    def require_room(self, needed_bytes: int) -> None:
        """Makes the folder on every node. Raises `ResourceError` if one cannot, or all together have less
        than `needed_bytes` free.
        """
        if self._folder is None:
            return
        homes = {home.place.id: home for home in self.nodes.require_folders().values()}
        free = sum(home.free_bytes for home in homes.values())
        if free < needed_bytes:
            listed = ", ".join(f"{home.place}: {gib(home.free_bytes)}" for home in homes.values())
            raise ResourceError(
                f"{gib(needed_bytes)} of disk are needed for resume points in "
                f"resume.node_folder={self._folder}, {gib(free)} are free ({listed}); free some, lower "
                "resume.keep_latest, or take another folder"
            )

    def serve(self) -> None:
        """Nodes have come, perhaps: each gets its server, which lives as long as this process. Waits for
        nothing.
        """
        if self._folder is not None:
            for node in self._servers.all():
                self._servers.start(node)
