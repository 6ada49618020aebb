"""Checks for silent errors: weights that differ between ranks, gradients that are not finite, data that all share."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import MismatchError, NotFiniteError, name_ranks
from ringreduce.common.instruments import EngineTally
from ringreduce.observe.seen.pace import Lasting
from ringreduce.runtime import global_process_set
from ringreduce.training.binding.framework import Memory, Named
from ringreduce.training.data.shares import Shares
from ringreduce.training.gradients.record import OptimizerRanks

_log = logging.getLogger(__name__)

#: Returns the hyper-parameters of this rank, as text by name.
Settings = Callable[[], Mapping[str, str]]

#: How names of hyper-parameters end that are the state of what scales the loss; of Keras, whether it does.
OF_SCALER = " of the GradScaler"
OF_LOSS_SCALE = " of the LossScaleOptimizer"

#: The same of numbers that a program gives the update of a transformation of optax.
OF_UPDATE = " of update()"

#: What ranks may not differ in: what one has that has none, and what to do.
_ALIKE = {
    OF_SCALER: (
        "no GradScaler",
        "their gradients have no average. Load the scaler's state on all ranks, as "
        "scaler.load_state_dict(broadcast_object(scaler.state_dict())) does, or load_checkpoint(..., scaler=scaler)",
    ),
    OF_UPDATE: (
        "no such argument",
        "they would step differently. Give all ranks the average: update(..., value=allreduce(value)), or that of "
        "weighted_average where ranks have different numbers of samples",
    ),
}

_FIRST_STEPS = 3  # that compare the ranks' gradients
_SHOWN = 3  # differences in a warning


class CheckedModel(NamedTuple):
    """What the gradients of a step are of, for checks: where a `Memory` knows gradients alone.

    Attributes:
        names: of the weights, in an order that is the same on all ranks.
        values: returns the weights as NumPy arrays, None for what has no value; called only if they are compared.
        sparse: names and arrays of gradients that are reduced apart from the others of the step.
        settings: returns the hyper-parameters of this rank, as text by name; called only in steps that compare them.
    """

    names: Sequence[str]
    values: Callable[[], Sequence[Any]]
    sparse: Sequence[tuple[str, Any]] = ()
    settings: Settings = dict


class _SlowRanks:
    """What rank 0 knows of ranks that were slow for some time; an engine keeps it."""

    def __init__(self) -> None:
        self._lasting = Lasting()
        self._nreports = 0
        self._warned = False

    def learn(self, tally: EngineTally, nodes: Sequence[Sequence[int]]) -> Any:
        """Return, once, the rank that was slow for some time by the reports so far; None: none was, or it was said."""
        if self._warned:
            return None
        windows = tally.windows
        for each in windows[len(windows) - min(tally.reports - self._nreports, len(windows)) :]:
            self._lasting = self._lasting.after(each)
        self._nreports = tally.reports
        slow = self._lasting.slow(windows, nodes)
        self._warned = slow is not None
        return slow


class _NotFinite:
    """Rank 0 has said, in the world of an engine, that weights are not finite; an engine keeps it then."""


class Checks:
    """What the settings ask to be looked at before the gradients of a step are reduced, and what rank 0 warns of.

    Args:
        memory: the gradients'.
        ranks: whose allgather gives all ranks what each has found.
        named: returns names and parameters, the same ones on all ranks.
        settings: returns this rank's hyper-parameters, as text by name; None: the model has them.

    Attributes:
        settings: returns this rank's hyper-parameters.
        compares_data: whether the ranks compare their gradients before the next step; the same on all.
    """

    def __init__(
        self, memory: Memory, ranks: OptimizerRanks, named: Callable[[], Named], settings: Settings | None = None
    ) -> None:
        self._memory = memory
        self._ranks = ranks
        self._named = named
        self._described = ranks.described
        config = ranks.engine.communicator.config
        self._weights_every = config.check_weights_every
        self._finite_every = config.check_finite_every
        self.compares_data = config.check_data and ranks.size > 1
        self._begins = memory.advice.first is not None and ranks.size > 1  # weights are still to be compared once
        self._compares_settings: bool | None = None  # None: it is not known yet whether there are any
        self._model: CheckedModel | None = None
        self.settings = settings or (lambda: {} if self._model is None else self._model.settings())

    @contextmanager
    def looking_at(self, model: CheckedModel | None) -> Iterator[None]:
        """Return a context for a step of a model; None: weights are the parameters, or unknown."""
        self._model = model
        try:
            yield
        finally:
            self._model = None

    @property
    def idle(self) -> bool:
        """Whether nothing is to be looked at any more."""
        looks = self._weights_every is not None or self._finite_every is not None
        return not (looks or self.compares_data or self._begins)

    @property
    def needs_own_gradients(self) -> bool:
        """Whether gradients must be this rank's own until they are looked at: none is reduced in the backward pass."""
        return self._finite_every is not None

    def needs_own_gradients_in(self, step: int) -> bool:
        """Return the same for one step; equal on all ranks."""
        return self.needs_own_gradients or (self.compares_data and step < _FIRST_STEPS)

    def after_join(self) -> None:
        """Compare no data any more, and settings from the beginning: ranks that had joined have made fewer steps."""
        self.compares_data = False
        self._compares_settings = None

    def look(self, step: int, gradients: Sequence[Any]) -> None:
        """Look at weights and gradients before a step, where that is due. Collective.

        Args:
            step: how many came before it; the same on all ranks.
            gradients: of all parameters, in order.

        Raises:
            MismatchError: on all ranks, if weights differ between them.
            NotFiniteError: on all ranks, if a gradient of any of them holds NaN or infinity.
        """
        if self.compares_weights(step):
            self._compare(step)
        self.require_finite(step, gradients)

    def compares_settings(self, step: int) -> bool:
        """Return whether `look_at_settings` compares hyper-parameters before a step; the same on all ranks."""
        if self._compares_settings is None:
            return step >= (self._memory.advice.first or 0)
        return self._compares_settings and step & (step + 1) == 0

    def look_at_settings(self) -> None:
        """Let rank 0 say, once, which hyper-parameters of the model differ between ranks. Collective.

        For steps in which no `GradientReducer` agrees on them.

        Raises:
            MismatchError: as `heed_settings`.
        """
        mine = self.settings()
        self._compares_settings = not self.heed_settings(mine) and bool(mine)

    def compares_weights(self, step: int) -> bool:
        """Return whether weights are compared before a step; the same on all ranks."""
        first = self._memory.advice.first
        every = self._weights_every
        if first is None:
            return every is not None and step % every == 0
        if self._begins:
            return step >= first
        return every is not None and step > first and step % every == 0

    def _compare(self, step: int) -> None:
        """Raise, or warn of the weights that programs begin with, if those of the ranks differ."""
        first = self._begins
        self._begins = False
        model = self._model
        named = self._named() if model is None else list(zip(model.names, model.values(), strict=True))
        mine = [len(named), self._memory.checksum([value for _, value in named])]
        everyone: npt.NDArray[np.int64] = self._ranks.allgather(np.array([mine], np.int64))
        if (everyone == everyone[0]).all():
            return
        count = everyone[:, :1]
        if (count == count[0]).all():
            mine = [self._memory.checksum([value]) for _, value in named]
            everyone = self._ranks.allgather(np.array([mine], np.int64))
        else:
            named = [("all weights together", None)]
            everyone = everyone[:, 1:]
        different = np.flatnonzero((everyone != everyone[0]).any(axis=0))
        name = named[different[0]][0]
        sums = everyone[:, different[0]].tolist()
        if first and self._weights_every is None:
            self.warn_of_weights(0, name)
            return
        usual, times = Counter(sums).most_common(1)[0]
        text = f"before step {step} of {self._described}, the values of {name} have the checksum"
        said = {
            rank: f"{text} {each:08x}" + " (unlike most)" * (each != usual and times > len(sums) / 2)
            for rank, each in enumerate(sums)
        }
        raise MismatchError(said)

    def require_finite(self, step: int, gradients: Sequence[Any]) -> None:
        """Raise `NotFiniteError` as `look` does, if that is due before a step. Collective.

        It is not due where a GradScaler or a LossScaleOptimizer has scaled them: it tries how large they may be, and
        skips what overflows. With gradients reduced in the backward pass, no scaler is known in the first step.
        """
        if self._finite_every is None or step % self._finite_every:
            return
        if any(name.endswith((OF_SCALER, OF_LOSS_SCALE)) for name in self.settings()):
            return
        finite = self._memory.is_finite
        names = [name for name, _ in self._named()]
        if self._model is not None and self._model.sparse:
            names += [name for name, _ in self._model.sparse]
            gradients = [*gradients, *(each for _, each in self._model.sparse)]
        wrong = [number for number, each in enumerate(gradients) if each is not None and not finite(each)]
        everyone = self._ranks.allgather(np.array([[wrong[0] if wrong else -1]], np.int64))[:, 0].tolist()
        found = [(number, rank) for rank, number in enumerate(everyone) if number >= 0]
        if found:
            first = min(found)[0]
            ranks = [rank for number, rank in found if number == first]
            raise NotFiniteError(
                f"the gradient of {names[first]} holds NaN or infinity on {name_ranks(ranks)}, before it "
                f"was reduced for step {step} of {self._described}"
            )

    def data_checksum(self, gradients: Sequence[Any]) -> int:
        """Return a checksum of 32 bits of this rank's gradients, which `heed_data` compares."""
        if self._model is not None:
            gradients = [*gradients, *(each for _, each in self._model.sparse)]
        return self._memory.checksum_of_gradients(gradients)

    def compare_data(self, step: int, gradients: Sequence[Any], *, more: bool = False) -> None:
        """Compare gradients before a step, where no agreement of the ranks does; see `heed_data`. Collective."""
        if self.compares_data:
            mine = self.data_checksum(gradients)
            everyone: npt.NDArray[np.int64] = self._ranks.allgather(np.array([[mine]], np.int64))
            self.heed_data(step, len(everyone) == self._ranks.size and len(np.unique(everyone)) == 1, more=more)

    def heed_data(self, step: int, alike: bool, *, more: bool = False) -> None:
        """Let rank 0 warn if the gradients of all ranks have been equal in each of the first steps.

        Args:
            step: how many came before it.
            alike: whether they were equal in this one; the same on all ranks.
            more: whether others of the same step follow.
        """
        self.compares_data = alike
        if alike and step == _FIRST_STEPS - 1 and not more:
            self.compares_data = False
            if self._ranks.rank == 0:
                _log.warning(
                    "%s: the gradients of all ranks were equal in each of the first %s steps, so all ranks seem to "
                    "train on the same data. Give each rank a part of its own: %s. RINGREDUCE_CHECK_DATA=0 ends this "
                    "check",
                    self._described,
                    _FIRST_STEPS,
                    self._memory.advice.data,
                )

    # ---- what reducers find ----

    def look_at_paces(self, *, weighs: bool) -> None:
        """Let rank 0 say, once, for whom the others wait; to be called after a step in which paces were reported.

        Args:
            weighs: whether the optimizer takes numbers of samples, so that a rank may have fewer.
        """
        engine = self._ranks.engine
        if self._ranks.rank or Shares in engine.attached:
            return
        slow = engine.attached[_SlowRanks].learn(engine.tally, engine.communicator.topology.nodes)
        if slow is not None:
            divides = weighs and global_process_set.connected and engine is global_process_set.engine
            _log.warning("%s: %s", self._described, slow.warning(self._memory.advice.fewer if divides else None))

    def warn_of_changes(self, *, in_backward: bool) -> None:
        """Let rank 0 say that the program changes gradients before they are averaged."""
        if self._ranks.rank == 0 and not in_backward:
            _log.warning(
                "%s: gradients were changed between the backward pass and the step, on each rank its own, before they "
                "were averaged. To clip or look at averages, call synchronize() first and step within "
                'skip_synchronize(), or give DistributedOptimizer(..., reduce_in="backward")',
                self._described,
            )

    def warn_of_weights(self, step: int, name: str = "") -> None:
        """Let rank 0 say that the ranks' weights differ before a step; ``name``: of the first that do."""
        if self._ranks.rank == 0 and step == 0:
            _log.warning(
                "the ranks begin with different weights%s, and will end with different ones; %s",
                f" ({name} for one)" if name else "",
                self._memory.advice.broadcast,
            )
        elif self._ranks.rank == 0:
            _log.warning(
                "%s: the ranks have different weights by now. Are weights changed on some ranks alone (by another "
                "optimizer, or by steps before a join() that no broadcast_parameters() followed), or is a gradient "
                "written to through .data or NumPy between the backward pass and the step (overlap=False allows that)?",
                self._described,
            )

    def heed_settings(self, mine: Mapping[str, str]) -> bool:
        """Let rank 0 say which hyper-parameters differ between ranks; return whether some do. Collective.

        Raises:
            MismatchError: on all ranks, if the state of GradScalers differs, as gradients of different scales have no
                average; or if arguments of an update do.
        """
        text = json.dumps([self._ranks.rank, mine]) + "\n"
        everyone = self._ranks.allgather(np.frombuffer(text.encode(), np.uint8)[:, None])
        said = dict(map(json.loads, everyone.tobytes().decode().splitlines()))
        _require_alike(said)
        differ = any(each != mine for each in said.values())
        if differ and self._ranks.rank == 0:
            _log.warning("%s", _differences(said, self._memory.advice.schedule))
        return differ


