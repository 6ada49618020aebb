"""Gradients as values: lists of arrays that a program passes in a call, as those of TensorFlow, Keras and JAX do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringreduce.collectives.communicator import Communicator
from ringreduce.runtime import count, global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.checks import Model
from ringreduce.training.framework import Arrays, Memory, Named
from ringreduce.training.host import HOST, HostMemory
from ringreduce.training.names import Identity, meet
from ringreduce.training.optimizer import Training
from ringreduce.training.options import Options


class ListTraining:
    """Reduces lists of arrays over the ranks. Collective.

    Args:
        kind: what errors call it.
        named: names and specs; equal on all ranks.
        process_set: the ranks that train together.
        arrays, bind: as for `Training`; those of NumPy.
        identity: of the lists; None: all ranks make those of equal names in one order.
        options: of `Options`. Nothing overlaps, and ``reduce_in="backward"`` is the same as ``"step"``.

    Raises:
        ConfigError: an option is wrong; the other ranks get a `MismatchError`.
        MismatchError: the ranks have different names, shapes, dtypes or options.
    """

    def __init__(
        self,
        kind: str,
        named: Named,
        process_set: ProcessSet = global_process_set,
        arrays: Arrays = HOST,
        bind: Callable[[Communicator], Memory] = lambda _: HostMemory(),
        identity: Identity | None = None,
        **options: Any,
    ) -> None:
        self.training = Training(kind, process_set, arrays, bind)
        self.training.identity = identity
        if identity is not None:
            meet(kind, identity, process_set)
        self._zeros, self._specs = arrays.zeros_like, [each for _, each in named]
        with self.training.checking(kind):
            checked = Options(**options).checked(self.training.communicator.config, self._specs)
        self.training.begin(kind, lambda: named, checked, None)

    def reduce(self, gradients: Sequence[Any], samples: Any = None, model: Model | None = None) -> list[Any]:
        """Return the averages, or sums, of gradients over the ranks. Collective.

        Args:
            gradients: one array, or None, for each spec; they are only read. Gradients that a rank lacks count as
                zeros there; what no rank has stays None.
            samples: of how many samples this rank's gradients are means; on all ranks or none.
            model: what the checks of the settings look at besides; None: nothing.

        Returns:
            Arrays that keep their values while they are held, or views of them. With staleness, those of an earlier
            step, and zeros where there are none yet.

        Raises:
            as `GradientReducer.reduce`.
        """
        self.training.rejoin()
        reducer = self.training.reducer
        reducer.samples, reducer.checks.model = samples, model
        reduced = reducer.reduce(gradients)
        reducer.stepped += 1
        reducer.checks.model = None
        count(steps=1)
        return reduced if reducer.late is None else self._whole(reduced)

    def pending(self) -> Iterator[list[Any]]:
        """Wait for the averages that `reduce` has not returned yet, and yield them, oldest first. Collective."""
        self.training.rejoin()
        late = self.training.late
        while late is not None and late.pending:
            yield self._whole(late.next())

    def _whole(self, averages: Sequence[Any]) -> list[Any]:
        return [self._zeros(spec) if each is None else each for each, spec in zip(averages, self._specs, strict=True)]
