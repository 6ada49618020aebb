"""`DiLoCo` and `LocalSGD` of TensorFlow: closed forms, the bits of one arithmetic in NumPy, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

tf = pytest.importorskip("tensorflow")

import ringreduce.tensorflow as hvd  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ETA = 0.05


def curvature_and_centre(rank: int) -> tuple[float, Any]:
    """Rank r has the loss a / 2 |x - c|^2."""
    return 1.0 + 0.7 * rank, np.array([rank, 1.0 - 2 * rank, 0.25 * rank * rank])


def variables(dtype: str = "float32") -> list[Any]:
    """Return variables of odd sizes, equal on all ranks, and one of integers."""
    draw = np.random.default_rng(3)
    made = [tf.Variable(tf.cast(draw.normal(size=shape), dtype)) for shape in ((5, 7), (7,), (3, 2, 1), ())]
    return [*made, tf.Variable(RANK)]


def move(values: list[Any], step: int) -> None:
    draw = np.random.default_rng(1000 * RANK + step)
    for each in values[:-1]:
        each.assign_sub(tf.cast(0.1 * draw.normal(size=each.shape), each.dtype))


def bits(values: list[Any]) -> list[bytes]:
    return [np.asarray(each.numpy()).tobytes() for each in values[:-1]]


def same_on_all_ranks(value: Any) -> bool:
    everyone = hvd.allgather_object(value)
    return all(each == everyone[0] for each in everyone)


@pytest.fixture(params=["eager", "function"])
def called(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """What calls a step as it is, or as a `tf.function`."""
    return {"eager": lambda function: function, "function": tf.function}[request.param]


def trained(called: Any, steps: int, local: Any, x: Any, process_set: Any, optimizer: Any = None) -> Any:
    """Descend on the quadratics, with gradients of the ranks of a process set."""
    a, c = curvature_and_centre(RANK)
    optimizer = optimizer or tf.keras.optimizers.SGD(ETA)

    @called
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = a / 2 * tf.reduce_sum((x - c) ** 2)
        tape = hvd.DistributedGradientTape(tape, process_set=process_set)
        optimizer.apply_gradients([(tape.gradient(loss, x), x)])

    for _ in range(steps):
        step()
        if local is not None:
            local.step()
    return x.numpy()


def start() -> Any:
    return tf.Variable([3.0, -2.0, 0.5], dtype=tf.float64)


@pytest.mark.smoke
@pytest.mark.parametrize("period", [1, 3])
def test_averages_of_quadratics(called: Any, period: int) -> None:
    """X' = mean(c + (1 - eta a)^H (x - c))."""
    x, expected = start(), start().numpy()
    local = hvd.LocalSGD([x], period=period, replica="rank")
    for _ in range(5):
        trained(called, period, local, x, local.process_set)
        problems = map(curvature_and_centre, range(SIZE))
        expected = np.mean([c + (1 - ETA * a) ** period * (expected - c) for a, c in problems], axis=0)
        np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)  # the learning rate is a float32


def test_an_outer_step_in_each_step_is_synchronous_nesterov(called: Any) -> None:
    """The learning rates multiply; the momentum is the outer one."""
    x, other = start(), start()
    local = hvd.DiLoCo([x], period=1, replica="rank", outer_lr=0.6, outer_momentum=0.8)
    nesterov = tf.keras.optimizers.SGD(0.6 * ETA, momentum=0.8, nesterov=True)
    expected = trained(called, 9, None, other, hvd.global_process_set, nesterov)
    np.testing.assert_allclose(trained(called, 9, local, x, local.process_set), expected, rtol=1e-6)


