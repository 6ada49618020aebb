"""Pieces of parameters, and the state of an optimizer in memory of the node, where each rank stores its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ringreduce.common.errors import ConfigError
from ringreduce.torch.tensors.streams import tensor_like
from ringreduce.training.binding.framework import Slot
from ringreduce.training.strategies.parts import Shard, Sharding

#: The state of an optimizer, by parameter and name.
State = dict[torch.Tensor, dict[str, Any]]

#: The dtypes in which Python numbers are stored.
_NUMBER_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

#: State of optimizers that is one number for all elements; it has the shape of a parameter that is a number, too.
_NUMBERS = frozenset({"eta", "mu", "mu_product", "step"})


def is_whole(parameter: torch.Tensor, name: str, value: object) -> bool:
    """Return whether state of a parameter has a value for each element."""
    is_number = parameter.dim() == 0 and name in _NUMBERS
    return torch.is_tensor(value) and value.shape == parameter.shape and not is_number


class Piece(NamedTuple):
    """This rank's part of a parameter: elements in the order that they have in memory, or all of it, or none.

    Attributes:
        parameter: all of it.
        view: of memory of the node, which it is.
        address: of that.
        slot: where the place of its gradient is; nobody else may hold that place.
        elements: this rank's, maybe none; None: the parameter is not cut.
        value: these, as a parameter of the copy of the optimizer; None: another rank has the parameter.
        gradient: their place.
    """

    parameter: torch.Tensor
    view: torch.Tensor
    address: int
    slot: Slot
    elements: slice | None
    value: torch.Tensor | None
    gradient: torch.Tensor

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor of the parameter's shape."""
        return tensor if self.elements is None else _flat(tensor, self.parameter)[self.elements]

    def has_part(self, name: str, value: object) -> bool:
        """Return whether whole state of the parameter is a tensor of which this rank has a part."""
        return torch.is_tensor(value) if self.elements is None else is_whole(self.parameter, name, value)

    def is_part(self, value: object) -> bool:
        """Return whether state of this piece has a value for each of its elements."""
        return torch.is_tensor(value) and value.shape == self.gradient.shape


def pieces_of(shard: Shard, *, elementwise: bool) -> Iterator[Piece]:
    """Return this rank's pieces of the parameters of a bucket."""
    bucket = shard.bucket
    for number, (slot, place, view) in enumerate(zip(bucket.slots, bucket.places, shard.views, strict=True)):
        parameter = slot.parameter
        start = place.start
        if not elementwise:
            value = view.detach().requires_grad_(parameter.requires_grad) if shard.owns(number) else None
            yield Piece(
                parameter, view, address=view.data_ptr(), slot=slot, elements=None, value=value, gradient=slot.place
            )
            continue
        part = shard.within(number)
        value = _in_order(view)[part].detach().requires_grad_(parameter.requires_grad)
        gradient = bucket.flat[start + part.start : start + part.stop]
        yield Piece(parameter, view, address=view.data_ptr(), slot=slot, elements=part, value=value, gradient=gradient)


class _Description(NamedTuple):
    """What state of a parameter is, for ranks that do not have it.

    Attributes:
        dtype: of a tensor, or of a Python number; None: it is something else.
        shape: of a tensor; None: that of the parameter, and its strides.
        value: what is no tensor.
    """

    dtype: torch.dtype | None
    shape: torch.Size | None = torch.Size()
    value: Any = None


class _Place(NamedTuple):
    """Memory of the node for state of a parameter.

    Attributes:
        memory: of the node, where others have their places, too.
        whole: all of it.
        mine: this rank's part, which the copy of the optimizer has.
        is_number: whether the optimizer has a Python number there.
    """

    memory: Any
    whole: torch.Tensor
    mine: torch.Tensor
    is_number: bool

    def take(self, value: Any, target: torch.Tensor) -> bool:
        """Store a value in ``whole`` or ``mine``; return False if it is of another kind."""
        if self.is_number:
            fits = _NUMBER_DTYPES.get(type(value)) == target.dtype
        else:
            fits = torch.is_tensor(value) and value.dtype == target.dtype and value.shape == target.shape
        if fits and value is not target:
            target.copy_(value) if torch.is_tensor(value) else target.fill_(value)
        return fits


