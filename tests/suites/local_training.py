"""What local training must do in every binding: replicas step by themselves, and exchange weights once per period.

All functions are collective and take what makes a `Trainee` of the binding, whose optimizer is a `DiLoCo` that gets the
options. Its `state_dict` is what resumes a run, besides the weights; `rejoin` goes on in a new world.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from suites.exchanges import Exchanges, Weights
from suites.trainees import (
    MOMENTUM,
    Floats,
    OneProcess,
    Trainee,
    assert_equal_on_ranks,
    assert_near,
    assert_raises,
    assert_weights,
    bits,
    mean,
    named,
    slopes,
    start,
    train,
)
from trainees.toy import RATE

from ringreduce import runtime
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.runtime.blocking import barrier
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.calls.handles import join
from ringreduce.training.compression.powersgd import PowerSGD

_STEPS = 11

#: Outer steps whose numbers are exact in float32.
_HALVES: dict[str, Any] = {"outer_lr": 0.5, "outer_momentum": 0.5}
_AVERAGES: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}

#: Trainings, and at which of the parameters of `start` (15, 7, 6 and 1 elements) fragments begin but for the first.
_TRAININGS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"period": 3, **_HALVES}, ()),
    ({"period": 4, **_AVERAGES}, ()),
    ({"period": 2, "outer_lr": 0.5, "outer_momentum": 0.0}, ()),
    ({"period": 4, "fragments": 2, **_HALVES}, (1,)),
    ({"period": 4, "fragments": 4, **_HALVES}, (1, 2, 3)),
    ({"period": 5, "delay": 2, **_HALVES}, ()),
    ({"period": 4, "delay": 3, **_AVERAGES}, ()),
    ({"period": 5, "fragments": 3, "delay": 4, **_HALVES}, (1, 2)),
)

#: What a run may be stopped in the middle of.
_RESUMED: tuple[dict[str, Any], ...] = (
    {},
    {"fragments": 3, "delay": 2},
    {"compression": "int8", "delay": 3},
    {"compression": "int4", "fragments": 2},
    {"delay": 3, **_AVERAGES},
)

#: What is no option, and words of the errors of some bindings.
_REFUSED: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"period": 0}, ("period must be at least 1",)),
    ({"period": 2.5}, ("whole number",)),
    ({"outer_lr": 0}, ("outer_lr",)),
    ({"outer_lr": float("nan")}, ("outer_lr",)),
    ({"outer_lr": "much"}, ("outer_lr",)),
    ({"outer_momentum": 1.0}, ("outer_momentum",)),
    ({"outer_momentum": -0.1}, ("outer_momentum",)),
    ({"fragments": 1.5}, ("whole number",)),
    ({"fragments": 5}, ("4 parameters",)),
    ({"fragments": 3, "period": 2}, ("2 steps",)),
    ({"delay": 7, "period": 7}, ("delay",)),
    ({"compression": PowerSGD(rank=1)}, ("compression is none", "unknown wire format")),
    ({"replica": "host"}, ("replica is",)),
    ({"replica": 3}, ("replica is",)),
    ({"replica": [ProcessSet([0]), ProcessSet([0])]}, ("each of",)),
)


class LocalTrainee(Trainee, Protocol):
    """See the head of this module."""

    def rejoin(self) -> None:
        """Go on in a new world."""


#: Makes a `LocalTrainee` of weights by name, with options as users of the binding give them, wire formats by name, and
#: ``momentum``, that of a replica's steps.
Make = Callable[..., LocalTrainee]


class AllReplicas:
    """One process that trains all replicas, and exchanges their weights.

    Args:
        replicas: the ranks of each.
        cuts: as in `_TRAININGS`.
        momentum: of a replica's steps.
        exact: as for `slopes`.
        period, outer_lr, outer_momentum, delay, warmup_steps: as for `DiLoCo`; ``fragments`` are those of ``cuts``.
    """

    def __init__(
        self,
        replicas: Sequence[Sequence[int]],
        cuts: Sequence[int] = (),
        *,
        momentum: float = 0.0,
        exact: bool = True,
        **options: Any,
    ) -> None:
        self._replicas = replicas
        self._processes = [OneProcess(start(), momentum) for _ in replicas]
        self._exact = exact
        self._warmup_steps = options.get("warmup_steps", 0)
        options = {"outer_lr": 0.7, "outer_momentum": 0.9, "delay": 0, **options, "fragments": len(cuts) + 1}
        names = list(start())
        fragments = [names[first:end] for first, end in pairwise([0, *cuts, len(names)])]
        self._exchanges = Exchanges(options, self._warmup_steps, fragments)

    @property
    def weights(self) -> Mapping[str, Floats]:
        """Those of this rank."""
        pairs = zip(self._replicas, self._processes, strict=True)
        return next(process.weights for replica, process in pairs if runtime.rank() in replica)

    def train(self, steps: range) -> AllReplicas:
        """Make steps, and return the process itself."""
        for step in steps:
            self._change(self._exchanges.before_step)
            for replica, process in zip(self._replicas, self._processes, strict=True):
                together = replica if step >= self._warmup_steps else range(runtime.size())
                process.step(mean([slopes(process.weights, each, step, exact=self._exact) for each in together]))
            self._change(self._exchanges.after_step)
        return self

    def synchronize(self) -> None:
        self._change(self._exchanges.synchronize)

    def rejoin(self) -> None:
        """Give all replicas the average of what each has learnt."""
        self._change(self._exchanges.average)

    def _change(self, change: Callable[[Sequence[Weights]], None]) -> None:
        """Let the weights of all ranks change, of which those of a replica are equal."""
        pairs = zip(self._replicas, self._processes, strict=True)
        ranks = [[dict(process.weights) for _ in replica] for replica, process in pairs]
        change([weights for replica in ranks for weights in replica])
        for process, (weights, *_) in zip(self._processes, ranks, strict=True):
            process.weights = weights


def _ranks() -> list[list[int]]:
    return [[rank] for rank in range(runtime.size())]


def _nodes() -> Sequence[Sequence[int]]:
    return runtime.global_process_set.communicator.topology.nodes


def _compare(
    make: Make, replicas: Sequence[Sequence[int]], cuts: Sequence[int] = (), *, steps: int = _STEPS, **options: Any
) -> None:
    """Train beside one process; weights are equal to it after each step, and on all ranks at the end."""
    trainee = make(start(), **options)
    expected = AllReplicas(replicas, cuts, **options)
    for step in range(steps):
        train(trainee, range(step, step + 1))
        assert_weights(trainee, expected.train(range(step, step + 1)).weights)
    for _ in range(2):  # the second time nothing is left
        trainee.synchronize()
        expected.synchronize()
        assert_weights(trainee, expected.weights)
    assert_equal_on_ranks(trainee)
    train(trainee, range(steps, steps + 2))
    assert_weights(trainee, expected.train(range(steps, steps + 2)).weights)


def check_exchanges(make: Make) -> None:
    """After each step weights are those of one process that trains all replicas; so they are after `synchronize`.

    No bit differs, on any number of ranks.
    """
    for options, cuts in _TRAININGS:
        _compare(make, _ranks(), cuts, replica="rank", **options)


def check_momentum_of_replicas(make: Make) -> None:
    """Exchanges leave the state of an optimizer to each replica."""
    _compare(make, _ranks(), steps=6, replica="rank", period=2, momentum=MOMENTUM, **_HALVES)


def check_replicas(make: Make) -> None:
    """Ranks of a node, or of a process set, step together; a replica counts by the number of its ranks."""
    _compare(make, _nodes(), period=3, **_HALVES)
    _compare(make, _nodes(), period=4, delay=1, **_AVERAGES)
    last = runtime.size() - 1
    if last > 1:
        sets = [[0, last], list(range(1, last))]
        given = list(map(ProcessSet, sets))
        for _ in range(2):  # the second time they are registered
            _compare(make, sets, period=3, replica=given, **_HALVES)


def check_quorum_of_all(make: Make) -> None:
    """Outer steps for which all replicas have to come are those without a quorum, up to rounding."""
    _compare(make, _ranks(), replica="rank", period=3, quorum=runtime.size(), **_HALVES)


def check_no_meeting(make: Make, warmup_steps: int = 0) -> None:
    """Between exchanges a replica waits for no other: once weights are compared it trains by itself."""
    trainee = make(start(), replica="rank", period=6, **_AVERAGES)
    train(trainee, range(warmup_steps + 1))
    alone = range(warmup_steps + 1, warmup_steps + 5)
    if runtime.rank() == 0:
        train(trainee, alone)
    barrier()
    if runtime.rank() != 0:
        train(trainee, alone)
    train(trainee, range(warmup_steps + 5, warmup_steps + 6))
    assert_equal_on_ranks(trainee)


def check_warm_up(make: Make) -> None:
    """The first steps reduce gradients over all ranks, later ones do not; for bindings that have ``warmup_steps``."""
    _compare(make, _nodes(), warmup_steps=2, period=3, **_HALVES)
    _compare(make, _nodes(), cuts=(1, 2), warmup_steps=3, period=5, fragments=3, delay=4, **_HALVES)
    check_no_meeting(partial(make, warmup_steps=3), warmup_steps=3)


def check_synchronous_training(make: Make) -> None:
    """Averages in each step are synchronous steps; outer steps in each step are those of Nesterov's momentum."""
    for momentum in (0.0, 0.5):
        rate = 1.0 - momentum
        trainee = make(start(), period=1, replica="rank", outer_lr=rate, outer_momentum=momentum)
        weights = {name: value.astype(np.float64) for name, value in start().items()}
        moving = {name: np.zeros(value.shape) for name, value in weights.items()}
        for step in range(7):
            train(trainee, range(step, step + 1))
            for name, slope in mean([slopes(weights, rank, step) for rank in range(runtime.size())]).items():
                moving[name] = momentum * moving[name] + slope
                weights[name] = weights[name] - rate * RATE * (slope + momentum * moving[name])
            assert_weights(trainee, weights)


