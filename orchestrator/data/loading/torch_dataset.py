"""A loader as a dataset for torch's `DataLoader`.

The only file of this folder that imports torch at the top.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from orchestrator.errors import RefusedError

if TYPE_CHECKING:
    from orchestrator.data.loading.loader import Loader


class LoaderDataset(IterableDataset[Any]):
    """The loader's batches. Its state is that of the loader."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        if worker is not None:
            raise RefusedError(
                f"the loader is in a DataLoader with num_workers={worker.num_workers}, and each worker "
                "process would read the whole stream; set num_workers=0 (the loader prefetches in a thread)",
                code="command.dataloader_workers",
            )
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Calls `Loader.load_state_dict`."""
        self._loader.load_state_dict(state)