class NodeState:
    """The state of an optimizer in memory of the node, where every rank sees all of it.

    State that has a value for each element of a parameter that is cut is stored part by part. Of a parameter that is
    not cut, the rank that has it stores all state. What else belongs to a parameter that is cut, such as its number of
    steps, every rank has.

    Args:
        optimizer: gets the whole state.
        sharding: of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding) -> None:
        self._optimizer = optimizer
        self._sharding = sharding
        self._parameters: Sequence[torch.Tensor] = ()
        self._pieces: Mapping[torch.Tensor, Piece] = {}
        self._private: list[torch.Tensor] = []  # parameters that each rank has
        self._places: dict[tuple[torch.Tensor, str], _Place] = {}
        self._kept: dict[tuple[torch.Tensor, str], Any] = {}  # what the copy of the optimizer had after the last step

    def load(self, parameters: Sequence[torch.Tensor], pieces: Mapping[torch.Tensor, Piece], state: State) -> None:
        """Give the copy of the optimizer this rank's part of the whole state. Local.

        Args:
            parameters: all of the optimizer's.
            pieces: this rank's, by parameter.
            state: the copy's.
        """
        whole = self._optimizer.state
        self._parameters = parameters
        self._pieces = pieces
        self._private = [each for each in parameters if each not in pieces]
        self._kept.clear()
        state.clear()
        self._places = {key: place for key, place in self._places.items() if key[1] in whole.get(key[0], ())}
        for parameter, known in whole.items():
            piece = pieces.get(parameter)
            if piece is None:
                state[parameter] = known
                continue
            for name, value in known.items():
                mine = self._loaded(piece, name, value)
                if piece.value is not None:
                    state[piece.value][name] = mine

    def _loaded(self, piece: Piece, name: str, value: Any) -> Any:
        """Return this rank's part of whole state, in memory of the node if it has a place there."""
        key = piece.parameter, name
        place = self._places.get(key)
        if place is not None and place.take(value, place.whole):
            if place.is_number:
                return value
            self._optimizer.state[piece.parameter][name] = place.whole
            mine = self._kept[key] = piece.of(place.whole) if piece.has_part(name, value) else place.whole
            self._places[key] = place._replace(mine=mine)
            return mine
        self._places.pop(key, None)
        if torch.is_tensor(value):
            return (piece.of(value) if piece.has_part(name, value) else value).clone()
        return value

    def keep(self, state: State) -> None:
        """Move state that the step has made to memory of the node, and wait for the other ranks. Collective.

        Args:
            state: that of the copy of the optimizer.
        """
        self._give_private(state)
        missing: dict[tuple[int, str], tuple[Piece, Any]] = {}
        for number, piece, made in self._of_pieces(state):
            for name, value in made.items():
                known = value is self._kept.get((piece.parameter, name))
                if not (known or self._store(piece, name, value=value, made=made)):
                    missing[number, name] = piece, value
        if self._sharding.share(needs=bool(missing)):
            self._make_places({key: _described(piece, value) for key, (piece, value) in missing.items()})
            for (_, name), (piece, value) in missing.items():
                assert piece.value is not None
                self._store(piece, name, value=value, made=state[piece.value])
            self._sharding.meet("kept")

    def _give_private(self, state: State) -> None:
        """Let the optimizer have the state of parameters that each rank has."""
        for parameter in self._private:
            if parameter in state:
                self._optimizer.state[parameter] = state[parameter]

    def _of_pieces(self, state: State) -> Iterator[tuple[int, Piece, dict[str, Any]]]:
        """Return this rank's pieces, with the numbers of their parameters and their state."""
        for number, parameter in enumerate(self._parameters):
            piece = self._pieces.get(parameter)
            if piece is not None and piece.value is not None and piece.value in state:
                yield number, piece, state[piece.value]

    def _store(self, piece: Piece, name: str, value: Any, made: dict[str, Any]) -> bool:
        """Store state of a piece where all ranks see it; return False if there is no place for it yet."""
        key = piece.parameter, name
        place = self._places.get(key)
        if piece.elements is not None and not piece.is_part(value):
            self._optimizer.state[piece.parameter][name] = value  # every rank has it
        elif place is not None:
            if not place.take(value, place.mine):
                return False
            if not place.is_number:
                value = made[name] = place.mine
        elif torch.is_tensor(value) or self._optimizer.state[piece.parameter].get(name, self) != value:
            return False
        self._kept[key] = value
        return True

    def _make_places(self, needed: Mapping[tuple[int, str], tuple[int, _Description]]) -> None:
        """Make memory of the node for state that some rank has made. Collective."""
        common, parts = self._sharding.allocate(needed)
        for (number, name), (memory, description) in parts.items():
            parameter = self._parameters[number]
            if description.dtype is None:
                self._places.pop((parameter, name), None)
                self._optimizer.state[parameter][name] = description.value
                continue
            is_number = description.value is not None
            if description.shape is None:
                whole = tensor_like(parameter, memory, description.dtype)
            else:
                whole = torch.from_numpy(memory).view(description.dtype).view(description.shape)
            piece = self._pieces.get(parameter)
            mine = whole if piece is None or not piece.has_part(name, whole) else piece.of(whole)
            self._places[parameter, name] = _Place(common, whole, mine=mine, is_number=is_number)
            self._optimizer.state[parameter][name] = description.value if is_number else whole

    @property
    def memory(self) -> list[Any]:
        """Memory of the node with the state of these parameters; alike on all ranks."""
        return list({id(place.memory): place.memory for place in self._places.values()}.values())

    def complete(self) -> None:
        """Let the optimizer have numbers of other ranks as the last step has made them. Local."""
        for (parameter, name), place in self._places.items():
            if place.is_number:
                self._optimizer.state[parameter][name] = place.whole.item()

    def release(self) -> None:
        """Let the optimizer have no more state than it needs. Local."""

    def make_own(self) -> None:
        """Let the optimizer have all state in memory of its own, as far as this rank knows it. Local."""
        self.complete()
        for (parameter, name), place in self._places.items():
            if not place.is_number:
                self._optimizer.state[parameter][name] = place.whole.clone()
        self._places.clear()

    def hand_over(self, sharding: Sharding, parameters: Sequence[torch.Tensor], size: int) -> None:
        """Let the optimizer have all state, in a world that comes after that of this state. Collective.

        Args:
            sharding: of the new world.
            parameters: all of the optimizer's.
            size: of the world of this state; 0: there was none, or this rank's state is not to be used.

        Raises:
            ConfigError: ranks with a part of the state are gone.
        """
        if size:
            self.complete()
        if sharding.divides_state:
            _holders(sharding, 0)


