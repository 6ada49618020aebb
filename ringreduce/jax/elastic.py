"""Elastic training with JAX: a state of pytrees, and the loop that goes on from it when ranks die or come."""

from __future__ import annotations

from typing import Any

import jax

from ringreduce.elastic import HostsUpdatedInterrupt, NumpyState, ObjectState, State, run, run_fn
from ringreduce.elastic.handlers import StateHandler
from ringreduce.jax.functions import broadcast_parameters
from ringreduce.training.calls.objects import broadcast_object

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run", "run_fn"]


class JaxState(NumpyState):
    """Pytrees of arrays, and other values, that training goes on from.

    A copy has memory of its own, so steps may donate what the state holds. On disk (`keep_on_disk`) is what rank 0 has;
    what ranks have of their own (`ringreduce.jax.RankState`) begins anew in the next job.

    Args:
        **kwargs: the attributes and their first values: pytrees, or anything that can be copied and pickled.
    """

    def _find_handler(self, value: Any) -> StateHandler | None:
        return None if _is_tree_of_arrays(value) else super()._find_handler(value)

    def _sync_values(self) -> None:
        values = {name: getattr(self, name) for name in (*self._names, "_commits")}
        trees = {name: value for name, value in values.items() if _is_tree_of_arrays(value)}
        others = broadcast_object({name: value for name, value in values.items() if name not in trees})
        for name, value in {**others, **broadcast_parameters(trees)}.items():
            setattr(self, name, value)


def _is_tree_of_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
