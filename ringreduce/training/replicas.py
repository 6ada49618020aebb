"""Replicas that step by themselves, for frameworks whose parameters are read and written as NumPy arrays.

The arithmetic is that of `ringreduce.training.local`. A binding makes a `Replicas`, gives its `process_set` to what
reduces gradients, says by `bind` how its arrays are read and written, and calls `before_step` and `after_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DType
from ringreduce.buffers.codecs import CODECS
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set, init
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.compression import wire_format
from ringreduce.training.compression.tensors import NoneCompressor
from ringreduce.training.host import HOST, ArraySpec
from ringreduce.training.local import LocalTraining
from ringreduce.training.local_options import LocalOptions, cut
from ringreduce.training.parameters import require_same_arrays

_Array = npt.NDArray[Any]

#: Returns copies or views of the arrays at some places of a list.
Read = Callable[[slice], Sequence[_Array]]
#: Takes new arrays for these places, of the same shapes and dtypes, which are the binding's from then on.
Write = Callable[[slice, Sequence[_Array]], None]


class HostLeaves:
    """NumPy arrays as one flat array; see `ringreduce.training.local.Leaves`. Complex numbers are pairs of reals.

    Args:
        specs: their shapes and dtypes, of floats and complex numbers.
        read: returns them.
        write: takes others in their place.
    """

    def __init__(
        self,
        specs: Sequence[ArraySpec],
        read: Callable[[], Sequence[_Array]],
        write: Callable[[Sequence[_Array]], None],
    ) -> None:
        self._specs, self._read, self._write = specs, read, write
        self._reals = [_real(each.dtype) for each in specs]
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


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype


def is_averaged(dtype: Any) -> bool:
    """Return whether arrays of a dtype are exchanged: floats and complex numbers are, integers stay each rank's own.

    Raises:
        UnsupportedBufferError: no collective takes them.
    """
    is_float = np.dtype(dtype).name.startswith(("float", "bfloat", "complex"))
    return is_float and DType.of(dtype) is not None


def checking() -> CheckingArguments:
    """Return a context in which arguments are checked: if a check fails, all ranks raise an error. Collective."""
    return CheckingArguments(global_process_set.communicator, "DiLoCo", "DiLoCo")


class Replicas:
    """The ranks that step together, and what they exchange with the others. Construction is collective.

    Args:
        period, outer_lr, outer_momentum, fragments, delay: as for `LocalOptions`.
        compression: the name of a wire format, or one of a binding's ``Compression``; None: none.
        replica, average: as for `LocalOptions`.

    Attributes:
        process_set: the ranks of this replica, which reduce their gradients in every step. It stays this object, also
            if the ranks are others in a new world.

    Raises:
        ConfigError: an argument is wrong.
        MismatchError: one is wrong on another rank.
    """

    def __init__(
        self,
        period: Any,
        outer_lr: Any,
        outer_momentum: Any,
        fragments: Any,
        delay: Any,
        compression: Any,
        replica: Any,
        average: Any = ("parameters",),
    ) -> None:
        ranks = global_process_set.communicator
        with checking():
            course = period, outer_lr, outer_momentum, 0, 1, delay  # how many fragments can be is not known yet
            self._options = LocalOptions(*course, _wire(compression), replica, average, 1, ranks.size)
        self._fragments = fragments
        require_same_arrays(HOST, ranks, "DiLoCo", [], options=self._options.in_words())
        self.process_set = ProcessSet([ranks.rank])
        self._bound: LocalTraining | None = None
        self._register()

    def _register(self) -> None:
        """Register the ranks of each replica, in the world there is now. Collective."""
        ranks, self._engine = global_process_set.communicator, global_process_set.engine
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
        """Begin to exchange some arrays; all those that `is_averaged` are taken. Collective.

        Args:
            parameters: their names, shapes and dtypes; equal on all ranks.
            read, write: how to get at them; places are numbers of parameters, and of buffers behind them.
            buffers: what is averaged as it is.

        Raises:
            ConfigError: there are more fragments than parameters.
            MismatchError: the ranks have different arrays or options.
        """
        ranks = global_process_set.communicator
        with checking():
            options = replace(self._options, fragments=self._fragments, parameters=len(parameters), ranks=ranks.size)
        named = [*parameters, *buffers]
        require_same_arrays(HOST, ranks, "DiLoCo", named, options=options.in_words())
        specs = [spec for _, spec in named]

        def leaves(place: slice) -> HostLeaves:
            return HostLeaves(specs[place], partial(read, place), partial(write, place))

        places = cut([prod(each.shape) for each in specs[: len(parameters)]], options.fragments)
        others = {"buffers": leaves(slice(len(parameters), len(named)))} if buffers else {}
        over = f"{len(parameters)} arrays, {parameters[0][0]} to {parameters[-1][0]}" if parameters else "no arrays"
        self._bound = LocalTraining(f"DiLoCo over {over}", options, list(map(leaves, places)), others)

    @property
    def _local(self) -> LocalTraining:
        if self._bound is None:
            raise ConfigError("it is not known yet what DiLoCo exchanges: call this once the training has begun")
        return self._bound

    def start(self) -> None:
        """As of `LocalTraining`."""
        self._local.start()

    def before_step(self) -> None:
        """As of `LocalTraining`, in the world there is now."""
        self.rejoin()
        self._local.before_step()

    def after_step(self) -> None:
        """As of `LocalTraining`."""
        self._local.after_step()

    def synchronize(self) -> None:
        """Make the values of all ranks their average. Collective."""
        self.rejoin()
        self._local.synchronize()

    def rejoin(self) -> None:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective."""
        if global_process_set.engine is not self._engine:
            self._register()
            if self._bound is not None:
                self._bound.rejoin()

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed, besides the parameters, to go on in mid-period: numbers and NumPy arrays. Local.

        It is each rank's own, as the parameters are: save both on every rank.
        """
        return self._local.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on all ranks. Local.

        Rounding errors of compression that another rank, or one among another number of ranks, has kept are left out.

        Raises:
            ConfigError: it is of other parameters or other options. Nothing was loaded then.
        """
        self._local.require_fit(state)
        self._local.load_state_dict(state)


def _wire(compression: Any) -> Any:
    """Return the wire format that a compression is or names; None for none. Other things stay what they are."""
    if compression is None or getattr(compression, "compress", None) is NoneCompressor.compress:
        return compression if getattr(compression, "wire", None) else None
    return wire_format(compression) if isinstance(compression, str) and compression in CODECS else compression
