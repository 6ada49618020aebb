"""Steps of a torch optimizer on this rank's pieces of parameters that a node has once."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from typing import Any

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.torch.private import mark_stepped, version_of
from ringreduce.torch.sharded.node_state import DividedState, NodeState, Pieces, pieces_of
from ringreduce.torch.sharded.shardable import STEPS, watch_other_steps
from ringreduce.torch.spares import Spares
from ringreduce.torch.split_updates import SplitUpdates, is_on_host, may_split
from ringreduce.torch.wrapping import STEPPING, parameters_of, settings_of
from ringreduce.training.optimizers.optimizer import Training
from ringreduce.training.optimizers.reducer import GradientReducer
from ringreduce.training.strategies.node_commit import NodeCommit
from ringreduce.training.strategies.parts import Sharding

_numbers = itertools.count()


class Stepper:
    """Makes the steps of a wrapped optimizer: its own, those of some parameters, or of its pieces with ``shard``.

    Args:
        optimizer: the wrapped one.
        training: reduces its gradients.

    Attributes:
        reading: steps wait for it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        self._optimizer = optimizer
        self._training = training
        self._sharded: ShardedStep | None = None
        self._split: SplitUpdates | None = None
        options = training.options
        self._may_split = not (options.adasum or options.shard) and may_split(optimizer, options.split_updates)
        self.reading = threading.RLock()

    def step(self, *closure: Callable[[], Any], reduced: bool = True) -> Any:
        """Make a step, of which nobody warns as one that the program makes with the wrapped optimizer itself.

        Collective with ``shard``, and with split updates if ``reduced``.

        Args:
            closure: as for torch; none or one.
            reduced: whether the ranks have equal gradients.
        """
        sharded = self._begun()
        stepping: Any = sharded or (self._splitting() if self._may_split and reduced else None) or self._optimizer
        number = id(self._optimizer if sharded is None else sharded.copy)
        STEPPING.add(number)
        try:
            return stepping.step(*closure)
        finally:
            STEPPING.discard(number)
            self._training.gradients.stepped()

    def cleared(self) -> None:
        """Take note that the gradients are None or zero."""
        if self._training.options.shard is not None and (sharding := self._training.reducer.sharding) is not None:
            sharding.uncleared.cleared()

    def parts_to_clip(self, norm_type: float) -> AbstractContextManager[None]:
        """Return a context in which gradients are reduced that `clip` needs."""
        return self._training.reducer.own_parts() if self._clips_parts(norm_type) else nullcontext()

    def _clips_parts(self, norm_type: float) -> bool:
        sharding = self._training.reducer.sharding
        return sharding is not None and sharding.is_disjoint and norm_type > 0

    def clip(self, max_norm: float, norm_type: float, **options: Any) -> torch.Tensor:
        """Clip the reduced gradients by the norm of all; arguments as for torch. Collective with ``shard``."""
        if self._clips_parts(norm_type) and (sharded := self._begun()) is not None:
            return sharded.clip(max_norm, norm_type, **options)
        return torch.nn.utils.clip_grad_norm_(parameters_of(self._optimizer), max_norm, norm_type, **options)

    def require_unchanged(self) -> None:
        """See `ShardedStep.require_unchanged`."""
        if self._sharded is not None and (sharded := self._current()) is not None and sharded.is_open:
            sharded.require_unchanged()

    def writing(self) -> AbstractContextManager[None]:
        """See `DistributedOptimizer.writing`."""
        sharded = self._current()
        return nullcontext() if sharded is None or sharded.is_own else sharded.writing()

    def load_state(self) -> None:
        """See `ShardedStep.load_state`."""
        sharded = self._current()
        if sharded is not None and sharded.is_open:
            sharded.load_state()
        else:
            self._sharded = None  # its state is not to come back in the next world

    def whole_state(self) -> AbstractContextManager[None]:
        """See `ShardedStep.whole_state`."""
        if self._sharded is not None and self._sharded.lacks_state:
            self._training.rejoin()
            self._begun()
        sharded = self._current()
        return nullcontext() if sharded is None else sharded.whole_state()

    def begin(self) -> bool:
        """Return whether ranks have different parts of the state; make it so that each of them can ask. Collective."""
        if self._training.options.shard != "all":
            return False
        self._training.rejoin()
        sharding = self._training.reducer.sharding
        return sharding is not None and not sharding.has_all_state and self._begun() is not None

    @property
    def splits_updates(self) -> bool:
        """Whether each rank updates some of the parameters by now."""
        return self._split is not None and self._split.splits is True and not self._training.alone

    def _splitting(self) -> SplitUpdates | None:
        """Return what makes steps in which each rank updates some of the parameters; None: all ranks update all."""
        training = self._training
        options = training.options
        if training.alone or not (options.split_updates or is_on_host(self._optimizer)):
            return None
        if self._split is None or self._split.reducer is not training.reducer:
            self._split = SplitUpdates(self._optimizer, training.reducer, options.split_updates)
        return self._split

    def _begun(self) -> ShardedStep | None:
        """Return what makes steps on shared parameters; None: each rank has its own. Collective."""
        if self._training.options.shard is None:
            return None
        if self._training.reducer.sharding is not None and self._current() is None:
            self._sharded = ShardedStep(self._optimizer, self._training.reducer, self._sharded)
        return self._current()

    def _current(self) -> ShardedStep | None:
        """Return what makes steps on shared parameters; None: there is none, or its world has ended."""
        sharded = self._sharded
        return sharded if sharded is not None and sharded.reducer is self._training.reducer else None


