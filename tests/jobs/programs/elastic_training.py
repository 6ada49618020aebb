"""Train a linear model elastically in one of the bindings while ranks, their shells or the launcher die.

    ringreduce run --elastic -np 4 elastic_training.py FOLDER WAY COMMIT COPY DISK RANK@STEP:WHERE:HOW ...

The state is committed after every COMMIT steps; one of COPY commits copies the weights, and one of DISK is written to
FOLDER, if these are not 0. A rank is called by its first number; each dies once, also in a job that begins again.
WHERE is "begin" or "end", of a step, "init", or a number: so many microseconds after the step has begun. Each rank
that reaches the end writes a line of JSON to a file of its own in FOLDER. `tests/jobs/elastic_trainings.py` computes
from these what the weights must be.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce.common import processes

FEATURES, OUTPUTS, ROWS, STEPS = 7, 3, 5, 12
RATE, MOMENTUM, PERIOD = 0.05, 0.5, 3


class Death(NamedTuple):
    """Which rank, in which step, where in that, and what it does."""

    rank: int
    step: int
    where: str
    how: str

    @classmethod
    def parse(cls, text: str) -> Death:
        who, where, how = text.split(":")
        rank, step = who.split("@")
        return cls(int(rank), int(step), where, how)


def batch(step: int, rank: int) -> tuple[Any, Any]:
    """Return the inputs and targets of a rank in a step, in float32; by its first number."""
    rng = np.random.default_rng([step, rank])
    inputs = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    return inputs, (inputs[:, :OUTPUTS] + rng.standard_normal((ROWS, OUTPUTS))).astype(np.float32)


def beginning() -> list[Any]:
    """Return the weights, the same on all ranks: a matrix and a bias."""
    rng = np.random.default_rng(3)
    return [rng.standard_normal((FEATURES, OUTPUTS)).astype(np.float32), np.zeros(OUTPUTS, np.float32)]


class Killer:
    """Lets this rank, its shell or the launcher die when its time has come.

    Args:
        folder: where a death is written down, so that it happens once.
        rank: this one's first number.
        deaths: of all ranks.
    """

    def __init__(self, folder: Path, rank: int, deaths: list[Death]) -> None:
        self._folder, self._deaths = folder, [each for each in deaths if each.rank == rank]
        self._timer: threading.Timer | None = None
        self._waits = False

    def come_to(self, step: int, where: str) -> None:
        for each in self._deaths:
            mark = self._folder / f"died-{each.rank}-{each.step}"
            timed = where == "begin" and each.where.isdigit()
            if each.step == step and (timed or each.where == where) and not mark.exists():
                mark.touch()
                self._waits = " " in each.how
                if not timed:
                    die(each.how)
                else:
                    self._timer = threading.Timer(int(each.where) / 1e6, die, [each.how])
                    self._timer.start()

    def wait_for_death(self) -> None:
        """Do not outlive the last step if this rank has a time to die, or its shell or the launcher has died."""
        if self._timer is not None:
            self._timer.join()
        if self._waits:
            threading.Event().wait()


def die(how: str) -> None:
    """End this process, or that which is named and the signal: "launcher SIGTERM", "shell SIGKILL"."""
    if how == "exception":
        raise RuntimeError("this rank fails, as it was told")
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(3)
    who, _, name = how.rpartition(" ")
    above = [pid for pid, _ in processes.ancestors()]
    place = {"": None, "shell": 0, "mpirun": above.index(mpirun()), "launcher": above.index(mpirun()) + 1}[who]
    os.kill(os.getpid() if place is None else above[place], getattr(signal, name))
    if how == "shell SIGSTOP":  # which the death of its rank continues
        os.kill(os.getpid(), signal.SIGKILL)


def mpirun() -> int:
    """Return the process of mpirun above this one."""
    found = processes.launcher()
    assert found is not None
    return found


class Way(NamedTuple):
    """What a binding trains with: a step with inputs and targets, the weights now, the end, and its state."""

    step: Callable[[Any, Any], None]
    weights: Callable[[], list[Any]]
    finish: Callable[[], object]
    make_state: Callable[..., Any]


def in_torch(name: str) -> Way:
    import torch

    import ringreduce.torch as hvd

    model = torch.nn.Linear(FEATURES, OUTPUTS)
    matrix, bias = map(torch.from_numpy, beginning())
    model.load_state_dict({"weight": matrix.T, "bias": bias})
    plain = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    options: dict[str, dict[str, Any]] = {"node": {"shard": "node"}, "all": {"shard": "all"}, "late": {"staleness": 1}}
    if name == "local":
        optimizer: Any = hvd.LocalSGD(plain, model, period=PERIOD, replica="rank")
    elif name == "diloco":
        optimizer = hvd.DiLoCo(plain, model, period=PERIOD, replica="rank")
    else:
        optimizer = hvd.DistributedOptimizer(plain, model, **options.get(name, {}))

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(torch.from_numpy(inputs)), torch.from_numpy(targets)).backward()
        optimizer.step()

    def finish() -> None:
        if name in ("late", "local", "diloco"):
            optimizer.synchronize()

    def weights() -> list[Any]:
        return [model.weight.detach().numpy().T, model.bias.detach().numpy()]

    return Way(step, weights, finish, lambda **more: hvd.elastic.TorchState(model, optimizer, **more))


def in_keras(name: str) -> Way:
    import keras

    import ringreduce.keras as hvd

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(OUTPUTS)])
    model.set_weights(beginning())
    plain = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    model.compile(hvd.DistributedOptimizer(plain), loss="mse")

    def step(inputs: Any, targets: Any) -> None:
        model.fit(inputs, targets, batch_size=ROWS, shuffle=False, verbose=0)  # or it adds up in an order of its own

    return Way(step, model.get_weights, lambda: None, lambda **more: hvd.elastic.KerasState(model, **more))


def in_tensorflow(name: str) -> Way:
    import tensorflow as tf

    import ringreduce.tensorflow as hvd

    matrix, bias = variables = list(map(tf.Variable, beginning()))
    optimizer = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    optimizer.build(variables)

    @tf.function  # type: ignore[untyped-decorator]
    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((inputs @ matrix + bias - targets) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def make_state(**more: Any) -> Any:
        return hvd.elastic.TensorFlowState(variables, optimizer=optimizer, **more)

    return Way(step, lambda: [each.numpy() for each in variables], lambda: None, make_state)


def in_jax(name: str) -> Way:
    import jax
    import jax.numpy as jnp
    import optax

    import ringreduce.jax as rj

    optimizer = rj.DistributedGradientTransformation(optax.sgd(RATE, momentum=MOMENTUM))
    matrix, bias = map(jnp.asarray, beginning())
    params = {"matrix": matrix, "bias": bias}

    def loss(params: Any, inputs: Any, targets: Any) -> Any:
        return jnp.mean((inputs @ params["matrix"] + params["bias"] - targets) ** 2)

    @jax.jit
    def update(params: Any, state: Any, inputs: Any, targets: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, inputs, targets), state, params)
        return optax.apply_updates(params, updates), state

    kept: list[Any] = []

    def step(inputs: Any, targets: Any) -> None:
        (state,) = kept
        state.params, state.optimizer = update(state.params, state.optimizer, inputs, targets)

    def make_state(**more: Any) -> Any:
        kept.append(rj.elastic.JaxState(params=params, optimizer=optimizer.init(params), **more))
        return kept[0]

    def weights() -> list[Any]:
        return [np.asarray(kept[0].params[name]) for name in ("matrix", "bias")]

    return Way(step, weights, lambda: None, make_state)


WAYS = {"torch": in_torch, "keras": in_keras, "tensorflow": in_tensorflow, "jax": in_jax}


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    every, copy, disk = map(int, sys.argv[3:6])
    killer = Killer(folder, int(os.environ["OMPI_COMM_WORLD_RANK"]), list(map(Death.parse, sys.argv[6:])))
    killer.come_to(0, "init")
    rr.init()
    me = rr.rank()
    binding, _, option = name.partition("-")
    way = WAYS[binding](option)
    state = way.make_state(number=0, members=[])
    if copy:
        state.keep_in_memory(copy)
    if disk:
        state.keep_on_disk(str(folder / "commits"), every=disk)

    @rr.elastic.run
    def train(state: Any) -> None:
        here = rr.training.objects.allgather_object(me)
        while state.number < STEPS:
            killer.come_to(state.number, "begin")
            way.step(*batch(state.number, me))
            state.members = [*state.members, here]
            state.number += 1
            killer.come_to(state.number - 1, "end")
            if state.number == STEPS:
                killer.wait_for_death()
            if state.number % every == 0:
                state.commit()

    train(state)
    way.finish()
    weights = [each.astype(float).ravel().tolist() for each in way.weights()]
    text = json.dumps({"rank": me, "size": rr.size(), "members": state.members, "weights": weights})
    (folder / f"end-{me}.json").write_text(text)


if __name__ == "__main__":
    main()
