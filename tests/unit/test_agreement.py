"""Agreement over messages: mismatches at first sight, confusions of known calls, and ranks that left."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TypeVar

from ringreduce.common.call_sites import AbortReason, CallSite
from ringreduce.common.errors import CollectiveTimeoutError, MismatchError
from ringreduce.testing import caught, run_threads
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.waiting import Waiter

T = TypeVar("T")


class Rank:
    """An agreement with its waiter, and what a rank does while it waits for data."""

    def __init__(self, world: MemoryWorld, rank: int, timeout_s: float, patience_s: float) -> None:
        self.rank = rank
        self.messages = world.messages(rank)
        self.waiter = Waiter(timeout_s, crowded=True)
        self.agreement = Agreement(self.messages, self.waiter)
        self.agreement.patience_s = patience_s
        self.waiter.watchers.append(self.agreement.watch)

    def call(self, signature: str) -> Exception | None:
        return caught(self.agreement.enter, signature)

    def wait_for_data(self) -> Exception | None:
        """Wait for what never comes."""
        return caught(self.waiter.until, lambda: False, lambda: "data")

    def notes(self) -> int:
        """Return how many notes wait to be read here, and drop them."""
        count = 0
        while self.messages.poll() is not None:
            count += 1
        return count


def on_ranks(function: Callable[[Rank], T], timeout_s: float = 20.0, patience_s: float = 0.0) -> list[T]:
    """Return the results of three ranks."""
    world = MemoryWorld(3)
    ranks = [Rank(world, rank, timeout_s, patience_s) for rank in range(3)]

    def fail() -> None:
        for rank in ranks:
            rank.waiter.timeout_s = 0.0
        world.meeting.abort()

    return run_threads(3, lambda index: function(ranks[index]), on_error=fail)


def test_a_known_call_costs_no_note() -> None:
    """Only the first call with a signature is announced; later ones send nothing at all."""
    world = MemoryWorld(2)
    ranks = [Rank(world, index, 20.0, 5) for index in range(2)]
    run_threads(2, lambda index: ranks[index].call("a"))
    for rank in ranks:
        for _ in range(10):
            assert rank.call("a") is None
    assert [rank.notes() for rank in ranks] == [0, 0]


def test_a_known_call_meets_a_new_one() -> None:
    """A rank that knows its call waits for data, and there hears of the rank that calls something new."""

    def call(rank: Rank) -> MismatchError:
        assert rank.call("known") is None
        error = rank.call("new" if rank.rank == 1 else "known") or rank.wait_for_data()
        assert isinstance(error, MismatchError)
        return error

    errors = on_ranks(call, patience_s=math.inf)
    assert [error.values for error in errors] == [{0: "known", 1: "new", 2: "known"}] * 3


def test_suspicion_without_reason_is_harmless() -> None:
    """A rank that waits long for ranks which are merely slow learns that they agree, and goes on waiting."""

    def call(rank: Rank) -> Exception | None:
        assert rank.call("a") is None
        assert rank.call("a") is None
        rank.waiter.timeout_s = 0.05
        error = rank.wait_for_data()
        rank.waiter.timeout_s = 20.0
        return error or rank.call("next")

    assert all(isinstance(error, CollectiveTimeoutError) for error in on_ranks(call))


def test_a_call_that_peers_already_finished() -> None:
    """A rank that announces a call which its peers have left behind hears what they called, and so do they."""

    def call(rank: Rank) -> MismatchError:
        assert rank.call("a") is None
        if rank.rank == 0:
            error = rank.call("new")
        else:  # known, and no data was missing
            assert [rank.call("a"), rank.call("a")] == [None, None]
            error = rank.wait_for_data()
        assert isinstance(error, MismatchError)
        return error

    errors = on_ranks(call, patience_s=math.inf)
    assert [error.values for error in errors] == [{0: "new", 1: "a", 2: "a"}] * 3


def test_a_call_announced_early_and_left_behind_is_answered() -> None:
    """A rank that hears of a call before it enters it, and then passes it without a wait, answers all the same."""
    world = MemoryWorld(2)
    early = world.messages(0)
    for call, signature in [(1, "a"), (2, "new")]:
        early.post(json.dumps({"call": call, "called": CallSite(signature), "refused": False}).encode(), 1)
    rank = Rank(world, 1, timeout_s=20.0, patience_s=math.inf)
    assert [rank.call("a"), rank.call("a"), rank.call("a")] == [None, None, None]
    error = rank.wait_for_data()
    assert isinstance(error, MismatchError)
    assert error.values == {0: "new", 1: "a"}


def test_a_rank_that_left_after_the_last_call_is_not_missed() -> None:
    """A rank that took part and left at once does not fail the others in that call."""

    def call(rank: Rank) -> Exception | None:
        error = rank.call("last")
        rank.agreement.detach(AbortReason())
        return error

    assert on_ranks(call) == [None] * 3


def test_the_time_limit_names_who_is_missing() -> None:
    """When ranks do not come to a new call the error names exactly those, and the call."""
    errors = on_ranks(lambda rank: rank.call("allreduce") if rank.rank == 0 else None, timeout_s=0.02)
    assert isinstance(errors[0], CollectiveTimeoutError)
    assert "ranks [1, 2]" in str(errors[0])
    assert "allreduce" in str(errors[0])


def test_ranks_resume_at_one_number() -> None:
    """After a mismatch ranks that are a call apart count on from the furthest, and old notes mean nothing."""

    def call(rank: Rank) -> Exception | None:
        assert rank.call("a") is None
        if rank.rank == 0:
            assert isinstance(rank.call("new"), MismatchError)
        else:
            assert rank.call("a") is None
            assert rank.call("ahead of you" if rank.rank == 2 else "a") or rank.wait_for_data()
        rank.messages.exchange(b"")
        rank.agreement.resume(3)
        return rank.call("together") or rank.call("a") or rank.call("again")

    assert on_ranks(call, patience_s=math.inf) == [None] * 3


def test_what_a_peer_announces_before_a_rank_resumes_is_not_lost() -> None:
    """It may be in the next call already, and says so only once."""

    def call(rank: Rank) -> Exception | None:
        assert isinstance(rank.call(f"call {rank.rank}"), MismatchError)
        if rank.rank > 0:
            rank.waiter.until(lambda: 2 in rank.agreement._received, lambda: "the announcement of rank 0")
        rank.agreement.resume(1)
        return rank.call("next")

    assert on_ranks(call) == [None] * 3


def test_impatience_is_a_matter_of_time() -> None:
    """However often a rank looks in vain, it announces nothing before its patience is over, and then once."""
    world = MemoryWorld(2)
    agreement, other = Agreement(world.messages(0), Waiter(1.0)), world.messages(1)
    agreement._known.add("call")
    agreement.enter("call")
    agreement.patience_s = math.inf
    for _ in range(10_000):
        agreement.watch()
    assert other.poll() is None
    agreement.patience_s = 0.0
    for _ in range(3):
        agreement.watch()
    assert other.poll() is not None
    assert other.poll() is None


def test_a_late_answer_is_no_mismatch() -> None:
    """A rank that hears only after thousands of calls that a peer was once worried says nothing about that old call."""
    world = MemoryWorld(2)
    slow, other = (Agreement(world.messages(rank), Waiter(1.0)) for rank in (0, 1))
    slow._known.add("call")
    other._known.add("call")
    other.patience_s = 0.0
    other.enter("call")
    other.watch()
    for _ in range(5000):
        slow.enter("call")
    slow.watch()
    other.watch()