def test_replicas_of_nodes_reduce_their_gradients(nodes_of_two: None, called: Any) -> None:
    """Between exchanges a node descends on the mean of its losses; a node counts by its ranks."""
    x, ends = start(), []
    local = hvd.LocalSGD([x], period=3)
    for first in range(0, SIZE, 2):
        node, end = range(first, min(first + 2, SIZE)), start().numpy()
        for _ in range(3):
            end = end - ETA * np.mean([a * (end - c) for a, c in map(curvature_and_centre, node)], axis=0)
        ends += [end] * len(node)
    np.testing.assert_allclose(trained(called, 3, local, x, local.process_set), np.mean(ends, axis=0), rtol=1e-6)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"fragments": 3, "delay": 2},
    {"compression": hvd.Compression.int8, "delay": 1},
    {"compression": "int4"},
    {"compression": hvd.Compression.fp16},
    {"outer_lr": 1.0, "outer_momentum": 0.0, "delay": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_makes_the_same_bits(nodes_of_one: None, dtype: str, options: dict[str, Any]) -> None:
    """Of equal inner steps, after each of them; integers stay as they are."""
    torch = pytest.importorskip("torch")
    from ringreduce.torch import Compression, DiLoCo

    values = variables(dtype)
    kind = getattr(torch, dtype)
    tensors = [
        torch.nn.Parameter(torch.from_numpy(np.array(each.numpy(), np.float32)).to(kind)) for each in values[:-1]
    ]
    wire = options.get("compression", "none")
    wire = getattr(Compression, wire if isinstance(wire, str) else wire.wire)
    reference = DiLoCo(
        torch.optim.SGD(tensors, lr=1.0), **{**options, "period": 4, "replica": "rank", "compression": wire}
    )
    local = hvd.DiLoCo(values, period=4, replica="rank", **options)
    for step in range(14):
        draw = np.random.default_rng(1000 * RANK + step)
        for each in tensors:
            each.grad = torch.from_numpy(np.asarray(0.1 * draw.normal(size=tuple(each.shape)), np.float32)).to(kind)
        reference.step()
        move(values, step)
        local.step()
        for mine, other in zip(values, tensors, strict=False):
            assert np.array(mine.numpy(), np.float32).tobytes() == other.detach().float().numpy().tobytes()
    local.synchronize()
    assert same_on_all_ranks(bits(values))
    assert values[-1].numpy() == RANK


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    nodes_of_one: None, stop: int, options: dict[str, Any]
) -> None:
    values = variables()
    local = hvd.DiLoCo(values, period=4, **options)
    for step in range(13):
        if step == stop:
            saved = [each.numpy() for each in values], local.state_dict()
        move(values, step)
        local.step()
    expected = bits(values)
    for each, value in zip(values, saved[0], strict=True):
        each.assign(value)
    local = hvd.DiLoCo(values, period=4, **options)
    local.load_state_dict(saved[1])
    for step in range(stop, 13):
        move(values, step)
        local.step()
    assert bits(values) == expected


def test_optimizers_of_a_replica(nodes_of_two: None) -> None:
    """`DistributedOptimizer` takes the process set; its ranks keep equal weights, also in a new world."""
    x = start()
    local = hvd.LocalSGD([x], period=100)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(ETA), process_set=local.process_set)
    node = list(range(RANK - RANK % 2, min(RANK - RANK % 2 + 2, SIZE)))

    def require_equal_steps() -> None:
        a, c = curvature_and_centre(RANK)
        for _ in range(3):
            optimizer.apply_gradients([(a * (x - c), x)])
            local.step()
        everyone = hvd.allgather_object(x.numpy().tobytes())
        assert all(everyone[each] == everyone[RANK] for each in node)
        assert SIZE < 3 or len(set(everyone)) == 2

    require_equal_steps()
    rr.shutdown()
    rr.init()
    local.rejoin()
    assert same_on_all_ranks(x.numpy().tobytes())
    require_equal_steps()


def test_graphs_and_what_is_no_variable_are_refused() -> None:
    """The error is TensorFlow's as well."""
    values = variables()
    local = hvd.DiLoCo(values, replica="rank")
    for call in (local.step, local.synchronize):
        with pytest.raises(rr.ConfigError, match=r"outside of tf\.function"):
            tf.function(call)()
    with pytest.raises(tf.errors.InvalidArgumentError, match="takes variables"):
        hvd.DiLoCo([tf.constant(1.0)])
    with pytest.raises(rr.ConfigError, match="unknown wire format"):
        hvd.DiLoCo(values, compression=hvd.Compression.topk)
    local.step()


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree() -> None:
    with pytest.raises(tf.errors.FailedPreconditionError, match="period"):
        hvd.DiLoCo(variables(), period=3 + RANK)
    with pytest.raises((rr.ConfigError, rr.MismatchError), match="takes variables"):
        hvd.DiLoCo([tf.constant(1.0)] if RANK else variables())
    local = hvd.DiLoCo([tf.Variable([float(RANK)])], replica="rank")
    with pytest.raises(rr.MismatchError, match="broadcast_parameters"):
        local.step()