def check_defaults(make: Make) -> None:
    """Without more than a period, weights are those of one process up to rounding."""
    trainee = make(start(), period=3)
    train(trainee, range(_STEPS), exact=False)
    assert_near(trainee, AllReplicas(_nodes(), exact=False, period=3).train(range(_STEPS)).weights)


def check_wire_formats(make: Make) -> None:
    """Differences travel in fewer bits; after an exchange ranks have the same weights, those of one process nearly."""
    for wire in ("fp16", "bf16", "fp8", "int8", "int4"):
        trainee = make(start(), period=3, compression=wire, outer_momentum=0.5)
        expected = AllReplicas(_nodes(), exact=False, period=3, outer_momentum=0.5)
        for first in range(0, 12, 3):
            train(trainee, range(first, first + 3), exact=False)
            assert_equal_on_ranks(trainee)
        assert_near(trainee, expected.train(range(12)).weights, 0.3 if wire == "int4" else 0.1)


def check_resumed(make: Make) -> None:
    """From what each rank has saved by itself a run goes on with the same bits, at any step; saving changes nothing."""
    for options in _RESUMED:
        expected = make(start(), period=4, **options)
        saved = []
        for step in range(_STEPS):
            for rank in range(runtime.size()):  # one after the other
                if rank == runtime.rank():
                    saved.append(pickle.dumps((named(expected), expected.state_dict())))
                barrier()
            train(expected, range(step, step + 1), exact=False)
        for stop in (0, 2, 5, 8):
            values, state = pickle.loads(saved[stop])
            trainee = make(values, period=4, **options)
            trainee.load_state_dict(state)
            train(trainee, range(stop, _STEPS), exact=False)
            assert bits(trainee) == bits(expected), f"stopped after {stop} steps, with {options}"


