"""Processes that train together (Gloo), for tests: one pool for every number of ranks, since starting takes seconds.

`together(size, work, *arguments)` calls `work(comm, *arguments)` in all processes and gives what they return, by rank.
"""

from __future__ import annotations

import atexit
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from fullstride import ModelConfig, Options
from fullstride.engine import weights_io
from fullstride.engine.batch import HostBatch
from fullstride.engine.step import Engine
from fullstride.parallel.comm import Communicator
from fullstride.parallel.rendezvous import join, serve
from fullstride.trainer.setting import Setting

TIMEOUT = 60.0  # seconds for one piece of work, which takes one or two


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work` and `arguments` travel by pickle. Raises RuntimeError with the traceback of the rank that failed."""
    return _pool(size).run(work, *arguments)


@cache
def _pool(size: int) -> Pool:
    return Pool(size)


class Pool:
    """`size` processes of one thread each; a failure ends them all, and the next piece of work starts others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: Any = None  # where they meet
        atexit.register(self.stop)

    def run(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        if not self._processes:
            self._start()
        results: dict[int, Any] = {}
        try:
            for pipe in self._pipes:
                pipe.send((work, arguments))
            end = time.monotonic() + TIMEOUT
            while len(results) < self.size:
                waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
                ready = wait(waiting, timeout=max(end - time.monotonic(), 0))
                if not ready:
                    raise RuntimeError(f"ranks {sorted(set(range(self.size)) - set(results))} are stuck")
                for pipe in ready:
                    rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                    failed, result = pipe.recv()  # type: ignore[union-attr]
                    if failed:
                        raise RuntimeError(f"rank {rank} of {self.size}:\n{result}")
                    results[rank] = result
        except BaseException:
            self.stop()
            raise
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = serve()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        self._processes, self._pipes, self._store = [], [], None


_grids: dict[tuple[Communicator, int], list[Any]] = {}


def rows_and_columns(comm: Communicator, tp: int) -> tuple[Communicator, Communicator]:
    """(ranks that have the same share of a model, the `tp` neighbours that share one out); made once a process."""
    if (comm, tp) not in _grids:
        column, place = divmod(comm.rank, tp)
        made = []
        for group, rank, size in ((("row", place), column, comm.size // tp), (("column", column), place, tp)):
            store = serve() if rank == 0 and size > 1 else None
            ports = dict(told for told in comm.gather(None if store is None else (group, store.port)) if told)
            made += [join(ports[group], rank, size, torch.device("cpu")) if size > 1 else Communicator(), store]
        _grids[comm, tp] = made
    row, _, column, _ = _grids[comm, tp]
    return row, column


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    comm = join(port, rank, size, torch.device("cpu"))
    while True:
        try:
            work, arguments = pipe.recv()
        except EOFError:  # the parent has gone
            return
        try:
            with torch.no_grad():
                pipe.send((False, work(comm, *arguments)))
        except BaseException:
            pipe.send((True, traceback.format_exc()))


class RankTrainer:
    """What the Trainer does, for one of several ranks: an engine, and its share of everybody's rows."""

    def __init__(
        self,
        comm: Communicator,
        config: ModelConfig,
        options: Options,
        batch_size: int,
        seq_len: int,
        grad_accum: int,
        tp: Communicator | None = None,
        **changed: Any,
    ) -> None:
        """batch_size: of this rank; tp: as the engine's. changed: fields of the engine's settings that the options do
        not have."""
        lora, settings = Setting(options.resolved(), batch_size, seq_len, grad_accum).engine(config)
        self.comm, self.batch_size = comm, batch_size
        self.engine = Engine(config, lora, replace(settings, **changed), torch.device("cpu"), comm, tp)
        if lora is not None:
            weights_io.init_adapters(self.engine, options.seed)

    def _own(self, array: np.ndarray | None) -> np.ndarray | None:
        first = self.comm.rank * self.batch_size
        return None if array is None else array[first : first + self.batch_size]

    def batch(self, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None = None) -> HostBatch:
        """This rank's rows of all ranks' arrays."""
        return HostBatch.of(*map(self._own, (inputs, targets, documents)))  # type: ignore[arg-type]

    def step(
        self, inputs: np.ndarray, targets: np.ndarray, documents: np.ndarray | None = None, z_loss: float = 0.0
    ) -> None:
        self.engine.micro_step(self.batch(inputs, targets, documents), z_loss)

    def validate(self, *arrays: Any) -> dict[str, float]:
        return self.engine.validate(self.batch(*arrays))

    def update(self, **hyper: float) -> dict[str, float]:
        return self.engine.update(step=self.engine.updates + 1, **hyper)  # type: ignore[arg-type]
