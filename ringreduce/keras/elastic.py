"""Elastic training with Keras: a state of a model and its optimizer, callbacks that commit it, and the loop."""

from __future__ import annotations

from typing import Any

import keras

from ringreduce.common.arguments import whole_number
from ringreduce.elastic import State, run
from ringreduce.elastic.handlers import HandlingState, StateHandler
from ringreduce.keras.backends import as_numpy, settle
from ringreduce.keras.functions import broadcast_variables, without
from ringreduce.training.optimizers.applying import built_optimizer, sums_of_a_rank

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class _VariablesHandler(StateHandler):
    """Keeps a model or an optimizer, by its variables."""

    returns_new_state = True

    def _variables(self) -> list[Any]:
        if isinstance(self.value, keras.layers.Layer):
            settle(self.value)
            return list(self.value.weights)
        return list(self.value.variables)

    def _read(self) -> Any:
        return list(map(as_numpy, self._variables()))

    def _load(self, state: Any) -> None:
        for variable, array in zip(self._variables(), state, strict=True):
            variable.assign(array)

    def sync(self) -> None:
        kept = sums_of_a_rank(self.value) if isinstance(self.value, keras.optimizers.Optimizer) else ()
        broadcast_variables(without(kept, self._variables()))


class KerasState(HandlingState):
    """A model, its optimizer, and other values (``epoch=0, batch=0``), as attributes.

    Models and optimizers are kept by their variables, and stay the objects that they are. Seeds of layers that draw
    random numbers stay each rank's own. Anything else is kept by value.

    Args:
        model: one that has its weights.
        optimizer: its optimizer; None: that with which it was compiled.
        backend: without meaning here, taken for Horovod's sake.
        **kwargs: other values; the same names on all ranks.

    Raises:
        ConfigError: the model has no weights yet, or there is no optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model=model, optimizer=built_optimizer(model, optimizer), **kwargs)

    def _find_handler(self, value: Any) -> StateHandler | None:
        kept = isinstance(value, (keras.layers.Layer, keras.optimizers.Optimizer))
        return _VariablesHandler(value) if kept else super()._find_handler(value)


TensorFlowKerasState = KerasState


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits a state after so many batches, and at the end of each epoch. Collective.

    Args:
        state: the same on all ranks.
        batches_per_commit: so many; must agree.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = whole_number("batches_per_commit", batches_per_commit, 1)
        self._since = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._since = 0  # The ranks may have changed.

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._since += 1
        if self._since == self.batches_per_commit:
            self._since = 0
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of the batch in ``state.batch``: 0 between epochs."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the number of epochs that are done in ``state.epoch``, those of earlier calls of `fit` included."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
