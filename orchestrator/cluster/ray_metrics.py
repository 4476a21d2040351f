"""Publishes metrics through Ray: each node's agent shows them to Prometheus, with `ray_` before the name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any


def in_a_cluster() -> bool:
    """Returns whether this process belongs to a Ray cluster. Loads no Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


class RayMetrics:
    """Gauges and counters of this process. A value that Ray does not take is left out: one that is no number,
    or a counter that does not grow.
    """

    def __init__(self, declared: Iterable[tuple[str, str, str]], tags: Mapping[str, str]) -> None:
        """`declared`: (name, gauge or counter, description)."""
        from ray.util.metrics import Counter, Gauge

        kinds: dict[str, Any] = {"gauge": Gauge, "counter": Counter}
        self._metrics: dict[str, Any] = {}
        for name, kind, text in declared:
            made = kinds[kind](name, description=text, tag_keys=tuple(tags))
            made.set_default_tags(dict(tags))
            self._metrics[name] = made

    def set(self, name: str, value: float) -> None:
        """Sets a gauge's new value, or adds to a counter."""
        metric = self._metrics[name]
        if hasattr(metric, "inc"):
            if value > 0:
                metric.inc(value)
        else:
            metric.set(value)
