"""Train a linear model elastically in one of the bindings while ranks, their shells or the launcher die.

    ringreduce run --elastic -np 4 elastic_training.py FOLDER WAY COMMIT COPY DISK RANK@STEP:WHERE:HOW ...

The state is committed after every COMMIT steps; one of COPY commits copies the weights, and one of DISK is written to
FOLDER, if these are not 0. A rank is called by its first number; each dies once, also in a job that begins again.
WHERE is "begin" or "end", of a step, "init", or a number: so many microseconds after the step has begun; in the toy,
also what `Killer` and `Kept` call places. Each rank that reaches the end writes a line of JSON to a file of its own in
FOLDER. `tests/jobs/elastic_trainings.py` computes from these what the weights must be.
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
from ringreduce.elastic.handlers import HandlingState, StateHandler
from ringreduce.training.data.epochs import EpochDivision

sys.path.append(str(Path(__file__).parents[2]))  # on other hosts, too
from trainees.toy import Toy

FEATURES, OUTPUTS, ROWS, STEPS = 60, 50, 5, 12
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


class Killer(rr.Instrument):
    """Lets this rank, its shell or the launcher die when its time has come.

    Args:
        folder: where a death is written down, so that it happens once.
        rank: this one's first number.
        deaths: of all ranks.

    Attributes:
        rank: the first number.
        step: the present one.
        syncs, shares, goes_back: whether a state is synchronised or committed, or gradients are computed.
    """

    def __init__(self, folder: Path, rank: int, deaths: list[Death]) -> None:
        self.rank = rank
        self._folder, self._deaths = folder, [each for each in deaths if each.rank == rank]
        self._timer: threading.Timer | None = None
        self._waits = False
        self.step = 0
        self.syncs = self.shares = self.goes_back = False

    def come_to(self, where: str) -> None:
        for each in self._deaths:
            mark = self._folder / f"died-{each.rank}-{each.step}"
            timed = where == "begin" and each.where.isdigit()
            if each.step == self.step and (timed or each.where == where) and not mark.exists():
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

    def operation_submitted(self, name: str) -> None:
        if self.goes_back:
            self.come_to("overlap")

    def operation_announced(self, name: str) -> None:
        self.come_to("negotiation")

    def step_finished(self, step: str) -> None:
        if self.syncs:
            self.come_to("broadcast")
        elif self.shares:
            self.come_to("share")
        elif step in ("rendezvous", "load and store") or "transfer" in step:
            self.come_to("allreduce")


def die(how: str) -> None:
    """End this process, or that which is named and the signal: "launcher SIGTERM", "shell SIGKILL"."""
    if how == "exception":
        raise RuntimeError("this rank fails, as it was told")
    if how == "MemoryError":
        raise MemoryError("as it was told")
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


class Kept(HandlingState):
    """A state that calls the killer."""

    def __init__(self, killer: Killer, **kept: Any) -> None:
        self._killer = killer
        super().__init__(**kept)

    def restore(self) -> None:
        self._killer.come_to("recovery")
        super().restore()

    def reset(self) -> None:
        self._killer.come_to("reset")
        super().reset()

    def sync(self) -> None:
        rr.global_process_set.engine.communicator.instruments.add(self._killer)  # of the world that has just begun
        self._killer.syncs = True
        super().sync()
        self._killer.syncs = False

    def commit(self) -> None:
        self._killer.shares = True
        super().commit()

    def _commit_here(self, *, to_disk: bool = False) -> None:
        self._killer.shares = False
        super()._commit_here(to_disk=to_disk)

    def _find_handler(self, value: Any) -> StateHandler | None:
        return ToyHandler(value, self._killer) if isinstance(value, ToyModel) else super()._find_handler(value)


class ToyHandler(StateHandler):
    """What keeps the weights of the toy; calls the killer before the rest of a commit is copied."""

    notes_steps = True

    def __init__(self, value: ToyModel, killer: Killer) -> None:
        super().__init__(value)
        self._killer, self._noted = killer, 0

    def save(self) -> None:
        super().save()
        self._in_a_commit()

    def copy_small(self) -> None:
        self._noted = self.value.toy.steps
        self._in_a_commit()

    def _in_a_commit(self) -> None:
        if not self._killer.syncs:
            self._killer.come_to("commit")

    def is_unchanged(self) -> bool:
        return bool(self._noted == self.value.toy.steps)

    def restore_small(self, copied: None) -> None:
        """There is nothing small."""


class ToyModel:
    """The weights of the toy, as a state keeps them."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy

    def state_dict(self) -> dict[str, Any]:
        return {name: weight.value for name, weight in self.toy.named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.toy.named:
            weight.value[...] = state[name]


class Division(EpochDivision):
    """A sampler, so that ranks share what each has processed before a commit."""

    def shuffled(self, seed: int) -> list[int]:
        return list(range(ROWS))


def in_toy(killer: Killer) -> Way:
    """Return a way in which the killer is told of all that happens in a step, and in a state."""
    sampler = Division(range(ROWS))
    toy = Toy(dict(zip(("matrix", "bias"), beginning(), strict=True)), overlap=True)

    def step(inputs: Any, targets: Any) -> None:
        toy.zero_grad()
        killer.come_to("forward")
        matrix, bias = toy.weights()
        error = 2 * (inputs @ matrix + bias - targets) / targets.size
        killer.goes_back = True
        toy.give({"bias": error.sum(0), "matrix": inputs.T @ error})
        killer.goes_back = False
        killer.come_to("backward")
        toy.step()
        sampler.set_epoch(killer.step // ROWS)
        sampler.record_indices([killer.step % ROWS])

    def make_state(**more: Any) -> Any:
        return Kept(killer, model=ToyModel(toy), sampler=sampler, **more)

    return Way(step, toy.weights, lambda: None, make_state)


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


def begin(name: str, killer: Killer) -> Way:
    """Begin a world, and return the way of a name."""
    killer.come_to("init")
    rr.init()
    binding, _, option = name.partition("-")
    return in_toy(killer) if binding == "toy" else WAYS[binding](option)


def train_on(
    state: Any, way: Way, killer: Killer, every: int, goes_on: Callable[[], bool], note: Callable[[], object]
) -> None:
    """Train from where the state is, which knows the first numbers of the ranks that have made each step.

    Args:
        state: what is committed after ``every`` steps.
        way: makes steps.
        killer: of this rank.
        every: how many.
        goes_on: returns whether there is another step.
        note: is called after each step.
    """
    here = rr.allgather_object(killer.rank)
    while goes_on():
        killer.step = state.number
        killer.come_to("begin")
        way.step(*batch(state.number, killer.rank))
        state.members = [*state.members, here]
        state.number += 1
        note()
        killer.come_to("end")
        if state.number == STEPS:
            killer.wait_for_death()
        if state.number % every == 0:
            state.commit()


def write_end(folder: Path, name: str, state: Any, way: Way) -> None:
    """Write down that this rank has reached the end, and with what."""
    way.finish()
    weights = [each.astype(float).ravel().tolist() for each in way.weights()]
    (folder / f"end-{name}.json").write_text(
        json.dumps({"size": rr.size(), "members": state.members, "weights": weights})
    )


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    every, copy, disk = map(int, sys.argv[3:6])
    killer = Killer(folder, int(os.environ["OMPI_COMM_WORLD_RANK"]), list(map(Death.parse, sys.argv[6:])))
    way = begin(name, killer)
    state = way.make_state(number=0, members=[])
    if copy:
        state.keep_in_memory(copy)
    if disk:
        state.keep_on_disk(str(folder / "commits"), every=disk)
    train = rr.elastic.run(
        lambda state: train_on(state, way, killer, every, lambda: state.number < STEPS, lambda: None)
    )
    train(state)
    write_end(folder, str(killer.rank), state, way)


if __name__ == "__main__":
    main()
