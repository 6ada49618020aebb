"""Elastic training with TensorFlow: a state of variables, and the loop that goes on from it when ranks die or come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from ringreduce.runtime import rank
from ringreduce.tensorflow.functions import broadcast_variables
from ringreduce.training.objects import broadcast_object

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowState", "run", "run_fn"]


class TensorFlowState(ObjectState):
    """Variables, and other values (``epoch=0, batch=0``), that training goes on from.

    Args:
        variables: the same on all ranks; None: all of a graph of TensorFlow 1.
        session: that holds the variables of such a graph; None: the default one. Eager programs have none.
        **kwargs: other values, as attributes: anything that can be copied and pickled.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session or tf.compat.v1.get_default_session()
        self._broadcast = None if self.session is None else broadcast_variables(self.variables, 0)
        super().__init__(broadcast_object, rank, **kwargs)

    def _copied_values(self) -> dict[str, Any]:
        tensors = [tf.convert_to_tensor(each) for each in self.variables] if self.session is None else self.variables
        arrays = [each.numpy() for each in tensors] if self.session is None else self.session.run(tensors)
        return {**super()._copied_values(), "variables": arrays}

    def _take_values(self, copied: dict[str, Any]) -> None:
        super()._take_values({name: value for name, value in copied.items() if name != "variables"})
        for variable, array in zip(self.variables, copied["variables"], strict=True):
            if self.session is None:
                variable.assign(array)
            else:
                variable.load(array, self.session)

    def _sync_values(self) -> None:
        super()._sync_values()
        if self.session is None:
            broadcast_variables(self.variables, 0)
        else:
            self.session.run(self._broadcast)
