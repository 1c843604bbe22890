"""The four collectives, against what each says, on Gloo."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from fullstride.errors import ConfigError
from fullstride.parallel.comm import Communicator, PeerLost
from tests.ranks import TIMEOUT, Pool, together

pytestmark = pytest.mark.xdist_group("ranks")
N = 6


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rank, size * N], what each rank has: small whole numbers, so that sums are exact in every dtype and order."""
    return torch.randint(-8, 9, (size, size * N), generator=torch.Generator().manual_seed(size)).to(dtype)


def collectives(comm: Communicator, dtype: torch.dtype, in_place: bool) -> None:
    every = values(comm.size, dtype)
    own = slice(comm.rank * N, (comm.rank + 1) * N)
    pieces = every.view(comm.size, comm.size, N)

    whole = every[comm.rank].clone()
    part = whole[own] if in_place else torch.empty(N, dtype=dtype)
    comm.reduce_scatter(whole, part).wait()
    assert torch.equal(part, pieces[:, comm.rank].sum(0))

    whole = torch.full((comm.size * N,), 99, dtype=dtype)
    part = whole[own] if in_place else torch.empty(N, dtype=dtype)
    part.copy_(every[comm.rank, :N])
    comm.all_gather(part, whole).wait()
    assert torch.equal(whole, every[:, :N].flatten())

    received = torch.full((comm.size * N,), 99, dtype=dtype)
    comm.all_to_all(every[comm.rank].clone(), received).wait()
    assert torch.equal(received, pieces[:, comm.rank].flatten())

    for maximum in (False, True):
        x = every[comm.rank].clone()
        comm.all_reduce(x, maximum).wait()
        assert torch.equal(x, every.amax(0) if maximum else every.sum(0))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_collectives(ranks: int, dtype: torch.dtype, in_place: bool) -> None:
    """Moves, and sums of small whole numbers: exact."""
    if ranks == 1:
        collectives(Communicator(), dtype, in_place)
    else:
        together(ranks, collectives, dtype, in_place)


def several_at_once(comm: Communicator) -> list[torch.Tensor]:
    whole = [torch.full((comm.size * N,), 10.0 * comm.rank + i) for i in range(5)]
    works = [comm.reduce_scatter(w, w[comm.rank * N : (comm.rank + 1) * N]) for w in whole]
    for work in reversed(works):
        work.wait()
    return [w[comm.rank * N].clone() for w in whole]


def test_several_under_way_at_once() -> None:
    for found in together(2, several_at_once):
        assert found == [10.0 + 2 * i for i in range(5)]


def between_hosts(comm: Communicator) -> list[object]:
    comm.barrier()
    return comm.gather({"rank": comm.rank, "more": "x" * 1000 * comm.rank})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gather_brings_objects_of_any_size_by_rank(ranks: int) -> None:
    expected = [{"rank": rank, "more": "x" * 1000 * rank} for rank in range(ranks)]
    assert (between_hosts(Communicator()) if ranks == 1 else together(ranks, between_hosts)[-1]) == expected


def agreeing(comm: Communicator, refuses: list[int]) -> str:
    try:
        with comm.agreed():
            if comm.rank in refuses:
                raise ConfigError(f"not on {comm.rank}")
    except (ConfigError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


def test_checks_are_made_by_all_ranks_or_none_goes_on() -> None:
    assert together(2, agreeing, []) == ["agreed", "agreed"]
    assert together(2, agreeing, [0, 1]) == ["ConfigError: not on 0", "ConfigError: not on 1"]
    others = "RuntimeError: only some ranks could go on; rank 1: not on 1"
    assert together(2, agreeing, [1]) == [others, "ConfigError: not on 1"]
    assert agreeing(Communicator(), []) == "agreed"


def losing(comm: Communicator) -> str:
    if comm.rank == 1:
        comm.close()
        return "left"
    try:
        comm.all_reduce(torch.ones(1)).wait()
    except PeerLost:
        comm.abort()
    with pytest.raises(PeerLost, match="another rank is gone"):
        comm.all_reduce(torch.ones(1))
    return "lost"


def test_a_wait_for_a_rank_that_is_gone_ends() -> None:
    pool = Pool(2)  # of its own: these ranks cannot meet again
    assert pool.run(losing) == ["lost", "left"]
    pool.stop()


def failing(comm: Communicator) -> None:
    if comm.rank == 1:
        raise ValueError("rank one only")
    comm.all_reduce(torch.ones(1)).wait()


def test_a_rank_that_fails_is_told_and_does_not_hang_the_tests() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2"):
        together(2, failing)
    together(2, collectives, torch.float32, False)  # others were started


def given_up(comm: Communicator) -> str:
    """Rank 1 is there, but stopped; whoever watches it aborts rank 0."""
    if comm.rank == 1:
        time.sleep(TIMEOUT / 4)
        return "stopped"
    threading.Timer(0.2, comm.abort).start()
    with pytest.raises(PeerLost, match="another rank is gone"):
        comm.gather(None)
    comm.close()
    return "went on"


def test_a_wait_for_a_rank_that_hangs_can_be_ended() -> None:
    pool = Pool(2)
    pool._start()
    for pipe in pool._pipes:
        pipe.send((given_up, ()))
    begin = time.monotonic()
    assert pool._pipes[0].poll(TIMEOUT / 5) and pool._pipes[0].recv() == (False, "went on")
    pool.stop()
    assert time.monotonic() - begin < TIMEOUT / 5


def parting(comm: Communicator) -> float:
    time.sleep(comm.rank)
    begin = time.monotonic()
    comm.part()
    waited = time.monotonic() - begin
    comm.close()
    comm.part()  # for nobody any more
    return waited


def test_ranks_part_together() -> None:
    pool = Pool(2)
    first, second = pool.run(parting)
    assert first > 0.7 and second < 0.7
    pool.stop()
