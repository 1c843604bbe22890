"""Signs of life and the word of the first failure: several ranks' in this process, over one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fullstride.errors import OutOfMemory, WorkerError
from fullstride.parallel import presence
from fullstride.parallel.comm import PeerLost
from fullstride.parallel.presence import Failure, Presence

WITHIN = 5.0  # seconds in which a failure is told here: many times BEAT and SILENCE
BEAT, SILENCE = 0.02, 0.5  # a machine that is busy may hold a thread up for some tenths
FIRST, SECOND = Failure(1, "failed: first"), Failure(0, "failed: second")

Make = Callable[..., list[Presence]]


class Waits:
    """What a failure ends."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """make(size, store) gives every rank's presence."""
    monkeypatch.setattr(presence, "BEAT", BEAT)
    monkeypatch.setattr(presence, "SILENCE", SILENCE)
    made: list[Presence] = []

    def start(size: int = 2, store: Any = None) -> list[Presence]:
        store = store or dist.HashStore()
        made.extend(ranks := [Presence(store, rank, size) for rank in range(size)])
        return ranks

    yield start
    for each in made:
        each._leave()


def die(rank: Presence) -> None:
    """As when it is killed: beats stop without a word."""
    rank._ended.set()
    rank._thread.join()


def meet(*ranks: Presence) -> list[Any]:
    """What `meet` returns or raises in each of them, at once."""
    found: list[Any] = [None] * len(ranks)

    def run(i: int) -> None:
        try:
            found[i] = ranks[i].meet()
        except PeerLost as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    return found


def test_the_first_word_reaches_all_and_ends_their_waits(make: Make) -> None:
    ranks, waits = make(3), [Waits() for _ in range(3)]
    assert meet(*ranks) == [1, 1, 1]
    for rank, wait in zip(ranks, waits, strict=True):
        rank.guard(wait)
    ranks[1].tell(FIRST)
    ranks[0].tell(SECOND)
    assert [rank.told(WITHIN) for rank in ranks] == [FIRST] * 3
    assert all(wait.aborted.wait(WITHIN) for wait in waits)


def test_a_failure_is_over_when_all_have_met_again(make: Make) -> None:
    ranks = make()
    meet(*ranks)
    ranks[1].tell(FIRST)
    assert ranks[0].told(WITHIN) == FIRST
    assert meet(*ranks) == [2, 2]
    assert [rank.told(5 * BEAT) for rank in ranks] == [None, None]


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_gives_no_sign_of_life_any_more(size: int, make: Make) -> None:
    *ranks, last = make(size)
    meet(*ranks, last)
    waits = [Waits() for _ in ranks]
    for rank, wait in zip(ranks, waits, strict=True):
        rank.guard(wait)
    time.sleep(5 * BEAT)
    begin = time.monotonic()
    die(last)
    expected = Failure(size - 1, f"gave no sign of life for {SILENCE:.0f} s")
    assert [rank.told(WITHIN) for rank in ranks] == [expected] * (size - 1)
    assert time.monotonic() - begin > SILENCE / 2
    assert all(wait.aborted.wait(WITHIN) for wait in waits)


def test_ranks_that_nobody_waits_for_may_end(make: Make) -> None:
    first, second, third = make(3)
    meet(first, second, third)
    first.guard(wait := Waits())
    first.leave_alone(wait)
    second._leave()
    die(third)
    assert first.told(2 * SILENCE) is None and not wait.aborted.is_set()


def test_a_rank_that_ends_while_others_need_it(make: Make) -> None:
    first, second = make()
    meet(first, second)
    first.guard(wait := Waits())
    second._leave()
    assert first.told(WITHIN) == Failure(1, "ended while others waited for it")
    assert wait.aborted.wait(WITHIN)


def test_a_meeting_waits_for_a_rank_that_is_late(make: Make) -> None:
    first, second = make()
    threading.Timer(2 * SILENCE, second.meet).start()
    assert first.meet() == 1


@pytest.mark.parametrize("end", ["tells", "leaves", "dies"])
def test_a_meeting_ends_when_one_cannot_come(end: str, make: Make) -> None:
    first, second = make()
    time.sleep(5 * BEAT)
    if end == "tells":
        second.tell(FIRST)
    die(second) if end == "dies" else second._leave()
    (found,) = meet(first)
    assert isinstance(found, PeerLost)
    told = first.told(0)
    assert told is not None and told.rank == 1
    assert {"tells": "first", "leaves": "ended while", "dies": "no sign of life"}[end] in told.story


def test_a_launcher_that_is_gone(make: Make) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (rank,) = make(1, dist.TCPStore("127.0.0.1", server.port, is_master=False))
    rank.guard(wait := Waits())
    del server
    told = rank.told(WITHIN)
    assert told is not None and "rank 0 or its launcher has ended" in str(told.error())
    assert wait.aborted.wait(WITHIN)


def test_failures_are_raised_with_their_rank() -> None:
    failed, short = Failure.of(2, ValueError("the fault")), Failure.of(3, OutOfMemory("too little"))
    assert isinstance(failed.error(), WorkerError) and "ValueError: the fault" in str(failed.error())
    error = short.error()
    assert isinstance(error, OutOfMemory) and (error.rank, str(error)) == (3, "rank 3: too little")
    assert Failure.of(0, PeerLost("gone")).consequence and not failed.consequence
