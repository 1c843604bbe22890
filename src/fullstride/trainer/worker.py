"""One rank: an engine, and the commands that the Trainer gives it.

A rank that is alone lives in the caller's process. Several have processes of their own, started by trainer/channel as

    python -m fullstride.trainer.worker RANK SOCKET MEMORY CALLER

with a socket for commands and answers, memory for tokens (both inherited), and the caller's process id. Such a process
lives as long as the caller's end of the socket: whatever ends the caller ends it too.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from fullstride.engine import checkpoint, weights_io
from fullstride.engine.batch import HostBatch
from fullstride.engine.plan import LIBRARIES
from fullstride.engine.step import Engine
from fullstride.errors import OutOfMemory
from fullstride.memory.arena import capacity, free_memory, shortage
from fullstride.model.spec import ModelConfig
from fullstride.parallel.comm import Communicator
from fullstride.parallel.pipeline import ActionTimes
from fullstride.parallel.presence import Failure
from fullstride.parallel.rendezvous import join, serve
from fullstride.trainer.channel import Outcome, OwnTokens, TokenMemory, attempt
from fullstride.trainer.profiling import ProfileRow, make_profiler, profile_rows
from fullstride.trainer.remedy import remedy
from fullstride.trainer.setting import DTYPES, Setting
from fullstride.trainer.telemetry import PeakMemory, device_info


class Worker:
    """A rank's engine. The methods without underscore but `run` are commands.

    Where memory is short, in any command, OutOfMemory names the segment, the missing bytes, and settings that fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        setting: Setting,
        comm: Communicator,
        device: torch.device,
        tokens: TokenMemory | OwnTokens,
    ) -> None:
        self.config, self.setting, self.comm, self.device, self._tokens = config, setting, comm, device, tokens
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # bytes for us, before anything is ours
        self._room, self._host_room = free_memory(device, 0), free_memory(torch.device("cpu"), 0)
        self._places: set[int] = set()  # for documents, in the micro-steps so far: each number has graphs of its own
        self.engine: Engine | None = None
        self.saving: checkpoint.Saving | None = None  # in a thread
        with torch.no_grad(), self._memory():
            self.engine = Engine(config, *setting.engine(config), device, comm)
            if setting.options.method == "lora":
                weights_io.init_adapters(self.engine, setting.options.seed)
        self._peak_memory = PeakMemory(device)

    def run(self, command: str, args: tuple[Any, ...]) -> Any:
        """Do one command."""
        with torch.no_grad(), self._memory():
            return getattr(self, command)(*args)

    def settle(self) -> None:
        """Return when the device has done what was issued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Drop the graphs, for whose end the communicator's waits, though somebody may still hold the engine."""
        if self.engine is not None:
            self.engine.graphs.drop()

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None, "commands come after construction"
        return self.engine

    # ---- weights

    def import_weights(self, path: Path) -> None:
        weights_io.import_weights(self._engine, path)

    def init_weights(self, seed: int) -> None:
        weights_io.init_weights(self._engine, seed)

    def import_adapter(self, directory: Path) -> None:
        weights_io.import_adapter(self._engine, directory)

    def export_model(self, directory: Path, dtype: str, source: Path | None, overwrite: bool) -> None:
        weights_io.export_model(self._engine, directory, DTYPES[dtype], source, overwrite)

    def export_adapter(self, directory: Path, source: Path | None, overwrite: bool) -> None:
        weights_io.export_adapter(self._engine, directory, source, overwrite)

    def save_checkpoint(self, directory: Path, step: int, extra: dict[str, Any]) -> None:
        assert self.saving is None, "the one before was not finished"
        background = self.setting.options.async_save
        self.saving = checkpoint.save_checkpoint(self._engine, directory, step, extra, background)

    def finish_saving(self) -> None:
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.finish()

    def load_checkpoint(self, directory: Path, step: int | str) -> tuple[dict[str, Any], int]:
        """What was saved as `extra`, and the number of the update."""
        return checkpoint.load_checkpoint(self._engine, directory, step), self._engine.updates

    # ---- training

    def step(self, documents: int, z_loss: float) -> None:
        """documents: the most that a rank has; 0: every row is one. So in `validate`."""
        self._engine.micro_step(self._batches(documents), z_loss)
        self._places.add(self._documents())

    def validate(self, documents: int) -> dict[str, float]:
        return self._engine.validate(self._batches(documents))

    def update(self, values: dict[str, Any]) -> dict[str, float]:
        return self._engine.update(**values)

    def discard(self) -> None:
        self._engine.start_from(self._engine.updates)

    def _batches(self, most: int) -> list[HostBatch]:
        """This rank's micro-batches of a micro-step."""
        s = self._engine.settings
        inputs, targets, documents = (
            # in a pipeline some of the work may wait for the next micro-step, whose tokens come here
            None if array is None else (array.copy() if s.pp > 1 else array).reshape(-1, s.rows, s.seq_len)
            for array in self._tokens.read(self._engine.mesh.dp.rank)
        )
        assert inputs is not None and targets is not None
        numbers = documents if most and documents is not None else [None] * len(inputs)
        return [HostBatch.of(*arrays, most) for arrays in zip(inputs, targets, numbers, strict=True)]

    # ---- queries

    def gpu_info(self) -> dict[str, Any]:
        return device_info(self.device)

    def peak_memory(self) -> int:
        return self._peak_memory()

    def time_actions(self) -> None:
        """Measure from now on: `action_times`."""
        self._engine.pipeline.times = ActionTimes(self.device)

    def action_times(self) -> tuple[float, float]:
        """Seconds in a pipeline's actions since `time_actions`, and from the first to the last; the end of it."""
        times, self._engine.pipeline.times = self._engine.pipeline.times, None
        assert times is not None, "time_actions comes first"
        return times.busy_and_span()

    def start_profile(self) -> None:
        """Record what the host does and the device runs, until `stop_profile`."""
        self._profiler = make_profiler(self.device)
        self._profiler.start()

    def stop_profile(self, directory: Path) -> list[ProfileRow]:
        """Write this rank's trace into `directory`; what took the time."""
        self.settle()
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(directory / f"rank{self.comm.rank}.json.gz"))
        return profile_rows(self._profiler, self.device)

    def parameters_finite(self) -> bool:
        values = (trained.param for trained in self._engine.state.trained.values())
        return all(bool(torch.isfinite(value).all()) for value in values)

    def allocations(self) -> dict[str, dict[str, int]]:
        return self._engine.arena.allocations()

    def stack_info(self) -> dict[str, int]:
        return self._engine.tools.scratch.high_water()

    def gradients(self, rank: int) -> dict[str, torch.Tensor]:
        """Those of `rank`, on that one. A collective where ranks share tensors out."""
        state, found = self._engine.state, {}
        for unit in [unit for unit in state.units if unit.name in state.trained]:
            views = state.gradient(unit)
            for spec in unit.tensors:
                found |= {part.hf_name: views[spec.name][part.start : part.stop] for part in spec.parts}
        return found if self.comm.rank == rank else {}

    # ---- memory

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Tells what would fit when the work inside runs out of memory."""
        try:
            yield
        except (OutOfMemory, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"{self._shortage(error)}; {self._remedy()}") from error

    def _shortage(self, error: Exception) -> str:
        """What was missing. The arena says it itself; torch's allocator, for everything else, in words of its own."""
        asked = re.search(r"(?:Tried to allocate|Requested\s*:) ([\d.]+) (bytes|[KMGT]iB)", str(error))
        if isinstance(error, OutOfMemory) or asked is None:
            return str(error)
        unit = 1024 ** ("bytes", "KiB", "MiB", "GiB", "TiB").index(asked[2])
        held = {} if self.engine is None else self.engine.arena.segments
        return shortage(self.device, LIBRARIES, int(float(asked[1]) * unit), held)

    def _remedy(self) -> str:
        places = self._places | (set() if self.engine is None else {self._documents()})
        room = min(self._room, capacity(self.device))
        met = max(places, default=0), max(1, len(places))
        return remedy(self.config, self.setting, self.device.type, room, self._host_room, *met)

    def _documents(self) -> int:
        """Places for documents in the micro-step that was loaded last; 0: a row is one."""
        documents = self._engine.documents
        return len(documents.boundaries) - 1 if documents.packed else 0


