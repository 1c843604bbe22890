"""Collectives and copies move the same bits; what copies have to wait for; peers that are gone or out of reach."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fullstride import Options, Trainer
from fullstride.parallel import peers
from fullstride.parallel.comm import Communicator, PeerLost
from fullstride.parallel.peers import HostPeers, connect
from fullstride.parallel.peers_cuda import WAIT, WRITE, CudaPeers, _MemoryOperation, meeting
from fullstride.parallel.transport import Collectives, Copies, Transport, make_transport
from tests.parity.harness import CONFIG
from tests.ranks import Pool, together

pytestmark = pytest.mark.xdist_group("ranks")
N = 512
SHORT = 10.0  # seconds in which a wait for a rank that is gone ends; it takes milliseconds


def buffer(transport: Transport, size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Of the transport's memory."""
    return torch.zeros(size, dtype=dtype, device=device) if transport.zeros is None else transport.zeros((size,), dtype)


def values(rank: int, round: int, size: int) -> torch.Tensor:
    """What `rank` has in a round: [size * N] whole numbers that bf16 holds."""
    return torch.randint(-99, 100, (size * N,), generator=torch.Generator().manual_seed(100 * round + rank))


def other_than(x: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The pieces of x [size * N] that are not `rank`'s."""
    return torch.cat([piece for i, piece in enumerate(x.view(size, -1)) if i != rank])


def moves(transport: Transport, rank: int, size: int, dtype: torch.dtype, device: str, late: Callable) -> None:
    """Every move, several rounds over the same buffers; `late` is called wherever a rank may be behind."""
    part, flat = buffer(transport, N, dtype, device), buffer(transport, size * N, dtype, device)
    received = buffer(transport, size * N, dtype, device)
    own = flat[rank * N : (rank + 1) * N]
    # views at an offset, and memory that is not the transport's
    whole, sent = (torch.full((2 * size * N,), 99, dtype=dtype, device=device)[size * N :] for _ in range(2))
    for round in range(6):
        every = [values(r, round, size).to(device, dtype) for r in range(size)]
        firsts = torch.cat([x[:N] for x in every])
        transport.fence().wait()
        late()
        part.copy_(every[rank][:N])
        own.copy_(every[rank][:N])
        spread = transport.spread(own, flat)
        late()
        spread.wait()
        transport.fence().wait()
        assert torch.equal(flat, firsts)
        for _ in range(2):  # parts stay, so this may be done again
            late()
            transport.gather(part, whole).wait()
            assert torch.equal(whole, firsts)
        for factor in (1, -1):  # into one buffer, which the others leave alone until it has been read
            late()
            sent.copy_(factor * every[rank])
            work = transport.exchange(sent, received)
            late()
            work.wait()
            late()
            expected = factor * torch.cat([x.view(size, -1)[rank] for x in every])
            assert torch.equal(other_than(received, rank, size), other_than(expected, rank, size))


def on_hosts(comm: Communicator, by_copy: bool, dtype: torch.dtype) -> str:
    transport, moment = make_transport(comm, by_copy), random.Random(comm.rank)
    moves(transport, comm.rank, comm.size, dtype, "cpu", lambda: time.sleep(moment.choice((0, 0, 0.01))))
    return type(transport).__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("by_copy", [False, True])
def test_moves(by_copy: bool, ranks: int, dtype: torch.dtype) -> None:
    """Ranks that are late at random see nothing that is of another round."""
    assert together(ranks, on_hosts, by_copy, dtype) == ["Copies" if by_copy else "Collectives"] * ranks


def test_one_rank_has_nothing_to_copy() -> None:
    transport = make_transport(Communicator(), True)
    assert isinstance(transport, Collectives)
    part, whole = torch.arange(4.0), torch.zeros(4)
    transport.gather(part, whole).wait()
    transport.fence().wait()
    assert torch.equal(part, whole)


# ---- the order of signals


def meet_at_random(size: int, seed: int, turns: tuple[int, ...]) -> bool:
    """Ranks meet nine times by the words `turns` in turn, one operation at a time, of whoever is drawn.

    Whether all come to the end, and no signal is overwritten unseen.
    """
    draw, meetings = random.Random(seed), 9
    programs = [
        [step for m in range(meetings) for step in meeting(rank, size, turns[m % len(turns)])] for rank in range(size)
    ]
    length = len(programs[0]) // meetings
    words = {(whose, which, by): 0 for whose in range(size) for which in turns for by in range(size)}
    at = [0] * size

    def can(rank: int) -> bool:
        if at[rank] == meetings * length:
            return False
        operation, whose, word, value = programs[rank][at[rank]]
        return operation == WRITE or words[whose, *word] == value

    while min(at) < meetings * length:
        able = [rank for rank in range(size) if can(rank)]
        if not able:
            return False
        rank = draw.choice(able)
        operation, whose, word, value = programs[rank][at[rank]]
        if operation == WRITE:
            if words[whose, *word] == value:
                return False
            words[whose, *word] = value
        at[rank] += 1
        left = at[rank] // length  # the meetings that it has left, to the last of which all must have come
        assert all(position > (left - 1) * length for position in at)
    return True


@pytest.mark.parametrize("size", [2, 3, 5])
def test_two_words_in_turn_are_enough(size: int) -> None:
    """Where one is not: it may be set again before the last signal was taken back."""
    assert all(meet_at_random(size, seed, (0, 1)) for seed in range(30))
    assert not all(meet_at_random(size, seed, (0,)) for seed in range(30))


def test_memory_operations_are_laid_out_as_the_driver_has_them() -> None:
    """cuda.h: CUstreamBatchMemOpParams is a union with six 64-bit words."""
    fields = {
        name: getattr(_MemoryOperation, name).offset for name in ("operation", "address", "value", "flags", "alias")
    }
    assert fields == {"operation": 0, "address": 8, "value": 16, "flags": 24, "alias": 32}
    assert ctypes.sizeof(_MemoryOperation) == 48 and (WAIT, WRITE) == (1, 2)


# ---- peers that are gone, or out of reach


def waiting(comm: Communicator, killed: bool) -> tuple[str, float]:
    there = connect(comm)
    assert isinstance(there, HostPeers)
    transport = Copies(there)
    transport.fence().wait()
    if comm.rank == 1:
        time.sleep(0.3)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        return "", 0.0
    if not killed:
        comm.abort()  # as a thread that hears of a failure does
    begin = time.monotonic()
    try:
        transport.fence().wait()
    except PeerLost as error:
        return str(error), time.monotonic() - begin
    return "it came", 0.0


def test_a_wait_ends_when_ranks_are_known_to_be_lost() -> None:
    pool = Pool(2)  # of its own: these ranks are apart afterwards
    (told, seconds), _ = pool.run(waiting, False)
    pool.stop()
    assert told == "another rank is gone" and seconds < SHORT


class Told:
    """What a rank tells before the pool hears of another's death."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, comm: Communicator) -> None:
        told, seconds = waiting(comm, True)
        self.file.write_text(f"{told}: {seconds < SHORT}")
        time.sleep(60)


def test_a_wait_ends_with_the_process_that_it_is_for(tmp_path: Path) -> None:
    """By itself: nobody tells this rank."""
    pool, file = Pool(3), tmp_path / "told"
    with pytest.raises((RuntimeError, EOFError)):
        pool.run(Told(file))
    until = time.monotonic() + SHORT
    while not file.is_file() and time.monotonic() < until:
        time.sleep(0.01)
    pool.stop()
    assert file.read_text() == "rank 1 is gone: True"


def kept(comm: Communicator) -> tuple[int, int]:
    """Open files and mapped memory without a name, beyond those before."""

    def count() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(list(Path("/proc/self/fd").iterdir())), maps.count("memfd:fullstride")

    before = count()
    transport = make_transport(comm, True)
    memory = buffer(transport, N, torch.float32)
    during = count()
    assert during[1] == before[1] + comm.size and during[0] > before[0]
    comm.barrier()
    del transport, memory
    after = count()
    return after[0] - before[0], after[1] - before[1]


def test_memory_and_pipes_go_with_the_transport() -> None:
    assert together(2, kept) == [(0, 0), (0, 0)]


def far(comm: Communicator, how: str) -> tuple[str, list[str]]:
    """What comes of ranks that `how` keeps apart, and the log's lines."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    peers.log.addHandler(handler)
    machine, identity = peers.machine, peers._identity
    try:
        if how == "machines":
            peers.machine = lambda: f"number {comm.rank}"
        elif how == "processes" and comm.rank == 1:  # what it finds below /proc belongs to others
            peers._identity = lambda path: identity(path) if "self" in path else (0, 0)
        return type(make_transport(comm, True)).__name__, lines
    finally:
        peers.log.removeHandler(handler)
        peers.machine, peers._identity = machine, identity


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("machines", "rank 0: the ranks are on several machines"),
        ("processes", r"rank 1: process \d+ is not to be seen"),
    ],
)
def test_ranks_that_do_not_reach_one_another_fall_back_with_one_line(how: str, why: str) -> None:
    (kind, lines), (other, silent) = together(2, far, how)
    assert kind == other == "Collectives" and not silent
    (line,) = lines
    assert re.search(rf"cannot copy .* here, NCCL \(on CPUs Gloo\) serves instead; {why}", line)


