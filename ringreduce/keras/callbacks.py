"""Callbacks for `Model.fit` on several ranks: equal weights, averages of metrics, schedules of the learning rate.

Each of them lets `fit` raise the errors of ringreduce as they are, on every backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import keras

from ringreduce.common.errors import ConfigError
from ringreduce.keras.backends import prepare, settle
from ringreduce.keras.functions import broadcast_variables
from ringreduce.runtime import rank, size
from ringreduce.training.averages import weighted_average

_log = logging.getLogger(__name__)


class DistributedCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Base of those that take part in the training of several ranks."""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        prepare(model)

    def on_train_begin(self, logs: Any = None) -> None:
        prepare(self.model)


class BroadcastGlobalVariablesCallback(DistributedCallback):
    """Gives all ranks the weights of one, and the state of its optimizer, before the first batch. Collective.

    Seeds of layers that draw random numbers stay each rank's own. A model that gets its weights only in the first
    batch, as a subclass may on the backend tensorflow, is broadcast after that. With ``staleness``, it makes the last
    steps when training ends.

    Args:
        root_rank: whose values count.
        device: without meaning here, taken for Horovod's sake.
        local_variables: that stay as they are on each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self._local = list(local_variables or ())
        self._done = False

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._done = bool(self.model.weights)
        if self._done:
            self._broadcast()

    def on_train_end(self, logs: Any = None) -> None:
        distribution = getattr(self.model.optimizer, "distribution", None)
        if distribution is not None and distribution.reduction.staleness:
            settle(self.model)
            self.model.optimizer.synchronize()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._done:
            self._done = True
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        local = set(map(id, self._local))
        variables = {id(each): each for each in [*self.model.weights, *optimizer.variables] if id(each) not in local}
        broadcast_variables(variables.values(), self.root_rank)


class MetricAverageCallback(DistributedCallback):
    """Replaces the metrics of an epoch by their averages over the ranks. Collective.

    It comes before callbacks that use them: ReduceLROnPlateau, TensorBoard, ModelCheckpoint.

    Args:
        device: without meaning here, taken for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs.update(weighted_average(logs, 1.0))


class LearningRateScheduleCallback(DistributedCallback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    Args:
        initial_lr: the learning rate in the beginning.
        multiplier: takes an epoch and returns the factor; or a number, whose power of the epoch is the factor.
        start_epoch: the first epoch in which it acts.
        end_epoch: the first epoch in which it acts no more; None: it goes on.
        staircase: whether the factor changes once in an epoch; else with each batch, and epochs are fractions.
        momentum_correction: whether the momentum of an optimizer follows the learning rate.
        steps_per_epoch: the batches of an epoch; None: as `fit` knows.

    Raises:
        ConfigError: there is no initial learning rate; in `fit`, if the number of batches is unknown and needed.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr is required: the learning rate in the beginning")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier**epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ConfigError(f"{type(self).__name__} needs steps_per_epoch, which fit does not know here")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def _adjust(self, epoch: float) -> None:
        settle(self.model)
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        # Velocities have the learning rate in them. To multiply them once is to multiply the momentum for one batch,
        # which is a constant of the compiled step.
        if self.momentum_correction and getattr(optimizer, "momentum", None) and old not in (0.0, new):
            for velocity in getattr(optimizer, "momentums", getattr(optimizer, "_momentums", ())):
                velocity.assign(velocity * (new / old))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to ``initial_lr`` in the first epochs, batch by batch.

    See https://arxiv.org/abs/1706.02677: with e for the epoch, a fraction, at the end of a batch, it is
    ``initial_lr / size * (e * (size - 1) / warmup_epochs + 1)``.

    Args:
        initial_lr: the learning rate after the warm-up: mostly that of one rank, times the number of ranks.
        warmup_epochs: how many epochs it takes.
        momentum_correction, steps_per_epoch: as for `LearningRateScheduleCallback`.
        verbose: whether rank 0 logs the end of the warm-up.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch
            at_end = epoch + 1.0 / self.steps_per_epoch
            return (at_end * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and rank() == 0:
            _log.info("epoch %d: the warm-up ends at %g", epoch + 1, float(self.model.optimizer.learning_rate))


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the model on rank 0 whenever a metric is better than before.

    Args:
        monitor, verbose, mode, save_freq: as for `keras.callbacks.ModelCheckpoint`.
        filepath: where to; may be set later, as an attribute.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str = "best.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, save_best_only=True, mode=mode, save_freq=save_freq)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if rank() == 0:
            super().on_epoch_end(epoch, logs)
