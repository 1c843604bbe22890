"""All ranks behind one `call`: one in this process, several in processes that this one starts, or those of torchrun.

However they came, a rank that fails takes all others with it, at once, and the caller gets that one's rank and
traceback, or the signal that killed it.
"""

from __future__ import annotations

import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.parallel.comm import Communicator, PeerLost
from fullstride.parallel.presence import SILENCE, Failure
from fullstride.parallel.rendezvous import join_launched, presence
from fullstride.trainer.arguments import Batch
from fullstride.trainer.channel import PATIENCE, Outcome, SocketChannel, TokenMemory, attempt, shared_memory
from fullstride.trainer.setting import Setting
from fullstride.trainer.worker import Worker

REFUSALS = (ConfigError,)  # come before anything has changed
WRITING = (ConfigError, OSError)  # what may keep the first rank from writing files, while all ranks stay as they were
CAUSE_WITHIN = 2.0  # seconds in which a failure that may be another one's consequence waits for that one


class Divided(RuntimeError):
    """(rank, story): a rank refused what others did, so they are not equal any more."""


class Team(ABC):
    """All ranks that train one model."""

    tokens: TokenMemory
    worker: Worker  # the rank in this process, where one is

    def __init__(self) -> None:
        self.closed = False
        self.saving = False  # in the background
        self.failure: Failure | None = None

    def call(self, command: str, *args: Any, rank: int | None = None, writes: bool = False) -> list[Any]:
        """What every rank's worker, or one rank's, answers to a command. `writes`: files are written, and
        the first rank speaks for all.

        Raises what the workers refused, if all did (or the first one, which writes), and then nothing has changed.
        Anything else is a failure, which ends the team and is raised as WorkerError or OutOfMemory with the rank; but
        the only rank's is raised as it is, and the team lives. Ctrl-C ends it: nobody knows what was half done.
        """
        with self._ended_by_errors():
            outcomes = self._exchange(command, args, rank, writes)
            refused = [i for i, outcome in enumerate(outcomes) if outcome.refusal is not None]
            if refused and len(refused) < len(outcomes) and not (writes and refused[0] == 0):
                raise Divided(refused[0], f"could not do {command} as others could: {outcomes[refused[0]].refusal}")
        for outcome in outcomes:
            if outcome.refusal is not None:
                raise outcome.refusal
        return [outcome.value for outcome in outcomes]

    def call_on(self, batch: Batch, command: str, *args: Any) -> list[Any]:
        """`call` of a command on tokens."""
        self.tokens.write(batch.inputs, batch.targets, batch.documents)
        return self.call(command, batch.most_documents, *args)

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
        """`close`, when the checkpoint that is being written is whole. Raises OSError when it could not be written."""
        try:
            if not self.closed and self.failure is None:
                self._finish()
        finally:
            self.close()

    def _finish(self) -> None:
        if self.saving:
            self.call("finish_saving", writes=True)

    def close(self) -> None:
        """End the workers, and free what this process holds."""
        self.closed = True
        for held in ("worker", "tokens"):
            vars(self).pop(held, None)  # an error may have come before they were there

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """An error inside ends the team, and the failure that it comes from is raised in its place."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            if self.failure is None:
                raise
            raise self.failure.error() from error

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """End the team for an error in this process, and find the failure if there is one."""


class OneRank(Team):
    """In this process."""

    def __init__(self, config: ModelConfig, setting: Setting, device: torch.device) -> None:
        super().__init__()
        self.tokens = TokenMemory(setting)
        self.worker = Worker(config, setting, Communicator(), device, self.tokens)

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
        self._changed = threading.Condition()
        with self._ended_by_errors():
            self._start(config, setting, world_size, device)

    def _start(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        fd = shared_memory(TokenMemory.size(setting))
        try:
            for rank in range(world_size):
                self._channels.append(SocketChannel(rank, fd, self._failed))
            self.tokens = TokenMemory(setting, fd)
        finally:
            os.close(fd)
        port, *_ = [channel.receive().value for channel in self._channels]
        threads = max(1, torch.get_num_threads() // world_size)
        for channel in self._channels:
            own = torch.device("cuda", channel.rank) if device.type == "cuda" else device
            channel.post((config, setting, world_size, port, own, threads))
        for channel in self._channels:
            channel.receive()

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        channels = self._channels if rank is None else [self._channels[rank]]
        for i, channel in enumerate(channels):
            channel.send(command, args, WRITING if writes and i == 0 else REFUSALS)
        return [channel.receive() for channel in channels]

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Divided):
            self._failed(Failure(*error.args))
        elif isinstance(error, PeerLost):  # whoever watches that rank tells how it ended
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None, 2 * PATIENCE)
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
        with self._changed:
            super().close()
            for channel in self._channels:
                channel.end()
            for channel in self._channels:
                channel.wait()
            self._changed.notify_all()
        self._channels = []


class Launched(Team):
    """The rank in this process, of those that torchrun started, which make the same calls by themselves."""

    def __init__(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        super().__init__()
        self._presence, self._ends = presence(), ExitStack()
        self.tokens = TokenMemory(setting)
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
        with self._ended_by_errors():
            return self._comm.gather(value)

    def abandon(self, error: BaseException) -> None:
        if not self.closed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # Ctrl-C stays what it is
            here = self._presence
            failure = Failure(*error.args) if isinstance(error, Divided) else Failure.of(here.rank, error)
            first = here.told(SILENCE + CAUSE_WITHIN) if failure.consequence else None
            self.failure = first or failure
            here.tell(self.failure)
        self.close()

    def _finish(self) -> None:
        """In step with the others, who may need this rank's files and memory until they come here too."""
        saved = Outcome()
        with self._ended_by_errors():
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


def find_ranks(gpus: int, device: str) -> tuple[int, torch.device]:
    """(number of ranks, the device of the one in this process) for a user's `gpus` and `device` (cuda, cpu).

    Raises ConfigError where there are not so many.
    """
    if not isinstance(gpus, int) or isinstance(gpus, bool) or gpus < 0:
        raise ConfigError(f"gpus must be a number of GPUs, or 0 for all, got {gpus!r}")
    if found := launched():
        if gpus not in (0, found[0]):
            raise ConfigError(
                f"gpus = {gpus}, but the launcher started {found[0]} processes; set gpus = {found[0]} or 0"
            )
        return found[0], torch.device("cuda", found[1]) if device == "cuda" else torch.device(device)
    if device != "cuda":
        return gpus or 1, torch.device(device)
    there = torch.cuda.device_count()
    if gpus > there:
        raise ConfigError(f"gpus = {gpus}, but this machine has {there}; set gpus to at most {there}, or to 0 for all")
    gpus = gpus or there
    return gpus, torch.device("cuda", 0 if gpus > 1 else torch.cuda.current_device())


def leads() -> bool:
    """Whether this process writes and prints for all: the only one, or the first that torchrun started."""
    return launched() is None or os.environ["RANK"] == "0"


def launched() -> tuple[int, int] | None:
    """(ranks, this process's GPU) where torchrun, or a launcher that sets the same variables, started this process."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) == 1:
        return None
    return int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0"))
