"""Ctrl-C and SIGTERM as a flag, so that a run ends between two micro-steps and saves its state."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Stopped(KeyboardInterrupt):
    """A stop that was asked for, met at a place where the state is whole."""


class StopRequest:
    """While in its `with` block, the first SIGINT or SIGTERM is only noted; a second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # signal handlers can be set in the main thread only; elsewhere Ctrl-C is the main thread's business
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()
