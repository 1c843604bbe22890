"""Which of a launcher's processes are there: each gives signs of life, and the word of the first failure reaches all.

At the launcher's store there is, for every rank,

    beats/RANK       a number that grows once a second; from LEFT on, the process has ended in an orderly way
    met/RANK         how often it has come to a meeting
    failed/MEETING   the first failure since so many meetings

A process keeps this up from its first use to its end, whatever it does, and however many groups it forms. A rank whose
beats were seen and stop, or that ends while it is waited for, is lost: whoever sees it leaves the word, which ends the
waits of all.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fullstride.errors import OutOfMemory, WorkerError
from fullstride.parallel.comm import PeerLost, Waiting

BEAT = 1.0  # seconds from one sign of life to the next
SILENCE = 15.0  # seconds without one after which a rank is lost
ARRIVAL = 30 * 60.0  # seconds in which a process may start
LEFT = 1 << 40


@dataclass(frozen=True)
class Failure:
    """Why a rank is no longer usable."""

    rank: int
    story: str
    memory: bool = False  # it ran out of memory
    consequence: bool = False  # of another rank's failure, most likely

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        if isinstance(error, OutOfMemory):
            return cls(rank, str(error), memory=True)
        text = "".join(traceback.format_exception(error))
        return cls(rank, f"failed:\n{text}", consequence=isinstance(error, PeerLost))

    def error(self) -> Exception:
        if not self.memory:
            return WorkerError(self.rank, self.story)
        error = OutOfMemory(f"rank {self.rank}: {self.story}")
        error.rank = self.rank
        return error


class Presence:
    """This process, rank `rank` of `size`, among those of a launcher."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """store: one that is not used for anything that waits, since beats would wait too."""
        self.rank, self.size = rank, size
        self._store = store
        self._meetings = 0
        self._awaited: set[int] = set()  # in a meeting
        self._waiting: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._seen = {other: (0, 0) for other in range(size) if other != rank}  # beats, and how often just those
        self._failure: Failure | None = None
        self._cut_off = False  # from the store
        self._turning = threading.Lock()  # to another meeting
        self._process = os.getpid()
        self._heard, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="presence", daemon=True)
        self._thread.start()
        # last of all: the ends of trainers, registered after this, come before it
        weakref.finalize(Presence, self._leave)
        atexit.register(self._tell_uncaught)

    def meet(self) -> int:
        """Return when all ranks have come here as often as this one; how often that is. Raises PeerLost."""
        with self._turning:
            self._meetings, self._failure = self._meetings + 1, None
            self._heard.clear()
        if self._cut_off:
            raise PeerLost("the launcher's store does not answer any more")
        try:
            self._store.add(f"met/{self.rank}", 1)
            while awaited := {rank for rank in self._seen if self._store.add(f"met/{rank}", 0) < self._meetings}:
                self._awaited = awaited
                if self._heard.wait(BEAT / 10):
                    raise PeerLost("another rank is gone")
        except RuntimeError as error:
            raise PeerLost(f"the ranks did not meet: {error}") from error
        finally:
            self._awaited = set()
        return self._meetings

    def guard(self, waiting: Waiting) -> None:
        """Let a failure end the waits of `waiting`, which is for all ranks."""
        self._waiting.add(waiting)

    def leave_alone(self, waiting: Waiting) -> None:
        """The opposite of `guard`: ranks may end now."""
        self._waiting.discard(waiting)

    # ---- the word

    def tell(self, failure: Failure) -> None:
        """Leave the word of a failure, unless there has been one since the last meeting."""
        if not self._cut_off:
            with suppress(RuntimeError):  # the store is gone, upon which all end
                self._store.compare_set(f"failed/{self._meetings}", "", pickle.dumps(failure).hex())

    def told(self, within: float) -> Failure | None:
        """The first failure since the last meeting, waited for so many seconds; None without one."""
        self._heard.wait(within)
        return self._failure

    def _word(self, meetings: int) -> Failure | None:
        key = f"failed/{meetings}"
        return pickle.loads(bytes.fromhex(self._store.get(key).decode())) if self._store.check([key]) else None

    # ---- in a thread

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            try:
                self._store.add(f"beats/{self.rank}", 1)
                self._look(self._meetings)
            except RuntimeError as error:
                self._cut_off = True
                gone = f"or its launcher has ended: the launcher's store does not answer any more ({error})"
                return self._hear(Failure(0, gone), self._meetings)

    def _look(self, meetings: int) -> None:
        """After `meetings` meetings: hear of a failure, or see one."""
        if self._heard.is_set():
            return
        if told := self._word(meetings):
            return self._hear(told, meetings)
        needed = set(self._seen) if self._waiting else self._awaited
        for rank, (beats, times) in self._seen.items():
            now = self._store.add(f"beats/{rank}", 0)
            # as often as this one looked: if it was held up itself, so may the other have been
            self._seen[rank] = now, times + 1 if now == beats else 0
            silence, patience = self._seen[rank][1] * BEAT, SILENCE if now else ARRIVAL
            if rank not in needed:
                continue
            if now >= LEFT:  # what it failed with before this meeting has ended it
                earlier = None if self._waiting else self._word(meetings - 1)
                self.tell(earlier or Failure(rank, "ended while others waited for it"))
            elif silence >= patience:
                self.tell(Failure(rank, f"gave no sign of life for {patience:.0f} s"))

    def _hear(self, failure: Failure, meetings: int) -> None:
        with self._turning:
            if meetings != self._meetings:  # what failed is over
                return
            self._failure = failure
            self._heard.set()
        for waiting in list(self._waiting):  # NCCL's takes until graphs are dropped; beats go on
            threading.Thread(target=waiting.abort, daemon=True).start()

    # ---- the end

    def _tell_uncaught(self) -> None:
        """An error that ended the program in the midst of what all do; the interpreter has printed it."""
        if os.getpid() != self._process:  # one that was forked says nothing for this one
            return
        if (error := getattr(sys, "last_value", None)) is not None:
            self.tell(Failure.of(self.rank, error))

    def _leave(self) -> None:
        if os.getpid() != self._process:
            return
        self._ended.set()
        self._thread.join(SILENCE)  # one that is inside the store when the interpreter ends would abort the process
        if not self._cut_off:
            with suppress(RuntimeError):
                self._store.add(f"beats/{self.rank}", LEFT)
