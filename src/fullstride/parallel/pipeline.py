"""Runs one rank's actions of a schedule: receive, act, send.

On a GPU neither the host nor the compute stream waits for more than an action needs: its message is received while the
action before it runs, and what it sends is sent while the next ones run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fullstride.parallel.comm import Work
from fullstride.parallel.mesh import BACKWARD, FORWARD, Mesh
from fullstride.parallel.schedule import Action, Schedule


class Buffers(Protocol):
    """Of a micro-batch in a stage: what it reads, later that's gradient; what it writes, and before the backward that's
    gradient. Rows may lie apart."""

    @property
    def input(self) -> torch.Tensor: ...

    @property
    def output(self) -> torch.Tensor: ...


class Stages(Protocol):
    """What the actions are done to."""

    def slot(self, stage: int, microbatch: int) -> Buffers:
        """Where the micro-batch is, or will be."""
        ...

    def act(self, action: Action) -> None:
        """Do it: what it needs has been received."""


class ActionTimes:
    """When this rank's actions began, what they need being there, and ended: on the device, in their order."""

    def __init__(self, device: torch.device | None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """An action begins or ends here."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def busy_and_span(self) -> tuple[float, float]:
        """Seconds in actions, and from the first one's begin to the last one's end. Waits for the device."""
        if not self._marks:
            return 0.0, 0.0
        if self._on_gpu:
            torch.cuda.synchronize()
            first = self._marks[0]
            times = [first.elapsed_time(mark) * 1e-3 for mark in self._marks]
        else:
            times = self._marks
        busy = sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
        return busy, times[-1] - times[0]


class Pipeline:
    """This rank's actions of `schedule`, done as micro-batches come."""

    def __init__(self, schedule: Schedule, mesh: Mesh, stages: Stages) -> None:
        self._schedule, self._mesh, self._stages = schedule, mesh, stages
        self._rank = mesh.pp.rank
        self._counts: dict[int, int] = {}  # of actions that are ready, by micro-batches supplied
        self._sent: dict[int, Work] = {}  # on a GPU, by the buffer's address
        self._copied: list[Work] = []  # on a CPU, where messages are copied first
        device = mesh.world.device
        on_gpu = mesh.pp.size > 1 and device is not None and device.type == "cuda"
        self._side = torch.cuda.Stream(device) if on_gpu else None
        self._used: dict[int, torch.cuda.Event] = {}  # on a GPU: when a slot's last action was over
        self.times: ActionTimes | None = None  # while somebody measures
        self.restart()

    def restart(self) -> None:
        """The next micro-batch is the first one."""
        self._left, self._done = self._schedule, 0
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())

    def run(self, supplied: int) -> None:
        """Do what can be done in order when the first `supplied` micro-batches are there."""
        order, done = self._left.orders[self._rank], self._done
        self._done = self._ready(supplied)
        self._do(order[done : self._done])

    def _ready(self, supplied: int) -> int:
        if self._left is not self._schedule:
            return self._left.ready(supplied)[self._rank]
        if supplied not in self._counts:  # every update asks for the same ones
            self._counts[supplied] = self._schedule.ready(supplied)[self._rank]
        return self._counts[supplied]

    def drain(self, supplied: int) -> None:
        """Do all that concerns the first `supplied` micro-batches; what is left of the order waits for more. Then the
        slots are free."""
        order, done = self._left.orders[self._rank], self._done
        self._left, self._done = self._left.after(supplied), 0
        self._do([action for action in order[done:] if action.microbatch < supplied])
        for buffer in list(self._sent):
            self._settle(buffer)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            slot = self._stages.slot(action.stage, action.microbatch)
            comes, goes = (slot.input, slot.output) if action.kind == "F" else (slot.output, slot.input)
            travels = action.kind != "W"
            if travels:
                self._receive(action, _rows(comes), slot)
                self._settle(goes.data_ptr())
            if self.times is not None:
                self.times.mark()
            self._stages.act(action)
            if self.times is not None:
                self.times.mark()
            if self._side is not None:
                self._used.setdefault(slot.input.data_ptr(), torch.cuda.Event()).record()
            if travels:
                self._send(action, _rows(goes))
        for work in self._copied:
            work.wait()
        self._copied.clear()

    def _settle(self, buffer: int) -> None:
        """What was sent from this address is gone, for what follows."""
        sent = self._sent.pop(buffer, None)
        if sent is not None:
            sent.wait()

    # ---- messages

    def _neighbour(self, action: Action, step: int) -> int | None:
        """The rank `step` stages on, if there is such a stage and it is another's."""
        stage = action.stage + step
        if not 0 <= stage < self._schedule.num_stages:
            return None
        rank = self._schedule.rank_of(stage)
        return None if rank == self._rank else rank

    def _receive(self, action: Action, buffer: torch.Tensor, slot: Buffers) -> None:
        flow, step = (FORWARD, -1) if action.kind == "F" else (BACKWARD, 1)
        source = self._neighbour(action, step)
        if source is None:
            return
        with self._aside(slot):
            self._settle(buffer.data_ptr())
            received = self._mesh.link(source, self._rank, flow).receive(buffer)
        received.wait()

    @contextmanager
    def _aside(self, slot: Buffers) -> Iterator[None]:
        """On a stream that waits for the last action in `slot`, and not for those after it."""
        if self._side is None:
            yield
            return
        with torch.cuda.stream(self._side):
            if slot.input.data_ptr() in self._used:
                self._side.wait_event(self._used[slot.input.data_ptr()])
            yield

    def _send(self, action: Action, buffer: torch.Tensor) -> None:
        flow, step = (FORWARD, 1) if action.kind == "F" else (BACKWARD, -1)
        target = self._neighbour(action, step)
        if target is None:
            return
        work = self._mesh.link(self._rank, target, flow).send(buffer)
        if self._side is None:
            self._copied.append(work)
        else:
            self._sent[buffer.data_ptr()] = work


def _rows(view: torch.Tensor) -> torch.Tensor:
    """The rows of a matrix [N, n] with what lies between them: contiguous."""
    return view.as_strided((view.shape[0], view.stride(0)), (view.stride(0), 1))
