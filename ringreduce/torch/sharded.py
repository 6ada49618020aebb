"""Steps of a torch optimizer on this rank's pieces of parameters that a node has once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import global_process_set
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.torch.wrapping import STEPPING, parameters_of
from ringreduce.training.framework import Slot
from ringreduce.training.optimizer import Training
from ringreduce.training.reducer import GradientReducer
from ringreduce.training.sharding import Shard

#: Optimizers that treat each element by itself, so that parameters may be cut anywhere.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

#: State of these that is one number for all elements; it has the shape of a parameter that is a number, too.
_NUMBERS = frozenset({"eta", "mu", "mu_product", "step"})


def require_shardable(optimizer: torch.optim.Optimizer, process_set: ProcessSet) -> None:
    """Raise `ConfigError` for an optimizer or ranks that cannot share parameters."""
    if type(optimizer) not in ELEMENTWISE:
        usable = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise ConfigError(
            f"shard cuts parameters between any two elements, and {type(optimizer).__name__} may need whole ones; "
            f"it is for {usable}"
        )
    if any(each.is_cuda for each in parameters_of(optimizer)):
        raise ConfigError("shard is for parameters in host memory, and some are on a GPU")
    ranks = set(process_set.ranks or ())
    for node in global_process_set.communicator.topology.nodes:
        if ranks & set(node) and not ranks >= set(node):
            raise ConfigError(f"shard needs all ranks of a node, and the process set has some of {list(node)} only")


class Stepper:
    """Makes the steps of a wrapped optimizer: its own, or with ``shard`` those of this rank's pieces.

    Args:
        optimizer: the wrapped one.
        training: reduces its gradients.

    Attributes:
        reading: steps wait for it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, training: Training) -> None:
        self._optimizer, self._training = optimizer, training
        self._sharded: ShardedStep | None = None
        self.reading = threading.RLock()

    def step(self, *closure: Callable[[], Any]) -> Any:
        """Make a step, without the warning about steps of the wrapped optimizer. Collective with ``shard``."""
        stepping: Any = self._optimizer
        if self._training.reducer.sharding is not None:
            if self._current() is None:
                self._sharded = ShardedStep(self._optimizer, self._training.reducer)
            stepping = self._sharded
        number = id(getattr(stepping, "copy", stepping))
        STEPPING.add(number)
        try:
            return stepping.step(*closure)
        finally:
            STEPPING.discard(number)
            self._training.gradients.stepped()

    def require_unchanged(self) -> None:
        """See `ShardedStep.require_unchanged`."""
        if (sharded := self._current()) is not None:
            sharded.require_unchanged()

    def writing(self) -> AbstractContextManager[None]:
        """See `DistributedOptimizer.writing`."""
        sharded = self._current()
        return nullcontext() if sharded is None else sharded.writing()

    def load_state(self) -> None:
        """See `ShardedStep.load_state`."""
        if (sharded := self._current()) is not None:
            sharded.load_state()

    def _current(self) -> ShardedStep | None:
        """Return what makes steps on shared parameters; None: there is none, or its world has ended."""
        sharded = self._sharded
        return sharded if sharded is not None and sharded.reducer is self._training.reducer else None


class _Piece(NamedTuple):
    """This rank's elements of a parameter, in the order that they have in memory; of some parameters, none.

    Attributes:
        parameter: all of it.
        view: of memory of the node, which it is.
        address: of that.
        slot: where the place of its gradient is; nobody else may hold that place.
        elements: this rank's.
        value: these, as a parameter of the copy of the optimizer.
        gradient: their place.
        shard, number: where it is: the slot of a bucket.
    """

    parameter: torch.Tensor
    view: torch.Tensor
    address: int
    slot: Slot
    elements: slice
    value: torch.Tensor
    gradient: torch.Tensor
    shard: Shard
    number: int


