"""Steps that all ranks take, or none of them; and what has several parts is closed as a whole."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.lifetime import close_all
from ringreduce.runtime.process_sets import Membership
from ringreduce.testing import caught, run_threads
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, StepFailedError, together

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])

#: What a step may fail with; the last one has nothing to say of itself.
FAILURES = (TransportError("lost"), ConfigError("not set"), MemoryError("full"), OSError(24, "too many"), ValueError())


class Step:
    """What a rank does, or cannot do; it counts how often it was taken back."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.undone: list[int] = []

    def run(self, messages: Messages) -> int:
        def act() -> int:
            if self.failure is not None:
                raise self.failure
            return 10 * messages.rank

        return together(messages, act, self.undone.append)


def given_or_raised(step: Step, messages: Messages) -> object:
    try:
        return step.run(messages)
    except Exception as error:
        return error


def on_ranks(steps: list[Step]) -> list[object]:
    """Let ranks take these steps, and then another one; return what the first gave, or raised."""
    world = MemoryWorld(len(steps), 20.0)

    def run(rank: int) -> object:
        messages = world.messages(rank)
        found = given_or_raised(steps[rank], messages)
        assert together(messages, lambda: rank) == rank  # the ranks are in step, whatever happened
        return found

    return run_threads(len(steps), run, on_error=world.meeting.abort)


@SIZES
def test_a_step_of_all_gives_each_its_own(size: int) -> None:
    """Nothing fails: every rank gets what it made, and nothing is taken back."""
    steps = [Step() for _ in range(size)]
    assert on_ranks(steps) == [10 * rank for rank in range(size)]
    assert [step.undone for step in steps] == [[]] * size


@SIZES
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failure_of_one_is_everyones(size: int, failure: Exception) -> None:
    """Whichever rank fails, all hear which one and why, and those that succeeded take back what they made."""
    for failing in range(size):
        steps = [Step(failure if rank == failing else None) for rank in range(size)]
        reason = str(failure) or "ValueError()"
        for error in on_ranks(steps):
            assert isinstance(error, StepFailedError)
            assert error.reasons == {failing: reason}
            assert str(error) == f"rank {failing}: {reason}"
        assert [step.undone for step in steps] == [[] if rank == failing else [10 * rank] for rank in range(size)]


@SIZES
def test_all_may_fail(size: int) -> None:
    """Every rank hears every reason; the text is about the first rank, and nobody takes anything back."""
    steps = [Step(TransportError(f"no cable at {rank}")) for rank in range(size)]
    for error in on_ranks(steps):
        assert isinstance(error, StepFailedError)
        assert error.reasons == {rank: f"no cable at {rank}" for rank in range(size)}
        assert str(error) == "rank 0: no cable at 0"
    assert [step.undone for step in steps] == [[]] * size


def test_what_is_our_mistake_is_no_reason_to_fall_back() -> None:
    """An error that no step may fail with comes out where it was raised."""
    messages = MemoryWorld(1, 20.0).messages(0)
    assert isinstance(given_or_raised(Step(KeyError("wrong")), messages), KeyError)


def test_every_part_is_closed() -> None:
    """The first error is raised, when all parts have been asked."""
    called: list[int] = []

    def part(number: int) -> None:
        called.append(number)
        if number:
            raise TransportError(str(number))

    error = caught(close_all, *(lambda number=number: part(number) for number in range(3)))
    assert str(error) == "1"
    assert called == [0, 1, 2]


def test_all_of_a_process_set_is_closed() -> None:
    """Whatever the first part raises, the second is closed, too."""
    closed: list[str] = []

    def fail() -> None:
        raise TransportError("a kernel of the user's")

    engine = SimpleNamespace(close=fail)
    communicator = SimpleNamespace(close=lambda: closed.append("communicator"))
    assert isinstance(caught(Membership(communicator, engine).close), TransportError)
    assert closed == ["communicator"]
