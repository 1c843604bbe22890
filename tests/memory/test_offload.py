"""Buffers in host memory: where they are, how they are locked and freed, and how the streams of their copies order."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

import pytest
import torch

from fullstride import OutOfMemory
from fullstride.memory import arena as arena_module
from fullstride.memory.arena import Arena
from fullstride.memory.offload import Lane, Offloaded
from fullstride.memory.pinned import pinned


def make() -> tuple[Offloaded, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Three buffers in host memory that share one on the device, and one that lives there."""
    shared = torch.zeros(4)
    buffers = {"a": shared, "b": shared, "c": shared[:2], "stays": torch.zeros(4)}
    hosts = {name: torch.zeros_like(buffers[name]) for name in "abc"}
    return Offloaded(buffers, hosts), buffers, hosts


def test_what_was_put_comes_back() -> None:
    held, buffers, hosts = make()
    for i, name in enumerate(buffers, 1):
        held.get(name).fill_(i)
        held.put(name)
    assert [hosts[name].tolist() for name in "abc"] == [[1] * 4, [2] * 4, [3] * 2]
    for i, name in enumerate(buffers, 1):
        held.fetch(name)
        assert held.get(name).unique().tolist() == [i] and held.get(name) is buffers[name]
    assert "a" in held and "stays" in held and "d" not in held


# ---- the order of streams


class FakeBuffer:
    """A tensor on a GPU, as far as a Lane looks."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log, self._on = name, log, ""

    def copy_(self, source: FakeBuffer, non_blocking: bool) -> None:
        assert non_blocking
        self._log.append(f"copy {source.name} to {self.name} on {FakeStream.current}")


class FakeStream:
    device, current = FakeBuffer.device, "main"

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was issued to torch.cuda's streams, in order."""
    log: list[str] = []
    streams = iter("xyz")
    main = FakeStream("main", log)

    @contextlib.contextmanager
    def use(stream: FakeStream):
        FakeStream.current = stream.name
        yield
        FakeStream.current = "main"

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(next(streams), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", use)
    return log


def test_copies_fork_off_and_join(log: list[str]) -> None:
    """Each copy begins after what was issued before it; the current stream waits once for what is under way, and
    never for a stream that has done nothing since: a capture that waits for one outside of itself is refused."""
    device, host = FakeBuffer("device", log), FakeBuffer("host", log)
    lane: Any = Lane(device)  # type: ignore[arg-type]
    lane.wait()
    assert log == []
    lane.copy(host, device)
    lane.wait()
    lane.wait()
    assert log == ["x waits for main", "copy host to device on x", "main waits for x"]
    log.clear()
    lane.copy(device, host)
    lane.copy(host, device)  # in order after the first, on the same stream
    lane.wait()
    forks = ["x waits for main", "copy device to host on x", "x waits for main", "copy host to device on x"]
    assert log == [*forks, "main waits for x"]


# ---- pinned memory


class FakeCuda:
    """cudaHostRegister and cudaHostUnregister, and what they were told."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.registered, self.waits = error, {}, 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        assert self.waits  # a copy may be under way
        del self.registered[address]
        return 0

    def synchronize(self) -> None:
        self.waits += 1


def fake_cuda(monkeypatch: pytest.MonkeyPatch, error: int = 0) -> FakeCuda:
    if sys.platform != "linux":
        pytest.skip("pinned memory is for GPUs, which are for Linux")
    cuda = FakeCuda(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    return cuda


def test_pinned_memory_is_registered_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its exact size: 12.3 MB would be 16.8 in the next power of two."""
    cuda = fake_cuda(monkeypatch)
    buffer = pinned((3, 1_025_000), torch.float32)
    assert buffer.shape == (3, 1_025_000) and not buffer.any()
    assert cuda.registered == {buffer.data_ptr(): 12_300_000}
    last = buffer[2, 1000:]
    last.fill_(1)
    del buffer
    gc.collect()
    assert cuda.registered and last.sum() == 1_024_000
    del last
    gc.collect()
    assert cuda.registered == {}


def test_memory_that_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = fake_cuda(monkeypatch, error=2)
    with pytest.raises(MemoryError, match="cudaHostRegister gave error 2"):
        pinned((4096,), torch.uint8)
    gc.collect()
    assert not cuda.waits  # there is nothing to unregister


def test_the_arena_counts_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch)
    arena = Arena(torch.device("cuda"))
    monkeypatch.setattr(arena_module, "_available_memory", lambda: 10_000)
    kept = [arena.host("gradients", (n,), torch.float32) for n in (100, 200)]
    told = arena.allocations()
    assert told == {"gradients": {"device": 0, "managed": 0, "pinned": 1200, "pageable": 0}}
    with pytest.raises(OutOfMemory, match=r"on cpu: segment 'gradients' asks for 12.00 kB, 10.00 kB are free, 2.00 kB"):
        arena.host("gradients", (3000,), torch.float32)
    assert arena.allocations() == told and len(kept) == 2


def test_a_cpus_host_buffers_are_its_own_memory() -> None:
    arena = Arena(torch.device("cpu"))
    arena.zeros("gradients", (10,), torch.float32)
    arena.host("gradients", (100,), torch.float32)
    assert arena.allocations() == {"gradients": {"device": 0, "managed": 0, "pinned": 0, "pageable": 440}}


# ---- on a GPU


@pytest.mark.gpu
def test_pinned_memory_on_a_gpu() -> None:
    """Torch knows it as pinned, copies read and write it, and it can be locked again after it was freed."""
    for _ in range(3):
        host = pinned((3, 1_025_000), torch.float32)
        assert host.is_pinned() and not host.any()
        device = torch.arange(host.numel(), dtype=torch.float32, device="cuda").view(host.shape)
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(host, device.cpu())
        del host


@pytest.mark.gpu
def test_copies_are_captured() -> None:
    """Fetch, change and put back, captured in one graph with two buffers by turns, and replayed."""
    shared = [torch.zeros(1 << 20, device="cuda") for _ in range(2)]
    hosts = {str(i): pinned((1 << 20,), torch.float32) for i in range(6)}
    held = Offloaded({name: shared[int(name) % 2] for name in hosts}, hosts)

    def work() -> None:
        held.fetch("0")
        for i in range(6):
            if i < 5:
                held.fetch(str(i + 1))
            held.get(str(i)).add_(i)
            held.put(str(i))
        held.settle()

    work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert all((host == 11 * int(name)).all() for name, host in hosts.items())
