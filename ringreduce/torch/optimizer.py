"""`DistributedOptimizer`: any torch optimizer, with gradients that are reduced over the ranks before each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.runtime.process_sets import require_process_set
from ringreduce.torch import own_state, wrapper, wrapping
from ringreduce.torch.compression import Compression
from ringreduce.torch.private import scaler_of
from ringreduce.torch.reduced import Reduced, ReductionState, warn_of_own_step, warn_of_second_reduction
from ringreduce.torch.sharded.saved import add_training, take_training
from ringreduce.torch.sharded.shardable import is_elementwise, require_shardable
from ringreduce.torch.sharded.stepper import Stepper
from ringreduce.torch.split_updates import require_splittable
from ringreduce.torch.tensors.arrays import TENSORS
from ringreduce.torch.tensors.gradients import TorchParameters
from ringreduce.torch.tensors.streams import TorchStreams
from ringreduce.training.optimizers.optimizer import Training
from ringreduce.training.optimizers.user_options import GRADIENT_OPTIONS, GradientArguments, checked, options_of
from ringreduce.training.options.features import CLOSURE, SCALER, SKIPPING
from ringreduce.training.options.options import Adasum, Options

if TYPE_CHECKING:
    from ringreduce.training.options.declared import Unpack

_KIND = "DistributedOptimizer"


@GRADIENT_OPTIONS.taken(
    "compression backward_passes_per_step op gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "bucket_nbytes skip_unused overlap reduce_in shard split_updates *",
    compression=Compression.none,
)
class DistributedOptimizer(wrapper.Wrapper):
    """Wraps a torch optimizer: `step` reduces the gradients over all ranks, then lets the wrapped one step.

    It is a `torch.optim.Optimizer` for learning-rate schedulers and everything else that asks, and shares parameter
    groups, state, defaults and hooks with the wrapped optimizer, so that either can be used in the other's place for
    all but `step`: if a program calls `step` of the wrapped one, a warning says so, once.

    Every rank ends a step with the same weights, bit by bit, if it began with the same ones (call
    `broadcast_parameters` first) and has the same hyper-parameters. The ranks compare their hyper-parameters in steps
    1, 2, 4, 8 and so on, and their weights in these but the second; a warning says what differs. Of a GradScaler they
    compare the state with them, and raise a `MismatchError` if it differs.

    Gradients of any number of backward passes add up locally until `step` reduces them, once. If only some ranks have a
    gradient for a parameter, the others count as zeros; if none has, it stays None, as on one rank, or becomes zeros
    under Horovod's conventions (see ``skip_unused``). With op `Average`, gradients that were reduced and then added to
    are right when they are reduced again; with `Sum` they must be zeroed after every reduction.

    With ``reduce_in="backward"`` the gradients are averages when ``backward()`` returns, as with torch's DDP, so that a
    program may change them before it steps, or step by the optimizer's own methods, as for SAM. All ranks then make the
    same backward passes. Gradients that no rank has stay None. Passes but the last of a step are made within `no_sync`,
    or declared.

    Between nodes, complete buckets are reduced while the backward pass goes on, where that makes steps quicker
    (``overlap``). It begins after two steps with the declared number of passes in which nobody changed gradients before
    the step. A program that changes them gets a warning and no overlap; if it begins to do so later, `step` raises a
    `ConfigError` on all ranks. Writes by ``p.grad.data`` or NumPy, which torch does not count, show only in the
    comparison of weights. A program that looks at gradients before the step calls `synchronize` first.

    A reduction writes into ``p.grad``, and so into all references to it. After ``zero_grad()`` a gradient that the
    program still holds, or a view of it, keeps its values, as in torch; bare ``p.grad.data_ptr()`` does not.

    Construction, `add_param_group`, `step` and `synchronize` are collective: all ranks call them, each optimizer's in
    the same order. A rank that has no more data calls `join`; `ringreduce.common.conventions` says over how many ranks
    the others average then. `torch.amp.GradScaler` can be used as with any optimizer: the gradients are reduced before
    it reads them, so that all ranks see the same overflows. So can its subclasses, unless they look for overflows
    outside of ``_unscale_grads_``; then call `synchronize` first.

    With op `Adasum` every rank steps with its own gradients; then the ranks combine the changes of each parameter.
    Parameters may be on this rank's GPU, on all ranks alike. What `step` does comes after what its caller has enqueued
    on the current stream. Formats of 16 bits and less change nothing within a node; between nodes they go through the
    host, and `powersgd`, `topk` and `Adasum` always do.

    Args:
        optimizer: the one to wrap, new or used; its parameters must have equal names, shapes and dtypes on all ranks,
            in equal order.
        named_parameters: ``model.named_parameters()``, or the model: what errors call the parameters. If given, it must
            name them all.
        compression: what travels in place of gradients, applied to buckets of them; see `Compression`. What it keeps
            from step to step is saved in `state_dict`, for this rank.
        **options: as for `GradientArguments`.
        backward_passes_per_step: how many backward passes come before each step. Buckets are reduced during the last;
            without ``overlap`` and ``reduce_in="backward"`` it changes nothing.
        sparse_as_dense: make sparse gradients dense before they are reduced. If not, what the ranks have is gathered;
            so it is with SparseAdam, which takes no dense gradients.

    All arguments from ``compression`` on must be equal on all ranks.

    Raises:
        ConfigError: an argument is wrong; names are missing or used twice. The other ranks get a `MismatchError` then.
        MismatchError: the ranks have different parameters, or different values of what must agree.
        UnsupportedBufferError: parameters are on a GPU that this process cannot use, or on several; or are sharded.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: wrapping.NamedParameters = None,
        *places: Any,
        **options: Unpack[GradientArguments],
    ) -> None:
        # Optimizer.__init__ is not called: what it would set is the wrapped optimizer's, by properties and __getattr__.
        self._optimizer = optimizer
        sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
        process_set = options["process_set"]
        bind = partial(TorchParameters, sparse_as_dense=options["sparse_as_dense"] and not sparse_only)
        self._make_training = partial(Training, _KIND, process_set, TENSORS, bind)
        self._training = training = self._make_training()
        with training.checking(_KIND):
            require_process_set(process_set).included()  # raises unless it is registered
            if isinstance(optimizer, DistributedOptimizer):
                raise ConfigError(
                    "this is a DistributedOptimizer already; wrapped twice, it would reduce gradients twice"
                )
            wrapping.require_optimizer(optimizer)
            compression = options["compression"]
            given = options_of(
                options,
                compression=None if compression is Compression.none else compression,
                skip_unused=True if sparse_only else options["skip_unused"],
                elementwise=is_elementwise(optimizer),
            )
            chosen = checked(given, training.communicator.config, self._parameters())
            names = wrapping.names_of(self._parameters(), named_parameters)
            require_shardable(optimizer, options["shard"], process_set)
            require_splittable(optimizer, options["split_updates"])
            self._name_parameters(names)
            TorchStreams(training.communicator).require_usable(self._parameters())
        training.prepare(type(optimizer).__name__, self._named, chosen, self._settings)
        training.begin()
        self._reset_step_state(chosen)

    def _reset_step_state(self, options: Options) -> None:
        self._adasum = options.adasum
        self.needs_whole_commits = options.needs_whole_commits
        self._reduced = Reduced(self._watch_arrivals())
        self._skipping = False
        self._stepper = Stepper(self._optimizer, self._training)
        unused = partial(wrapping.unused, self._training)
        self.unwatch = wrapping.watch_steps(self._optimizer, self._stepped_by_itself, unused=unused)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedOptimizer:
        """Return a wrapper of a copy of the wrapped optimizer, with the same options and process set.

        The copy joins the other ranks' copies when it first clears, reduces or steps; these are collective then. It
        begins without what compression has kept, and averages.
        """
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied._become_copy(self, copy.deepcopy(self._optimizer, memo))
        return copied

    def _become_copy(self, original: DistributedOptimizer, optimizer: torch.optim.Optimizer) -> None:
        """Wrap an optimizer, a copy of that of an original, as that is wrapped."""
        self._optimizer = optimizer
        self._make_training = original._make_training
        self._training = self._make_training()
        counterparts = list(zip(original._named(), self._parameters(), strict=True))
        self._name_parameters({id(new): name for (name, _), new in counterparts})
        options = original._training.options
        groups = {id(new): options.groups[id(old)] for (_, old), new in counterparts if id(old) in options.groups}
        options = replace(options, groups=groups)
        self._training.prepare(type(optimizer).__name__, self._named, options, self._settings)
        self._reset_step_state(options)

    def _name_parameters(self, names: Mapping[int, str]) -> None:
        # Neither refers to the wrapper, so that hooks end with it.
        self._named = partial(wrapping.named_parameters, self._optimizer, names)
        self._settings = wrapping.Hyperparameters(self._optimizer)

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Reduce the gradients, then step. Collective.

        Args:
            closure: clears the gradients, computes loss and gradients, and returns the loss. The wrapped optimizer may
                call it several times; the gradients are reduced after each, and the loss too, so that line searches
                decide the same on all ranks. It must return a loss on all ranks or on none.
            samples: over how many samples this rank's gradients are a mean; on all ranks or none. See `share`.

        Returns:
            What the wrapped optimizer returns: with a closure, the loss, reduced over the ranks like the gradients.
        """
        self.rejoin()
        if samples is not None:
            self._training.reducer.require_samples_allowed(SKIPPING if self._skipping else self._reduced.by(id(self)))
        equal = not self._skipping or self._reduced.state is not ReductionState.OWN  # gradients, on all ranks
        with self._stepper.reading:
            self._stepper.require_unchanged()
            if self._adasum and not self._training.alone:
                self._reduced.taken()
                step = self._stepper.step if closure is None else partial(self._stepper.step, closure)
                return wrapping.step_and_combine(self._parameters(), self._training, step)
            if closure is not None:
                self._training.options.require_allowed(CLOSURE)
                result = self._stepper.step(partial(self._evaluate, closure, samples), reduced=not self._skipping)
                self._reduced.taken()
                return result
            gradients = self._training.gradients
            if not (self._skipping or self._reduced.is_final(id(self))) and gradients.pending:
                if self._reduced.state is ReductionState.SYNCHRONIZED and not self._training.alone:
                    warn_of_second_reduction(adds_up=self._training.options.op is SUM)
                with gradients.reducer.own_parts():
                    gradients.reduce(samples=samples)
                self._reduced.synchronized()
            self._reduced.taken()
            return self._stepper.step(reduced=equal)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. None costs less memory traffic than zeros."""
        self._reduced.forget()
        with self._training.gradients.clearing():
            self._optimizer.zero_grad(set_to_none)
        self._stepper.cleared()

    def synchronize(self) -> None:
        """Reduce the gradients now, to look at them or change them before `step`. Collective.

        The step must then be made within `skip_synchronize`:

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()

        With ``staleness`` it makes the steps instead whose averages are still to be applied.
        """
        self.rejoin()
        if (late := self._training.late) is None:
            return self._reduce()
        if self._reduced.is_final(id(self)):
            self.step()
        with self._stepper.reading:
            return wrapping.apply_late(self._parameters(), late, self._stepper.step)

    def _reduce(self, samples: int | None = None) -> None:
        gradients = self._training.gradients
        if not self._adasum and gradients.pending:
            gradients.reduce(samples=samples)
        self._reduced.synchronized()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        """Reduce the gradients, then scale them so that their norm is at most ``max_norm``. Collective.

        The next `step` uses the clipped gradients. With ``shard`` each rank has those of its own part only, and
        ``foreach`` is ignored. With a GradScaler, call ``scaler.unscale_(optimizer)`` before.

        Args:
            max_norm, norm_type, error_if_nonfinite, foreach: as for ``torch.nn.utils.clip_grad_norm_``; equal on ranks.

        Returns:
            The norm that the reduced gradients had, all of them as one vector; the same on all ranks.

        Raises:
            ConfigError: with Adasum, which reduces what a step does and not the gradients.
            RuntimeError: that norm is not finite, and ``error_if_nonfinite`` is set; on all ranks.
        """
        if self._adasum:
            raise ConfigError("with Adasum gradients are not reduced, so that every rank would clip them differently")
        self.rejoin()
        if not (self._skipping or self._reduced.is_final(id(self))):
            with self._stepper.parts_to_clip(norm_type):
                self._reduce()
        norm = self._stepper.clip(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, foreach=foreach)
        self._reduced.clipped(self._parameters())
        return norm

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` use the gradients as they are; to be entered on all ranks.

        Raises:
            ConfigError: with Adasum, which reduces what a step does and not the gradients.
        """
        if self._adasum:
            raise ConfigError("with Adasum there is no synchronize() to skip: the step itself is what is reduced")
        self._training.options.require_allowed(SKIPPING)
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Say how many backward passes come before each step; see the class.

        Raises:
            ConfigError: it is not a positive whole number.
        """
        self._training.declare_passes(passes)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes come before each step."""
        return self._training.options.passes

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes only add up gradients, on this rank, as in torch's DDP.

        Those passes do not count among the ``backward_passes_per_step``. Use it for all passes of a step but the last,
        or for a pass whose gradients are not for the next step.
        """
        return self._training.gradients.overlap.suspended()

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which the program may write to parameters, as in ``load_state_dict``. Collective.

        With ``shard``, ranks write to parameters of their own meanwhile, and those of the first rank of a node stay.
        Before the first step parameters are each rank's own; then, and without ``shard``, nothing happens.
        """
        return self._stepper.writing()

    def reading(self) -> AbstractContextManager[object]:
        """Return a context in which another thread than that of `step` may read parameters: steps wait for its end."""
        return self._stepper.reading

    #: Watch no steps of the wrapped optimizer any more. Local.
    unwatch: Callable[[], object]

    def retire(self) -> None:
        """Reduce no gradients any more, nor watch steps: another object makes them. Local."""
        self.unwatch()
        self._training.gradients.retire()

    def rejoin(self) -> None:
        """Go on in the world there is now, if ``shutdown()`` and ``init()`` came since the last time. Collective.

        `step` and `synchronize` do so by themselves. Call it where a rank may `join` before it steps again. Drops what
        compression has kept. Does nothing while the process set is not registered. `MismatchError`: parameters differ.
        """
        self._training.rejoin()

    @property
    def overlaps(self) -> bool:
        """Whether complete buckets are reduced during the backward pass by now."""
        return self._training.gradients.overlap.begun

    @property
    def splits_updates(self) -> bool:
        """Whether each rank updates some of the parameters by now; see ``split_updates``."""
        return self._stepper.splits_updates

    @property
    def communication_s(self) -> float:
        """Seconds that this rank has spent in collectives of this optimizer, waiting for others included."""
        return self._training.seconds

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train; the same on all ranks. Collective.

        If it fails on one rank, no rank has added any.

        Raises:
            MismatchError: the ranks have different parameters now, or another rank's are wrong.
        """
        self.rejoin()
        before = len(self._optimizer.param_groups)
        try:
            with self._training.checking(f"{_KIND}.add_param_group"):
                self._optimizer.add_param_group(param_group)
                wrapping.require_parameters(self._parameters())
                TorchStreams(self._training.communicator).require_usable(self._parameters())
            self._training.require_agreement()
            self._training.gradients.watch()
        except Exception:
            del self._optimizer.param_groups[before:]
            raise

    @property
    def compression_error(self) -> float:
        """The largest relative error that compressing a bucket of gradients made on this rank in the last step."""
        return self._training.reducer.compression_error

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, as it would save it itself, and what compression keeps on this rank.

        The latter, under ``"compression"``, is this rank's own: save it on every rank. Averages that are still to be
        applied (``staleness``) are under ``"late"``, the same on all ranks. Collective with ``shard="all"``.
        """
        with self._stepper.whole_state():
            state: dict[str, Any] = self._optimizer.state_dict()
        add_training(state, self._training)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict`, here or of an optimizer like the wrapped one, has returned.

        What compression has kept on another rank, or among another number of ranks, does not replace what it keeps now.
        """
        state = dict(state_dict)
        load_training = take_training(state, self._training)
        own_state.load(self._optimizer, state)
        self._stepper.load_state()
        load_training()

    def __repr__(self) -> str:
        how = Adasum if self._adasum else self._training.options.op.value
        return f"DistributedOptimizer({how} over {self._training.communicator.size} ranks of {self._optimizer!r})"

    def _evaluate(self, closure: Callable[[], Any], samples: int | None) -> Any:
        """Call a closure, and make gradients and loss those of all ranks."""
        loss = closure()
        if not self._skipping:
            self._reduce(samples)
        return wrapping.reduced_loss(self._training, loss)

    def _prepare_for_scaler(self, caller: FrameType) -> None:
        """Let a GradScaler, if ``caller`` is its frame, see the same overflows on all ranks: all step, or none."""
        scaler = None if self._skipping else scaler_of(caller)
        if scaler is None:
            return
        self.rejoin()
        self._training.options.require_allowed(SCALER)
        self._settings.scaler = scaler
        if self._adasum:
            wrapping.share_overflows(self._parameters(), self._training)
        elif self._training.gradients.pending and not self._reduced.is_done_for(scaler, id(self)):
            self._reduce()
            self._reduced.done_for(scaler, id(self))

    def _parameters(self) -> list[torch.Tensor]:
        return wrapping.parameters_of(self._optimizer)

    def _may_own_methods_step(self) -> bool:
        return self._training.alone or self._skipping or self._training.options.in_backward

    def _stepped_by_itself(self) -> None:
        """Warn, once, of a step of the wrapped optimizer with gradients that were not reduced."""
        if self._training.alone or self._skipping or self._training.is_reduced or self._reduced.is_taken():
            return
        self.unwatch()
        warn_of_own_step(self._training.described)


_DistributedOptimizer = DistributedOptimizer  # Horovod's name, by which libraries ask what kind an optimizer is
