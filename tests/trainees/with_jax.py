"""The binding of JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from trainees.toy import RATE

import ringreduce.jax as rj


class Jax:
    """See `suites.trainees.Trainee`; weights lie in NumPy arrays, as the suite overwrites them.

    Args:
        values: weights by name.
        compiled: whether steps are.
        momentum: of the steps.
        passes, bucket_nbytes: without meaning here.
        **options: of the transformation.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        compiled: bool = True,
        momentum: float = 0.0,
        passes: int = 1,
        bucket_nbytes: int | None = None,
        **options: Any,
    ) -> None:
        self.values = {name: value.copy() for name, value in values.items()}
        rj.broadcast_parameters(self.values)  # which compares names and shapes
        self.tx = rj.DistributedGradientTransformation(optax.sgd(RATE, momentum), **options)
        self.state = self.tx.init(self.tree())
        self.compiled = compiled
        self.programs: dict[Any, Any] = {}
        self.no_sync = nullcontext
        self.zero_grad()

    def tree(self) -> Any:
        return jax.tree.map(jnp.asarray, self.values)

    def weights(self) -> list[Any]:
        return list(self.values.values())

    def zero_grad(self) -> None:
        self.gradients = jax.tree.map(jnp.zeros_like, self.values)

    def give(self, gradients: Mapping[str, Any]) -> None:
        self.gradients = {name: old + gradients.get(name, 0) for name, old in self.gradients.items()}

    def step(self, samples: Any = None) -> None:
        """A program takes a whole number of samples as an argument, and anything else as it is."""
        if isinstance(samples, int):
            update = self.program("counted", self.tx.update)
            weighted = {"samples": samples}
        else:
            update = self.program(samples, partial(self.tx.update, samples=samples))
            weighted = {}
        updates, self.state = raising(lambda: update(self.gradients, self.state, self.tree(), **weighted))
        self.set(jax.tree.map(jnp.add, self.tree(), updates))

    def program(self, key: Any, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return what updates, compiled once for each key."""
        return self.programs.setdefault(key, jax.jit(update)) if self.compiled else update

    def synchronize(self) -> None:
        params, self.state = self.tx.synchronize(self.tree(), self.state)
        self.set(params)

    def set(self, params: Any) -> None:
        for name, value in self.values.items():
            value[...] = np.asarray(params[name])

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


class LocalJax(Jax):
    """See `suites.local_training.LocalTrainee`; parameters are a list, as a dict would be sorted."""

    def __init__(
        self, values: Mapping[str, Any], *, compiled: bool = True, momentum: float = 0.0, **options: Any
    ) -> None:
        self.local = rj.DiLoCo([jnp.asarray(each) for each in values.values()], **options)
        super().__init__(values, compiled=compiled, momentum=momentum, process_set=self.local.process_set)
        self.state_dict = self.local.state_dict
        self.load_state_dict = self.local.load_state_dict

    def change(self, method: Callable[[Any], Any]) -> None:
        self.set(dict(zip(self.values, method([jnp.asarray(each) for each in self.values.values()]), strict=True)))

    def step(self) -> None:
        super().step()
        self.change(self.local.step)

    def synchronize(self) -> None:
        self.change(self.local.synchronize)

    def rejoin(self) -> None:
        self.change(self.local.rejoin)


def raising(function: Callable[[], Any]) -> Any:
    """Call a function and wait for what it computes; if that fails, raise the error of ringreduce."""
    try:
        return jax.block_until_ready(function())
    except Exception as error:
        raise rj.error_of(error) from None