def look_at_the_end(memory: Memory, ranks: OptimizerRanks, named: Callable[[], Named]) -> None:
    """Let rank 0 say, once, that an optimizer leaves weights that are not finite, unless a setting looks for it. Local.

    Args:
        memory, ranks, named: as for `Checks`.
    """
    engine = ranks.engine
    looked = engine.communicator.config.check_finite_every is not None or not ranks.seconds
    if looked or ranks.rank or _NotFinite in engine.attached or getattr(sys, "last_value", None) is not None:
        return
    for name, parameter in named():
        if memory.is_trainable(parameter) and not memory.is_finite(parameter):
            _ = engine.attached[_NotFinite]
            _log.warning(
                "%s ends with NaN or infinity in its weights (%s for one): RINGREDUCE_CHECK_FINITE=1 finds the step, "
                "the gradient and the rank where it came first",
                ranks.described,
                name,
            )
            return


def _require_alike(said: Mapping[int, Mapping[str, str]]) -> None:
    """Raise `MismatchError` if ranks differ in what they may not; the arguments are those of `_differences`."""
    for ending, (missing, advice) in _ALIKE.items():
        names = dict.fromkeys(name for each in said.values() for name in each if name.endswith(ending))
        differ = [name for name in names if len({each.get(name) for each in said.values()}) > 1]
        if differ:
            values = {rank: [f"{name} {each[name]}" for name in differ if name in each] for rank, each in said.items()}
            raise MismatchError({rank: ", ".join(each) or missing for rank, each in values.items()}, advice=advice)


def _differences(said: Mapping[int, Mapping[str, str]], schedule: str) -> str:
    """Return a warning that says which hyper-parameters differ between ranks.

    Args:
        said: for ranks, the hyper-parameters by name.
        schedule: as for `Advice`.
    """
    different = []
    for name in dict.fromkeys(name for each in said.values() for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in said.items():
            ranks.setdefault(each.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {name_ranks(where)}" for value, where in ranks.items())
            different.append(f"{name} is {values}")
    more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return (
        "the ranks step with different hyper-parameters, and end with different weights: "
        f"{'; '.join(different[:_SHOWN])}{more}. All ranks must change them alike: a schedule that follows the "
        f"loss, for example, {schedule}"
    )