class ShardedStep:
    """Makes the steps of an optimizer, each rank those of its pieces, and keeps the state in memory of the node.

    The optimizer has whole parameters and their whole state, as views of that memory: its ``state_dict()`` is complete
    on every rank. Parameters that have had no dense gradient yet are each rank's own.

    Args:
        optimizer: whose steps.
        reducer: of the gradients.
        earlier: made them in an earlier world, with a state that goes on; None: there was none.

    Attributes:
        optimizer, reducer: the same.
        is_writing: whether the program is within `writing`.
        is_own: whether parameters are each rank's own again, as the world has ended.
        number: greater than those that were made earlier.
        pieces: this rank's, of the parameters that the ranks of a node have in common.
        commit: of what the ranks of the node have in common.
        copy: the optimizer of this rank's pieces.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, reducer: GradientReducer, earlier: ShardedStep | None = None
    ) -> None:
        assert reducer.sharding is not None
        self.number = next(_numbers)
        self.optimizer = optimizer
        self.reducer = reducer
        self._sharding = reducer.sharding
        self._changes = -1
        self._parameters = list[torch.Tensor]()
        self.pieces = Pieces()
        self._versions: list[int] = []
        self._spares = Spares(optimizer, {})
        self._state = (NodeState if self._sharding.has_all_state else DividedState)(optimizer, self._sharding)
        _hand_over(earlier, optimizer, self._sharding)
        self.commit = NodeCommit(self._sharding)
        self.is_writing = self._detached = self.is_own = False
        self._failure = ""  # why the last step was not made by all ranks
        self.copy = _copy_of(optimizer)
        STEPS.add(self)
        watch_other_steps()
        self._lifetime = reducer.ranks.engine.communicator.lifetime
        self._lifetime.listen_while_held("closed", self._world_ended)

    def __del__(self) -> None:
        # Other optimizers may train what is left; nobody does when the program ends.
        if hasattr(self, "_lifetime") and not (self.is_own or self._detached or sys.is_finalizing()):
            self._make_own()
            self._state.make_own()

    def _world_ended(self) -> None:
        """Let parameters be this rank's own from now on. Local."""
        self._make_own()
        if self._sharding.has_all_state:
            self._state.complete()

    def _make_own(self) -> None:
        if self.is_own:
            return
        self.is_own = True
        self.pieces.make_own()

    def step(self, *closure: Callable[[], Any]) -> Any:
        """Make a step with the reduced gradients, and meet the other ranks. Collective."""
        self.commit.leave_out(())
        evaluated = [self._evaluated(each) for each in closure]
        self._refresh()
        self._sharding.uncleared.require_reduced()
        copy = self.copy
        groups = list(zip(self.copy.param_groups, self.optimizer.param_groups, strict=True))
        for group, whole in groups:
            group.update(settings_of(whole))
        self._hand_out_gradients()
        self._failure = "it was interrupted"  # until it is made
        try:
            result = copy.step(*[lambda: evaluated.pop() if evaluated else self._again(*closure)][: len(closure)])
        except Exception as error:
            self._failure = _in_words(error)
            self._sharding.refuse(error, "updated")  # which the other ranks wait for
            raise
        for group, whole in groups:
            whole.update(settings_of(group))  # which some optimizers count steps in
        mark_stepped(self.optimizer)
        try:
            self._state.keep(copy.state)
        except Exception as error:
            self._failure = _in_words(error)
            raise
        self._failure = ""
        torch.autograd.graph.increment_version(self.pieces)
        self._remember()
        return result

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
        """Clip this rank's parts of the gradients by the norm of all. Collective."""
        self._refresh()
        self._hand_out_gradients()
        everything = [each.grad for each in self._parameters if each.grad is not None]
        private = [each.grad for each in self._parameters if each not in self.pieces and each.grad is not None]
        is_first = self.reducer.ranks.rank == 0
        local = list[float]()
        mine = list[torch.Tensor]()
        for parameter in self._parameters:
            piece = self.pieces.get(parameter)
            part = None if piece is None or piece.value is None else piece.value.grad
            if part is not None:
                mine.append(part)
            counted = parameter.grad if piece is None and is_first else part
            local.append(0.0 if counted is None else _norm(counted, norm_type))
        # Rounded where torch rounds: the norm of each gradient has its dtype, and that of these norms their common one.
        norms = zip(self._parameters, self._sharding.norms(local, norm_type), strict=True)
        made = partial(torch.tensor, device="cpu")  # whatever the program's default device is
        rounded = [made(norm, dtype=each.grad.dtype.to_real()) for each, norm in norms if each.grad is not None]
        rounded = rounded or [made(0.0)]
        dtype = reduce(torch.promote_types, [each.dtype for each in rounded])
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([each.to(dtype) for each in rounded]), norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        uncleared = self._sharding.uncleared
        for each in mine + private if uncleared.divides else everything:
            each.mul_(factor)
        uncleared.part_changed()
        return total

    def require_unchanged(self) -> None:
        """Raise a `ConfigError`, on all ranks, if the program has written to parameters, or moved them.

        So it does if the last step has failed, here or on other ranks.
        """
        pieces = self.pieces.values()
        if self._failure:
            error = ConfigError(
                f"the last step has failed ({self._failure}): with shard each rank updates some of the parameters, "
                "and not all of them have done so. To go on, load weights on all ranks within `with "
                "optimizer.writing():`, and the state that belongs to them by optimizer.load_state_dict"
            )
            self._sharding.refuse(error)
            raise error
        if self._sharding.overwritten or self._versions != [version_of(each.parameter) for each in pieces]:
            problem = "the program has written to parameters between two steps"
        elif self._detached or any(each.parameter.data_ptr() != each.address for each in pieces):
            problem = "the program has moved parameters to other memory (.to(), .double(), p.data = ...)"
        else:
            return
        error = ConfigError(
            f"{problem}: with shard the ranks of a node have them in common, so that each of them would change "
            "what the others have changed. Write within `with optimizer.writing():`, and move a model before the "
            "optimizer is wrapped"
        )
        self._sharding.refuse(error)
        raise error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `DistributedOptimizer.writing`."""
        self._sharding.meet("about to be written")
        self.is_writing = True
        try:
            with nullcontext() if self._sharding.is_first else self.pieces.lent():
                yield
        finally:
            self.is_writing = False
            self._sharding.meet("written")
            self._failure = ""
            self._remember()

    def _remember(self) -> None:
        """Remember the parameters as they are now."""
        self._versions = [version_of(each.parameter) for each in self.pieces.values()]
        self._sharding.watch()

    def load_state(self) -> None:
        """Take over the whole state that the optimizer has now. Local."""
        if self._detached:
            return
        self._spares.look()
        self._state.load(self._parameters, self.pieces, self.copy.state)
        self._spares.load(self.copy.state)

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Return a context in which the optimizer has all state. Collective where a node has not."""
        if not self._sharding.has_all_state:
            self._sharding.begin("state_dict()")
        self._state.complete()
        if not self._sharding.has_all_state:
            self.commit.leave_out(self._state.memory)
        try:
            yield
        finally:
            self._state.release()

    # ---- commits ----

    @property
    def is_open(self) -> bool:
        """Whether the ranks still make steps on what they have in common."""
        return not self._detached and self._lifetime.open

    @property
    def lacks_state(self) -> bool:
        """Whether the world has ended in which the ranks had the state together."""
        return not (self._lifetime.open or self._detached or self._sharding.has_all_state)

    def prepare_commit(self) -> None:
        """Make room for a copy of parameters and state, once all ranks are here. Collective."""
        self._sharding.meet("about to be saved")
        self.commit.prepare([*(shard.memory for shard in self._sharding.shards), *self._state.memory])

    def detach(self) -> None:
        """Let parameters be this rank's own, for a restored state, unless they are by `writing`; no step follows."""
        if self.is_writing or self._detached:
            return
        self._detached = True
        self._make_own()

    # ---- gradients ----

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            return closure()

    def _again(self, closure: Callable[[], Any]) -> Any:
        loss = self._evaluated(closure)
        if self._changes != self._sharding.changes:
            raise ConfigError("a closure has made gradients of other parameters when it was called again")
        self._hand_out_gradients()
        return loss

    def _hand_out_gradients(self) -> None:
        self.pieces.hand_out_gradients()
        self._spares.add(self.copy.param_groups)

    # ---- pieces ----

    def _refresh(self) -> None:
        """Make pieces of parameters that were moved to other memory of the node, or are new."""
        parameters = parameters_of(self.optimizer)
        if self._changes == self._sharding.changes and len(parameters) == len(self._parameters):
            return
        self._changes = self._sharding.changes
        self._parameters = parameters
        if self.pieces:
            self._state.complete()
        elementwise = self._sharding.elementwise
        pieces = [each for shard in self._sharding.shards for each in pieces_of(shard, elementwise=elementwise)]
        self.pieces = Pieces((piece.parameter, piece) for piece in pieces)
        values = {piece.parameter: piece.value for piece in pieces}
        self.copy.state = defaultdict(dict)
        self.copy.param_groups = [
            {**group, "params": [value for each in group["params"] if (value := values.get(each, each)) is not None]}
            for group in self.optimizer.param_groups
        ]
        self._spares = Spares(self.optimizer, values)
        self.load_state()
        self._remember()


def _hand_over(earlier: ShardedStep | None, optimizer: torch.optim.Optimizer, sharding: Sharding) -> None:
    """Let an optimizer have its state of an earlier world. Collective, also where there was none."""
    parameters = parameters_of(optimizer)
    if earlier is not None and not earlier._detached:
        earlier._make_own()
        earlier._state.hand_over(sharding, parameters, earlier.reducer.ranks.size)
    elif sharding.divides_state:
        DividedState(optimizer, sharding).hand_over(sharding, parameters, 0)


def _norm(part: torch.Tensor, norm_type: float) -> float:
    """Return the norm of a part, so exact that the sum of the parts is as good as that of all."""
    values = part.coalesce().values() if part.is_sparse else part
    dtype = torch.complex128 if part.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(values, norm_type, dtype=dtype)) if values.numel() else 0.0


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with all attributes of another one but a ``step`` that somebody has patched."""
    made = object.__new__(type(optimizer))
    attributes: Mapping[str, Any] = vars(optimizer)
    vars(made).update({name: value for name, value in attributes.items() if name != "step"})
    return made
