"""Callbacks for `Model.fit` on several ranks: equal weights, averages of metrics, schedules of the learning rate.

Each of them lets `fit` raise the errors of ringreduce as they are, on every backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import keras

from ringreduce.common.errors import ConfigError
from ringreduce.keras.backends import as_numpy, named_as, prepare, settle
from ringreduce.keras.fits import began_alike, differs_anywhere, end_together, passes_of
from ringreduce.keras.functions import broadcast_variables, without
from ringreduce.keras.local import require_whole_steps
from ringreduce.keras.metrics import UNKNOWN, averages_of, samples_of
from ringreduce.keras.private import give_initial_epoch, layers_of, velocities_of
from ringreduce.runtime import config, rank, report_value, size
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.calls.objects import broadcast_object
from ringreduce.training.optimizers.applying import sums_of_a_rank
from ringreduce.training.optimizers.replicas import Replicas, checking, is_averaged
from ringreduce.training.options.local_options import LOCAL_OPTIONS, LocalArguments, averaging

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

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

    Seeds of layers that draw random numbers stay each rank's own, as sums of gradients do that a `fit` before has left
    on all ranks. A model that gets its weights only in the first batch, as a subclass may on the backend tensorflow, is
    broadcast after that. At the end of training with ``staleness``, the callback applies the last averages. After each
    batch it reports this rank's metrics; see `ringreduce.report_value`.

    A `keras.callbacks.BackupAndRestore` of the root alone stands before it in the list: then all ranks go on from the
    root's backup, with its epoch.

    Args:
        root_rank: whose values count.
        device: without meaning here, taken for Horovod's sake.
        local_variables: that stay as they are on each rank.

    Raises:
        MismatchError: in `fit`: the ranks begin with different epochs, or `fit` ends on some ranks before the
            others, of which the optimizer reduces gradients with theirs. A rank that is to end alone, and `join`, has
            fewer batches.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._local = list(local_variables or ())
        self._done = False
        self._begun = False
        self._ended = False
        self._passes = 0
        self._place = (0, -1)  # In fit: the epoch, and the last batch that is done.

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._begun = self._ended = False
        self._done = bool(self.model.weights)
        give_initial_epoch(self.model, lambda epoch: broadcast_object(epoch, self.root_rank))
        if self._done:
            self._broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._place = epoch, -1
        if self._begun:
            return
        self._begun = True
        began_alike(epoch)
        # A callback behind this one may have loaded a state on some ranks.
        if self._done and differs_anywhere(self._passes != passes_of(self.model)):
            self._broadcast()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        steps = self.params.get("steps")
        if self.model.stop_training and steps is not None and self._place[1] + 1 < steps:
            self._end(logs)

    def on_train_end(self, logs: Any = None) -> None:
        if self.model.stop_training and self._place[0] + 1 < self.params.get("epochs", 0):
            self._end(logs)
        distribution = getattr(self.model.optimizer, "distribution", None)
        if distribution is not None and distribution.reduction.staleness:
            settle(self.model)
            self.model.optimizer.synchronize()

    def _end(self, logs: Any) -> None:
        if not self._ended:
            self._ended = True
            end_together(self.model, self._place, logs)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._place = self._place[0], batch
        if not self._done:
            self._done = True
            self._broadcast()
        for name, value in (logs or {}).items():
            if isinstance(value, Real):
                report_value(name, value)

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        own = [*self._local, *sums_of_a_rank(optimizer)]
        broadcast_variables(without(own, [*self.model.weights, *optimizer.variables]), self.root_rank)
        self._passes = passes_of(self.model)


class MetricAverageCallback(DistributedCallback):
    """Replaces the metrics of an epoch, and of its evaluation, by their averages over the ranks. Collective.

    It comes before callbacks that use them: ReduceLROnPlateau, EarlyStopping, TensorBoard, ModelCheckpoint.

    Averages are over the samples of all ranks; ranks may have different numbers of samples. For a metric that is a mean
    over samples, such as the loss or the accuracy, one process with all samples gets the same value. A rank's number of
    samples is the count of Keras's metric ``loss``. If a rank has no such metric, or no rank has counted samples, all
    ranks count alike. A ``train_step`` of the program's own that updates this metric decides what it counts.

    Args:
        device: without meaning here, taken for Horovod's sake.
        weighted: False: all ranks count alike, whatever their numbers of samples. None: False with Horovod's
            conventions, else True. Must agree.

    Raises:
        MismatchError: in `fit`: the ranks have different metrics.
    """

    def __init__(self, device: str = "", weighted: bool | None = None) -> None:
        super().__init__()
        self.weighted = weighted
        self._trained = self._evaluated = UNKNOWN

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._trained = self._evaluated = UNKNOWN

    def on_test_begin(self, logs: Any = None) -> None:
        self._trained = samples_of(self.model)  # An evaluation counts from zero.

    def on_test_end(self, logs: Any = None) -> None:
        self._evaluated = samples_of(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            return
        trained = samples_of(self.model) if self._evaluated == UNKNOWN else self._trained
        weighted = config().conventions.weights_metrics if self.weighted is None else self.weighted
        logs.update(averages_of(logs, trained, self._evaluated, weighted=weighted))


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
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
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
        old = float(optimizer.learning_rate)
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        # Velocities have the learning rate in them. To multiply them once is to multiply the momentum for one batch,
        # which is a constant of the compiled step.
        if self.momentum_correction and getattr(optimizer, "momentum", None) and old not in (0.0, new):
            for velocity in velocities_of(optimizer):
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


@LOCAL_OPTIONS.taken()
class DiLoCoCallback(DistributedCallback):
    """Lets replicas step by themselves, and exchange weights once per period.

        local = hvd.callbacks.DiLoCoCallback(period=20)
        model.compile(hvd.DistributedOptimizer(optimizer, process_set=local.process_set), loss=...)
        model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), local])

    A replica is a node, or one rank, or the ranks of a process set; its ranks reduce their gradients in every step. In
    every ``period``-th step all ranks average how far their weights have moved, and make an outer step with Nesterov's
    momentum; `ringreduce.training.optimizers.local` has the formulas and their sources. All ranks must make equally
    many steps.

    The ranks have equal weights in an evaluation within `fit`, and after `fit`. Collective are the construction, the
    beginning of `fit`, its first batch, and batches at which an exchange begins or ends.

    On each rank this takes 12 bytes of host memory for each weight in float32, 16 during a delay, 8 without momentum.
    Weights are exchanged through the host, those of 16 bits in float32.

    A program with a loop of its own calls the methods that `fit` calls: ``set_model`` and ``on_train_begin`` first,
    ``on_train_batch_begin`` and ``on_train_batch_end`` around each step, and `synchronize` at the end.

    Args:
        **options: as for `LocalArguments`.
        compression: the wire format of differences between nodes, one of `Compression`, or its name. Its rounding
            errors are added to the next exchange.
        average: the weights to average: ``"parameters"``, the trainable variables, by outer steps; and ``"buffers"``,
            other floating-point weights of trainable layers, such as batch statistics, without outer steps.

    All arguments must agree on all ranks. To begin with synchronous steps, make them before, in a `fit` whose optimizer
    reduces gradients over all ranks.

    Attributes:
        process_set: the ranks of this replica, for `DistributedOptimizer`; replicas of one rank need none.

    Raises:
        ConfigError: an argument is wrong; at the beginning of `fit`: the model has no weights yet, or its optimizer
            reduces gradients over other ranks, late, or not after each batch. The other ranks get a `MismatchError`.
        MismatchError: the ranks have different weights or arguments.
    """

    def __init__(
        self,
        *,
        compression: Any = None,
        average: Sequence[Literal["parameters", "buffers"]] = ("parameters", "buffers"),
        **options: Unpack[LocalArguments],
    ) -> None:
        super().__init__()
        with checking():
            if "state" in (average or ()):
                raise ConfigError('average of DiLoCoCallback has "parameters" and may have "buffers", not "state"')
        self._averages_buffers = "buffers" in (average or ())
        self._replicas = Replicas(compression=compression, average=average, **options)
        self.process_set = self._replicas.process_set
        self._variables: list[Any] = []
        self._saved: Mapping[str, Any] | None = None
        self._training = self._trained = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._replicas.rejoin()
        with checking():
            require_whole_steps(self.model, self.process_set)
            parameters, buffers = self._found()
        averaged = [*parameters, *buffers]
        if list(map(id, averaged)) != list(map(id, self._variables)):
            self._variables = averaged
            named = [(named_as(var, number), ArraySpec(var.shape, var.dtype)) for number, var in enumerate(averaged)]
            self._replicas.bind(named[: len(parameters)], self._read, self._write, named[len(parameters) :])
            if self._saved is not None:
                self._replicas.load_state_dict(self._saved)
        elif self._trained:
            self.synchronize()  # The program may have given the model other weights since.
        self._saved = None
        self._training = True
        self._trained = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._replicas.before_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._replicas.after_step()

    def on_test_begin(self, logs: Any = None) -> None:
        if self._training:
            self.synchronize()

    def on_train_end(self, logs: Any = None) -> None:
        self.synchronize()
        self._training = False
        self._trained = True

    def synchronize(self) -> None:
        """Make the weights of all ranks their average, once `fit` has begun. Collective.

        `fit` calls it before an evaluation and at its end. It ends exchanges that are under way, and does not change
        the outer momentum.
        """
        self._replicas.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from in mid-period, besides the weights: numbers and NumPy arrays. Local.

        Each rank has its own: save it and the weights on every rank, once `fit` has begun.
        """
        return self._replicas.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of `state_dict`, on all ranks; if called before `fit`, once it begins. Local.

        Rounding errors of compression are loaded only by the rank that saved them, among as many ranks.

        Raises:
            ConfigError: the state is of other weights or other options; nothing is loaded.
        """
        if self._variables:
            self._replicas.load_state_dict(state)
            self._trained = False
        else:
            self._saved = state

    def _found(self) -> tuple[list[Any], list[Any]]:
        """Return the variables of outer steps, and those that are averaged without them."""
        if not self.model.built:
            raise ConfigError("the model has no weights yet: call model.build(input_shape) first")
        if not self._averages_buffers:
            return self.model.trainable_variables, []
        layers = [layer for layer in layers_of(self.model) if not layer.trainable]
        frozen = {id(weight) for layer in layers for weight in layer.weights}
        buffers = [variable for variable in self.model.non_trainable_weights if id(variable) not in frozen]
        return self.model.trainable_variables, [variable for variable in buffers if is_averaged(variable.dtype)]

    def _read(self, place: slice) -> Sequence[Any]:
        settle(self.model)
        return list(map(as_numpy, self._variables[place]))

    def _write(self, place: slice, arrays: Sequence[Any]) -> None:
        settle(self.model)
        for variable, array in zip(self._variables[place], arrays, strict=True):
            variable.assign(array)


class LocalSGDCallback(DiLoCoCallback):
    """A `DiLoCoCallback` with other defaults: replicas average their weights once per period.

    Args:
        **options: of `DiLoCoCallback`; ``outer_lr`` is 1 and ``outer_momentum`` 0 unless they are given.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**averaging(options))
