"""JAX in jobs of their own: ranks that die, programs from JAX's cache, failures that nobody reads, ends and forks."""

from __future__ import annotations

import sys
from pathlib import Path

import launching
from launching import RINGREDUCE, Job, needs

needs("jax", "optax")

HEAD = """
import contextlib, os, signal, sys, threading
import jax, jax.numpy as jnp, numpy as np, optax
import ringreduce as rr, ringreduce.jax as rj

rj.init()
me, size = rj.rank(), rj.size()
"""


def run(source: str, *, ranks: int = 2, **environment: str) -> Job:
    """Run a program on some ranks."""
    return launching.run_job(ranks, "-c", HEAD + source, **environment)


ELASTIC = """
tx = rj.DistributedGradientTransformation(optax.sgd(0.5), op=rj.Sum)

@jax.jit
def step(params, state):
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state)
    return optax.apply_updates(params, updates), state

@rj.elastic.run
def train(state):
    while state.number < 5:
        if (me, state.number) == (1, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        state.params, state.opt = step(state.params, state.opt)
        state.number += 1
        state.commit()

params = {"w": jnp.zeros(3)}
state = rj.elastic.JaxState(params=params, opt=tx.init(params), number=0)
train(state)
print(rj.size(), float(state.params["w"][0]))
"""


def test_training_goes_on_when_a_rank_dies_in_a_compiled_step() -> None:
    """Two steps of three ranks and three of two, each of which adds half of the number of ranks."""
    words = ("-x", "RINGREDUCE_TIMEOUT=10", sys.executable, "-c", HEAD + ELASTIC)
    done = launching.run(RINGREDUCE, "run", "--elastic", "-np", 3, *words, limit_s=60).well()
    assert done.stdout.splitlines() == ["2 -6.0"] * 2


CACHED = """
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None)
tx = rj.DistributedGradientTransformation(optax.sgd(1.0), compression=rj.PowerSGD(rank=1))
params = {"w": jnp.zeros((8, 8))}
state = tx.init(params)
known = len(hits)
made, _ = jax.jit(tx.update)({"w": jnp.full((8, 8), me + 1.0)}, state)
average = jax.jit(rj.allreduce)(jnp.full(2, float(me)))
print(round(float(made["w"][0, 0]), 3), float(average[0]), len(hits) > known)
"""


def test_programs_come_from_the_cache_of_another_process(tmp_path: Path) -> None:
    """What they call, also a compression, is known in a process that has not compiled them."""
    first, second = (run(CACHED, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2))
    assert [line.rpartition(" ")[0] for line in first.stdout.splitlines()] == ["-1.5 0.5"] * 2, first.stderr
    assert second.stdout.splitlines() == ["-1.5 0.5 True"] * 2, second.stderr


UNREAD = (
    """
import jax.numpy as jnp
jnp.ones(1).block_until_ready()  # JAX decides here whether programs run on while they are computed
"""
    + HEAD
    + """
product = jax.jit(lambda each: rj.allreduce((each @ each)[: 3 + me], rj.Sum))  # more than JAX computes while it waits
with contextlib.suppress(Exception):
    jax.block_until_ready(product(jnp.ones((500, 500))))
try:
    rj.allreduce(jnp.ones(5))
except rr.MismatchError as error:
    print(sorted(error.values))
"""
)


def test_a_failure_that_nobody_reads_is_raised_by_the_next_call() -> None:
    """Where JAX does not wait for compiled programs, as its first array is older than the binding.

    Here the program waits, so that both ranks have failed before their next call, and drops what JAX raises.
    """
    done = launching.run_job(2, "-c", UNREAD)
    assert done.stdout.splitlines() == ["[0, 1]"] * 2, done.stderr


IN_FLIGHT = """
def wait():
    try:
        jax.jit(rj.allreduce)(jnp.ones(3)).block_until_ready()
    except Exception as error:
        print(isinstance(rj.error_of(error), rr.RingReduceError))

if me == 0:
    thread = threading.Thread(target=wait)
    thread.start()
    rj.shutdown()
    thread.join()
"""


def test_a_result_in_flight_ends_with_shutdown() -> None:
    """In a typed error, whether the operation has begun or not; nothing hangs."""
    assert run(IN_FLIGHT).well().stdout == "True\n"


FORKED = """
reduce = jax.jit(lambda each: rj.allreduce(each, rj.Sum))
ones = jnp.ones(3)
reduce(ones).block_until_ready()
child = os.fork()
if not child:
    try:
        rj.allreduce(ones)
    except rr.ConfigError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), reduce(ones)[0])
"""


def test_a_forked_child_cannot_reduce_and_its_rank_goes_on() -> None:
    """With the usual error, in the child alone."""
    assert run(FORKED).well().stdout == "7 2.0\n" * 2


DEVICES = """
first, second = jax.devices()
spread = jax.sharding.NamedSharding(jax.make_mesh((2,), ("devices",)), jax.sharding.PartitionSpec("devices"))
for place in (first, second, spread):
    array = jax.device_put(jnp.arange(4.0), place)
    made = rj.allreduce(array, rj.Sum)
    print(made.sharding == array.sharding, made.tolist())
compiled = jax.jit(lambda each: rj.allreduce(each, rj.Sum))(jax.device_put(jnp.arange(4.0), second))
print(compiled.devices() == {second}, compiled.tolist())
"""


def test_results_are_on_the_devices_of_the_arrays() -> None:
    """Outside of a compiled program also of arrays that are spread over several."""
    done = run(DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.stdout.splitlines() == ["True [0.0, 2.0, 4.0, 6.0]"] * 8, done.stderr


def test_a_version_that_is_too_old_is_named() -> None:
    """With the one that is needed."""
    program = "import jax; jax.__version__, jax.__version_info__ = '0.4.38', (0, 4, 38); import ringreduce.jax"
    done = launching.run(sys.executable, "-c", program)
    assert "needs JAX 0.5 or newer, and 0.4.38 is installed" in done.stderr
