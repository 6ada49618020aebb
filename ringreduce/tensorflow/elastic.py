"""Elastic training with TensorFlow: a state of variables, and the loop that goes on from it when ranks die or come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from ringreduce.elastic.handlers import HandlingState, StateHandler
from ringreduce.tensorflow.functions import broadcast_variables

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State", "TensorFlowState", "run", "run_fn"]


class _VariablesHandler(StateHandler):
    """Keeps a list of variables.

    Args:
        value: the list.
        session: that holds them; None: they are those of eager programs.
    """

    returns_new_state = True

    def __init__(self, value: list[Any], session: Any) -> None:
        super().__init__(value)
        self._session = session
        self._broadcast = None if session is None else broadcast_variables(value, 0)

    def _read(self) -> Any:
        return [each.numpy() for each in self.value] if self._session is None else self._session.run(self.value)

    def _load(self, state: Any) -> None:
        for variable, array in zip(self.value, state, strict=True):
            if self._session is None:
                variable.assign(array)
            else:
                variable.load(array, self._session)

    def sync(self) -> None:
        if self._session is None:
            broadcast_variables(self.value, 0)
        else:
            self._session.run(self._broadcast)


class TensorFlowState(HandlingState):
    """Variables, and other values (``epoch=0, batch=0``), that training goes on from.

    Args:
        variables: of TensorFlow or Keras, the same on all ranks; None: all of a graph of TensorFlow 1.
        session: that holds the variables of such a graph; None: the default one. Eager programs have none.
        **kwargs: other values, as attributes: anything that can be copied and pickled.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._session = session or tf.compat.v1.get_default_session()
        found = tf.compat.v1.global_variables() if variables is None else variables
        super().__init__(variables=list(found), **kwargs)

    @property
    def session(self) -> Any:
        """The session that holds the variables; None: there is none."""
        return self._session

    def _find_handler(self, value: Any) -> StateHandler | None:
        if isinstance(value, list) and value and all(hasattr(each, "assign") for each in value):
            return _VariablesHandler(value, self._session)
        return super()._find_handler(value)
