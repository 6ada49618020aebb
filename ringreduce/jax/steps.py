"""Steps of training whose gradients JAX reduces: counted, and looked at before that, as the settings ask for.

A compiled program passes the addresses of its gradients, and of the weights that they are for, in calls that it makes
anyway. What is there is read only in steps that look at it.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import jax
import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DType
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.finalizers import when_ended
from ringreduce.engine import Engine
from ringreduce.runtime import count
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.framework import Advice
from ringreduce.training.binding.host import HostMemory
from ringreduce.training.calls.parameters import in_words
from ringreduce.training.gradients.checks import OF_UPDATE, CheckedModel, Checks
from ringreduce.training.gradients.record import OptimizerRanks

ADVICE = Advice(
    "begin with params = broadcast_parameters(params, root_rank=0)",
    "arrays as x[rank()::size()], or a loader of grain with ShardOptions(rank(), size())",
    first=0,
)

Arrays = Sequence[npt.NDArray[Any]]


class Beside(NamedTuple):
    """What the arrays beside gradients are: weights that can be read, and behind them hyper-parameters.

    Attributes:
        names: returns the names of the weights.
        nweights: how many weights there are.
        settings: hyper-parameters by name, as text; None: it is the next of the arrays.
    """

    names: Callable[[], Sequence[str]]
    nweights: int
    settings: Mapping[str, str | None]

    def model(self, arrays: Callable[[], Sequence[Any]]) -> CheckedModel:
        """Return what checks look at; ``arrays`` returns the values, and is called only if they do."""

        def settings() -> dict[str, str]:
            values = map(_single, arrays()[self.nweights :])
            return in_words({name: next(values) if text is None else text for name, text in self.settings.items()})

        return CheckedModel(self.names(), lambda: arrays()[: self.nweights], settings=settings)


NOTHING = Beside(list, 0, {})


class StepReduction(NamedTuple):
    """A reduction of the gradients of one step, before it is carried out or while its program is traced.

    Attributes:
        owner: of the steps.
        names: returns the names of the gradients.
        arrays: that the program passes beside the gradients.
        beside: what these are.
    """

    owner: Steps
    names: Callable[[], Sequence[str]]
    arrays: Sequence[Any]
    beside: Beside

    def look(self, gradients: Sequence[Any], operation: str | None) -> None:
        """Look at gradients that are reduced now, by an operation of this name. Collective."""
        count(steps=1)
        watched = self.owner.watched(f"at once: {operation}", lambda: operation)
        if watched is None or not watched.begin():
            return
        model = None
        if not any(isinstance(array, jax.core.Tracer) for array in self.arrays):
            model = self.beside.model(lambda: list(map(np.asarray, self.arrays)))
        watched.look(list(map(np.asarray, gradients)), self.names(), model)


class Steps:
    """The steps of one optimizer.

    Args:
        kind: what errors call it.
        process_set: the ranks that train together.
        advice: for warnings.
        shared: whether another optimizer may have operations of the same names, and go on with these steps.

    Attributes:
        key: by which compiled programs find this, as long as it lives; new in this process.
    """

    def __init__(self, kind: str, process_set: ProcessSet, advice: Advice = ADVICE, *, shared: bool = False) -> None:
        self.key = f"{kind} {next(_numbers)}"
        self._kind = kind
        self._process_set = process_set
        self._advice = advice
        self._names: dict[tuple[str, str], Sequence[str]] = {}
        self._beside: dict[str, Beside] = {}
        self._engines: WeakSet[Engine] = WeakSet()  # Engines that have something of these steps.
        _all[self.key] = self
        when_ended(self, _forget, self.key, self._engines, shared)

    def of_trees(
        self,
        gradients: Any,
        params: Any,
        settings: Mapping[str, Any],
        wanted: Callable[[Any], bool] = lambda leaf: True,
    ) -> StepReduction:
        """Return a step, given the trees of its gradients and of the parameters; None: they are not known.

        Args:
            gradients, params: the trees.
            settings: as for `of_lists`.
            wanted: which leaves of the gradients are reduced.
        """
        return self.of_lists(
            names=lambda: _names_of(gradients, wanted),
            weights=jax.tree.leaves(params),
            weight_names=lambda: _names_of(params, lambda leaf: True),
            settings=settings,
        )

    def of_lists(
        self,
        names: Callable[[], Sequence[str]],
        weights: Sequence[Any],
        weight_names: Callable[[], Sequence[str]],
        settings: Mapping[str, Any],
    ) -> StepReduction:
        """Return a step.

        Args:
            names: returns the names of its gradients.
            weights, weight_names: the weights, and what returns their names.
            settings: hyper-parameters by name; those that `in_words` leaves out are left out here, too, but for arrays
                that are arguments of the update.
        """
        readable = [number for number, weight in enumerate(weights) if _is_readable(weight)]

        def names_of_readable() -> list[str]:
            known = weight_names()
            return [known[number] for number in readable]

        given = {name: setting for name, setting in settings.items() if isinstance(setting, (jax.Array, np.ndarray))}
        wanted = {name for name, setting in given.items() if setting.size == 1 or name.endswith(OF_UPDATE)}
        given = {name: setting for name, setting in given.items() if name in wanted and _is_readable(setting)}
        texts = in_words({name: setting for name, setting in settings.items() if name not in given})
        beside = Beside(names_of_readable, len(readable), {**texts, **dict.fromkeys(given)})
        return StepReduction(
            self, names, arrays=[*(weights[number] for number in readable), *given.values()], beside=beside
        )

    def watched(self, place: str, operation: Callable[[], str | None]) -> _Watched | None:
        """Return what looks at the steps of a place in the program; None: there are no other ranks.

        Args:
            place: in words.
            operation: returns the name of what reduces the gradients there; None: such calls match in their order.
        """
        process_set = self._process_set
        if not process_set.connected or process_set.size() == 1:
            return None
        engine = process_set.engine
        everything: _AllWatched = engine.attached[_AllWatched]
        known = everything.by_place.get(self.key)
        if known is None:
            self._engines.add(engine)
            known = everything.by_place[self.key] = {}
        if place not in known:
            name = operation() or engine.new_name(self._kind)
            all_known = everything.by_name
            # Other steps of this name are those of a program that was traced anew, on some ranks perhaps: they go on.
            if name not in all_known:
                if len(all_known) == _REMEMBERED:
                    del all_known[next(iter(all_known))]
                all_known[name] = _Watched(engine, name, shown=f"{self._kind}, {place}", advice=self._advice)
            known[place] = all_known[name]
        return known[place]

    # ---- compiled programs ----

    def note(self, name: str, step: StepReduction) -> None:
        """Note what is known of the steps at a place of a program, which is being traced."""
        names = step.beside.names()
        self._beside[name] = step.beside._replace(names=lambda: names)

    def note_part(self, name: str, part: str, names: Sequence[str]) -> None:
        """Note the names of the gradients that a call of the program reduces: a part of the step."""
        self._names[name, part] = names

    def look(
        self,
        name: str,
        operation: Callable[[], str],
        part: str,
        gradients: Callable[[], Arrays],
        beside: Callable[[], Arrays],
        *,
        first: bool,
        last: bool,
        which: str,
    ) -> None:
        """Look at what a compiled program is about to reduce. Collective.

        Args:
            name: of the place in the program.
            operation: returns the name of the first operation of the step.
            part: which part of the step this is, in words.
            gradients: returns those of this part.
            beside: returns what comes beside the first part.
            first, last: whether it is the first or last part of a step.
            which: of several calls at this place, in words.
        """
        watched = self.watched(f"{name}{which}", operation)
        if watched is None or not (watched.begin() if first else watched.looks):
            return
        names = self._names[name, part]
        arrays = gradients()[: len(names)]
        if first:
            watched.look(arrays, names, self._beside[name].model(beside), last=last)
        else:
            watched.look_further(arrays, names, last=last)


_REMEMBERED = 4096  # The most names of steps.

_numbers = itertools.count()
_all: WeakValueDictionary[str, Steps] = WeakValueDictionary()


def steps_of(key: str) -> Steps | None:
    """Return the steps of a key; None: they are gone."""
    return _all.get(key)


def _single(array: npt.NDArray[Any]) -> Any:
    """Return an array of one element, or in the place of another one what tells its values."""
    return array if array.size == 1 else f"with the checksum {zlib.crc32(array.tobytes()):08x}"


def _is_readable(array: Any) -> bool:
    """Return whether a weight can be compared: keys and some dtypes cannot."""
    try:
        DType.of(array.dtype)
    except (AttributeError, UnsupportedBufferError):
        return False
    return isinstance(array, (jax.Array, np.ndarray))


def _names_of(tree: Any, wanted: Callable[[Any], bool]) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, leaf in leaves if wanted(leaf)]


class _Watched:
    """Looks at the steps of one optimizer, or of one place of a compiled program.

    Args:
        engine: of the ranks that train together.
        name: of the steps, the same on all ranks.
        shown: what errors call the steps.
        advice: for warnings.

    Attributes:
        name: the argument.
    """

    def __init__(self, engine: Engine, name: str, shown: str, advice: Advice) -> None:
        self.name = name
        # The checks keep this list and not the object, which goes with its last reference.
        named: list[tuple[str, None]] = []
        self._named = named
        self._since = (engine.joins, engine.mismatches)
        self._step = -1
        self._ranks = OptimizerRanks(engine, f"{name}, checks", described=shown, where="step")
        self._checks = Checks(HostMemory(advice), self._ranks, lambda: named)

    def begin(self) -> bool:
        """Take note that a step begins; return whether something may have to be looked at."""
        self._step += 1
        engine = self._ranks.engine
        if self._since != (engine.joins, engine.mismatches):
            # Ranks that had joined have made fewer steps, and some have begun a step that ended in a mismatch.
            self._since = (engine.joins, engine.mismatches)
            self._step = 0
            self._checks.after_join()
        return self.looks or self._checks.compares_settings(self._step)

    @property
    def looks(self) -> bool:
        """Whether something of gradients or weights may have to be looked at."""
        return not self._checks.idle

    def look(self, gradients: Arrays, names: Sequence[str], model: CheckedModel | None, *, last: bool = True) -> None:
        """Look at the first gradients of a step, and at the weights. Collective."""
        self._named[:] = [(name, None) for name in names]
        with self._checks.looking_at(model):
            if self._checks.compares_settings(self._step):
                self._checks.look_at_settings()
            self._checks.look(self._step, gradients)
            self._checks.compare_data(self._step, gradients, more=not last)

    def look_further(self, gradients: Arrays, names: Sequence[str], *, last: bool) -> None:
        """Look at further gradients of a step. Collective."""
        self._named[:] = [(name, None) for name in names]
        self._checks.require_finite(self._step, gradients)
        self._checks.compare_data(self._step, gradients, more=not last)


class _AllWatched:
    """What looks at steps; an engine keeps it, and drops it when it ends.

    Attributes:
        by_place: by the key of `Steps`, as long as these live, and the place in the program.
        by_name: by the name of the steps.
    """

    def __init__(self) -> None:
        self.by_place: dict[str, dict[str, _Watched]] = {}
        self.by_name: dict[str, _Watched] = {}


def _forget(key: str, engines: WeakSet[Engine], shared: bool) -> None:
    """Drop what looked at the steps of a `Steps` that is gone; if shared, keep what another one may go on with."""
    for engine in list(engines):
        if _AllWatched in engine.attached:
            everything = engine.attached[_AllWatched]
            for each in everything.by_place.pop(key, {}).values():
                if not shared:
                    everything.by_name.pop(each.name, None)
