"""`DiLoCo` and `LocalSGD` of JAX: closed forms, the bits of torch's, and what goes on from a saved state."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import ringreduce.jax as rj  # noqa: E402
from ringreduce.training.data.shares import Batches  # noqa: E402

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
ETA = 0.05


def curvature_and_centre(rank: int) -> tuple[float, Any]:
    """Rank r has the loss a / 2 |x - c|^2."""
    return 1.0 + 0.7 * rank, np.array([rank, 1.0 - 2 * rank, 0.25 * rank * rank])


def tree(dtype: Any = np.float32) -> Any:
    """Return arrays of odd sizes, equal on all ranks, with a leaf that stays each rank's own."""
    draw = np.random.default_rng(3)
    shapes: list[tuple[int, ...]] = [(5, 7), (7,), (3, 2, 1), ()]
    arrays = [jnp.asarray(draw.normal(size=shape).astype(np.float32)).astype(dtype) for shape in shapes]
    return {"a": arrays[:2], "b": {"c": tuple(arrays[2:]), "own": jnp.int32(RANK)}, "none": None}


def floats(params: Any) -> list[Any]:
    return [each for each in jax.tree.leaves(params) if jnp.issubdtype(each.dtype, jnp.inexact)]


def moved(params: Any, step: int) -> Any:
    """Return what this rank's step makes of parameters: x - g, with other numbers g in each step and on each rank."""
    draw = np.random.default_rng(1000 * RANK + step)

    def less(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return leaf - jnp.asarray(0.1 * draw.normal(size=leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(less, params)


def bits(params: Any) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in floats(params)]


def same_on_all_ranks(value: Any) -> bool:
    everyone = rj.allgather_object(value)
    return all(each == everyone[0] for each in everyone)


def agreed(local: Any) -> list[bytes]:
    averages = local.state_dict()["averages"].values()
    return [saved[name].tobytes() for saved in averages for name in ("agreed", "momentum") if name in saved]


# ---- closed forms ----


@pytest.mark.smoke
@pytest.mark.parametrize("period", [1, 3])
def test_averages_of_quadratics(period: int) -> None:
    """X' = mean(c + (1 - eta a)^H (x - c))."""
    a, c = curvature_and_centre(RANK)
    problems = [curvature_and_centre(rank) for rank in range(SIZE)]
    params = x = np.array([3.0, -2.0, 0.5])
    local = rj.LocalSGD(params, period=period, replica="rank")
    for _ in range(20):
        for _ in range(period):
            params = local.step(params - ETA * a * (params - c))
        x = np.mean([each + (1 - ETA * slope) ** period * (x - each) for slope, each in problems], axis=0)
        np.testing.assert_allclose(params, x, rtol=1e-11, atol=1e-12)


def loss(params: Any, a: Any, c: Any) -> Any:
    return a / 2 * jnp.sum((params["x"] - c) ** 2)


def trained(tx: Any, params: Any, local: Any, steps: int) -> Any:
    """Train in compiled steps on this rank's quadratic; ``local`` may be None."""
    a, c = curvature_and_centre(RANK)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, a, jnp.asarray(c, jnp.float32)), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        params = params if local is None else local.step(params)
    return params


def start() -> Any:
    return {"x": jnp.asarray([3.0, -2.0, 0.5])}


def test_averages_in_each_step_are_synchronous_sgd() -> None:
    local = rj.LocalSGD(start(), period=1, replica="rank")
    mine = rj.DistributedGradientTransformation(optax.sgd(ETA), process_set=local.process_set)
    synchronous = trained(rj.DistributedGradientTransformation(optax.sgd(ETA)), start(), None, 9)
    np.testing.assert_allclose(trained(mine, start(), local, 9)["x"], synchronous["x"], rtol=1e-5)


def test_an_outer_step_in_each_step_is_synchronous_nesterov() -> None:
    """The learning rates multiply; the momentum is the outer one."""
    local = rj.DiLoCo(start(), period=1, replica="rank", outer_lr=0.6, outer_momentum=0.8)
    nesterov = rj.DistributedGradientTransformation(optax.sgd(0.6 * ETA, momentum=0.8, nesterov=True))
    made, expected = trained(optax.sgd(ETA), start(), local, 9), trained(nesterov, start(), None, 9)
    np.testing.assert_allclose(made["x"], expected["x"], rtol=1e-5, atol=1e-6)


def test_replicas_of_nodes_reduce_their_gradients(nodes_of_two: None) -> None:
    """Between exchanges a node descends on the mean of its losses; a node counts by its ranks."""
    local = rj.LocalSGD(start(), period=3)
    nodes = [list(range(first, min(first + 2, SIZE))) for first in range(0, SIZE, 2)]
    assert local.process_set.ranks == nodes[RANK // 2]
    tx = rj.DistributedGradientTransformation(optax.sgd(ETA), process_set=local.process_set)
    ends = []
    for node in nodes:
        x = np.array([3.0, -2.0, 0.5])
        for _ in range(3):
            x -= ETA * np.mean([a * (x - c) for a, c in map(curvature_and_centre, node)], axis=0)
        ends += [x] * len(node)
    made = trained(tx, start(), local, 3)
    np.testing.assert_allclose(made["x"], np.mean(ends, axis=0), rtol=1e-5)


@pytest.mark.sizes(3, 4)
def test_replicas_of_process_sets() -> None:
    sets = [[0, 2], [1]] if SIZE == 3 else [[0, 3], [1, 2]]
    local = rj.DiLoCo(tree(), replica=list(map(rj.ProcessSet, sets)))
    assert local.process_set.ranks == next(each for each in sets if RANK in each)
    total = rj.allreduce(jnp.float32(RANK), rj.Sum, process_set=local.process_set)
    assert total == sum(local.process_set.ranks or ())


# ---- torch's DiLoCo has the same bits ----

OPTIONS: list[dict[str, Any]] = [
    {},
    {"fragments": 3, "delay": 2},
    {"compression": "int8", "delay": 1},
    {"compression": "int4", "fragments": 2},
    {"outer_lr": 1.0, "outer_momentum": 0.0},
    {"outer_lr": 1.0, "outer_momentum": 0.0, "delay": 3},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_makes_the_same_bits(nodes_of_one: None, dtype: str, options: dict[str, Any]) -> None:
    """Of equal inner steps, after each of them, and after an average."""
    torch = pytest.importorskip("torch")
    hvd = pytest.importorskip("ringreduce.torch")
    params = tree(dtype)
    tensors = [
        torch.nn.Parameter(torch.from_numpy(np.array(each, np.float32)).to(getattr(torch, dtype)))
        for each in floats(params)
    ]
    wire = getattr(hvd.Compression, options.get("compression", "none"))
    given = {**options, "period": 4, "replica": "rank"}
    reference = hvd.DiLoCo(torch.optim.SGD(tensors, lr=1.0), **{**given, "compression": wire})
    local = rj.DiLoCo(params, **given)

    def require_same_bits() -> None:
        for mine, other in zip(floats(params), tensors, strict=True):
            assert np.array(mine, np.float32).tobytes() == other.detach().float().numpy().tobytes()

    for step in range(14):
        own = floats(moved(jax.tree.map(jnp.zeros_like, params), step))
        for each, less in zip(tensors, own, strict=True):
            each.grad = -torch.from_numpy(np.array(less, np.float32)).to(each.dtype)
        reference.step()
        params = local.step(moved(params, step))
        require_same_bits()
    reference.synchronize()
    params = local.synchronize(params)
    require_same_bits()
    assert same_on_all_ranks(bits(params))


# ---- trees, exchanges, and what is saved ----


@pytest.mark.parametrize("wire", [None, "fp16", "bf16", "fp8", "int8", "int4"])
def test_agreed_bits_are_equal_in_every_format(nodes_of_one: None, wire: str | None) -> None:
    params = tree()
    local = rj.DiLoCo(params, period=3, compression=wire)
    for step in range(9):
        params = local.step(moved(params, step))
        assert same_on_all_ranks(agreed(local))
    assert same_on_all_ranks(bits(params))


def test_a_step_without_an_exchange_returns_its_argument() -> None:
    """So it needs no value of it: here, none that there is any more."""
    params = tree()
    local = rj.DiLoCo(params, period=3, replica="rank")
    params = moved(params, 0)
    assert local.step(params) is params
    params = moved(params, 1)
    given = jax.tree.map(jnp.copy, params)
    jax.tree.map(lambda each: each.delete(), params)
    assert local.step(params) is params
    made = local.step(given)
    assert made is not given
    assert jax.tree.structure(made) == jax.tree.structure(given)
    assert made["b"]["own"] is given["b"]["own"]


def test_leaves_stay_what_they_are() -> None:
    """Dtypes, arrays of NumPy, numbers, devices; complex numbers are averaged, keys and integers are not."""
    params = {
        "complex": jnp.asarray([1 + 2j, RANK], jnp.complex64) if SIZE == 1 else jnp.asarray([1 + 2j, 0j]),
        "half": jnp.ones(3, jnp.float16),
        "key": jax.random.key(RANK),
        "number": 2.5,
        "numpy": np.float64([1.0, 2.0]),
        "text": "relu",
        "whole": jnp.arange(3) + RANK,
    }
    local = rj.LocalSGD(params, period=1, replica="rank")
    changed = {**params, "complex": params["complex"] + RANK * (1 - 1j), "number": 2.5 + RANK}
    made = local.step(changed)
    mean = (SIZE - 1) / 2
    np.testing.assert_allclose(made["complex"], params["complex"] + mean * (1 - 1j), rtol=1e-6)
    assert (type(made["number"]), made["number"]) == (float, 2.5 + mean)
    assert isinstance(made["numpy"], np.ndarray)
    assert {name: made[name] is changed[name] for name in ("key", "text", "whole")} == dict.fromkeys(
        ("key", "text", "whole"), True
    )
    for name in ("complex", "half", "numpy"):
        assert made[name].dtype == changed[name].dtype
    assert made["half"].sharding == changed["half"].sharding


def test_what_is_learnt_during_a_delay_is_kept() -> None:
    params = tree()
    local = rj.LocalSGD(params, period=4, delay=2, replica="rank")
    for step in range(4):
        params = local.step(moved(params, step))
    mean = [np.mean(each, axis=0) for each in zip(*rj.allgather_object(floats(params)), strict=True)]
    then = floats(params)
    params = local.step(moved(params, 4))
    learnt = [new - old for new, old in zip(floats(moved(params, 5)), then, strict=True)]
    params = local.step(moved(params, 5))
    for made, average, more in zip(floats(params), mean, learnt, strict=True):
        np.testing.assert_allclose(made, average + more, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("stop", [0, 2, 4, 5, 9])
def test_a_run_that_is_stopped_goes_on_with_the_same_bits(
    nodes_of_one: None, stop: int, options: dict[str, Any]
) -> None:
    """Also where the object is made of weights in mid-period, which differ between ranks."""
    expected = params = tree()
    local = rj.DiLoCo(params, period=4, **options)
    saved = b""
    for step in range(13):
        if step == stop:
            saved = pickle.dumps((jax.device_get(expected), local.state_dict()))
        expected = local.step(moved(expected, step))
    params, state = pickle.loads(saved)
    params = jax.tree.map(jnp.asarray, params)
    local = rj.DiLoCo(params, period=4, **options)
    local.load_state_dict(state)
    for step in range(stop, 13):
        params = local.step(moved(params, step))
    assert bits(params) == bits(expected)


def test_a_new_world_in_the_middle_of_a_period() -> None:
    """The ranks average what each has learnt; momentum, steps and the object of the process set stay."""
    params = tree()
    local = rj.DiLoCo(params, period=5, delay=3, replica="rank")
    process_set = local.process_set
    for step in range(6):
        params = local.step(moved(params, step))
    mean = [np.mean(each, axis=0) for each in zip(*rj.allgather_object(floats(params)), strict=True)]
    before = local.state_dict()
    rr.shutdown()
    rr.init()
    params = local.rejoin(params)
    for made, expected in zip(floats(params), mean, strict=True):
        np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)
    assert local.process_set is process_set
    assert process_set.included()
    state = local.state_dict()
    assert state["steps"] == 6
    assert state["averages"][0]["momentum"].tobytes() == before["averages"][0]["momentum"].tobytes()
    for step in range(6, 13):
        params = local.step(moved(params, step))
    assert same_on_all_ranks(agreed(local))


def test_other_trees_have_objects_of_their_own() -> None:
    """As the statistics of batches, which are averaged as they are."""
    params, stats = tree(), {"mean": jnp.zeros(3)}
    local, means = rj.DiLoCo(params, period=2, replica="rank"), rj.LocalSGD(stats, period=2, replica="rank")
    for step in range(2):
        params, stats = local.step(moved(params, step)), means.step({"mean": stats["mean"] + RANK})
    np.testing.assert_allclose(stats["mean"], np.full(3, SIZE - 1.0))


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"period": 0}, "period must be at least 1"),
        ({"outer_lr": 0}, "outer_lr"),
        ({"outer_momentum": 1.0}, "outer_momentum"),
        ({"fragments": 5}, "4 parameters"),
        ({"fragments": 1.5}, "whole number"),
        ({"delay": 7, "period": 7}, "delay"),
        ({"compression": rj.PowerSGD(rank=1)}, "unknown wire format"),
        ({"compression": "zip"}, "unknown wire format"),
        ({"replica": "host"}, "replica is"),
        ({"replica": [rj.ProcessSet([0]), rj.ProcessSet([0])]}, "each of"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], complaint: str) -> None:
    """On all ranks, and training goes on with others."""
    with pytest.raises(rr.ConfigError, match=complaint):
        rj.DiLoCo(tree(), **options)
    rj.DiLoCo(tree(), period=1).step(tree())


