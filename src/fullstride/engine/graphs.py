"""CUDA graphs: a piece of work is captured once and replayed after that, so that the host issues it in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from fullstride.engine.graph_nodes import replace_memsets


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Any


class Graphs:
    """Runs pieces of work, each under a key; with `enabled` as CUDA graphs from their third run on.

    A piece's first run is eager: libraries make their plans, scratch gets its buffers. The second is captured. The work
    must read and write the same addresses every time, with the same shapes and the same host values; whatever differs
    otherwise belongs into the key. They run on one stream, and what a piece returns stays alive with it: tensors that a
    library made in one piece may be read by another.

    Graphs of one pool share memory: what is temporary in one may be where the result of one that was captured later is.
    So a piece whose result is read after other pieces have run needs a `pool` in which none of those is.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, _Captured] = {}
        self._pools: dict[Hashable, Any] = {}

    def run(self, key: Hashable, work: Callable[[], Any], pool: Hashable = None) -> Any:
        """Do `work`, eagerly or by its graph; returns what it returned (when captured: the same tensors every time)."""
        if not self._enabled:
            return work()
        captured = self._captured.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen.add(key)
                return work()
            captured = self._captured[key] = self._capture(work, pool)
        captured.graph.replay()
        return captured.result

    def drop(self) -> None:
        """Destroy what was captured; it may still be running."""
        for captured in self._captured.values():
            captured.graph.reset()
        self._captured.clear()

    def _capture(self, work: Callable[[], Any], pool: Hashable) -> _Captured:
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the eager run held for the same work
        with torch.cuda.graph(graph, pool=self._pools[pool], capture_error_mode="thread_local"):
            result = work()
        replace_memsets(graph)
        graph.instantiate()
        return _Captured(graph, result)
