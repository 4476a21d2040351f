"""Sets Ray Data's share of the cluster, and removes helpers of it, in the feeder's process.

It replaces private functions of Ray 2.60. By default, an actor gives Ray Data what Ray Train's runs and other
datasets leave, and counts those that died in the last three minutes as alive. The launch has counted the
tokenizers' CPUs before it began, so they are ours.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from orchestrator.cluster.private_ray import NullActor, replace
from orchestrator.cluster.ray_inventory import LOOKS, OWN_SHARE, PLACES, STATISTICS

# Credits bound what lies in the object store (`Feeder.slot`, `Feeder.room`), so no share of it is dealt out.
_OBJECT_STORE_BYTES = 1 << 50
# Ray Data reads these when it is loaded. Without the first, it passes on a block one round of its loop (0.1
# s) later. The second saves a helper process at start.
_ENVIRONMENT = {"RAY_DATA_METADATA_PREFETCH_ON_THREAD": "0", "RAY_DATA_USAGE_DISABLED": "1"}

_LOOKS_S = 0.01


def before_loading() -> None:
    """Must be called in the feeder's process before anything of Ray Data is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def take_own_share(num_cpus: float) -> None:
    """Gives every later dataset of this process `num_cpus` CPUs, and no process for statistics or for actors'
    places.

    Statistics would only serve a page of Ray's dashboard. Each process costs 1 to 2 CPU seconds and up to 200
    MB. Parts that this Ray does not let us replace stay as they are.
    """
    statistics, places = NullActor(uuid.uuid4().hex), NullActor({})
    found = OWN_SHARE.found()
    if found is not None:
        share = _own_share(num_cpus, *found[1:])
        replace(OWN_SHARE, [lambda *_, **__: share])
    replace(STATISTICS, [lambda *_, **__: statistics])
    replace(PLACES, [lambda *_, **__: places, lambda *_, **__: places])


@contextmanager
def looking_often() -> Iterator[None]:
    """Within this, while a chunk is waited for, Ray Data looks for finished tokenizers more often.

    By default it gives a finished tokenizer its next slot when all of them have results, or after 0.1 s. A
    look costs it a millisecond.
    """
    own = _rays_looks()  # known before: a pipeline that ends may overlap with the next one
    replace(LOOKS, [_LOOKS_S])
    try:
        yield
    finally:
        replace(LOOKS, [own])


@cache
def _rays_looks() -> Any:
    found = LOOKS.found()
    return None if found is None else found[0]


def _own_share(num_cpus: float, autoscaler: Any, resources: Any) -> Any:
    """A `ClusterAutoscaler` for Ray Data: always `num_cpus` CPUs. It asks for no more."""
    total = resources(
        cpu=num_cpus, gpu=0, object_store_memory=_OBJECT_STORE_BYTES, memory=_OBJECT_STORE_BYTES
    )
    methods = {
        "try_trigger_scaling": lambda _: None,  # the pool has a fixed size
        "on_executor_shutdown": lambda _: None,
        "get_total_resources": lambda _: total,
    }
    return type("OwnShare", (autoscaler,), methods)()
