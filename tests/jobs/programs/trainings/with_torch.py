"""Random trainings in torch: plain, sharded, late, weighted by numbers of samples."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from collections import deque
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import ringreduce.torch as hvd
from trainings import episodes
from trainings.episodes import PRIVATE, RANK, SIZE, Episode

WAYS = ("torch", "shard", "late", "samples")

_ODD = ("scalar", "single", "strided", "empty")


class Counting(torch.optim.Optimizer):
    """An optimizer that takes whole parameters and counts its steps in a Python number, as Adafactor does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step by lr / n, and by the mean of the gradient besides."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                state["mean"] = (state.get("mean", torch.zeros_like(p)) + p.grad) / 2
                p.add_(p.grad + state["mean"].mean() if p.numel() else p.grad, alpha=-group["lr"] / state["n"])


class Nested(torch.optim.Optimizer):
    """An optimizer whose state is lists, dicts and None, changed in place, and that updates by torch._foreach_*."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "has_gradients": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step by lr / n times the sum of all gradients so far; by twice of it from the third step on."""
        for group in self.param_groups:
            there = [p for p in group["params"] if p.grad is not None]
            changes = []
            for p in there:
                state = self.state[p]
                if not state:
                    state |= {
                        "n": [0],
                        "sums": {"all": torch.zeros_like(p)},
                        "factor": None,
                        "last": [p.grad.clone(), None],
                    }
                state["n"][0] += 1
                state["sums"]["all"] += p.grad
                state["last"][0] = p.grad.clone()
                if state["n"][0] == 3:
                    state["factor"] = 2.0
                changes.append(state["sums"]["all"] * (state["factor"] or 1.0) / state["n"][0] + state["last"][0])
            if there or group["has_gradients"]:  # then a program has no need to look
                torch._foreach_add_(there, changes, alpha=-group["lr"])


class Model(nn.Module):
    """Some layers, an embedding, and parameters of odd shapes and strides; of matrices alone for Muon."""

    def __init__(self, dtype: torch.dtype, width: int, *, sparse: bool, added: int = 0, matrices: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, width, bias=not matrices), nn.Linear(width, 2, bias=not matrices)
        self.odd = () if matrices else _ODD
        self.table = nn.Embedding(7, 2, sparse=sparse)
        self.to(dtype)
        self.added = nn.ParameterList()
        if matrices:
            return
        self.scalar = nn.Parameter(torch.randn((), dtype=dtype))
        self.single = nn.Parameter(torch.randn(1, 2, dtype=dtype)[:, 0])
        self.strided = nn.Parameter(torch.randn(3, 2, dtype=dtype)[:, 1])
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        for _ in range(added):
            self.add()

    def add(self) -> None:
        """Add a parameter to those that the optimizer had at first."""
        self.added.append(nn.Parameter(torch.ones(3, dtype=self.body.weight.dtype)))

    def loss(self, rng: np.random.Generator, uses: list[str]) -> torch.Tensor:
        """Return a loss of random data that touches only what is used."""
        dtype = self.body.weight.dtype

        def data(*shape: int) -> torch.Tensor:
            return torch.from_numpy(rng.normal(size=shape)).to(dtype)

        total = torch.zeros((), dtype=dtype)
        for use in uses:
            x, y = data(4, 3), data(3, 2)
            if use == "net":
                total = total + self.head(torch.tanh(self.body(x))).square().mean()
            elif use == "body":
                total = total + (self.body(x) * data(4, self.body.out_features)).mean()
            elif use == "penalty":
                x.requires_grad_(True)
                (slope,) = torch.autograd.grad(self.head(torch.tanh(self.body(x))).sum(), x, create_graph=True)
                total = total + slope.square().mean()
            elif use == "added":
                for parameter in self.added:
                    total = total + (parameter - data(3)).square().sum()
            elif use == "table":
                total = total + (self.table(torch.from_numpy(rng.integers(0, 7, 3))) * y).sum()
            else:
                parameter = getattr(self, use)
                total = total + (parameter - data(*parameter.shape)).square().sum()
        return total


OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.02, eps=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=0.02, eps=1e-3, amsgrad=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.02, eps=1e-3),
    "Adamax": partial(torch.optim.Adamax, lr=0.02, eps=1e-3),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.2),
    "Counting": partial(Counting, lr=0.1),
    "Nested": partial(Nested, lr=0.02),
    "Muon": partial(torch.optim.Muon, lr=0.02),
}
#: Largest error of a wire format, as a part of the largest gradient of any rank in one pass.
WIRE_ERRORS = {"bf16": 0.03, "fp16": 0.01, "int8": 0.1}
#: A training whose gradients are larger ends: their sums leave the range of 16 bits soon, which the reference has not.
_MOST_SENT = 300.0
#: Largest error that int8 carries into later steps, likewise. Gradients of up to 3 passes are sent, and their average;
#: each with the error that was carried before. Of each, rounding loses half a scale: 1 / 254 of the largest value, and
#: more by the rounding of the scale to a bfloat16.
_CARRIED = 2 * 3 / 240
_TAKE_SPARSE = ["SGD", "Adagrad"]


def _shards() -> list[str]:
    return ["node", "all"] if hvd.is_homogeneous() else ["node"]  # "all" needs as many ranks on each node


class Training(episodes.Training):
    """One model, its optimizer over the ranks, and the same in one process.

    Args:
        episode: the episode.
        way: one of `WAYS`.
        number: of the model in the episode.
        saved: what `save` of another training has returned, among any number of ranks and in any way; None: a new one.
    """

    def __init__(self, episode: Episode, way: str, number: int, saved: dict[str, Any] | None = None) -> None:
        draw = self.draw = episode.draw
        self.episode, self.way, self.number = episode, way, number
        torch.manual_seed(draw.randrange(1 << 30))
        self.dtype = torch.float64
        sparse = way in ("torch", "samples") and draw.chance(0.1)
        # What a plain training has besides; a deterministic sum has no wire format.
        more = draw.choices(["wire format", "process set", "split updates"], [38, 32, 30])[0]
        if sparse or way != "torch" or (more == "wire format" and os.environ.get("RINGREDUCE_DETERMINISTIC")):
            more = ""
        self.options: dict[str, Any] = {}
        self.make_name = draw.choice(_TAKE_SPARSE if sparse else [*OPTIMIZERS, *["Muon"] * 6, *["Nested"] * 7])
        width, self.groups, added = draw.choice([1, 5, 40]), draw.chance(0.3), 0
        if saved is not None:
            sparse, self.make_name, width, self.groups, added = False, *saved["made"]
            episode.drawn["another way"] += 1
        if more == "wire format" and saved is not None and self.make_name != "SGD":
            more = ""  # what is loaded decides on the optimizer
        if more == "wire format":
            self.make_name = "SGD"  # others make much of small errors
        episode.drawn["nested state"] += self.make_name == "Nested"
        episode.drawn["Muon"] += self.make_name == "Muon"
        self.make = OPTIMIZERS[self.make_name]
        self.by_backward = self.sums = False
        self.members = list(range(SIZE))  # ranks that reduce gradients together
        self.scaler: torch.amp.GradScaler | None = None
        self.scale = 1.0  # of the gradients of this step
        self.wire = ""
        self.largest = 0.0  # gradient of any rank, in this step
        self.carried = 0.0  # the largest error that a bucket may have kept of an earlier step, times the scale of that
        if way == "torch":
            self._draw_plain(more, sparse=sparse)
        elif way == "shard":
            self.options["shard"] = draw.choice(_shards())
        elif way == "late":
            self.options["staleness"] = draw.choice([1, 2, 3])
        if draw.chance(0.5):
            self.options["bucket_nbytes"] = draw.choice([1, 64, 200, 100_000])
        self.model = Model(self.dtype, width, sparse=sparse, added=added, matrices=self.make_name == "Muon")
        if saved is not None:
            self.model.load_state_dict(saved["weights"])
        self.alone = copy.deepcopy(self.model)
        self.late: deque[dict[str, torch.Tensor]] = deque()
        self.nsaved = 0  # so many of them, the oldest, were saved and loaded: a new world does not lose these
        self.wrapped = hvd.DistributedOptimizer(self.make(self._grouped(self.model)), self.model, **self.options)
        self.reference = self.make(self._grouped(self.alone))
        how = f"{way} {self.make_name} {self.options} sparse={sparse} groups={self.groups} scaler={bool(self.scaler)}"
        episode.say(f"model {number}: {how}" + (", from another job" if saved else ""))
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        if saved is not None:
            self.wrapped.load_state_dict(copy.deepcopy(saved["state"]))
            self.reference.load_state_dict(saved["reference"])

    def _grouped(self, model: Model) -> list[dict[str, Any]]:
        parameters = [p for name, p in model.named_parameters() if not name.startswith("added.")]
        added = [{"params": [p]} for p in model.added]
        if not self.groups:
            return [{"params": parameters}, *added]
        return [{"params": parameters[1::2]}, {"params": parameters[::2], "lr": 0.05}, *added]

    def _draw_plain(self, more: str, *, sparse: bool) -> None:
        draw, options = self.draw, self.options
        self.by_backward = draw.chance(0.25)
        if self.by_backward:
            options["reduce_in"] = "backward"
        else:
            options["overlap"] = draw.choice([None, True, True, False])
            self.sums = draw.chance(0.2)
            if self.sums:
                options["op"] = hvd.Sum
        if draw.chance(0.3):
            options["num_groups"] = draw.choice([1, 2, 3])
        if draw.chance(0.2) and not self.sums and not self.by_backward:
            options["gradient_predivide_factor"] = 2.0
        if sparse and draw.chance(0.5):
            options["sparse_as_dense"] = True
        if more == "wire format":
            self.wire = draw.choice([*WIRE_ERRORS])
            options["compression"] = getattr(hvd.Compression, self.wire)
        elif more == "process set" and SIZE > 1 and not self.by_backward:
            self.members = sorted(draw.sample(range(SIZE), draw.randrange(1, SIZE)))
            options["process_set"] = _set_of(self.members)
        elif more == "split updates":
            options["split_updates"] = True
        else:
            more = ""
        self.episode.drawn[more or "plain"] += 1
        if self.episode.draws("scaler", 0.4, can=not (sparse or self.sums or self.by_backward)):
            interval = 1000 if self.wire == "fp16" else 3  # scales that grow overflow in 16 bits
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=interval)
            self.scaler.scale(torch.zeros(1))  # a rank may make no pass in the first step

    # ---- a step ----

    def train(self) -> None:
        """Make one step, and compare."""
        draw, episode = self.draw, self.episode
        if self.wire and self.largest > _MOST_SENT:
            return  # all ranks find the same
        self._before()
        keeps = draw.chance(0.2) and not (self.sums or self.way == "late" or self.scaler or self.wire)
        if not keeps:
            to_none = draw.chance(0.7)
            self.wrapped.zero_grad(to_none)
            self.reference.zero_grad(to_none)
        episode.say(f"step {episode.step} of model {self.number}: keeps={keeps}")
        samples = [draw.randrange(1, 9) for _ in range(SIZE)] if self.way == "samples" else None
        weights = [1.0 if self.sums else 1 / SIZE] * SIZE if samples is None else [n / sum(samples) for n in samples]
        if len(self.members) < SIZE:  # who is no member steps by itself
            mine = self.members if RANK in self.members else [RANK]
            weights = [(1.0 if self.sums else 1 / len(mine)) * (rank in mine) for rank in range(SIZE)]
        same = self.by_backward or draw.chance(0.6)
        self.largest = 0.0
        self.scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        overflows = draw.randrange(SIZE) if draw.chance(0.2) and self.scaler is not None else None
        self._passes(draw.choice([1, 1, 1, 2, 3]), weights, same=same, overflows=overflows)
        skips = self.scaler is not None and not all(
            bool(p.grad.isfinite().all()) for p in self.alone.parameters() if p.grad is not None
        )
        for mine, alone in zip(self.wrapped.param_groups, self.reference.param_groups, strict=True):
            if "has_gradients" in alone:
                has = self.way != "late" and any(p.grad is not None for p in alone["params"])
                mine["has_gradients"] = alone["has_gradients"] = has
        if samples is not None:
            self.wrapped.step(samples=samples[RANK])
        elif self.scaler is not None and all(p.grad is None for p in self.alone.parameters()):
            skips = True  # a scaler refuses steps without any gradient
        elif self.scaler is not None:
            self.scaler.step(self.wrapped)
            self.scaler.update()
        else:
            self._clip_and_step(weights)
        if skips:
            episode.say("  skipped")
        else:
            self._step_alone()
        self.compare()

    def _passes(self, number: int, weights: list[float], *, same: bool, overflows: int | None = None) -> None:
        """Make backward passes; ``same``: as many on all ranks; ``overflows``: the rank whose gradients do."""
        draw, episode = self.draw, self.episode
        numbers = [number if same else draw.randrange(number + 1) for _ in range(SIZE)]
        declares = self.by_backward or draw.chance(0.5)
        uses = self._uses()
        for turn in range(number):
            if draw.chance(0.3) and not self.by_backward:
                uses = self._uses()
            differ = draw.chance(0.3)
            of_rank = [draw.some(uses) if differ else uses for _ in range(SIZE)]
            episode.say(f"  pass {turn} of {numbers}: {of_rank if differ else uses} declares={declares}")
            episode.hold()
            for rank, rng in enumerate(episode.numbers()):
                if turn >= numbers[rank]:
                    continue
                factor = float("inf") if rank == overflows else 1.0
                if rank == RANK:
                    last = turn == numbers[rank] - 1
                    with self.wrapped.no_sync() if declares and not last else nullcontext():
                        loss = self.model.loss(copy.deepcopy(rng), of_rank[rank]) * factor
                        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if weights[rank]:
                    self._pass_alone(rng, of_rank[rank], weights[rank] * factor)

    def _pass_alone(self, rng: np.random.Generator, uses: list[str], weight: float) -> None:
        loss = self.alone.loss(rng, uses)
        if not self.wire:
            (loss * weight).backward()
            return
        parameters = [p for p in self.alone.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                p.grad = gradient * weight + (0.0 if p.grad is None else p.grad)
                if p.numel():
                    self.largest = max(self.largest, float(gradient.abs().max()))

    def _uses(self) -> list[str]:
        added = ["added"] if len(self.model.added) else []
        uses = self.draw.some(["net", "net", "body", "penalty", "table", *added, *self.model.odd])
        kept = [each for each in dict.fromkeys(uses) if each not in _ODD or getattr(self.model, each).requires_grad]
        return kept or ["net"]

    def _clip_and_step(self, weights: list[float]) -> None:
        draw, episode = self.draw, self.episode
        sparse = any(p.grad is not None and p.grad.is_sparse for p in self.alone.parameters())
        whole = self.make_name in ("Counting", "Nested", "Muon")
        if self.way == "late" or whole or self.sums or sparse or self.wire or draw.chance(0.6):
            self.wrapped.step()
            return
        if draw.chance(0.5):
            found = self.wrapped.clip_grad_norm_(0.1)
            right = torch.nn.utils.clip_grad_norm_(self.alone.parameters(), 0.1)
            episode.say(f"  clipped {float(found)}")
            episode.compare({"norm": found.numpy()}, {"norm": right.numpy()}, 1e-9, self._replica)
            if draw.chance(0.2) and not self.by_backward and self.way != "shard":
                episode.say("  and one more pass")
                self._passes(1, weights, same=True)
            self.wrapped.step()
        else:
            episode.say("  synchronized")
            self.wrapped.synchronize()
            if self.way == "torch":
                self.compare_gradients()
            with self.wrapped.skip_synchronize():
                self.wrapped.step()

    def _step_alone(self) -> None:
        if self.way == "late":
            there = [(name, p) for name, p in self._named(self.alone) if p.requires_grad or p.grad is not None]
            self.late.append({name: zeros_if_none(p) for name, p in there})
            staleness = self.options["staleness"]
            due = self._oldest() if len(self.late) > staleness else {}
            for name, p in self._named(self.alone):
                p.grad = due.get(name)
        self.reference.step()

    def _oldest(self) -> dict[str, torch.Tensor]:
        self.nsaved = max(self.nsaved - 1, 0)
        return self.late.popleft()

    def finish(self) -> None:
        """Apply what is late."""
        if self.way == "late":
            self.wrapped.synchronize()
            while self.late:
                due = self._oldest()
                for name, p in self._named(self.alone):
                    p.grad = due.get(name)
                self.reference.step()
        self.compare()

    # ---- what else programs do ----

    def _before(self) -> None:
        draw, episode = self.draw, self.episode
        if draw.chance(0.06) and self.model.odd:
            name, on = draw.choice(_ODD[:3]), draw.chance(0.5)
            episode.say(f"{name} is {'trained' if on else 'frozen'}")
            for model in (self.model, self.alone):
                getattr(model, name).requires_grad_(on)
        if draw.chance(0.03) and len(self.model.added) < 3 and self.model.odd:
            self._add()
        if draw.chance(0.05):
            self._save_and_load()
        if draw.chance(0.04) and self.way == "shard" and self.model.odd:
            episode.say("writes")
            with self.wrapped.writing(), torch.no_grad():
                self.model.strided.mul_(0.5)
                self.alone.strided.mul_(0.5)

    def _add(self) -> None:
        """Train one parameter more from now on."""
        self.episode.say("adds a parameter")
        for model, optimizer in ((self.model, self.wrapped), (self.alone, self.reference)):
            model.add()
            optimizer.add_param_group({"params": [model.added[-1]]})

    def restarted(self) -> None:
        """Forget what a new world forgets."""
        if len(self.members) < SIZE:
            _set_of(self.members)
        if self.way == "late":
            self.wrapped.rejoin()
            self.late = deque(list(self.late)[: self.nsaved])

    def _save_and_load(self) -> None:
        """Go on in new objects, sharded in another way perhaps."""
        self.episode.say("saves and loads")
        self.nsaved = len(self.late)
        old, from_old = self.model, self.wrapped
        by_file = self.episode.draws("checkpoint", 0.5, can=len(self.members) == SIZE)
        file = PRIVATE.bcast(tempfile.mkdtemp(prefix="checkpoint-") if RANK == 0 and by_file else "") + "/c.pt"
        if by_file:
            hvd.save_checkpoint(file, model=old, optimizer=from_old)
        else:
            weights, state = copy.deepcopy(old.state_dict()), copy.deepcopy(from_old.state_dict())
        trained = [p.requires_grad for p in old.parameters()]
        if self.way == "shard":
            self.options["shard"] = self.draw.choice([*_shards(), None])
        elif "split_updates" in self.options:
            self.options["split_updates"] = self.draw.choice([True, False])
        sparse, width, matrices = old.table.sparse, old.body.out_features, not old.odd
        self.model = Model(self.dtype, width, sparse=sparse, added=len(old.added), matrices=matrices)
        for p, on in zip(self.model.parameters(), trained, strict=True):
            p.requires_grad_(on)
        wrapped = self.make(self._grouped(self.model))
        self.wrapped = hvd.DistributedOptimizer(wrapped, self.model, **self.options)
        if by_file:
            hvd.load_checkpoint(file, model=self.model, optimizer=self.wrapped)
            if RANK == 0:
                shutil.rmtree(os.path.dirname(file))
        else:
            self.model.load_state_dict(weights)
            self.wrapped.load_state_dict(state)
        self.reference.zero_grad()  # new parameters have no gradients

    def save(self) -> dict[str, Any]:
        """Return all to go on from."""
        made = self.make_name, self.model.body.out_features, self.groups, len(self.model.added)
        state, weights = self.wrapped.state_dict(), self.alone.state_dict()
        return {"made": made, "weights": weights, "state": state, "reference": self.reference.state_dict()}

    # ---- comparisons ----

    @property
    def _replica(self) -> object:
        return "members" if RANK in self.members else RANK

    def _named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        return list(model.named_parameters())

    def compare(self) -> None:
        """Compare weights; then go on from equal ones, as a training that diverges makes much of rounding errors."""
        found, right = (
            {name: p.detach().numpy() for name, p in self._named(model)} for model in (self.model, self.alone)
        )
        error = 0.0
        if self.wire:
            error = 0.1 * (self.largest * WIRE_ERRORS[self.wire] * SIZE + self.carried / self.scale)
            if self.wire == "int8":
                self.carried = max(self.carried, self.largest * self.scale * _CARRIED * (SIZE if self.sums else 1))
        self.episode.compare(found, right, max(1e-8, error), self._replica)
        with torch.no_grad():
            for mine, alone in zip(self.model.parameters(), self.alone.parameters(), strict=True):
                alone.copy_(mine)

    def compare_gradients(self) -> None:
        """Compare gradients that are reduced."""
        found, right = (
            {name: p.grad.to_dense().numpy() for name, p in self._named(each) if p.grad is not None}
            for each in (self.model, self.alone)
        )
        self.episode.compare(found, right, 1e-8, self._replica)


def _set_of(ranks: list[int]) -> Any:
    """Return the process set of some ranks, which is added unless this world has it."""
    made = _SETS.setdefault(tuple(ranks), hvd.ProcessSet(ranks))
    if not made.registered:
        hvd.add_process_set(made)
    return made


_SETS: dict[tuple[int, ...], Any] = {}


def zeros_if_none(p: nn.Parameter) -> torch.Tensor:
    """Return a copy of the gradient."""
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def from_another_job(file: Path | None) -> dict[str, Any] | None:
    """Return what a job has saved, on all ranks; None if there is nothing, or a training that diverges."""
    saved = torch.load(file, weights_only=False) if file is not None and file.exists() else None
    hvd.barrier()  # all ranks have read it
    if saved is not None and any(bool((each.abs() > 100.0).any()) for each in saved["weights"].values()):
        return None
    return saved


def for_another_job(file: Path, state: dict[str, Any]) -> None:
    """Save what a training goes on from, by rank 0."""
    if RANK == 0:
        torch.save(state, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # not half of it, if saving fails
    hvd.barrier()


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn; return the number of steps.

    Args:
        episode: the episode.
        way: one of `WAYS`.
        folder: has what an earlier job has saved, perhaps, and gets what this one saves; None: neither.
    """
    draw = episode.draw
    begins = draw.chance(0.5)  # drawn in any case, or --only would make another training without a folder
    file = None if folder is None or begins else folder / "training.pt"
    saved = from_another_job(file)
    trainings = [Training(episode, way, 0, saved)]
    trainings += [Training(episode, way, 1)] if draw.chance(0.3) else []
    steps = episodes.train_in_turn(episode, trainings, hvd.shutdown, hvd.init)
    # The next job may go on in any way, with a model of all kinds of parameters.
    if file is not None and not trainings[0].model.table.sparse and trainings[0].model.odd:
        for_another_job(file, trainings[0].save())
    return steps


def begin() -> None:
    """Begin."""
    hvd.init()
    torch.set_num_threads(1)