def test_compiled_programs_and_other_trees_are_refused() -> None:
    params = tree()
    local = rj.DiLoCo(params, replica="rank")
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(local.step)(params)
    with pytest.raises(rr.ConfigError, match="outside of jit"):
        jax.jit(lambda each: rj.DiLoCo(each) and each)(params)
    for other in ({**params, "more": jnp.ones(2)}, {**params, "a": [params["a"][1]] * 2}):
        with pytest.raises(rr.ConfigError, match="not the parameters"):
            local.step(other)
    local.step(params)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_must_agree() -> None:
    with pytest.raises(rr.MismatchError, match="period"):
        rj.DiLoCo(tree(), period=3 + RANK)
    with pytest.raises((rr.ConfigError, rr.MismatchError), match="delay"):
        rj.DiLoCo(tree(), delay=-1 if RANK else 0)
    with pytest.raises(rr.RingReduceError, match="float8"):
        rj.DiLoCo({"x": jnp.ones(2, jnp.float8_e4m3fn if RANK else jnp.float32)})
    with pytest.raises(rr.MismatchError, match="shape"):
        rj.DiLoCo({"x": jnp.ones(2 + RANK)})
    different = {"x": jnp.full(2, float(RANK))}
    for make in (rj.DiLoCo, rj.LocalSGD):
        local = make(different, replica="rank")
        with pytest.raises(rr.MismatchError, match="broadcast_parameters"):
            local.step(different)


