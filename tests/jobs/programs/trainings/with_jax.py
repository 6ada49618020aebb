"""Random trainings in JAX: pytrees and optax, at once and compiled."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ringreduce.jax as rj
from trainings import episodes
from trainings.episodes import RANK, SIZE, Episode


def _loss(params: Any, data: Any) -> Any:
    x, target, rows = data
    hidden = jnp.tanh(x @ params["net"]["body"] + params["net"]["bias"])
    fit = jnp.mean((hidden @ params["net"]["head"] - target) ** 2) + jnp.sum(params["table"][rows] * target[:1])
    return fit + params["scalar"] ** 2 + jnp.sum(params["empty"])


def _data(rng: np.random.Generator) -> tuple[Any, ...]:
    return rng.normal(size=(4, 3)), rng.normal(size=(4, 2)), rng.integers(0, 7, 3)


@jax.jit
def _total(array: Any) -> Any:
    """Sum over the ranks: traced once, and called several times in one program."""
    return rj.allreduce(array, op=rj.Sum)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.02, eps=1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02, eps=1e-3)),
}


class Training(episodes.Training):
    """One model over the ranks, and the same in one process."""

    def __init__(self, episode: Episode, number: int) -> None:
        draw = self.draw = episode.draw
        self.episode, self.number = episode, number
        rng, width = episode.numbers()[0], draw.choice([1, 5, 40])
        net = {"body": rng.normal(size=(3, width)), "bias": rng.normal(size=width), "head": rng.normal(size=(width, 2))}
        others = {"table": rng.normal(size=(7, 2)), "scalar": rng.normal(size=()), "empty": np.zeros((0, 3))}
        params = jax.tree.map(jnp.asarray, {"net": net, **others})
        self.params, self.alone = rj.broadcast_parameters(params, root_rank=0), params
        name = draw.choice([*OPTIMIZERS])
        self.weighs = draw.chance(0.3)
        self.staleness = draw.choice([0, 0, 1, 2]) if not self.weighs else 0
        options: dict[str, Any] = {"staleness": self.staleness} if self.staleness else {}
        if draw.chance(0.2) and not self.staleness:
            options["gradient_predivide_factor"] = 2.0
        self.tx = rj.DistributedGradientTransformation(OPTIMIZERS[name](), **options)
        self.reference = OPTIMIZERS[name]()
        self.state, self.reference_state = self.tx.init(self.params), self.reference.init(self.alone)
        self.late: deque[Any] = deque()
        compiled = draw.chance(0.5)
        self.totals = episode.draws("helper twice", 0.7)
        self.run = jax.jit(self._step) if compiled else self._step
        episode.say(f"model {number}: {name} {options} weighs={self.weighs} compiled={compiled}")

    def _step(self, params: Any, state: Any, data: Any, samples: Any) -> tuple[Any, Any, list[Any]]:
        totals = []
        if self.totals:
            x, target, _ = data
            if RANK == SIZE - 1:  # one rank computes more before one of the calls, so that XLA may order them otherwise
                x = jnp.sort(x @ x.T @ x, axis=0) * 0 + x
            totals = [
                _total(x),
                _total(x * 3),
                jax.lax.scan(lambda sofar, row: (sofar + _total(row), 0), x[0] * 0, x)[0],
            ]
            totals = [*totals, _total(target)]
        gradients = jax.grad(_loss)(params, data)
        weights = {"samples": samples} if self.weighs else {}
        updates, state = self.tx.update(gradients, state, params, **weights)
        return optax.apply_updates(params, updates), state, totals

    def train(self) -> None:
        """Make one step, and compare."""
        samples = [self.draw.randrange(1, 9) for _ in range(SIZE)]
        weights = [n / sum(samples) if self.weighs else 1 / SIZE for n in samples]
        self.episode.hold()
        data = [_data(rng) for rng in self.episode.numbers()]
        self.params, self.state, found = self.run(self.params, self.state, data[RANK], samples[RANK])
        if found:
            x, target = (np.sum([each[place] for each in data], axis=0) for place in (0, 1))
            right = {"x": x, "3 x": 3 * x, "rows": x.sum(axis=0), "target": target}
            self.episode.compare(dict(zip(right, map(np.asarray, found), strict=True)), right, 1e-8)
        totals = jax.grad(lambda p: sum(_loss(p, each) * part for each, part in zip(data, weights, strict=True)))
        self.late.append(totals(self.alone))
        due = self.late.popleft() if len(self.late) > self.staleness else jax.tree.map(jnp.zeros_like, self.alone)
        self._apply(due)
        self.compare()

    def _apply(self, gradients: Any) -> None:
        updates, self.reference_state = self.reference.update(gradients, self.reference_state, self.alone)
        self.alone = optax.apply_updates(self.alone, updates)

    def leave(self) -> None:
        """Apply what is late."""
        self.finish()

    def finish(self) -> None:
        """Apply what is late."""
        if self.staleness:
            self.params, self.state = self.tx.synchronize(self.params, self.state)
        while self.late:
            self._apply(self.late.popleft())
        self.compare()

    def compare(self) -> None:
        """Compare weights; then go on from equal ones, as a training that diverges makes much of rounding errors."""
        found, right = (
            {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
            for tree in (self.params, self.alone)
        )
        self.episode.compare(found, right, 1e-8)
        self.alone = jax.tree.map(jnp.copy, self.params)


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn; return the number of steps."""
    trainings = [Training(episode, number) for number in range(episode.draw.choice([1, 1, 2]))]
    return episodes.train_in_turn(episode, trainings, rj.shutdown, rj.init)


def begin() -> None:
    """Begin."""
    jax.config.update("jax_enable_x64", True)
    rj.init()
