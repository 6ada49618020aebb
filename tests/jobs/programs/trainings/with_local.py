"""Random local trainings in torch: LocalSGD and DiLoCo, with replicas of one rank or of a node."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringreduce as rr
import ringreduce.torch as hvd
from ringreduce.training.options.local_options import LocalOptions
from trainings import episodes
from trainings.episodes import PRIVATE, RANK, SIZE, Draw, Episode
from trainings.with_torch import (
    OPTIMIZERS,
    Model,
    begin,  # noqa: F401 which fuzz_training.py calls
    for_another_job,
    from_another_job,
)

sys.path.append(str(Path(__file__).parents[3]))
from suites.exchanges import Exchanges, Weights

_USES = ["net", "body", "penalty", "table", "scalar", "single", "strided", "empty"]


def drawn(draw: Draw, parameters: int) -> dict[str, Any]:
    """Return options of an optimizer of so many parameters that trains locally."""
    period = draw.choice([1, 2, 3, 5])
    options = {
        "period": period,
        "fragments": draw.randrange(1, min(period, parameters) + 1),
        "delay": draw.choice([0, draw.randrange(period)]),
        "replica": draw.choice(["node", "rank"]),
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
    }
    if draw.chance(0.6):
        options |= {"outer_lr": draw.choice([0.7, 1.0]), "outer_momentum": draw.choice([0.0, 0.9])}
    return options


class Buffered(Model):
    """A model with a buffer that each rank changes."""

    def __init__(self, width: int) -> None:
        super().__init__(torch.float64, width, sparse=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def see(self, rng: np.random.Generator) -> None:
        """Change the buffer."""
        self.seen.mul_(0.5).add_(torch.from_numpy(rng.normal(size=3)))


class Training(episodes.Training):
    """One model of each rank, and all of them on every rank, in one process.

    Args:
        episode: the episode.
        number: of the model in the episode.
        saved: what `save` of another training has returned, among any number of ranks; None: a new one.
    """

    def __init__(self, episode: Episode, number: int, saved: dict[str, Any] | None = None) -> None:
        draw = self.draw = episode.draw
        self.episode, self.number = episode, number
        torch.manual_seed(draw.randrange(1 << 30))
        self.make_name, self.width = (
            draw.choice([name for name in OPTIMIZERS if name != "Muon"]),
            draw.choice([1, 5, 40]),
        )
        if saved is not None:
            self.make_name, self.width = saved["made"]
        first = Buffered(self.width)
        self.warmup_steps = draw.choice([0, 0, 3])
        self.options = drawn(draw, len([*first.parameters()]))
        self.averages_state = draw.chance(0.3) and self.options["delay"] == 0
        if saved is not None:
            self.options = {**saved["options"], "replica": self.options["replica"]}
            self.warmup_steps, self.averages_state = saved["warmup_steps"], saved["averages_state"]
            first.load_state_dict(saved["weights"])
        self.models = [copy.deepcopy(first) for _ in range(SIZE)]
        self.references = [self._optimizer(each) for each in self.models]
        self._make(first)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        parameters = [(name, p.numel()) for name, p in self.model.named_parameters()]
        places = LocalOptions(**self.options, ranks=SIZE).cut([count for _, count in parameters])
        fragments = [[name for name, _ in parameters[place]] for place in places]
        self.exchanges = Exchanges(self.options, self.warmup_steps, fragments)
        if saved is not None:
            self.wrapped.load_state_dict(copy.deepcopy(saved["state"]))
            self.exchanges.load_state_dict(saved["exchanges"])
            for each in self.references:
                each.load_state_dict(copy.deepcopy(saved["reference"]))
        how = f"{self.make_name} {self.options} warm-up {self.warmup_steps} state={self.averages_state}"
        episode.say(f"model {number}: {how}" + (", from another job" if saved else ""))

    def _optimizer(self, model: Model) -> Any:
        return OPTIMIZERS[self.make_name]([{"params": list(model.parameters())}])

    def _make(self, model: Buffered) -> None:
        self.model = model
        average = ("parameters", "buffers", "state") if self.averages_state else ("parameters", "buffers")
        options = {**self.options, "warmup_steps": self.warmup_steps, "average": average}
        self.wrapped = hvd.DiLoCo(self._optimizer(model), model, **options)

    # ---- a step ----

    def train(self) -> None:
        """Make one step, and compare."""
        draw, episode = self.draw, self.episode
        if draw.chance(0.05):
            self._save_and_load()
        if draw.chance(0.05):
            self._synchronize()
        keeps = draw.chance(0.2)
        episode.say(f"step {episode.step} of model {self.number}: keeps={keeps}")
        if not keeps:
            to_none = draw.chance(0.7)
            for each in (self.wrapped, *self.references):
                each.zero_grad(to_none)
        self._passes(draw.choice([1, 1, 2, 3]))
        self._average_gradients()
        if draw.chance(0.3) and self.make_name != "Counting":
            found = self.wrapped.clip_grad_norm_(0.1)
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in self.models]
            episode.say(f"  clipped {float(found)}")
            episode.compare({"norm": found.numpy()}, {"norm": norms[RANK].numpy()}, 1e-8, self._replica())
        self.wrapped.step()
        self.exchanges.before_step(self._values())
        for each in self.references:
            each.step()
        self._exchange(self.exchanges.after_step)
        self.compare()

    def _passes(self, number: int) -> None:
        draw, episode = self.draw, self.episode
        declares = draw.chance(0.5)
        for turn in range(number):
            # Averages of state that some ranks lack are tested elsewhere.
            uses = [_USES if self.averages_state else draw.some(_USES) for _ in range(SIZE)]
            episode.say(f"  pass {turn} of {number}: {uses} declares={declares}")
            episode.hold()
            for rank, rng in enumerate(episode.numbers()):
                if rank == RANK:
                    with self.wrapped.no_sync() if declares and turn < number - 1 else nullcontext():
                        mine = copy.deepcopy(rng)
                        self.model.loss(mine, uses[rank]).backward()
                        self.model.see(mine)
                self.models[rank].loss(rng, uses[rank]).backward()
                self.models[rank].see(rng)

    def _replicas(self) -> list[list[int]]:
        if self.exchanges.steps < self.warmup_steps:
            return [list(range(SIZE))]
        if self.options["replica"] == "rank":
            return [[rank] for rank in range(SIZE)]
        return [list(node) for node in rr.world().topology.nodes]

    def _replica(self) -> list[int]:
        return next(each for each in self._replicas() if RANK in each)

    def _average_gradients(self) -> None:
        for replica in self._replicas():
            for parameters in zip(*(self.models[rank].parameters() for rank in replica), strict=True):
                gradients = [p.grad for p in parameters if p.grad is not None]
                for p in parameters:
                    p.grad = torch.stack(gradients).sum(0) / len(replica) if gradients else None

    # ---- exchanges ----

    def _values(self) -> list[Weights]:
        """Return what is exchanged, of all ranks."""
        return [{name: each.numpy().copy() for name, each in self._tensors(rank)} for rank in range(SIZE)]

    def _tensors(self, rank: int) -> list[tuple[str, torch.Tensor]]:
        model = self.models[rank]
        found = [(name, p.detach()) for name, p in model.named_parameters()] + [("seen", model.seen)]
        for name, p in model.named_parameters() if self.averages_state else ():
            state = self.references[rank].state.get(p, {})
            moments = [(key, each) for key, each in state.items() if torch.is_tensor(each) and each.shape == p.shape]
            found += [(f"{name} {key}", each) for key, each in moments if each.is_floating_point()]
        return found

    def _exchange(self, change: Any) -> None:
        values = self._values()
        self.exchanges.others = [name for name in values[0] if not self.exchanges.has(name)]
        change(values)
        for rank, found in enumerate(values):
            for name, each in self._tensors(rank):
                each.copy_(torch.from_numpy(np.asarray(found[name])))

    def _synchronize(self) -> None:
        self.episode.say("synchronizes")
        self.wrapped.synchronize()
        self._exchange(self.exchanges.synchronize)
        self.compare()

    def restarted(self) -> None:
        """Average what each has learnt, as a new world does."""
        self.wrapped.rejoin()
        if self.exchanges.steps:
            self._exchange(self.exchanges.average)

    def _save_and_load(self) -> None:
        self.episode.say("saves and loads")
        weights, state = copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.wrapped.state_dict())
        model = Buffered(self.width)
        model.load_state_dict(weights)
        self._make(model)
        self.wrapped.load_state_dict(state)
        for each in self.references:
            each.zero_grad()  # new parameters have no gradients

    def finish(self) -> None:
        """Average, as a program does at the end."""
        self._synchronize()

    def save(self) -> dict[str, Any]:
        """Return all to go on from."""
        return {
            "made": (self.make_name, self.width),
            "options": self.options,
            "warmup_steps": self.warmup_steps,
            "averages_state": self.averages_state,
            "weights": self.models[0].state_dict(),
            "state": self.wrapped.state_dict(),
            "reference": self.references[0].state_dict(),
            "exchanges": self.exchanges.state_dict(),
        }

    def compare(self) -> None:
        """Compare this rank's weights and buffer; the ranks of a replica have the same bits.

        Then go on from equal ones, as a training that diverges makes much of rounding errors.
        """
        found = {name: p.detach().numpy() for name, p in self.model.named_parameters()}
        values = self._values()[RANK]
        self.episode.compare(found, {name: values[name] for name in found}, 1e-8, self._replica())
        self.episode.compare({"seen": self.model.seen.numpy()}, {"seen": values["seen"]}, 1e-8, RANK)
        for model, weights in zip(self.models, PRIVATE.allgather(self.model.state_dict()), strict=True):
            model.load_state_dict(weights)


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn; return the number of steps.

    Args:
        episode: the episode.
        way: ``"local"``.
        folder: has what an earlier job has saved, perhaps, and gets what this one saves; None: neither.
    """
    file = None if folder is None else folder / "local.pt"
    saved = from_another_job(file)
    trainings = [Training(episode, 0, saved)]
    trainings += [Training(episode, 1)] if episode.draw.chance(0.3) else []
    steps = episodes.train_in_turn(episode, trainings, hvd.shutdown, hvd.init)
    if file is not None:
        for_another_job(file, trainings[0].save())
    return steps
