"""All ranks behind one `call`: one in this process, several in processes that this one starts, or those of torchrun.

However they came, a rank that fails takes all others with it, at once, and the caller gets that one's rank and
traceback, or the signal that killed it.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

from fullstride.errors import ConfigError
from fullstride.model.spec import ModelConfig
from fullstride.parallel.comm import Communicator, PeerLost
from fullstride.parallel.rendezvous import join_launched
from fullstride.trainer.arguments import Batch
from fullstride.trainer.channel import (
    PATIENCE,
    Channel,
    Failure,
    LocalChannel,
    Outcome,
    SocketChannel,
    TokenMemory,
    shared_memory,
)
from fullstride.trainer.setting import Setting
from fullstride.trainer.worker import Worker

REFUSALS = (ConfigError,)  # come before anything has changed
WRITING = (ConfigError, OSError)  # what may keep the first rank from writing files, while all ranks stay as they were
CAUSE_WITHIN = 2.0  # seconds in which a failure that may be another one's consequence waits for that one


class Divided(RuntimeError):
    """(rank, story): a rank refused what others did, so they are not equal any more."""


class Team:
    """`world_size` ranks: one in this process, or several in processes of their own.

    Then this process holds no model, and waits for answers only, never for a GPU: so whatever happens to a rank, all of
    them can be killed from here.
    """

    def __init__(self, config: ModelConfig, setting: Setting, world_size: int, device: torch.device) -> None:
        """device: of the rank in this process. Those in processes of their own have the GPUs in order, or the CPU."""
        self.world_size, self.device, self.closed = world_size, device, False
        self.saving = False  # in the background
        self.failure: Failure | None = None
        self.worker: Worker | None = None
        self.tokens: TokenMemory | None = None
        self._channels: list[Channel] = []
        self._changed = threading.Condition()
        self._sockets: list[SocketChannel] = []
        self.comm = Communicator()
        try:
            self._start(config, setting)
        except BaseException as error:
            if (told := self._ended_by(error)) is error:
                raise
            raise told from error

    def _start(self, config: ModelConfig, setting: Setting) -> None:
        if self.world_size == 1:
            self.tokens = TokenMemory(setting)
            self.worker = Worker(config, setting, self.comm, self.device, self.tokens)
            self._channels = [LocalChannel(self.worker.run)]
            return
        fd = shared_memory(TokenMemory.size(setting))
        try:
            for rank in range(self.world_size):
                self._sockets.append(SocketChannel(rank, fd, self.fail))
            self.tokens = TokenMemory(setting, fd)
        finally:
            os.close(fd)
        port, *_ = [channel.receive().value for channel in self._sockets]
        threads = max(1, torch.get_num_threads() // self.world_size)
        for channel in self._sockets:
            device = torch.device("cuda", channel.rank) if self.device.type == "cuda" else self.device
            channel.post((config, setting, self.world_size, port, device, threads))
        for channel in self._sockets:
            channel.receive()
        self._channels = [*self._sockets]

    def call(self, command: str, *args: Any, rank: int | None = None, writes: bool = False) -> list[Any]:
        """What every rank's worker, or one rank's, answers to a command. `writes`: files are written, and
        the first rank speaks for all.

        Raises what the workers refused, if all did (or the first one, which writes), and then nothing has changed.
        Anything else is a failure, which ends the team and is raised as WorkerError or OutOfMemory with the rank; but
        the only rank's is raised as it is, and the team lives. Ctrl-C ends it: nobody knows what was half done.
        """
        try:
            outcomes = self._exchange(command, args, rank, writes)
            refused = [i for i, outcome in enumerate(outcomes) if outcome.refusal is not None]
            if refused and len(refused) < len(outcomes) and not (writes and refused[0] == 0):
                raise Divided(refused[0], f"could not do {command} as others could: {outcomes[refused[0]].refusal}")
        except BaseException as error:
            alone = self.world_size == 1 and not isinstance(error, KeyboardInterrupt)
            if alone or (told := self._ended_by(error)) is error:
                raise
            raise told from error
        for outcome in outcomes:
            if outcome.refusal is not None:
                raise outcome.refusal
        return [outcome.value for outcome in outcomes]

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        channels = self._channels if rank is None else [self._channels[rank]]
        for i, channel in enumerate(channels):
            channel.send(command, args, WRITING if writes and i == 0 else REFUSALS)
        return [channel.receive() for channel in channels]

    def call_on(self, batch: Batch, command: str, *args: Any) -> list[Any]:
        """`call` of a command on tokens."""
        assert self.tokens is not None, "a stopped team gets no calls"
        self.tokens.write(batch.inputs, batch.targets, batch.documents)
        return self.call(command, batch.most_documents, *args)

    def agree(self, value: Any) -> list[Any]:
        """The `value` of every process that drives the ranks: of this one alone, or of all that torchrun started."""
        return [value]

    # ---- the end

    def abandon(self, error: BaseException) -> None:
        """This process goes on no more with what all do, because of an error in it: nobody shall wait for it."""

    def _ended_by(self, error: BaseException) -> BaseException:
        """What to raise for an error in this process, after the team has been ended."""
        if isinstance(error, Divided):
            self.fail(Failure(*error.args))
        elif isinstance(error, PeerLost):  # whoever watches that rank tells how it ended
            with self._changed:
                self._changed.wait_for(lambda: self.failure is not None, 2 * PATIENCE)
        self.close()
        return error if self.failure is None else self.failure.error()

    def fail(self, failure: Failure) -> None:
        """End the team, unless that has been done: kill its processes."""
        with self._changed:
            if failure.consequence:
                self._changed.wait_for(lambda: self.failure is not None or self.closed, CAUSE_WITHIN)
            if self.failure is None and not self.closed:
                self.failure = failure
                for channel in self._sockets:
                    channel.kill()
                for channel in self._sockets:
                    channel.wait()
                self._changed.notify_all()

    def end(self) -> None:
        """`close`, when the checkpoint that is being written is whole. Raises OSError when it could not be written."""
        try:
            if self.saving and self.failure is None and not self.closed:
                self._finish_saving()
        finally:
            self.close()

    def _finish_saving(self) -> None:
        self.call("finish_saving", writes=True)

    def close(self) -> None:
        """End the workers, and free what the rank in this process holds."""
        with self._changed:
            self.closed = True
            for channel in self._sockets:
                channel.end()
            for channel in self._sockets:
                channel.wait()
            self._changed.notify_all()
        self._channels = []
        self.worker = self.tokens = None
        self.comm.close()


class LaunchedTeam(Team):
    """The rank in this process, of those that torchrun started, which make the same calls by themselves."""

    def _start(self, config: ModelConfig, setting: Setting) -> None:
        self.comm = join_launched(self.device)
        self.tokens = TokenMemory(setting)
        self.worker = Worker(config, setting, self.comm, self.device, self.tokens)
        self.comm.barrier()
        self._channels = [LocalChannel(self.worker.run)]

    def _exchange(self, command: str, args: tuple, rank: int | None, writes: bool) -> list[Outcome]:
        outcome, own = Outcome(), self.comm.rank
        if rank in (None, own):
            (outcome,) = super()._exchange(command, args, None, writes and own == 0)
        if command == "step":  # which waits for nobody
            self.comm.check()
            return [outcome]
        outcomes = self.comm.gather(outcome)
        return outcomes if rank is None else [outcomes[rank]]

    def agree(self, value: Any) -> list[Any]:
        try:
            return self.comm.gather(value)
        except BaseException as error:
            if (told := self._ended_by(error)) is error:
                raise
            raise told from error

    def abandon(self, error: BaseException) -> None:
        if not self.closed:
            self._ended_by(error)

    def _finish_saving(self) -> None:
        """Alone: a process may end because of an error that the others do not have."""
        assert self.worker is not None
        self.worker.finish_saving()

    def _ended_by(self, error: BaseException) -> BaseException:
        if isinstance(error, Exception):  # Ctrl-C stays what it is
            divided = isinstance(error, Divided)
            self.fail(Failure(*error.args) if divided else Failure.of(self.comm.rank, error))
        return super()._ended_by(error)

    def fail(self, failure: Failure) -> None:
        first = self.comm.told(CAUSE_WITHIN) if failure.consequence else None
        self.failure = first or failure
        self.comm.tell(self.failure)


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
