"""Measure a training step, and the reduction of a list of gradients, with ringreduce and without, in turn, in one run.

    mpirun -np 2 python benchmarks/training.py                   # torch: all options are those of torch_training.py
    mpirun -np 2 python benchmarks/training.py --framework jax   # or tensorflow, keras, keras-tensorflow

The step is that of an MLP (24 layers of 1024 x 1024, 25 M parameters, plain SGD):

    plain             no communication
    ringreduce        with ringreduce, in a compiled step
    own               the framework's own way: JAX's psum over Gloo in shard_map, TensorFlow's
                      MultiWorkerMirroredStrategy (ring); of Keras on JAX keras.distribution over Gloo, of Keras on
                      TensorFlow that strategy

What is reduced besides is a list like the gradients of ResNet-50 (161 arrays, 25.6 M floats) and one float, not with
keras:

    list plus-one     a compiled program that adds 1 to all: results in new memory are what nobody can go below
    list ringreduce   allreduce in a compiled program
    list eager        outside of one
    list own          as above
    list buffer       ringreduce's allreduce of as many floats in one communication buffer, in place
    list copy         a copy of the list into that buffer: what memory of a framework takes besides, once or twice
    one ...           the same of one float; `one request` is an operation of ringreduce on NumPy arrays

A time is the slowest rank's; figures are medians. Contenders take short turns, which begin with untimed calls.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce
from ringreduce.bench.peers import mpi_library
from ringreduce.common.reduce_ops import AVERAGE
from ringreduce.training.calls.objects import allgather_object
from ringreduce.training.calls.requests import RequestBuilder

TURN, LEAD = 5, 2  # calls of a contender that are timed in a row, and before them that are not
WIDTH, LAYERS, RATE = 1024, 24, 0.001
#: The shapes of ResNet-50's gradients: stem, four stages of bottlenecks, and the classifier.
RESNET = [(7, 7, 3, 64), (64,), (64,), (2048, 1000), (1000,)]
for _depth, _width, _into in ((3, 64, 64), (4, 128, 256), (6, 256, 512), (3, 512, 1024)):
    for _block in range(_depth):
        _from = 4 * _width if _block else _into
        RESNET += [(1, 1, _from, _width), (3, 3, _width, _width), (1, 1, _width, 4 * _width)]
        RESNET += [(_width,)] * 4 + [(4 * _width,)] * 2
    RESNET += [(1, 1, _into, 4 * _width), (4 * _width,), (4 * _width,)]

Contenders = dict[str, Callable[[], object]]  # each does a step, or a reduction, and waits for it
Layers = Sequence[Any]


def lists() -> dict[str, list[np.ndarray]]:
    """Return what is reduced besides steps, by name."""
    return {"list": [np.full(shape, 0.5, np.float32) for shape in RESNET], "one": [np.ones(1, np.float32)]}


def bare() -> Contenders:
    """Return what ringreduce takes without a framework."""
    arrays = lists()["list"]
    buffer = ringreduce.empty(sum(each.size for each in arrays), np.float32)
    buffer[:] = 0
    cuts = np.cumsum([each.size for each in arrays])[:-1]
    parts = [part.reshape(each.shape) for part, each in zip(np.split(buffer, cuts), arrays, strict=True)]
    given, made = np.ones(1, np.float32), np.ones(1, np.float32)

    def copy() -> None:
        for part, each in zip(parts, arrays, strict=True):
            np.copyto(part, each)

    def request() -> None:
        with RequestBuilder("allreduce", "bare", ringreduce.global_process_set) as prepare:
            found = prepare.allreduce([given], [made], AVERAGE, 1.0, 1.0)
        found.carry_out()

    reduce = partial(ringreduce.allreduce, buffer, out=buffer)
    return {"list buffer": reduce, "list copy": copy, "one request": request}


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's samples and their targets."""
    random = np.random.default_rng(ringreduce.rank())
    x, y = random.standard_normal((2, 16, WIDTH)).astype(np.float32)
    return x, y


