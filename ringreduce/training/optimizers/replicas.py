"""Replicas that step by themselves, for frameworks whose parameters are read and written as NumPy arrays.

The formulas are those of `ringreduce.training.optimizers.local`. A binding makes a `Replicas`, reduces gradients over
its `process_set`, gives `bind` functions that read and write its arrays, and calls `before_step` and `after_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DType
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set, init
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.binding.host import HOST, ArraySpec
from ringreduce.training.calls.parameters import require_same_arrays
from ringreduce.training.compression import is_wire_format
from ringreduce.training.compression.tensors import wire_format_of
from ringreduce.training.optimizers.local import Average, LocalTraining
from ringreduce.training.optimizers.quorum import local_training
from ringreduce.training.options.local_options import LocalOptions

_Array = npt.NDArray[Any]

#: Returns copies or views of the arrays at some places of a list.
Read = Callable[[slice], Sequence[_Array]]
#: Takes new arrays for these places, of the same shapes and dtypes; the binding may keep them.
Write = Callable[[slice, Sequence[_Array]], None]


class HostLeaves:
    """NumPy arrays as one flat array; see `ringreduce.training.optimizers.local.Leaves`. Complex numbers are pairs of
    reals.

    Args:
        specs: shapes and dtypes of the arrays, which hold floats or complex numbers.
        read: returns the arrays.
        write: takes new ones.
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        read: Callable[[], Sequence[_Array]],
        write: Callable[[Sequence[_Array]], None],
    ) -> None:
        self._specs = specs
        self._read = read
        self._write = write
        self._reals = [np.empty(0, each.dtype).real.dtype for each in specs]
        self._ends = np.cumsum([prod(each.shape) * (1 + (each.dtype.kind == "c")) for each in specs], dtype=int)

    def find(self) -> tuple[int, str]:
        count = int(self._ends[-1]) if len(self._ends) else 0
        return count, "float64" if np.dtype(np.float64) in self._reals else "float32"

    def read(self, flat: _Array) -> None:
        for array, place, real in zip(self._read(), self._places(flat), self._reals, strict=True):
            place[:] = np.ascontiguousarray(array).reshape(-1).view(real)

    def write(self, flat: _Array) -> None:
        known = zip(self._specs, self._places(flat), self._reals, strict=True)
        self._write([place.astype(real).view(spec.dtype).reshape(spec.shape) for spec, place, real in known])

    def _places(self, flat: _Array) -> list[_Array]:
        return np.split(flat, self._ends[:-1]) if len(self._ends) else []


def is_averaged(dtype: Any) -> bool:
    """Return whether arrays of a dtype are exchanged: floats and complex numbers are, integers stay each rank's own.

    Raises:
        UnsupportedBufferError: no collective takes floats of this dtype.
    """
    is_float = np.dtype(dtype).name.startswith(("float", "bfloat", "complex"))
    return is_float and DType.of(dtype) is not None


def checking() -> CheckingArguments:
    """Return a context in which arguments are checked: if a check fails, all ranks raise an error. Collective."""
    return CheckingArguments(global_process_set.communicator, "DiLoCo", "DiLoCo")


class Replicas:
    """The ranks that step together, and their exchanges with the others. Construction is collective.

    Args:
        **options: as for `LocalOptions`, but ``compression``: that of a binding's ``Compression``, or the name of one.

    Attributes:
        process_set: the ranks of this replica, which reduce their gradients in every step. It stays the same object in
            a new world, where its ranks may be others.

    Raises:
        ConfigError: an argument is wrong.
        MismatchError: one is wrong on another rank.
    """

    def __init__(self, *, compression: Any, **options: Any) -> None:
        ranks = global_process_set.communicator
        with checking():
            wire = compression if is_wire_format(compression) else wire_format_of(compression)
            self._options = LocalOptions(compression=wire, ranks=ranks.size, **options)
        require_same_arrays(HOST, ranks, caller="DiLoCo", named=[], options=self._options.in_words())
        self.process_set = ProcessSet([ranks.rank])
        self._bound: LocalTraining | None = None
        self._register()

    def _register(self) -> None:
        """Register the ranks of each replica in this world. Collective."""
        ranks = global_process_set.communicator
        self._engine = global_process_set.engine
        sets = [ProcessSet(each) for each in self._options.replicas(ranks.topology.nodes)]
        init(process_sets=sets)  # registers those that are not registered yet
        next(each for each in sets if each.included()).share(self.process_set)

    def bind(
        self,
        parameters: Sequence[tuple[str, ArraySpec]],
        read: Read,
        write: Write,
        buffers: Sequence[tuple[str, ArraySpec]] = (),
    ) -> None:
        """Begin to exchange some arrays, of dtypes that `is_averaged` accepts. Collective.

        Args:
            parameters: names, shapes and dtypes of the arrays of outer steps; equal on all ranks.
            read, write: read and write the arrays at some places of one list: the parameters, then the buffers.
            buffers: the same of arrays that are averaged without outer steps.

        Raises:
            ConfigError: there are more fragments than parameters.
            MismatchError: the ranks have different arrays or options.
        """
        ranks = global_process_set.communicator
        named = [*parameters, *buffers]
        specs = [spec for _, spec in named]
        with checking():
            places = self._options.cut([prod(each.shape) for each in specs[: len(parameters)]])
        require_same_arrays(HOST, ranks, caller="DiLoCo", named=named, options=self._options.in_words())

        def leaves(place: slice) -> HostLeaves:
            return HostLeaves(specs[place], partial(read, place), partial(write, place))

        others = [Average(leaves(slice(len(parameters), len(named))), "buffers")] if buffers else []
        over = f"{len(parameters)} arrays, {parameters[0][0]} to {parameters[-1][0]}" if parameters else "no arrays"
        fragments = list(map(leaves, places))
        self._bound = local_training(f"DiLoCo over {over}", self._options, parameters=fragments, others=others)

    @property
    def _local(self) -> LocalTraining:
        if self._bound is None:
            raise ConfigError("DiLoCo does not know its weights yet: call this once training has begun")
        return self._bound

    @property
    def outer_steps(self) -> int:
        """How many outer steps the weights have that this replica goes on from."""
        return self._local.outer_steps

    def start(self) -> None:
        """See `LocalTraining.start`."""
        self._local.start()

    def before_step(self) -> None:
        """See `LocalTraining.before_step`; in a new world, rejoin first."""
        self.rejoin()
        self._local.before_step()

    def after_step(self) -> None:
        """See `LocalTraining.after_step`."""
        self._local.after_step()

    def synchronize(self) -> None:
        """Make the values of all ranks their average. Collective."""
        self.rejoin()
        self._local.synchronize()

    def rejoin(self) -> None:
        """Go on in a new world, after ``shutdown()`` and ``init()``; in the same world, do nothing. Collective."""
        if global_process_set.engine is not self._engine:
            self._register()
            if self._bound is not None:
                self._bound.rejoin()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from in mid-period, besides the parameters: numbers and NumPy arrays. Local.

        Each rank has its own: save it and the parameters on every rank.
        """
        return self._local.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, on all ranks. Local.

        Rounding errors of compression are loaded only by the rank that saved them, among as many ranks.

        Raises:
            ConfigError: the state is of other parameters or other options; nothing is loaded.
        """
        self._local.require_fit(state)
        self._local.load_state_dict(state)
