"""Elastic training with TensorFlow: a state of variables, and the loop that goes on from it when ranks die or come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringreduce.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from ringreduce.elastic.handlers import HandlingState, StateHandler
from ringreduce.tensorflow.functions import broadcast_variables
from ringreduce.training.optimizers.applying import built_optimizer, sums_of_a_rank

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]


class _VariablesHandler(StateHandler):
    """Keeps a list of variables, or what has some: a model or an optimizer of Keras.

    Args:
        value: the list, or the object.
        session: that holds them; None: they are those of eager programs.
    """

    returns_new_state = True

    def __init__(self, value: Any, session: Any) -> None:
        super().__init__(value)
        self._session = session
        self._broadcast = None if session is None else broadcast_variables(_variables_of(value), 0)

    def _read(self) -> Any:
        variables = _variables_of(self.value)
        return [variable.numpy() for variable in variables] if self._session is None else self._session.run(variables)

    def _load(self, state: Any) -> None:
        for variable, array in zip(_variables_of(self.value), state, strict=True):
            if self._session is None:
                variable.assign(array)
            else:
                variable.load(array, self._session)

    def sync(self) -> None:
        if self._session is None:
            kept = sums_of_a_rank(self.value) if hasattr(self.value, "apply_gradients") else ()
            own = set(map(id, kept))
            broadcast_variables([variable for variable in _variables_of(self.value) if id(variable) not in own], 0)
        else:
            self._session.run(self._broadcast)


def _variables_of(value: Any) -> list[Any]:
    """Return the variables of a list, a model or an optimizer; none of anything else."""
    variables = value if isinstance(value, list) else getattr(value, "weights", getattr(value, "variables", ()))
    return list(variables) if all(hasattr(variable, "assign") for variable in variables) else []


class TensorFlowState(HandlingState):
    """Variables, and other values (``epoch=0, batch=0``), that training goes on from.

    Args:
        variables: of TensorFlow or Keras, the same on all ranks; None: all of a graph of TensorFlow 1.
        session: that holds the variables of such a graph; None: the default one. Eager programs have none.
        **kwargs: other values, as attributes: models and optimizers of Keras are kept by their variables, anything else
            can be copied and pickled.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self._session = session or tf.compat.v1.get_default_session()
        variables_of_session = tf.compat.v1.global_variables() if variables is None else variables
        super().__init__(variables=list(variables_of_session), **kwargs)

    @property
    def session(self) -> Any:
        """The session that holds the variables; None: there is none."""
        return self._session

    def _find_handler(self, value: Any) -> StateHandler | None:
        return _VariablesHandler(value, self._session) if _variables_of(value) else super()._find_handler(value)


class TensorFlowKerasState(TensorFlowState):
    """A model of Keras, on its backend tensorflow, its optimizer, and other values (``epoch=0, batch=0``).

    Args:
        model: one that has its weights; the seeds of its layers stay each rank's own.
        optimizer: its optimizer; None: that with which it was compiled.
        backend: without meaning here, taken for Horovod's sake.
        **kwargs: as for `TensorFlowState`.

    Raises:
        ConfigError: the model has no weights yet, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self._session = None
        HandlingState.__init__(self, model=model, optimizer=built_optimizer(model, optimizer), **kwargs)