class DividedState(NodeState):
    """The state of an optimizer of which each rank has that of its pieces, in memory of its own.

    The optimizer has state between `complete` and `release` alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding) -> None:
        super().__init__(optimizer, sharding)
        self._state: State = {}

    def load(self, parameters: Sequence[torch.Tensor], pieces: Mapping[torch.Tensor, Piece], state: State) -> None:
        """See `NodeState.load`."""
        self._places.clear()
        super().load(parameters, pieces, state)
        self._state = state
        self.release()

    def keep(self, state: State) -> None:
        """Wait for the other ranks. Collective."""
        self._give_private(state)
        self._sharding.share()

    def complete(self) -> None:
        """Let the optimizer have all state, in memory of the node that is new. Collective."""
        pieces = list(self._of_pieces(self._state))
        made = {(number, name): (piece, value) for number, piece, made in pieces for name, value in made.items()}
        self._make_places({key: _described(piece, value) for key, (piece, value) in made.items()})
        mine: dict[tuple[int, str], tuple[int, Any]] = {}
        for key, (piece, value) in made.items():
            place = self._places.get((piece.parameter, key[1]))
            if place is not None:
                place.take(value, place.mine)
                cut = slice(0, 0) if place.mine is place.whole else piece.elements or slice(0, 0)
                mine[key] = cut.start * place.whole.element_size(), _bytes_of(place.mine)
        for (number, name), start, data in self._sharding.exchange(mine):
            _bytes_of(self._places[self._parameters[number], name].whole)[start : start + data.nbytes] = data
        self._sharding.meet("put together")

    def hand_over(self, sharding: Sharding, parameters: Sequence[torch.Tensor], size: int) -> None:
        """See `NodeState.hand_over`."""
        holders = _holders(sharding, size)
        if not holders:
            return
        if len(holders) != max(holders):
            gone = f"{max(holders) - len(holders)} of the {max(holders)} ranks"
            raise ConfigError(
                f'with shard="all" ranks have parts of the state of an optimizer, and {gone} of the last world are '
                "gone, or have loaded another state: load a state dict on all ranks, one that was saved before"
            )
        self._sharding = sharding
        self._parameters = parameters
        self.complete()
        self._places.clear()

    def make_own(self) -> None:
        """See `NodeState.make_own`; this rank knows its own part only, which is of no use."""

    def release(self) -> None:
        """See `NodeState.release`."""
        self._places.clear()
        for parameter in self._pieces:
            self._optimizer.state.pop(parameter, None)


def _holders(sharding: Sharding, size: int) -> list[int]:
    """Return the size of an earlier world, once for each rank with state of it; 0: this has none. Collective."""
    said = sharding.ranks.allgather(np.array([[size]], np.int64))
    return [each for each in said[:, 0].tolist() if each]


def _described(piece: Piece, value: Any) -> tuple[int, _Description]:
    """Return how many bytes state needs, and its description."""
    if piece.is_part(value):
        return piece.parameter.numel() * value.element_size(), _Description(value.dtype, None)
    if torch.is_tensor(value):
        return value.nbytes, _Description(value.dtype, value.shape)
    dtype = _NUMBER_DTYPES.get(type(value))
    return (0 if dtype is None else dtype.itemsize), _Description(dtype, value=value)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return the memory of a dense tensor, as NumPy's array of bytes."""
    return _in_order(tensor).view(torch.uint8).numpy()


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor as one dimension, in the order that they have in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _flat(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as one dimension, in the order that those of the parameter have in memory."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    return _in_order(tensor)
