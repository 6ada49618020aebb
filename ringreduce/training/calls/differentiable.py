"""Collectives that gradients flow through: the operation in the forward pass, its adjoint in the backward pass.

| forwards      | backwards                                                     | by the conventions                 |
|---------------|---------------------------------------------------------------|------------------------------------|
| allreduce     | the same allreduce                                            |                                    |
| allgather     | an allreduce, of which each rank takes its own rows           | `Conventions.gradient_op`          |
| broadcast     | an allreduce for the root, zeros for the others               | `Conventions.gradient_op`          |
| reducescatter | an allgather, times both factors and, of an average, 1 / size | `scattered_gradient_factor`        |
| alltoall      | an alltoall that gives back what was received                 |                                    |

Where Horovod's gradients differ from those of the chain rule, `ringreduce.common.conventions` says by what.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import real_number
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp
from ringreduce.engine import Engine
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.framework import Arrays
from ringreduce.training.calls.requests import Request, RequestBuilder
from ringreduce.training.options.options import Op, ReproducibleSum

_Values = Sequence[Any]

#: Numbers the gradients of operations without a name, alike on all ranks of a set.
_numbers: WeakKeyDictionary[Engine, itertools.count[int]] = WeakKeyDictionary()


class Differentiable:
    """Blocking collectives that gradients flow through, on a framework's arrays. The backward pass is collective, too.

    Args:
        arrays: the framework's.
        name: of the operation; None: it has none.
        process_set: the ranks that take part.
        backwards: whether this is for the backward pass of another.
    """

    __slots__ = ("_arrays", "_backwards", "_name", "_process_set")

    def __init__(self, arrays: Arrays, name: str | None, process_set: ProcessSet, *, backwards: bool = False) -> None:
        self._arrays = arrays
        self._name = name
        self._process_set = process_set
        self._backwards = backwards

    def allreduce(
        self, values: _Values, op: Op, prescale: float = 1.0, postscale: float = 1.0, wire: str | None = None
    ) -> _Values:
        """Reduce arrays into new ones; see `RequestBuilder.allreduce_new`."""

        def prepared(prepare: RequestBuilder, sources: _Values) -> Request:
            return prepare.allreduce_new(sources, op, prescale, postscale, wire)

        def adjoint(back: Differentiable, grads: _Values) -> _Values:
            _require_linear(op, "allreduce")
            return back.allreduce(grads, op, prescale, postscale, wire)

        how = {"op": op, "prescale": prescale, "postscale": postscale, "wire": wire}
        return self._flow("allreduce", prepared, adjoint=adjoint, values=values, **how)

    def allgather(self, values: _Values) -> _Values:
        """Concatenate arrays along their first dimension."""
        rows = [each.shape[0] if len(each.shape) else 0 for each in values]

        def adjoint(back: Differentiable, grads: _Values) -> _Values:
            starts = back._first_rows(rows)
            totals = back.allreduce(grads, self._conventions.gradient_op)
            return [total[start : start + own] for total, start, own in zip(totals, starts, rows, strict=True)]

        return self._flow(
            "allgather", lambda prepare, sources: prepare.allgather(sources, list), adjoint=adjoint, values=values
        )

    def broadcast(self, value: Any, root: int) -> Any:
        """Return the root's array; ``root`` is a rank of the set."""

        def adjoint(back: Differentiable, grads: _Values) -> _Values:
            totals = back.allreduce(grads, self._conventions.gradient_op)
            is_root = self._process_set.rank() == root
            return totals if is_root else [self._arrays.zeros_like(each) for each in totals]

        (result,) = self._flow(
            "broadcast", lambda prepare, sources: prepare.broadcast(sources[0], root), adjoint=adjoint, values=[value]
        )
        return result

    def alltoall(self, value: Any, rows: list[int]) -> tuple[Any, list[int]]:
        """Send so many rows to each rank; return what came, and how many rows came from each."""
        received: list[int] = []

        def prepared(prepare: RequestBuilder, sources: _Values) -> Request:
            return prepare.alltoall(sources[0], rows, came)

        def came(result: Any, counts: list[int]) -> Any:
            received[:] = counts
            return result

        def adjoint(back: Differentiable, grads: _Values) -> _Values:
            return [back.alltoall(grads[0], received)[0]]

        return self._flow("alltoall", prepared, adjoint=adjoint, values=[value])[0], received

    def reducescatter(self, values: _Values, op: Op, prescale: float, postscale: float) -> _Values:
        """Reduce arrays into this rank's parts."""
        shapes = [each.shape for each in values]

        def prepared(prepare: RequestBuilder, sources: _Values) -> Request:
            return prepare.reducescatter(sources, op, prescale, postscale, list)

        def adjoint(back: Differentiable, grads: _Values) -> _Values:
            _require_linear(op, "reducescatter")
            size = self._process_set.size()
            factor = real_number("prescale_factor", prescale) * real_number("postscale_factor", postscale)
            factor *= self._conventions.scattered_gradient_factor(size) / (size if ReduceOp.parse(op) is AVERAGE else 1)
            wholes = back._joined(grads, shapes)
            return wholes if factor == 1.0 else [self._times(whole, factor) for whole in wholes]

        return self._flow(
            "reducescatter", prepared, adjoint=adjoint, values=values, op=op, prescale=prescale, postscale=postscale
        )

    def _flow(
        self,
        kind: str,
        prepared: Callable[[RequestBuilder, _Values], Request],
        adjoint: Callable[[Differentiable, _Values], _Values],
        values: _Values,
        **how: Any,
    ) -> _Values:
        """Carry out a request for arrays, so that gradients flow through it by its adjoint.

        Args:
            kind: of collective.
            prepared: returns the request.
            adjoint: takes the collectives of the backward pass and the gradients of results; returns those of arrays.
            values: the arrays.
            **how: the other arguments of the collective, for frameworks whose programs hold them.
        """

        def run(sources: _Values) -> _Values:
            with RequestBuilder(kind, self._name, process_set=self._process_set, arrays=self._arrays) as prepare:
                request = prepared(prepare, sources)
            result = request.carry_out()
            return result if isinstance(result, list) else [result]

        return self._arrays.differentiable(run, lambda: partial(adjoint, self._back()), values)

    def _back(self) -> Differentiable:
        """Return the collectives of the backward pass, under a name of their own: passes may come in any order."""
        if self._backwards:
            name = f"{self._name}'"
        elif self._name is not None:
            name = f"gradient of {self._name}"
        else:
            name = f"gradient {next(_numbers.setdefault(self._process_set.engine, itertools.count(1)))}"
        return type(self)(self._arrays, name, self._process_set, backwards=True)

    def _times(self, value: Any, factor: float) -> Any:
        """Return an array times a number, which is not rounded to 16 bits before."""
        return value * factor

    def _joined(self, parts: _Values, shapes: Sequence[Any]) -> _Values:
        """Return arrays of these shapes of which each rank has a part, as of `reducescatter`."""
        return self.allgather(parts)

    def _first_rows(self, rows: Sequence[int]) -> list[int]:
        """Return where the rows that this rank has contributed to each array begin. Collective."""

        def run(communicator: Communicator) -> list[int]:
            everyone = communicator.allgather(np.array([rows], np.int64))
            return [int(start) for start in everyone[: communicator.rank].sum(0)]

        with RequestBuilder("allgather", f"{self._name} rows", self._process_set) as prepare:
            request = prepare.call(f"rows of {len(rows)} arrays", run)
        starts: list[int] = request.carry_out()
        return starts

    @property
    def _conventions(self) -> Conventions:
        return self._process_set.communicator.config.conventions


def _require_linear(op: Op, collective: str) -> None:
    if op not in (AVERAGE, SUM, "average", "sum", ReproducibleSum):
        word = op.value if isinstance(op, ReduceOp) else op
        raise ConfigError(f"no gradient flows through {collective} with op {word}; use average or sum, or detach")
