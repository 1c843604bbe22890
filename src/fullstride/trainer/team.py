"""All ranks behind one `call`: one in this process, several in processes that this one starts, or those of torchrun.

However they came, a rank that fails takes all others with it, at once, and the caller gets that one's rank and
traceback, or the signal that killed it.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.files import discard_partial
from fullstride.model.spec import ModelConfig
from fullstride.parallel.comm import Communicator, PeerLost
from fullstride.parallel.presence import SILENCE, Failure
from fullstride.parallel.rendezvous import join_launched, presence
from fullstride.trainer.arguments import Batch
from fullstride.trainer.channel import (
    PATIENCE,
    Inbox,
    Outcome,
    OwnTokens,
    SocketChannel,
    TokenMemory,
    attempt,
    shared_memory,
)
from fullstride.trainer.ranks import launched, open_files
from fullstride.trainer.setting import Setting
from fullstride.trainer.worker import Worker, watch

REFUSALS = (ConfigError,)  # come before anything has changed
WRITING = (ConfigError, OSError)  # what may keep the first rank from writing files, while all ranks stay as they were
CAUSE_WITHIN = 2.0  # seconds in which a failure that may be another one's consequence waits for that one
DIVIDED_AFTER = 10.0  # seconds after a rank's refusal in which the others, who come to the same, answer too


class Divided(RuntimeError):
    """A rank refused what others did, so they are not equal any more."""

    def __init__(self, rank: int, command: str, refusal: Exception | None) -> None:
        self.failure = Failure(rank, f"could not do {command} as others could: {refusal}")
        super().__init__(self.failure.story)


class Team(ABC):
    """All ranks that train one model."""

    tokens: TokenMemory | OwnTokens
    worker: Worker  # the rank in this process, where one is

    def __init__(self) -> None:
        self.closed = False
        self.saving = False  # in the background
        self.unfinished: set[Path] = set()  # directories that are being written
        self.failure: Failure | None = None
        self._process = os.getpid()
        self._turn = threading.RLock()  # whose call it is: answers do not say to which call
        self._stopped = False  # by the caller

    def call(self, command: str, *args: Any, rank: int | None = None, writes: bool = False) -> list[Any]:
        """What every rank's worker, or one rank's, answers to a command. `writes`: files are written, and
        the first rank speaks for all.

        Raises what the workers refused, if all did (or the first one, which writes), and then nothing has changed.
        Anything else is a failure, which ends the team and is raised as WorkerError or OutOfMemory with the rank; but
        the only rank's is raised as it is, and the team lives. Ctrl-C ends it: nobody knows what was half done.
        Calls of several threads come one after the other.
        """
        with self._one_at_a_time(), self._ended_by_errors():
            outcomes = self._exchange(command, args, rank, writes)
            refused = [i for i, outcome in enumerate(outcomes) if outcome.refusal is not None]
            if refused and len(refused) < len(outcomes) and not (writes and refused[0] == 0):
                raise Divided(refused[0], command, outcomes[refused[0]].refusal)
        for outcome in outcomes:
            if outcome.refusal is not None:
                raise outcome.refusal
        return [outcome.value for outcome in outcomes]

    def call_on(self, batch: Batch, command: str, *args: Any) -> list[Any]:
        """`call` of a command on tokens."""
        with self._one_at_a_time():
            self.tokens.write(batch.inputs, batch.targets, batch.documents)
            return self.call(command, batch.most_documents, *args)

    def check_running(self) -> None:
        """Raise ConfigError unless this can be called."""
        if self.forked:
            raise ConfigError(f"the trainer belongs to process {self._process}; make one in this, which was forked")
        if self.closed:
            why = "" if self.failure is None else f" since rank {self.failure.rank} failed"
            raise ConfigError(f"the trainer is stopped{why}; make a new one")

    @property
    def forked(self) -> bool:
        """Whether this is a copy in a process that was forked, and what it would say or end is another's."""
        return os.getpid() != self._process

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        self.check_running()  # a forked process might find the turn taken for ever
        with self._turn:
            self.check_running()
            yield

    def agree(self, value: Any) -> list[Any]:
        """The `value` of every process that drives the ranks: of this one alone, or of all that torchrun started."""
        return [value]

    @abstractmethod
    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        """What became of a command on every rank, or on one."""

    # ---- the end

    def abandon(self, error: BaseException) -> None:
        """This process goes on no more with what all do, because of an error in it: nobody shall wait for it."""
        return None

    def end(self) -> None:
        """`close`, when the checkpoint that is being written is whole. Raises OSError when it could not be written.

        A call in another thread ends with an error where ranks have processes of their own; else it is waited for. In a
        forked process this only forgets."""
        if self.forked:
            self.closed = True
            return
        try:
            if not self.closed and self.failure is None:
                self._finish()
        finally:
            self._stopped = True
            self.close()

    def _finish(self) -> None:
        if self.saving:
            self.call("finish_saving", writes=True)

    def close(self) -> None:
        """End the workers, and free what this process holds."""
        self.closed = True
        with self._turn:
            for held in ("worker", "tokens"):
                vars(self).pop(held, None)  # an error may have come before they were there
        for directory in self.unfinished:
            discard_partial(directory)
        self.unfinished.clear()

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """An error inside ends the team, and the failure that it comes from is raised in its place."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            if self.failure is not None:
                raise self.failure.error() from error
            if self._stopped and isinstance(error, PeerLost):
                raise ConfigError(
                    "the trainer was stopped in another thread during this call; make a new one"
                ) from error
            raise

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """End the team for an error in this process, and find the failure if there is one."""


class OneRank(Team):
    """In this process."""

    def __init__(self, config: ModelConfig, setting: Setting, device: torch.device) -> None:
        super().__init__()
        self.tokens = OwnTokens(setting)
        self.worker = Worker(config, setting, Communicator(), device, self.tokens)

    @property
    def forked(self) -> bool:
        """What is forked is all there is, and its own."""
        return False

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        return [_do(self.worker, command, args, writes)]

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.close()


class Processes(Team):
    """Ranks in processes of their own.

    This process holds no model, and waits for answers only, never for a GPU: so whatever happens to a rank, all of them
    can be killed from here.
    """

    def __init__(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        """device: the ranks have the GPUs in order, or the CPU."""
        super().__init__()
        self._channels: list[SocketChannel] = []
        self._inbox: Inbox = queue.SimpleQueue()
        self._changed = threading.Condition()
        with self._ended_by_errors():
            self._start(config, setting, world_size, device)

    def _start(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        with open_files(world_size):
            fd = shared_memory(TokenMemory.size(setting))
            try:
                for rank in range(world_size):
                    self._channels.append(SocketChannel(rank, fd, self._inbox, self._failed))
                self.tokens = TokenMemory(setting, fd)
            finally:
                os.close(fd)
        port, *_ = [outcome.value for outcome in self._receive("start", self._channels)]
        threads = max(1, torch.get_num_threads() // world_size)
        for channel in self._channels:
            own = torch.device("cuda", channel.rank) if device.type == "cuda" else device
            channel.post((config, setting, world_size, port, own, threads))
        self._receive("start", self._channels)

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        channels = self._channels if rank is None else [self._channels[rank]]
        for i, channel in enumerate(channels):
            channel.send(command, args, WRITING if writes and i == 0 else REFUSALS)
        return self._receive(command, channels)

    def _receive(self, command: str, channels: list[SocketChannel]) -> list[Outcome]:
        """What these ranks answer. When one has refused, the others may wait for it inside, for ever."""
        found: dict[int, Outcome] = {}
        refused, until = None, 0.0
        while len(found) < len(channels):
            try:
                within = None if refused is None else max(0.0, until - time.monotonic())
                rank, outcome = self._inbox.get(timeout=within)
            except queue.Empty:
                assert refused is not None
                raise Divided(refused, command, found[refused].refusal) from None
            if outcome is None:
                raise PeerLost(f"rank {rank} is gone")
            found[rank] = outcome
            if outcome.refusal is not None and refused is None:
                refused, until = rank, time.monotonic() + DIVIDED_AFTER
        return [found[channel.rank] for channel in channels]

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Divided):
            self._failed(error.failure)
        elif isinstance(error, PeerLost):  # whoever watches that rank tells how it ended
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None or self._stopped, 2 * PATIENCE)
        self.close()

    def _failed(self, failure: Failure) -> None:
        """End the team, unless that has been done: kill its processes. From any thread."""
        with self._changed:
            if failure.consequence:
                self._changed.wait_for(lambda: self.failure is not None or self.closed, CAUSE_WITHIN)
            if self.failure is None and not self.closed:
                self.failure = failure
                for channel in self._channels:
                    channel.kill()
                for channel in self._channels:
                    channel.wait()
                self._changed.notify_all()

    def close(self) -> None:
        self.closed = True
        with self._changed:
            for channel in self._channels:
                channel.end()
            for channel in self._channels:
                channel.wait()
            self._channels = []
            self._changed.notify_all()
        super().close()  # which waits for a call in another thread, whose end this was


class Launched(Team):
    """The rank in this process, of those that torchrun started, which make the same calls by themselves."""

    def __init__(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        super().__init__()
        self._presence, self._ends = presence(), ExitStack()
        self.tokens = OwnTokens(setting)
        ended, here = threading.Event(), self._presence
        self._ends.callback(ended.set)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # other launchers may leave, and their processes stay
            word = Failure(here.rank, "lost its launcher: torchrun was killed on its machine")
            threading.Thread(target=watch, args=(os.getppid(), ended, lambda: here.tell(word)), daemon=True).start()
        with self._ended_by_errors():
            self._comm = join_launched(device)
            self._ends.callback(self._comm.close)
            self._ends.callback(self._presence.leave_alone, self._comm)
            self.worker = Worker(config, setting, self._comm, device, self.tokens)
            self._ends.callback(self.worker.close)  # before that
            self._comm.barrier()

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        outcome, own = Outcome(), self._presence.rank
        if rank in (None, own):
            outcome = _do(self.worker, command, args, writes and own == 0)
        if command == "step":  # which waits for nobody
            self._comm.check()
            return [outcome]
        outcomes = self._comm.gather(outcome)
        return outcomes if rank is None else [outcomes[rank]]

    def agree(self, value: Any) -> list[Any]:
        with self._one_at_a_time(), self._ended_by_errors():
            return self._comm.gather(value)

    def abandon(self, error: BaseException) -> None:
        if not self.closed and not self.forked:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # Ctrl-C stays what it is
            here = self._presence
            failure = error.failure if isinstance(error, Divided) else Failure.of(here.rank, error)
            first = here.told(SILENCE + CAUSE_WITHIN) if failure.consequence else None
            self.failure = first or failure
            here.tell(self.failure)
        self.close()

    def _finish(self) -> None:
        """In step with the others, who may need this rank's files and memory until they come here too."""
        saved = Outcome()
        with self._turn, self._ended_by_errors():
            if self.saving:
                saved = _do(self.worker, "finish_saving", (), self._presence.rank == 0)
                self._comm.part(math.inf)  # disks are slow
            self.worker.settle()
        self._comm.part()
        if saved.refusal is not None:
            raise saved.refusal

    def close(self) -> None:
        super().close()
        self._ends.close()


def make_team(config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> Team:
    """Of as many ranks as `find_ranks` has found, and the device that it has."""
    if launched():
        return Launched(config, setting, world_size, device)
    return OneRank(config, setting, device) if world_size == 1 else Processes(config, setting, world_size, device)


def _do(worker: Worker, command: str, args: tuple, writes: bool) -> Outcome:
    return attempt(worker.run, command, args, WRITING if writes else REFUSALS)


@contextmanager
def attended() -> Iterator[None]:
    """For a program that makes a Trainer inside: under torchrun, errors that come before it are told to those who wait
    for it, and so is the end of this process."""
    here = presence() if launched() else None
    try:
        yield
    except Exception as error:
        if here is not None:
            here.tell(Failure.of(here.rank, error))
        raise