class ShardedStep:
    """Makes the steps of an optimizer, each rank those of its pieces, and keeps the state in memory of the node.

    The optimizer has whole parameters and their whole state, as views of that memory: its ``state_dict()`` is complete
    on every rank. Parameters that have had no dense gradient yet are each rank's own.

    Args:
        optimizer: whose steps.
        reducer: of the gradients.

    Attributes:
        reducer: the same.
        copy: the optimizer of this rank's pieces.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradientReducer) -> None:
        assert reducer.sharding is not None
        self._optimizer, self.reducer, self._sharding = optimizer, reducer, reducer.sharding
        self._changes, self._parameters = -1, list[torch.Tensor]()
        self._pieces: dict[torch.Tensor, _Piece] = {}
        self._versions: list[int] = []
        self._private: list[torch.Tensor] = []
        #: The state of pieces: memory of the node for all of a bucket, as arrays like its parameters.
        self._blocks: dict[tuple[Shard, str], list[torch.Tensor]] = {}
        self._kept: dict[tuple[torch.Tensor, str], Any] = {}  # by parameter and name, what was seen last
        self.copy = _copy_of(optimizer)

    def step(self, *closure: Callable[[], Any]) -> Any:
        """Make a step with the reduced gradients, and meet the other ranks. Collective."""
        evaluated = [self._evaluated(each) for each in closure]
        self._refresh()
        copy = self.copy
        for group, whole in zip(copy.param_groups, self._optimizer.param_groups, strict=True):
            group.update({name: value for name, value in whole.items() if name != "params"})
        self._hand_out_gradients()
        result = copy.step(*[lambda: evaluated.pop() if evaluated else self._again(*closure)][: len(closure)])
        self._keep_state()
        self._sharding.meet("updated")
        torch.autograd.graph.increment_version(self._pieces)
        self._remember()
        return result

    def require_unchanged(self) -> None:
        """Raise a `ConfigError`, on all ranks, if the program has written to parameters, or moved them."""
        pieces = self._pieces.values()
        if self._sharding.overwritten or self._versions != [each.parameter._version for each in pieces]:
            problem = "the program has written to parameters between two steps"
        elif any(each.parameter.data_ptr() != each.address for each in pieces):
            problem = "the program has moved parameters to other memory (.to(), .double(), p.data = ...)"
        else:
            return
        error = ConfigError(
            f'{problem}: with shard="node" the ranks of a node have them in common, so that each of them would change '
            "what the others have changed. Write within `with optimizer.writing():`, and move a model before the "
            "optimizer is wrapped"
        )
        self._sharding.refuse(error)
        raise error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `DistributedOptimizer.writing`."""
        pieces = [] if self._sharding.is_first else list(self._pieces.values())
        self._sharding.meet("about to be written")
        for piece in pieces:
            piece.parameter.data = piece.parameter.detach().clone()
        try:
            yield
        finally:
            for piece in pieces:
                piece.parameter.data = piece.view
            self._sharding.meet("written")
            self._remember()

    def _remember(self) -> None:
        """Remember the parameters as they are now."""
        self._versions = [each.parameter._version for each in self._pieces.values()]
        self._sharding.watch()

    def load_state(self) -> None:
        """Take over the whole state that the optimizer has now. Local."""
        for parameter, state in self._optimizer.state.items():
            piece = self._pieces.get(parameter)
            if piece is None:
                self.copy.state[parameter] = state
                continue
            mine = self.copy.state[piece.value]
            for name, value in state.items():
                whole = is_whole(parameter, name, value)
                mine[name] = _flat(value, parameter)[piece.elements].clone() if whole else value
                views = self._blocks.get((piece.shard, name)) if whole else None
                if views is not None:
                    views[piece.number].copy_(value)
                    self._adopt(piece, name, views)

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
        for parameter, piece in self._pieces.items():
            gradient = parameter.grad
            if gradient is piece.slot.place:
                piece.value.grad = piece.gradient
            else:
                piece.value.grad = None if gradient is None else _flat(gradient, parameter)[piece.elements]

    # ---- pieces ----

    def _refresh(self) -> None:
        """Make pieces of parameters that were moved to other memory of the node, or are new."""
        parameters = parameters_of(self._optimizer)
        if self._changes == self._sharding.changes and len(parameters) == len(self._parameters):
            return
        self._changes, self._parameters = self._sharding.changes, parameters
        shards = self._sharding.shards
        self._pieces = {piece.parameter: piece for shard in shards for piece in _pieces_of(shard)}
        values = {parameter: piece.value for parameter, piece in self._pieces.items()}
        values = {parameter: piece.value for parameter, piece in self._pieces.items()}
        self._private = [each for each in parameters if each not in self._pieces]
        self._blocks = {key: block for key, block in self._blocks.items() if key[0] in shards}
        self._kept.clear()
        copy = self.copy
        copy.state = defaultdict(dict)
        copy.param_groups = [
            {**group, "params": [values.get(each, each) for each in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        self.load_state()

    # ---- state ----

    def _keep_state(self) -> None:
        """Move state that the step has made to memory of the node, and let the optimizer have all of it."""
        made, whole = self.copy.state, self._optimizer.state
        fresh: list[tuple[_Piece, str]] = []
        for parameter, piece in self._pieces.items():
            for name, value in made[piece.value].items() if piece.value in made else ():
                if value is self._kept.get((parameter, name)):
                    continue
                if torch.is_tensor(value) and value.shape == piece.value.shape:
                    fresh.append((piece, name))
                else:
                    whole[parameter][name] = self._kept[parameter, name] = value
        for parameter in self._private:
            if parameter in made:
                whole[parameter] = made[parameter]
        if fresh:
            self._make_blocks(fresh)
            for piece, name in fresh:
                self._adopt(piece, name, self._blocks[piece.shard, name])

    def _make_blocks(self, fresh: list[tuple[_Piece, str]]) -> None:
        """Make the memory of the node that state needs. Collective, if any."""
        needed: dict[tuple[Shard, str], torch.Tensor] = {}
        for piece, name in fresh:
            if (piece.shard, name) not in self._blocks:
                needed[piece.shard, name] = self.copy.state[piece.value][name]
        lengths = [len(shard.bucket.flat) * value.element_size() for (shard, _), value in needed.items()]
        if lengths:
            memory = self._sharding.node_memory(sum(lengths))
            for (shard, name), value, nbytes in zip(needed, needed.values(), lengths, strict=True):
                self._blocks[shard, name] = self._sharding.views(shard.bucket, memory[:nbytes], value)
                memory = memory[nbytes:]

    def _adopt(self, piece: _Piece, name: str, views: list[torch.Tensor]) -> None:
        """Let a piece keep its state in a block, where the optimizer sees all of it."""
        state, view = self.copy.state[piece.value], views[piece.number]
        mine = view.as_strided((view.numel(),), (1,))[piece.elements]
        mine.copy_(state[name])
        state[name] = self._kept[piece.parameter, name] = mine
        self._optimizer.state[piece.parameter][name] = view


def _pieces_of(shard: Shard) -> Iterator[_Piece]:
    bucket, own = shard.bucket, shard.own
    for number, (slot, place) in enumerate(zip(bucket.slots, bucket.places, strict=True)):
        parameter, start = slot.parameter, place.start
        first = min(max(own.start - start, 0), parameter.numel())
        last = max(first, min(own.stop - start, parameter.numel()))
        view = shard.views[number]
        flat = view.as_strided((parameter.numel(),), (1,))
        value = flat[first:last].detach().requires_grad_(parameter.requires_grad)
        gradient = bucket.flat[start + first : start + last]
        elements = slice(first, last)
        yield _Piece(parameter, view, view.data_ptr(), slot, elements, value, gradient, shard, number)


def _flat(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a parameter's shape as one dimension, in the order that its elements have in memory."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_whole(parameter: torch.Tensor, name: str, value: object) -> bool:
    """Return whether state of a parameter has a value for each element."""
    is_number = parameter.dim() == 0 and name in _NUMBERS
    return torch.is_tensor(value) and value.shape == parameter.shape and not is_number


def _copy_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with all attributes of another one but a ``step`` that somebody has patched."""
    made = object.__new__(type(optimizer))
    attributes: Mapping[str, Any] = vars(optimizer)
    vars(made).update({name: value for name, value in attributes.items() if name != "step"})
    return made