# ---- on GPUs (two processes on one GPU share memory in the same way as on two)


def gpu(comm: Communicator) -> torch.device:
    device = torch.device("cuda", comm.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def meet_on(comm: Communicator) -> CudaPeers:
    there = CudaPeers(comm, gpu(comm))
    assert comm.gather(there.obstacle()) == [""] * comm.size
    there.contacted()
    return there


def on_gpus(comm: Communicator, dtype: torch.dtype) -> None:
    moment = random.Random(comm.rank)
    transport = Copies(meet_on(comm))

    def late() -> None:
        if moment.random() < 0.5:
            torch.cuda._sleep(20_000_000)  # cycles: some 10 ms

    moves(transport, comm.rank, comm.size, dtype, str(gpu(comm)), late)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_moves_on_gpus(ranks: int, dtype: torch.dtype) -> None:
    together(ranks, on_gpus, dtype)


def replayed(comm: Communicator) -> None:
    """A gather and an exchange in one graph, whose replays see new values."""
    transport, device = Copies(meet_on(comm)), gpu(comm)
    part, received = (buffer(transport, n * N, torch.float32, str(device)) for n in (1, comm.size))
    whole, sent = (torch.zeros(comm.size * N, device=device) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        gathered, exchanged = transport.gather(part, whole), transport.exchange(sent, received)
        gathered.wait()
        exchanged.wait()
        transport.fence().wait()
    for round in range(20):
        every = [values(r, round, comm.size).to(device, torch.float32) for r in range(comm.size)]
        transport.fence().wait()
        part.copy_(every[comm.rank][:N])
        sent.copy_(every[comm.rank])
        transport.fence().wait()
        graph.replay()
        assert torch.equal(whole, torch.cat([x[:N] for x in every]))
        expected = torch.cat([x.view(comm.size, -1)[comm.rank] for x in every])
        assert torch.equal(*(other_than(x, comm.rank, comm.size) for x in (received, expected)))
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_are_captured_in_graphs(ranks: int) -> None:
    together(ranks, replayed)


def deserted(comm: Communicator) -> float:
    there = meet_on(comm)
    begin = time.monotonic()
    if comm.rank == 0:
        Copies(there).fence()
        time.sleep(0.2)
        assert not there._stream.query()  # it waits
        comm.abort()
        torch.cuda.synchronize()
    return time.monotonic() - begin


@pytest.mark.gpu
def test_a_stream_that_waits_is_released() -> None:
    pool = Pool(2)
    assert max(pool.run(deserted)) < SHORT
    pool.stop()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_two_gpus_train_by_copies_as_by_nccl(zero: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The same bits under `deterministic`, in graphs (the third update replays them): copies move what NCCL's gathers
    and exchanges move, and sums are made in the same order."""
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, CONFIG.vocab_size, (2, 8, 64), dtype=np.int32) for _ in range(2)]
    found = []
    for by in ("nccl", "copy"):
        exchange = {"grad_reduce": "all-to-all", "send_by": by} if zero >= 2 else {}
        options = Options(device="cuda", dtype="bf16", deterministic=True, zero=zero, gather_by=by, **exchange)
        with Trainer(CONFIG, options, gpus=2, batch_size=4, seq_len=64, grad_accum=2) as trainer:
            trainer.init_weights(seed=1)
            told = []
            for _ in range(6):
                for inputs, targets in rows:
                    trainer.step(inputs, targets)
                told.append(trainer.update(lr=1e-3, grad_clip=1.0))
            found.append(told)
    assert "cannot copy" not in capfd.readouterr().err  # which ranks say where they fall back
    assert found[0] == found[1] and found[0][-1]["loss"] < found[0][0]["loss"]
