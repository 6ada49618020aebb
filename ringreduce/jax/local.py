"""`DiLoCo` and `LocalSGD`: replicas step by themselves, and exchange weights now and then; outside of `jit`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from ringreduce.common.errors import ConfigError
from ringreduce.jax.functions import is_key, like
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.training.host import ArraySpec
from ringreduce.training.replicas import Replicas, checking, is_averaged

__all__ = ["DiLoCo", "LocalSGD"]

_NUMBERS = jax.Array, np.ndarray, np.generic, float, complex


class DiLoCo:
    """Lets replicas step by themselves, and exchange what they have learnt once per period.

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
    momentum; `ringreduce.training.local` has the arithmetic and its sources. All ranks make equally many steps.

    Floats and complex numbers of the tree are exchanged, those of 16 bits in float32, through the host; other leaves
    stay each rank's own. Means of other things, as the statistics of batches or the state of an optimizer, are those of
    a `LocalSGD` of their own: ``stats = rj.LocalSGD(stats, period=20)``.

    On each rank this takes 12 bytes of host memory for each element in float32, 16 during a delay, 8 without momentum.

    Args:
        params: a pytree, with equal values on all ranks (`broadcast_parameters`), which the first step compares.
        period: so many steps of a replica come between two exchanges of a parameter.
        outer_lr: of the outer step; 1 is the average, where there is no momentum.
        outer_momentum: of the outer steps; less than 1.
        fragments: cut the parameters into so many parts of about equal size, each of whole arrays, and exchange them
            one after the other, at equal distances within the period.
        delay: make so many more steps before an exchange has to be complete; less than the period. What a replica
            learns meanwhile is kept.
        compression: the wire format of differences between nodes: ``"fp16"``, ``"bf16"``, ``"fp8"``, ``"int8"`` or
            ``"int4"``. What rounding to it loses is sent in the next exchange.
        replica: ``"node"``, ``"rank"`` or process sets, which together have each rank of the world once.

    All arguments must agree on all ranks. For synchronous steps first, make them before this object.

    Attributes:
        process_set: the ranks of this replica, for what reduces gradients.

    Raises:
        ConfigError: an argument is wrong. The other ranks get a `MismatchError` then.
        MismatchError: the ranks have different trees or arguments.
        UnsupportedBufferError: a leaf has floats that no collective takes.
    """

    def __init__(
        self,
        params: Any,
        *,
        period: int = 100,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        delay: int = 0,
        compression: str | None = None,
        replica: Literal["node", "rank"] | Sequence[ProcessSet] = "node",
    ) -> None:
        with checking():
            paths, self._structure = jax.tree_util.tree_flatten_with_path(params)
            leaves = [leaf for _, leaf in paths]
            _require_values(leaves)
            self._numbers = [number for number, leaf in enumerate(leaves) if _is_exchanged(leaf)]
            self._leaves = [leaves[number] for number in self._numbers]
            self._shapes = list(map(np.shape, self._leaves))
            specs = [
                ArraySpec(np.shape(each), each.dtype if hasattr(each, "dtype") else type(each)) for each in self._leaves
            ]
            names = [jax.tree_util.keystr(paths[number][0]) for number in self._numbers]
        self._replicas = Replicas(period, outer_lr, outer_momentum, fragments, delay, compression, replica)
        self._replicas.bind(list(zip(names, specs, strict=True)), self._read, self._write)
        self._replicas.start()
        self._leaves = []
        self.process_set = self._replicas.process_set

    def step(self, params: Any) -> Any:
        """Begin or end the exchanges that are due after a step of the replica. Collective where there are some.

        Args:
            params: what the step has made of the parameters, as a tree of the same structure and shapes.

        Returns:
            The parameters to go on with, of the same dtypes, on the same devices; the same object where no exchange
            ends. The device is waited for only where an exchange begins or ends.

        Raises:
            ConfigError: it is called in `jit`; the tree is another one; or a rank has joined.
            MismatchError: the ranks began with different weights, or go on from states that do not belong together.
        """
        return self._changed(params, self._replicas.before_step, self._replicas.after_step)

    def synchronize(self, params: Any) -> Any:
        """Return the average over all ranks. Collective.

        For an evaluation and the end of a training. Ends what is under way, and leaves the outer momentum as it is.

        Args:
            params: as for `step`.
        """
        return self._changed(params, self._replicas.synchronize)

    def rejoin(self, params: Any) -> Any:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        Call it first in what `elastic.run` runs: the ranks that go on average what each has learnt.

        Args:
            params: as for `step`.
        """
        return self._changed(params, self._replicas.rejoin)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed, besides the parameters, to go on in mid-period: numbers and NumPy arrays. Local.

        It is each rank's own, as the parameters are: save both on every rank.
        """
        return self._replicas.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, on all ranks.

        Rounding errors of compression that another rank, or one among another number of ranks, has kept are left out.

        Raises:
            ConfigError: it is of other parameters or other options. Nothing was loaded then.
        """
        self._replicas.load_state_dict(state)

    def _changed(self, params: Any, *calls: Callable[[], None]) -> Any:
        """Return the tree that some calls make of one."""
        leaves, structure = jax.tree_util.tree_flatten(params)
        _require_values(leaves)
        given = [leaves[number] for number in self._numbers] if structure == self._structure else []
        if structure != self._structure or list(map(np.shape, given)) != self._shapes:
            raise ConfigError("these are other parameters than DiLoCo was made with: their structure or shapes differ")
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
        return [np.asarray(each) for each in jax.device_get(self._leaves[place])]

    def _write(self, place: slice, arrays: Sequence[Any]) -> None:
        self._leaves[place] = list(map(like, arrays, self._leaves[place]))


def LocalSGD(params: Any, **options: Any) -> DiLoCo:  # noqa: N802
    """Return a `DiLoCo` with other defaults: replicas average their weights once per period. Collective.

    Args:
        params: as for `DiLoCo`.
        options: the others of `DiLoCo`; ``outer_lr`` is 1 and ``outer_momentum`` 0 unless they are given.

    Raises:
        as `DiLoCo`.
    """
    return DiLoCo(params, **{"outer_lr": 1.0, "outer_momentum": 0.0, **options})


def _is_exchanged(leaf: Any) -> bool:
    return isinstance(leaf, _NUMBERS) and not is_key(leaf) and is_averaged(getattr(leaf, "dtype", type(leaf)))


def _require_values(leaves: Sequence[Any]) -> None:
    if any(isinstance(each, jax.core.Tracer) for each in leaves):
        raise ConfigError("DiLoCo exchanges values: call it outside of jit, with what the compiled step has returned")