@pytest.mark.sizes(2, 3, 4)
def test_states_must_belong_together() -> None:
    """Those of different steps are an error in the next exchange; those of other options are none to load."""
    params = tree()
    local = rj.DiLoCo(params, period=3, replica="rank")
    for step in range(4):
        params = local.step(moved(params, step))
    early = local.state_dict()
    with pytest.raises(rr.ConfigError, match="the state"):
        rj.DiLoCo(tree(), period=3, fragments=2, replica="rank").load_state_dict(early)
    for step in range(4, 7):
        params = local.step(moved(params, step))
    local.load_state_dict(early if RANK else local.state_dict())
    params = local.step(params)
    with pytest.raises(rr.MismatchError, match="checksum"):
        local.step(params)


@pytest.mark.sizes(2, 3, 4)
def test_join_is_refused() -> None:
    local = rj.DiLoCo(start(), period=2, replica="rank")
    params = local.step(start())
    if RANK:
        with pytest.raises(rr.ConfigError, match="joined"):
            local.step(params)
    rj.join()


def test_a_sampler_by_speed_is_refused() -> None:
    """Replicas have weights by their numbers of ranks, not by their numbers of samples."""
    local, batches = rj.DiLoCo(start(), period=2), Batches(2, "repeat", by_speed=True)
    for _ in batches.of(range(2 * SIZE)):
        with pytest.raises(rr.ConfigError, match="do not go together"):
            local.step(start())


def test_dtypes_are_compared_as_compiled_programs_have_them() -> None:
    """Numbers of Python and float64 of NumPy become float32 in a compiled step; another dtype is an error."""
    local = rj.LocalSGD({"w": np.zeros(3), "scale": 1.0}, period=1, replica="rank")
    with pytest.raises(rr.ConfigError, match="dtypes differ"):
        local.step({"w": jnp.arange(3), "scale": jnp.float32(1.0)})
    params = local.step({"w": jnp.full(3, RANK, jnp.float32), "scale": jnp.float32(1.0)})
    assert params["w"].dtype == jnp.float32
    np.testing.assert_allclose(params["w"], np.full(3, (SIZE - 1) / 2))


def test_other_weights_begin_with_synchronize() -> None:
    """Else the next exchange would take the difference for what was learned."""
    params = start()
    local = rj.DiLoCo(params, period=1, replica="rank")
    params = local.step(params)
    params = local.synchronize(jax.tree.map(lambda each: each + 10, params))
    expected = floats(params)
    for made, each in zip(floats(local.step(params)), expected, strict=True):
        np.testing.assert_allclose(made, each, rtol=1e-6)
