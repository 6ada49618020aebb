"""`DiLoCo` and `LocalSGD`: replicas step by themselves, and exchange weights once per period; outside of `jit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ringreduce.common.errors import ConfigError
from ringreduce.jax.calls import is_traced
from ringreduce.jax.functions import like
from ringreduce.jax.ops import is_key
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.optimizers.replicas import Replicas, checking, is_averaged
from ringreduce.training.options.local_options import LOCAL_OPTIONS, LocalArguments, averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

_NUMBERS = jax.Array, np.ndarray, np.generic, float, complex


@LOCAL_OPTIONS.taken()
class DiLoCo:
    """Lets replicas step by themselves, and exchange weights once per period.

        params = rj.broadcast_parameters(params)
        local = rj.DiLoCo(params, period=20)
        optimizer = rj.DistributedGradientTransformation(optax.adam(1e-3), process_set=local.process_set)
        ...
        params, state = step(params, state, batch)  # compiled
        params = local.step(params)
        ...
        params = local.synchronize(params)

    A replica is a node, or one rank, or the ranks of a process set; its ranks reduce their gradients in every step. In
    every ``period``-th step all ranks average how far their weights have moved, and make an outer step with Nesterov's
    momentum; `ringreduce.training.optimizers.local` has the formulas and their sources. All ranks must make equally
    many steps. With ``quorum`` an outer step does not wait for all; `ringreduce.training.optimizers.quorum` says what
    is otherwise then.

    Floats and complex numbers of the tree are exchanged through the host, floats of 16 bits in float32; other leaves
    stay each rank's own. To average other trees, such as batch statistics or the state of an optimizer, give them a
    `LocalSGD` of their own: ``local_stats = rj.LocalSGD(stats, period=20)``.

    On each rank this takes 12 bytes of host memory for each element in float32, 16 during a delay, 8 without momentum.

    Args:
        params: a pytree, with equal values on all ranks (`broadcast_parameters`), which the first step compares.
        **options: as for `LocalArguments`.
        compression: the wire format of differences between nodes: ``"fp16"``, ``"bf16"``, ``"fp8"``, ``"int8"`` or
            ``"int4"``. Its rounding errors are added to the next exchange.

    All arguments must agree on all ranks. To begin with synchronous steps, make them before this object.

    Attributes:
        process_set: the ranks of this replica, for `DistributedGradientTransformation`.

    Raises:
        ConfigError: an argument is wrong; the other ranks get a `MismatchError`.
        MismatchError: the ranks have different trees or arguments.
        UnsupportedBufferError: a leaf has floats that no collective takes.
    """

    def __init__(self, params: Any, *, compression: str | None = None, **options: Unpack[LocalArguments]) -> None:
        with checking():
            paths, self._structure = jax.tree_util.tree_flatten_with_path(params)
            leaves = [leaf for _, leaf in paths]
            _require_values(leaves)
            self._numbers = [number for number, leaf in enumerate(leaves) if _is_exchanged(leaf)]
            self._leaves = [leaves[number] for number in self._numbers]
            self._shapes = list(map(np.shape, self._leaves))
            self._dtypes = list(map(_dtype, self._leaves))
            specs = list(map(ArraySpec, self._shapes, self._dtypes))
            names = [jax.tree_util.keystr(paths[number][0]) for number in self._numbers]
        self._replicas = Replicas(compression=compression, **options)
        self._replicas.bind(list(zip(names, specs, strict=True)), self._read, self._write)
        self._replicas.start()
        self._leaves = []
        self.process_set = self._replicas.process_set

    @property
    def outer_steps(self) -> int:
        """How many outer steps the weights have that this replica goes on from. Local."""
        return self._replicas.outer_steps

    def step(self, params: Any) -> Any:
        """Begin and end the exchanges that are due; to be called after each step. Collective then, and in the first.

        Args:
            params: the parameters after the step, a tree of the same structure and shapes.

        Returns:
            The parameters for the next step, of the same dtypes, on the same devices; the argument itself if no
            exchange ends. It waits for the device only if an exchange begins or ends.

        Raises:
            ConfigError: it is called in `jit`; structure, shapes or dtypes of the tree differ; or a rank has joined.
            MismatchError: the ranks began with different weights, or have loaded states of different runs or steps.
        """
        return self._changed(params, self._replicas.before_step, self._replicas.after_step)

    def synchronize(self, params: Any) -> Any:
        """Return the average over all ranks. Collective.

        Call it before an evaluation and at the end of training. It ends exchanges that are under way, and does not
        change the outer momentum.

        Args:
            params: as for `step`.
        """
        return self._changed(params, self._replicas.synchronize)

    def rejoin(self, params: Any) -> Any:
        """Go on in a new world, after ``shutdown()`` and ``init()``; in the same world, do nothing. Collective.

        Call it first in the function that `elastic.run` calls: its ranks average their weights.

        Args:
            params: as for `step`.
        """
        return self._changed(params, self._replicas.rejoin)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from in mid-period, besides the parameters: numbers and NumPy arrays. Local.

        Each rank has its own: save it and the parameters on every rank.
        """
        return self._replicas.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, on all ranks. Local.

        Rounding errors of compression are loaded only by the rank that saved them, among as many ranks.

        Raises:
            ConfigError: the state is of other parameters or other options; nothing is loaded.
        """
        self._replicas.load_state_dict(state)

    def _changed(self, params: Any, *calls: Callable[[], None]) -> Any:
        """Return a tree with the values that it has after some calls."""
        leaves, structure = jax.tree_util.tree_flatten(params)
        _require_values(leaves)
        given = [leaves[number] for number in self._numbers] if structure == self._structure else []
        own_dtypes = _compiled(self._dtypes)
        their_dtypes = _compiled(list(map(_dtype, given)))
        if structure != self._structure or list(map(np.shape, given)) != self._shapes or their_dtypes != own_dtypes:
            raise ConfigError(
                "these are not the parameters that DiLoCo was made with: their structure, shapes or dtypes differ"
            )
        self._leaves = list(given)
        try:
            for call in calls:
                call()
            made = self._leaves
        finally:
            self._leaves = []
        if all(new is old for new, old in zip(made, given, strict=True)):
            return params
        for number, new in zip(self._numbers, made, strict=True):
            leaves[number] = new
        return jax.tree_util.tree_unflatten(structure, leaves)

    def _read(self, place: slice) -> Sequence[Any]:
        arrays = zip(jax.device_get(self._leaves[place]), self._dtypes[place], strict=True)
        return [np.asarray(array, dtype) for array, dtype in arrays]

    def _write(self, place: slice, arrays: Sequence[Any]) -> None:
        leaves = self._leaves[place]
        self._leaves[place] = [like(new.astype(_dtype(leaf)), leaf) for new, leaf in zip(arrays, leaves, strict=True)]


def LocalSGD(params: Any, **options: Any) -> DiLoCo:  # noqa: N802
    """Return a `DiLoCo` with other defaults: replicas average their weights once per period. Collective.

    Args:
        params: as for `DiLoCo`.
        options: the others of `DiLoCo`; ``outer_lr`` is 1 and ``outer_momentum`` 0 unless they are given.

    Raises:
        as `DiLoCo`.
    """
    return DiLoCo(params, **averaging(options))


def _dtype(leaf: Any) -> np.dtype[Any]:
    return np.dtype(leaf.dtype if hasattr(leaf, "dtype") else type(leaf))


def _compiled(dtypes: Sequence[np.dtype[Any]]) -> list[Any]:
    """Return the dtypes that arrays have in compiled programs: numbers of Python and float64 may get another."""
    return list(map(jax.dtypes.canonicalize_dtype, dtypes))


def _is_exchanged(leaf: Any) -> bool:
    return isinstance(leaf, _NUMBERS) and not is_key(leaf) and is_averaged(getattr(leaf, "dtype", type(leaf)))


def _require_values(leaves: Sequence[Any]) -> None:
    if is_traced(leaves):
        raise ConfigError(
            "DiLoCo exchanges values: call it outside of jit, with the parameters that the compiled step returns"
        )
