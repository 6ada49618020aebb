"""Train a small model elastically while ranks die as they are told, and write down what the training consisted of.

    ringreduce run --elastic -np 4 python faults.py FOLDER EVERY RANK@STEP:WHERE:HOW ...

One of EVERY commits copies the weights. Each rank writes one line of JSON for every step that it begins, to a file of
its own in FOLDER, and one at the end. `tests/jobs/faults.py` computes from these what the weights must be.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ringreduce as rr
from ringreduce import elastic
from ringreduce.common import processes
from ringreduce.elastic.handlers import HandlingState, StateHandler
from ringreduce.testing.toy import Toy
from ringreduce.training.calls.objects import broadcast_object
from ringreduce.training.data.epochs import EpochDivision

ROWS, FEATURES, OUTPUTS, EPOCHS = 403, 60, 50, 2


class Death(NamedTuple):
    """Who dies (its first rank), in which step, where in that, and how."""

    rank: int
    step: int
    where: str
    how: str

    @classmethod
    def parse(cls, text: str) -> Death:
        who, where, how = text.split(":")
        rank, step = who.split("@")
        return cls(int(rank), int(step), where, how)


def data() -> tuple[Any, Any]:
    """Return inputs and targets, the same in every process; noisy, so that the last batches always matter."""
    rng = np.random.default_rng(5)
    inputs = rng.standard_normal((ROWS, FEATURES)).astype(np.float32)
    targets = inputs @ rng.standard_normal((FEATURES, OUTPUTS)) + rng.standard_normal((ROWS, OUTPUTS))
    return inputs, targets.astype(np.float32)


class Killer(rr.Instrument):
    """Ends this process when its time has come."""

    def __init__(self, deaths: list[Death]) -> None:
        self.me = rr.rank()  # the first number, which stays
        self.deaths = [each for each in deaths if each.rank == self.me]
        self.step = 0
        self.sync = self.backward = self.sharing = False

    def come_to(self, where: str) -> None:
        for each in self.deaths:
            if (each.step, each.where) == (self.step, where):
                self.deaths.remove(each)
                die(each.how)

    def operation_submitted(self, name: str) -> None:
        if self.backward:
            self.come_to("overlap")

    def operation_announced(self, name: str) -> None:
        self.come_to("negotiation")

    def step_finished(self, step: str) -> None:
        if self.sync:
            self.come_to("broadcast")
        elif self.sharing:
            self.come_to("share")
        elif step in ("rendezvous", "load and store") or "transfer" in step:
            self.come_to("allreduce")


def die(how: str) -> None:
    if how == "exception":
        raise RuntimeError("this rank fails, as it was told")
    if how == "MemoryError":
        raise MemoryError("as it was told")
    if how == "exit":
        os._exit(3)
    if how == "launcher":
        launcher = processes.launcher()
        assert launcher is not None
        shell = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        os.kill(shell, signal.SIGKILL)  # and this rank with it, perhaps before the next line
    os.kill(os.getpid(), getattr(signal, how))


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
        self._killer.sync = True
        super().sync()
        self._killer.sync = False

    def commit(self) -> None:
        self._killer.sharing = True
        super().commit()

    def _commit_here(self, *, to_disk: bool = False) -> None:
        self._killer.sharing = False
        super()._commit_here(to_disk=to_disk)

    def _find_handler(self, value: Any) -> StateHandler | None:
        return Weights(value, self._killer) if isinstance(value, Model) else super()._find_handler(value)


class Weights(StateHandler):
    """What keeps the weights of the toy; calls the killer before the rest of a commit is copied."""

    notes_steps = True

    def __init__(self, value: Model, killer: Killer) -> None:
        super().__init__(value)
        self._killer, self._noted = killer, 0

    def save(self) -> None:
        super().save()
        self._in_a_commit()

    def copy_small(self) -> None:
        self._noted = self.value.toy.steps
        self._in_a_commit()

    def _in_a_commit(self) -> None:
        if not self._killer.sync:
            self._killer.come_to("commit")

    def is_unchanged(self) -> bool:
        return bool(self._noted == self.value.toy.steps)

    def restore_small(self, copied: None) -> None:
        pass


class Model:
    """The weights of the toy, as a state keeps them."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy

    def state_dict(self) -> dict[str, Any]:
        return {name: weight.value for name, weight in self.toy.named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, weight in self.toy.named:
            weight.value[...] = state[name]


class Division(EpochDivision):
    """A sampler."""

    def shuffled(self, seed: int) -> list[int]:
        return [int(each) for each in np.random.default_rng(seed).permutation(ROWS)]


class Training:
    """The training of a linear model, and its log."""

    batch_size = 8

    def __init__(self, folder: str, every: int, deaths: list[Death], name: str | None = None) -> None:
        self.file = (Path(folder) / f"{rr.rank() if name is None else name}.jsonl").open("w")
        self.began_ns = 0
        self.killer = Killer(deaths)
        self.inputs, self.targets = data()
        zeros = {"matrix": np.zeros((FEATURES, OUTPUTS), np.float32), "bias": np.zeros(OUTPUTS, np.float32)}
        self.toy = Toy({**zeros, "more": np.zeros(OUTPUTS, np.float32)}, overlap=True)
        self.sampler = Division(range(ROWS), seed=3)
        self.state: Any = Kept(self.killer, model=Model(self.toy), sampler=self.sampler, epoch=0, step=0, attempts=[])
        self.state.keep_in_memory(every)

    def run(self) -> None:
        elastic.run(self._train)(self.state)
        weights = [each.tolist() for each in self.toy.weights()]
        self._write(done=True, attempts=self.state.attempts, size=rr.size(), weights=weights)

    def _train(self, state: Any) -> None:
        self.began_ns = broadcast_object(time.time_ns())  # the same on all ranks, whoever fails before this or after
        while self._goes_on(state):
            mine = list(self.sampler)
            for first in range(0, len(mine), self.batch_size):
                self._step(mine[first : first + self.batch_size])
                state.commit()
            state.epoch += 1
            self.sampler.set_epoch(state.epoch)
            state.commit()

    def _goes_on(self, state: Any) -> bool:
        return bool(state.epoch < EPOCHS)

    def _step(self, batch: list[int]) -> None:
        killer, state = self.killer, self.state
        killer.step = state.step
        self._write(step=state.step, epoch=state.epoch, size=rr.size(), indices=batch)
        killer.come_to("idle")
        self.toy.zero_grad()
        killer.come_to("forward")
        killer.backward = True
        self.toy.backward(self.inputs[batch], self.targets[batch])
        killer.backward = False
        killer.come_to("backward")
        self.toy.step()
        self.sampler.record_indices(batch)
        state.step += 1
        state.attempts.append(self.began_ns)

    def _write(self, **what: Any) -> None:
        print(json.dumps({"began_ns": self.began_ns, **what}), file=self.file, flush=True)


if __name__ == "__main__":
    rr.init()
    Training(sys.argv[1], int(sys.argv[2]), [Death.parse(each) for each in sys.argv[3:]]).run()
