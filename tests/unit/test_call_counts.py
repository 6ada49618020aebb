"""How many functions of the package a call goes through: a number that, unlike a time, is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import numpy as np
import pytest
from trainees.toy import Toy

import ringreduce as rr
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import Engine, Reduction
from ringreduce.testing import run_engines, run_process_sets, run_ranks
from ringreduce.transport import waiting
from ringreduce.transport.shared.board_memory import TURNS

#: By the ranks of a node: the most function calls of rank 0 in an allreduce of 256 KiB in private memory, in place; the
#: first one, the same again, and one of another array of the same kind.
LIMITS = {None: {"first": 100, "again": 10, "other": 57}, 1: {"again": 25}}

#: Likewise, of 8 B from one rank to another, when it has come.
MESSAGE_LIMITS = {"send": 4, "recv": 4}

#: Likewise, of an asynchronous allreduce of 4 KiB that comes again, from the array to the result: the engine's alone.
ASYNCHRONOUS_LIMITS = {"again": 55}

#: Likewise, of a training step in which nothing has changed since the last one: clearing, a backward pass, the step.
STEP_LIMITS = {"again": 100}

#: Likewise, of the step alone, of torch with four parameters: the first one, and one like the last.
TORCH_STEP_LIMITS = {"first": 640, "again": 110}

#: The most worlds that are tried. An engine that waits for another rank's looks again, more often on a busy machine.
WORLDS = 30


def calls_of(function: Callable[[], object]) -> int:
    """Return how many functions of the package begin while a function runs, on this thread.

    Those that a wait calls do not count: it looks again and again until the other rank has come.
    """
    count = 0

    def observe(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and "/ringreduce/" in frame.f_code.co_filename:
            count += not _is_in_wait(frame.f_back)

    sys.setprofile(observe)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def _is_in_wait(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != waiting.__file__:
        frame = frame.f_back
    return frame is not None


class Fewest(dict[str, int]):
    """The fewest functions that calls went through, by their names."""

    def count(self, name: str, function: Callable[[], object]) -> None:
        self[name] = min(self.get(name, 1 << 30), calls_of(function))

    def require(self, limits: dict[str, int], run: Callable[[], object], worlds: int = WORLDS) -> None:
        """Run worlds, which count, until all is within its limit."""
        above: dict[str, int] = {}
        for _ in range(worlds):
            run()
            above = {name: self[name] for name, limit in limits.items() if self[name] > limit}
            if not above:
                break
        assert above == {}


@pytest.mark.parametrize("node_size", LIMITS)
def test_a_call_goes_through_few_functions(node_size: int | None) -> None:
    """The table holds, for the fewest of several worlds."""
    least = Fewest()

    def program(communicator: rr.Communicator) -> None:
        arrays = [np.zeros(65536, np.float32) for _ in range(3)]
        turns = ("first", arrays[0]), *[("again", arrays[0])] * (TURNS + 1), ("other", arrays[1]), ("other", arrays[2])
        for name, array in turns:

            def reduce(array: np.ndarray = array) -> None:
                communicator.allreduce(array, out=array)

            if communicator.rank == 0:
                least.count(name, reduce)
            else:
                reduce()

    least.require(LIMITS[node_size], lambda: run_ranks(2, program, node_size=node_size))


def test_a_message_goes_through_few_functions() -> None:
    """The fewest of some messages, from one rank to the other."""
    least = Fewest()

    def program(communicator: rr.Communicator) -> None:
        array = np.zeros(1)
        for _ in range(10):
            if communicator.rank == 0:
                least.count("send", lambda: communicator.send(array, 1))
            communicator.barrier()
            if communicator.rank == 1:
                least.count("recv", lambda: communicator.recv(array, 0))

    least.require(MESSAGE_LIMITS, lambda: run_ranks(2, program), worlds=1)


def test_an_asynchronous_operation_goes_through_few_functions() -> None:
    """The fewest of some that come again."""
    least = Fewest()

    def program(engine: Engine) -> None:
        array = np.zeros(1024, np.float32)
        for number in range(15):
            operation = Reduction("x", "x", SUM, [array], [array])
            if engine.communicator.rank == 0 and number > 3:
                least.count("again", partial(engine.run, operation))
            else:
                engine.run(operation)

    least.require(ASYNCHRONOUS_LIMITS, lambda: run_engines(2, program), worlds=1)


def test_a_training_step_goes_through_few_functions() -> None:
    """That of the toy, three parameters; the fewest of some steps of several worlds."""
    least = Fewest()

    def train(ranks: rr.ProcessSet) -> None:
        shapes = {"matrix": (5, 3), "bias": (3,), "extra": (3,)}
        toy = Toy({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, ranks)
        x, y = np.ones((4, 5), np.float32), np.ones((4, 3), np.float32)

        def step() -> None:
            toy.zero_grad()
            toy.backward(x, y)
            toy.step()

        for number in range(15):
            if ranks.rank() == 0 and number > 8:  # before, the ranks agree, and in steps 8 and 16 they compare more
                least.count("again", step)
            else:
                step()

    least.require(STEP_LIMITS, lambda: run_process_sets(2, train))


def test_a_step_of_torch_goes_through_few_functions() -> None:
    """The first step of an optimizer of four parameters, and later ones, in which nothing has changed; the fewest."""
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("ringreduce.torch")
    least = Fewest()

    def train(ranks: rr.ProcessSet) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
        with torch.no_grad():
            for parameter in model.parameters():  # torch's generator is one for all threads
                parameter.fill_(0.5)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), process_set=ranks
        )
        for number in range(15):
            optimizer.zero_grad()
            model(torch.full((4, 5), 1.0 + ranks.rank())).sum().backward()
            name = "first" if number == 0 else "again"
            if ranks.rank() == 0 and (number == 0 or number > 8):  # as above
                least.count(name, optimizer.step)
            else:
                optimizer.step()

    least.require(TORCH_STEP_LIMITS, lambda: run_process_sets(2, train))