def jax_contenders(addresses: list[str]) -> Contenders:
    """Return those of JAX."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    with_gloo(addresses)
    import ringreduce.jax as rj

    mesh = jax.make_mesh((ringreduce.size(),), ("ranks",))
    parted, whole = PartitionSpec("ranks"), PartitionSpec()

    def everywhere(array: Any, spec: PartitionSpec) -> Any:
        return jax.make_array_from_process_local_data(NamedSharding(mesh, spec), np.asarray(array))

    def loss(layers: Layers, x: Any, y: Any) -> Any:
        for each in layers:
            x = jax.nn.relu(x @ each)
        return ((x - y) ** 2).mean()

    def trainer(average: Callable[[Any], Any]) -> Callable[..., Any]:
        def step(layers: Layers, x: Any, y: Any) -> Any:
            gradients = average(jax.grad(loss)(layers, x, y))
            return jax.tree.map(lambda layer, gradient: layer - RATE * gradient, layers, gradients)

        return step

    def mean(tree: Any) -> Any:
        return jax.tree.map(lambda each: jax.lax.pmean(each, "ranks"), tree)

    def spread(function: Callable[..., Any], *specs: Any) -> Any:
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)

    def training(step: Callable[..., Any], layers: Layers, *given: Any) -> Callable[[], object]:
        kept, compiled = [layers], jax.jit(step, donate_argnums=0)

        def run() -> None:
            kept[0] = jax.block_until_ready(compiled(kept[0], *given))

        return run

    def layers() -> Any:
        return [jnp.full((WIDTH, WIDTH), 1.0 / WIDTH) for _ in range(LAYERS)]

    x, y = batch()
    tx = rj.DistributedGradientTransformation(optax.identity())
    own = [everywhere(each, parted) for each in (x, y)]
    found = {
        "plain": training(trainer(lambda gradients: gradients), layers(), x, y),
        "ringreduce": training(trainer(lambda gradients: tx.update(gradients, tx.init(gradients))[0]), layers(), x, y),
        "own": training(spread(trainer(mean), whole, parted, parted), [everywhere(e, whole) for e in layers()], *own),
    }
    for name, arrays in lists().items():
        tree = [jnp.asarray(each) for each in arrays]
        wide = [everywhere(each[None], parted) for each in arrays]
        calls = {
            "plus-one": (jax.jit(lambda tree: [each + 1 for each in tree]), tree),
            "ringreduce": (jax.jit(rj.allreduce), tree),
            "eager": (rj.allreduce, tree),
            "own": (jax.jit(spread(mean, parted)), wide),
        }
        for kind, (call, given) in calls.items():
            found[f"{name} {kind}"] = lambda call=call, given=given: jax.block_until_ready(call(given))
    return found


def tensorflow_contenders(addresses: list[str]) -> Contenders:
    """Return those of TensorFlow."""
    strategy = mirrored(addresses)
    import tensorflow as tf

    import ringreduce.tensorflow as hvd

    x, y = map(tf.constant, batch())

    def layers() -> Any:
        return [tf.Variable(tf.fill((WIDTH, WIDTH), 1.0 / WIDTH)) for _ in range(LAYERS)]

    def trainer(variables: Layers, wrap: Callable[[Any], Any], optimizer: Any) -> Callable[[], object]:
        optimizer.build(variables)

        def step() -> None:
            with tf.GradientTape() as tape:
                made = x
                for each in variables:
                    made = tf.nn.relu(made @ each)
                loss = tf.reduce_mean((made - y) ** 2)
            optimizer.apply_gradients(zip(wrap(tape).gradient(loss, variables), variables, strict=True))

        return step

    def sgd() -> Any:
        return tf.keras.optimizers.SGD(RATE)

    with strategy.scope():
        mirrored_step = trainer(layers(), lambda tape: tape, sgd())
    found = {
        "plain": tf.function(trainer(layers(), lambda tape: tape, sgd())),
        "ringreduce": tf.function(trainer(layers(), hvd.DistributedGradientTape, sgd())),
        "own": tf.function(lambda: strategy.run(mirrored_step)),
    }
    for name, arrays in lists().items():
        given = [tf.constant(each) for each in arrays]

        def mean(given: Any) -> Any:
            placed = [tf.identity(each) for each in given]  # arguments have no device yet
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, placed)

        calls = {
            "plus-one": tf.function(lambda given: [each + 1 for each in given]),
            "ringreduce": tf.function(hvd.grouped_allreduce),
            "eager": hvd.grouped_allreduce,
            "own": tf.function(lambda given, mean=mean: strategy.run(mean, (given,))),
        }
        for kind, call in calls.items():
            found[f"{name} {kind}"] = lambda call=call, given=given: call(given)
    return found


def keras_contenders(addresses: list[str], backend: str = "jax") -> Contenders:
    """Return those of Keras, on JAX or TensorFlow."""
    os.environ["KERAS_BACKEND"] = backend
    strategy = mirrored(addresses) if backend == "tensorflow" else with_gloo(addresses)
    import keras

    import ringreduce.keras as hvd

    x, y = batch()

    def compiled(optimizer: Any) -> Any:
        layers = [keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(LAYERS)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers])
        model.compile(optimizer, "mse")
        return model

    models = {
        "plain": compiled(keras.optimizers.SGD(RATE)),
        "ringreduce": compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE))),
    }
    found: Contenders = {name: lambda model=model: model.train_on_batch(x, y) for name, model in models.items()}
    distribution = strategy or keras.distribution.DataParallel()
    keras.utils.set_random_seed(0)  # it wants the same weights on all ranks
    with distribution.scope():
        own = compiled(keras.optimizers.SGD(RATE))
    if strategy is not None:  # under which Keras fails to average the losses of `train_on_batch` over the workers
        import tensorflow as tf

        inputs = tuple(map(tf.constant, (x, y)))
        return found | {"own": tf.function(lambda: strategy.run(own.train_step, (inputs,)))}

    def distributed() -> None:
        with distribution.scope():
            own.train_on_batch(x, y)

    return found | {"own": distributed}


#: By the framework that the option names, what makes contenders.
MAKE: dict[str, Callable[[list[str]], Contenders]] = {
    "tensorflow": tensorflow_contenders,
    "jax": jax_contenders,
    "keras": keras_contenders,
    "keras-tensorflow": lambda addresses: keras_contenders(addresses, "tensorflow"),
}


def with_gloo(addresses: list[str]) -> None:
    """Connect JAX's processes, whose collectives are Gloo's; before JAX makes an array."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(addresses[0], ringreduce.size(), ringreduce.rank())