# ---- a process of its own


def main(rank: int, socket_fd: int, memory_fd: int, caller: int) -> None:
    """Serve rank `rank` until the caller's end of the socket closes."""
    faulthandler.enable()
    connection = socket.socket(fileno=socket_fd)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, commands), daemon=True).start()
    # the caller's end of the socket stays open while a process that it forked lives
    threading.Thread(target=watch, args=(caller, threading.Event(), lambda: None), daemon=True).start()

    def answer(value: Outcome | Failure) -> None:
        connection.sendall(pickle.dumps(value))

    try:
        # the store is here, not in the caller's process: when workers die, waits for them end there
        store = serve() if rank == 0 else None
        answer(Outcome(store and store.port))
        config, setting, world_size, port, device, threads = _taken(commands)
        torch.set_num_threads(threads)
        tokens = TokenMemory(setting, memory_fd)
        worker = Worker(config, setting, join(port, rank, world_size, device), device, tokens)
        answer(Outcome())
        while True:
            answer(attempt(worker.run, *_taken(commands)))
    except BaseException as error:
        with suppress(OSError):  # the caller is gone too
            answer(Failure.of(rank, error))
        os._exit(1)


def _taken(commands: queue.SimpleQueue[Any]) -> Any:
    command = commands.get()
    if isinstance(command, Exception):
        raise command
    return command


def _listen(connection: socket.socket, commands: queue.SimpleQueue[Any]) -> None:
    """Read commands; end the process, whatever it is doing, when the caller's end is closed."""
    with connection.makefile("rb") as stream, suppress(OSError, EOFError):
        while True:
            try:
                commands.put(pickle.load(stream))
            except (OSError, EOFError):
                raise
            except Exception as error:  # a class that this process cannot import, for one
                commands.put(error)
    os._exit(0)


def watch(parent: int, done: threading.Event, orphaned: Callable[[], None]) -> None:
    """End this process, after a last word, when `parent` has ended, unless this is `done` before."""
    while not done.wait(1):
        if os.getppid() != parent:
            orphaned()
            os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
