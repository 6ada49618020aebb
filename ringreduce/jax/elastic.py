"""Elastic training with JAX: a state of pytrees, and the loop that goes on from it when ranks die or come."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax

from ringreduce import elastic
from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState, State
from ringreduce.jax.ffi import error_of
from ringreduce.jax.functions import broadcast_parameters
from ringreduce.runtime import rank
from ringreduce.training.objects import broadcast_object

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run", "run_fn"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Do what `ringreduce.elastic.run` does, also for errors that JAX has raised in place of ours."""
    return elastic.run(_raising_ours(func))


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Do what `ringreduce.elastic.run_fn` does, likewise."""
    return elastic.run_fn(_raising_ours(func), reset)


def _raising_ours(func: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(func)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except Exception as error:
            original = error_of(error)
            if original is error:
                raise
            raise original from error

    return called


class JaxState(ObjectState):
    """Pytrees of arrays, and other values, that training goes on from.

    A copy has memory of its own, so steps may donate what the state holds.

    Args:
        **kwargs: the attributes and their first values: pytrees, or anything that can be copied and pickled.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(broadcast_object, rank, **kwargs)

    def _sync_values(self) -> None:
        trees = {name: getattr(self, name) for name in self._names if _is_tree_of_arrays(getattr(self, name))}
        others = {name: getattr(self, name) for name in (*self._names, "_commits") if name not in trees}
        for name, value in {**broadcast_object(others), **broadcast_parameters(trees)}.items():
            setattr(self, name, value)


def _is_tree_of_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(each, jax.Array) for each in leaves)