def mirrored(addresses: list[str]) -> Any:
    """Return TensorFlow's strategy for these workers, which it wants to have before all else."""
    task = {"type": "worker", "index": ringreduce.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def free_address() -> str:
    """Return a port of this machine that nobody uses."""
    with socket.socket() as made:
        made.bind(("localhost", 0))
        return f"localhost:{made.getsockname()[1]}"


def measure(contenders: Contenders, steps: int) -> dict[str, float]:
    """Return the median time (ms) of each contender: of so many calls, on the slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    while min(map(len, times.values())) < steps:
        for name, call in contenders.items():
            for number in range(LEAD + TURN):
                ringreduce.barrier()
                begin = time.perf_counter()
                call()
                if number >= LEAD:
                    times[name].append(time.perf_counter() - begin)
    slowest = ringreduce.allreduce(np.array(list(times.values())), "max")
    return {name: float(np.median(row)) * 1e3 for name, row in zip(times, slowest, strict=True)}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], add_help=False)
    parser.add_argument("--framework", choices=["torch", *MAKE], default="torch")
    arguments, others = parser.parse_known_args()
    if arguments.framework == "torch":
        sys.argv[1:] = others
        status: int = import_module("torch_training").main()
        return status
    parser.add_argument("--steps", type=int, default=20, help="timed calls of each contender (20)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    ringreduce.init()
    contenders = MAKE[arguments.framework](allgather_object(free_address()))
    if "keras" not in arguments.framework:
        contenders |= bare()
    medians = measure(contenders, arguments.steps)
    ours = {name: medians[(name.rpartition(" ")[0] + " ringreduce").strip()] for name in medians}
    ratios = {f"ringreduce/{name}": ours[name] / ms for name, ms in medians.items()}
    if ringreduce.rank() == 0:
        print(f"{arguments.framework}, {ringreduce.size()} ranks, {mpi_library()}; median of {arguments.steps} calls")
        print(f"{'contender':<18}{'median (ms)':>12}{'ringreduce /':>14}")
        for name, ms in medians.items():
            print(f"{name:<18}{ms:>12.3f}{ratios[f'ringreduce/{name}']:>14.2f}", flush=True)
        if arguments.output_file:
            found = {"framework": arguments.framework, "median_ms": medians, "ratios": ratios}
            arguments.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ringreduce.barrier()
    ringreduce.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
