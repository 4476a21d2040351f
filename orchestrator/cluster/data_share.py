"""What Ray Data gets of the cluster, and which of its helpers it does without, in the feeder's process.

It replaces private functions of Ray 2.60 and knows nothing of our data. Ray Data's own way to its share is an
actor that deals out what Ray Train's runs and other datasets leave, and counts those that died in the last
three minutes as alive. The launch has counted the tokenizers' CPUs before it began, so they are ours.
"""

from __future__ import annotations

import uuid

from ray.data._internal import stats
from ray.data._internal.cluster_autoscaler.base_cluster_autoscaler import ClusterAutoscaler
from ray.data._internal.execution import streaming_executor
from ray.data._internal.execution.interfaces.execution_options import ExecutionResources
from ray.data._internal.execution.operators import actor_pool_map_operator
from ray.data._internal.utils import cached_ray_internals

from orchestrator.cluster.null_actor import NullActor

# Credits bound what lies in the object store (`Feeder.slot`, `Feeder.room`), so no share of it is dealt out.
_OBJECT_STORE_BYTES = 1 << 50


class _OwnShare(ClusterAutoscaler):
    """`num_cpus` CPUs, whatever others want; asks for nothing more."""

    def __init__(self, num_cpus: float) -> None:
        self._total = ExecutionResources(
            cpu=num_cpus, gpu=0, object_store_memory=_OBJECT_STORE_BYTES, memory=_OBJECT_STORE_BYTES
        )

    def try_trigger_scaling(self) -> None:
        """The pool has a fixed size."""

    def on_executor_shutdown(self) -> None:
        """Nothing was asked for."""

    def get_total_resources(self) -> ExecutionResources:
        """The share."""
        return self._total


def take_own_share(num_cpus: float) -> None:
    """From now on every dataset of this process has `num_cpus` CPUs, and starts no process for statistics
    (they would feed a page of Ray's dashboard) or for actors' places: each costs 1 to 2 CPU seconds and up to
    200 MB.
    """
    share, statistics, places = _OwnShare(num_cpus), NullActor(uuid.uuid4().hex), NullActor({})
    setattr(streaming_executor, "create_cluster_autoscaler", lambda *_, **__: share)  # noqa: B010
    setattr(stats, "get_or_create_stats_actor", lambda: statistics)  # noqa: B010
    for module in (actor_pool_map_operator, cached_ray_internals):
        setattr(module, "get_or_create_actor_location_tracker", lambda: places)  # noqa: B010