def check_new_world(make: Make) -> None:
    """In the middle of a period and of an exchange ranks average what each has learnt; momentum and steps stay."""
    options: dict[str, Any] = {"period": 5, "delay": 3, **_HALVES}
    trainee = make(start(), **options)
    expected = AllReplicas(_nodes(), **options)
    train(trainee, range(6))
    expected.train(range(6))
    runtime.shutdown()
    runtime.init()
    trainee.rejoin()
    expected.rejoin()
    assert_weights(trainee, expected.weights)
    for step in range(6, 15):
        train(trainee, range(step, step + 1))
        assert_weights(trainee, expected.train(range(step, step + 1)).weights)


def check_local_refusals(make: Make) -> None:
    """What is no option is refused on all ranks; training goes on with others."""
    for options, words in _REFUSED:
        text = assert_raises(partial(make, start(), **options), ConfigError, f"{options} is no option")
        assert any(each in text for each in words), text
    _compare(make, _ranks(), steps=2, replica="rank", period=1, **_HALVES)


def check_local_mismatches(make: Make) -> None:
    """Ranks that have other options, or begin with other weights, hear it."""
    last = runtime.size() - 1
    if not last:
        return
    is_last = runtime.rank() == last
    text = assert_raises(partial(make, start(), period=3 + is_last), MismatchError, "the periods differ")
    assert "period" in text
    wrong = partial(make, start(), delay=-1 if is_last else 0)
    assert "delay" in assert_raises(wrong, (ConfigError, MismatchError), "a delay is wrong")
    values = {name: np.asarray(value + is_last, np.float32) for name, value in start().items()}
    trainee = make(values, replica="rank", period=1)
    text = assert_raises(partial(train, trainee, range(1)), MismatchError, "the weights differ")
    assert "broadcast_" in text


def check_states(make: Make) -> None:
    """States of other options are refused; those of different steps are an error in the next exchange."""
    trainee = make(start(), replica="rank", period=3)
    train(trainee, range(4))
    early = trainee.state_dict()
    other = make(start(), replica="rank", period=3, fragments=2)
    assert "the state" in assert_raises(partial(other.load_state_dict, early), ConfigError, "the options differ")
    train(trainee, range(4, 7))
    if runtime.size() > 1:
        trainee.load_state_dict(early if runtime.rank() else trainee.state_dict())
        train(trainee, range(1))
        assert "checksum" in assert_raises(partial(train, trainee, range(1, 2)), MismatchError, "the states differ")


def check_local_join(make: Make) -> None:
    """A rank that makes fewer steps would not have the weights that the others agree on: it is refused."""
    trainee = make(start(), replica="rank", period=2)
    train(trainee, range(1))
    if runtime.rank():
        assert "joined" in assert_raises(partial(train, trainee, range(1, 2)), ConfigError, "a rank has joined")
    join()


LOCAL_CHECKS: tuple[Callable[[Make], None], ...] = (
    check_exchanges,
    check_momentum_of_replicas,
    check_replicas,
    check_quorum_of_all,
    check_no_meeting,
    check_synchronous_training,
    check_defaults,
    check_wire_formats,
    check_resumed,
    check_new_world,
    check_local_refusals,
    check_local_mismatches,
    check_states,
    check_local_join,
)

#: Those that differ where ranks share nodes.
NODE_CHECKS = (check_replicas, check_wire_formats, check_new_world)
