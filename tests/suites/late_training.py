"""What staleness must do in every binding: a step applies the averages of an earlier step, and waits for no later one.

All functions are collective and take what makes a `Trainee` of the binding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from suites.trainees import (
    MOMENTUM,
    Floats,
    Make,
    OneProcess,
    assert_equal_on_ranks,
    assert_near,
    assert_raises,
    assert_weights,
    mean,
    slopes,
    start,
    train,
)

from ringreduce import runtime
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.runtime.blocking import barrier
from ringreduce.training.calls.ops import Adasum
from ringreduce.training.compression.powersgd import PowerSGD

_STEPS = 7

#: What does not go with staleness 1, and words of the errors of some bindings.
_REFUSED: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"op": Adasum}, ("Adasum",)),
    ({"compression": PowerSGD(rank=2)}, ("powersgd", "unknown wire format")),
    ({"gradient_predivide_factor": 2.0}, ("gradient_predivide_factor and staleness",)),
    ({"staleness": -1}, ("staleness",)),
    ({"staleness": 1.5}, ("staleness",)),
)


class Delayed:
    """One process that applies the averages of all ranks, each so many steps late.

    Args:
        staleness: how many.
        momentum: of the steps.
        exact: as for `slopes`.
        counts: weights of the ranks; None: equal ones.
    """

    def __init__(
        self, staleness: int, *, momentum: float = MOMENTUM, exact: bool = True, counts: Sequence[int] | None = None
    ) -> None:
        self._process = OneProcess(start(), momentum)
        self._waiting = deque[dict[str, Floats]]()
        self._staleness = staleness
        self._exact = exact
        self._counts = counts

    @property
    def weights(self) -> dict[str, Floats]:
        return self._process.weights

    def train(self, steps: range) -> Delayed:
        """Make steps, and return the process itself."""
        for step in steps:
            everyone = [slopes(self.weights, rank, step, exact=self._exact) for rank in range(runtime.size())]
            self._waiting.append(mean(everyone, self._counts))
            self._apply(self._staleness)
        return self

    def synchronize(self) -> None:
        self._apply(0)

    def _apply(self, left: int) -> None:
        while len(self._waiting) > left:
            self._process.step(self._waiting.popleft())


def make_late(make: Make, staleness: int, **options: Any) -> Any:
    """Make a trainee of `start`, with momentum, each of whose parameters is in a bucket of its own."""
    return make(start(), momentum=MOMENTUM, staleness=staleness, bucket_nbytes=32, **options)


def check_delay(make: Make) -> None:
    """After each step, weights are those of one process that delays; so they are after `synchronize`.

    No bit differs, on any number of ranks.
    """
    for staleness in (0, 1, 2, 4):
        trainee = make_late(make, staleness)
        expected = Delayed(staleness)
        for step in range(_STEPS):
            train(trainee, range(step, step + 1))
            expected.train(range(step, step + 1))
            assert_weights(trainee, expected.weights)
        if staleness:
            expected.synchronize()
            for _ in range(2):  # the second time nothing is left
                trainee.synchronize()
                assert_weights(trainee, expected.weights)
        assert_equal_on_ranks(trainee)


def check_going_on(make: Make) -> None:
    """After `synchronize` training begins anew, with the weights that there are: without momentum, which differs.

    Some optimizers step with zeros as long as there are no averages, others do not step.
    """
    trainee = make(start(), staleness=2)
    expected = Delayed(2, momentum=0.0)
    for steps in (range(4), range(4, 5), range(5, 9)):
        train(trainee, steps)
        assert_weights(trainee, expected.train(steps).weights)
        trainee.synchronize()
        expected.synchronize()
        assert_weights(trainee, expected.weights)


def check_no_waiting(make: Make) -> None:
    """A rank that does not come blocks nobody for as many steps as averages are late."""
    staleness = 3
    trainee = make_late(make, staleness)
    train(trainee, range(2))
    if runtime.rank() == 0:
        barrier()  # until the others have made as many steps more
    train(trainee, range(2, 2 + staleness))
    if runtime.rank() != 0:
        barrier()
    assert_weights(trainee, Delayed(staleness).train(range(2 + staleness)).weights)


def check_late_wires(make: Make) -> None:
    """Averages travel in fewer bits; ranks agree on what comes of them."""
    for wire in ("fp16", "bf16", "int8"):
        trainee = make(start(), staleness=2, compression=wire)
        train(trainee, range(17), exact=False)
        trainee.synchronize()
        expected = Delayed(2, momentum=0.0, exact=False).train(range(17))
        expected.synchronize()
        assert_near(trainee, expected.weights, 0.1)
        assert_equal_on_ranks(trainee)


def check_late_mismatches(make: Make) -> None:
    """Ranks with other staleness raise an error, in one of the first steps at the latest."""
    last = runtime.size() - 1
    for other in (0, 2) if last else ():

        def begin(staleness: int = other if runtime.rank() == last else 1) -> None:
            train(make_late(make, staleness), range(3))

        assert_raises(begin, MismatchError, "the ranks differ")


def check_late_refusals(make: Make) -> None:
    """What does not go together with staleness, and what is none, is refused on all ranks."""
    for options, words in _REFUSED:
        arguments = {"staleness": 1, **options}
        text = assert_raises(partial(make, start(), **arguments), ConfigError, f"{arguments} is no option")
        assert any(each in text for each in words), text


LATE_CHECKS: tuple[Callable[[Make], None], ...] = (
    check_delay,
    check_going_on,
    check_no_waiting,
    check_late_wires,
    check_late_mismatches,
    check_late_refusals,
)
