"""Pieces of parameters, and the state of an optimizer in memory of the node, where each rank stores its part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from ringreduce.common.errors import ConfigError
from ringreduce.common.partition import Partition
from ringreduce.torch.own_state import TENSOR, Apart, apart, is_dense, together
from ringreduce.torch.tensors.streams import tensor_like
from ringreduce.training.binding.framework import Slot
from ringreduce.training.gradients.buckets import padded
from ringreduce.training.strategies.parts import ParameterShard, Sharding

#: The state of an optimizer, by parameter and name.
State = dict[torch.Tensor, dict[str, Any]]

#: The dtypes in which Python numbers are stored.
_NUMBER_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}

_NUMBER = b"number"  # the form of these
_INT64 = 1 << 63

#: State that nobody changes in place.
_IMMUTABLE = {bool, int, float, str, bytes, type(None)}

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

    def part_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of state of the parameter; all of it, if it has no value for each element."""
        return self.of(tensor) if is_whole(self.parameter, name, tensor) else tensor

    def is_part(self, value: object) -> bool:
        """Return whether state of this piece has a value for each of its elements."""
        return torch.is_tensor(value) and value.shape == self.gradient.shape


def pieces_of(shard: ParameterShard, *, elementwise: bool) -> Iterator[Piece]:
    """Return this rank's pieces of the parameters of a bucket."""
    bucket = shard.bucket
    for number, (slot, place, view) in enumerate(zip(bucket.slots, bucket.places, shard.views, strict=True)):
        parameter = slot.parameter
        part: slice | None = None
        value: torch.Tensor | None = view if shard.owns(number) else None
        gradient = slot.place
        if elementwise:
            part = shard.within(number)
            value = _in_order(view)[part]
            gradient = bucket.flat[place.start + part.start : place.start + part.stop]
        if value is not None:
            value = value.detach().requires_grad_(parameter.requires_grad)
        yield Piece(parameter, view, address=view.data_ptr(), slot=slot, elements=part, value=value, gradient=gradient)


class Pieces(dict[torch.Tensor, Piece]):
    """This rank's pieces, by parameter."""

    def has_any(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether some of these are parameters that the ranks have in common."""
        return any(each in self for each in tensors)

    def make_own(self) -> None:
        """Let parameters be this rank's own from now on, those that are still in memory of the node."""
        for piece in self.values():
            if piece.parameter.data_ptr() == piece.address:
                piece.parameter.data = piece.parameter.detach().clone()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return a context in which this rank writes to parameters of its own, which are gone at the end."""
        for piece in self.values():
            piece.parameter.data = piece.parameter.detach().clone()
        try:
            yield
        finally:
            for piece in self.values():
                piece.parameter.data = piece.view

    def hand_out_gradients(self) -> None:
        """Let the parameters of the copy of the optimizer have their parts of the gradients."""
        for parameter, piece in self.items():
            gradient = parameter.grad
            if piece.value is None:
                continue
            if gradient is piece.slot.place:
                piece.value.grad = piece.gradient
            else:
                piece.value.grad = None if gradient is None else piece.of(gradient)


class _Description(NamedTuple):
    """What state of a parameter is, for ranks that do not have it.

    Attributes:
        form: see `Apart`.
        tensors: dtypes and shapes; a shape of None: that of the parameter, and its strides.
        nbytes: of each; None: they stay where they are.
        problem: why other ranks cannot have it; empty: they can.
    """

    form: bytes = b""
    tensors: Sequence[tuple[torch.dtype, torch.Size | None]] = ()
    nbytes: Sequence[int] | None = ()
    problem: str = ""


class _StatePlace(NamedTuple):
    """Memory of the node for state of a parameter.

    Attributes:
        memory: of the node, where others have their places, too.
        data: this place, as bytes.
        form: of the state, see `Apart`.
        whole: its tensors.
        mine: this rank's parts of them, which the copy of the optimizer has.
    """

    memory: Any
    data: Any
    form: bytes
    whole: list[torch.Tensor]
    mine: list[torch.Tensor]

    def take(self, value: Apart, targets: Sequence[torch.Tensor], *, agreed: bool = False) -> bool:
        """Store a value in ``whole`` or ``mine``; return False if it is of another form, unless that is ``agreed``."""
        if value.form != self.form and not agreed:
            return False
        pairs = list(zip(value.tensors, targets, strict=True))
        fits = all((each.dtype, each.shape) == (target.dtype, target.shape) for each, target in pairs)
        for each, target in pairs if fits else ():
            if each is not target:
                target.copy_(each)
        return fits

    def value(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a value of this form."""
        return tensors[0].item() if self.form == _NUMBER else together(self.form, tensors)


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
        self._places: dict[tuple[torch.Tensor, str], _StatePlace] = {}
        self._kept: dict[tuple[torch.Tensor, str], Any] = {}  # what the copy of the optimizer had after the last step
        self._names = defaultdict[torch.Tensor, set[str]](set)  # of the state of whole parameters

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
        self._names.clear()
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
                    self._names[parameter].add(name)

    def _loaded(self, piece: Piece, name: str, value: Any) -> Any:
        """Return this rank's part of whole state, in memory of the node if it has a place there."""
        key = piece.parameter, name
        place = self._places.pop(key, None)
        form, tensors = parts = _apart(name, value)
        if place is not None and place.form in (_NUMBER, TENSOR) and place.take(parts, place.whole):
            mine = place.whole
            if form == TENSOR:
                self._optimizer.state[piece.parameter][name] = place.whole[0]
                mine = [piece.part_of(name, each) for each in place.whole]
            self._places[key] = place._replace(mine=mine)
            value = self._kept[key] = place.value(mine)
            return value
        if form == _NUMBER:
            return value
        return together(form, [piece.part_of(name, each).clone() for each in tensors])

    def keep(self, state: State) -> None:
        """Move state that the step has made to memory of the node, and wait for the other ranks. Collective.

        Args:
            state: that of the copy of the optimizer.

        Raises:
            ConfigError: on all ranks, if other ranks cannot have state of some rank.
        """
        self._give_private(state)
        missing: dict[tuple[int, str], tuple[int, _Description | None]] = {}
        stored: list[tuple[Piece, str, dict[str, Any]]] = []
        for number, piece in self._own_pieces():
            made = state.get(piece.value, {})
            for name, value in made.items():
                changes = not (type(value) in _IMMUTABLE or is_dense(value))
                if not changes and value is self._kept.get((piece.parameter, name), self):
                    continue
                if not self._store(piece, name, made):
                    missing[number, name] = self._described(piece, name, value)
                    stored.append((piece, name, made))
            if piece.elements is None:
                missing |= {(number, name): (0, None) for name in self._names[piece.parameter] - made.keys()}
                self._names[piece.parameter] = set(made)
        if self._sharding.share(needs=bool(missing)):
            self._make_places(missing)
            for piece, name, made in stored:
                self._store(piece, name, made, agreed=True)
            self._sharding.meet("kept")

    def _give_private(self, state: State) -> None:
        """Let the optimizer have the state of parameters that each rank has, and what belongs to no parameter."""
        for parameter in self._private:
            if parameter in state:
                self._optimizer.state[parameter] = state[parameter]
        keys: list[Any] = list(state)
        self._optimizer.state.update({key: state[key] for key in keys if not torch.is_tensor(key)})

    def _own_pieces(self) -> Iterator[tuple[int, Any]]:
        """Yield the pieces that this rank updates, with the numbers of their parameters."""
        for number, parameter in enumerate(self._parameters):
            piece = self._pieces.get(parameter)
            if piece is not None and piece.value is not None:
                yield number, piece

    def _store(self, piece: Piece, name: str, made: dict[str, Any], *, agreed: bool = False) -> bool:
        """Store state of a piece where all ranks see it; return False if there is no place for it yet."""
        key = piece.parameter, name
        value = made[name]
        is_part = piece.is_part(value)
        if piece.elements is None or is_part:
            place = self._places.get(key)
            try:
                parts = _apart(name, value)
            except ConfigError:  # of which its description tells all ranks
                return False
            if place is None or not place.take(parts, place.mine, agreed=agreed):
                return False
            is_same = all(one is other for one, other in zip(parts.tensors, place.mine, strict=True))
            if place.form != _NUMBER and not (is_same and parts.form == place.form):
                value = made[name] = place.value(place.mine)
        if piece.elements is None or not is_part:
            self._optimizer.state[piece.parameter][name] = value  # if it is cut, every rank has this
        self._kept[key] = value
        return True

    def _make_places(self, needed: Mapping[tuple[int, str], tuple[int, _Description | None]]) -> None:
        """Make memory of the node for state that some rank has made. Collective."""
        common, parts = self._sharding.allocate(needed)
        if problem := next((each.problem for _, each in parts.values() if each is not None and each.problem), ""):
            raise ConfigError(problem)
        for (number, name), (memory, description) in parts.items():
            parameter = self._parameters[number]
            key = parameter, name
            if description is None:
                self._places.pop(key, None)
                self._optimizer.state[parameter].pop(name, None)
                continue
            if description.nbytes is None:
                place = self._places[key]._replace(form=description.form)
            else:
                place = self._place(parameter, name, common, memory, description)
            self._places[key] = place
            self._optimizer.state[parameter][name] = place.value(place.whole)

    def _place(
        self, parameter: torch.Tensor, name: str, common: Any, memory: Any, description: _Description
    ) -> _StatePlace:
        """Return a place that is new."""
        assert description.nbytes is not None
        whole = []
        places = Partition.of_sizes(list(map(padded, description.nbytes))).segment
        for place, nbytes, (dtype, shape) in zip(places, description.nbytes, description.tensors, strict=True):
            part = memory[place][:nbytes]
            if shape is None:
                whole.append(tensor_like(parameter, part, dtype))
            else:
                whole.append(torch.from_numpy(part).view(dtype).view(shape))
        piece = self._pieces.get(parameter)
        mine = whole if piece is None else [piece.part_of(name, each) for each in whole]
        return _StatePlace(common, memory, description.form, whole=whole, mine=mine)

    def _described(self, piece: Piece, name: str, value: Any) -> tuple[int, _Description]:
        """Return how many bytes of new memory state needs, and its description."""
        try:
            form, tensors = _apart(name, value)
        except ConfigError as error:
            return 0, _Description(problem=str(error))
        parts = [piece.is_part(each) for each in tensors]
        kinds = [(each.dtype, None if is_part else each.shape) for each, is_part in zip(tensors, parts, strict=True)]
        place = self._places.get((piece.parameter, name))
        if place is not None and [(each.dtype, each.shape) for each in tensors] == [
            (each.dtype, each.shape) for each in place.mine
        ]:
            return 0, _Description(form, nbytes=None)
        counts = [
            piece.parameter.numel() if is_part else each.numel() for each, is_part in zip(tensors, parts, strict=True)
        ]
        nbytes = [count * each.element_size() for count, each in zip(counts, tensors, strict=True)]
        return sum(map(padded, nbytes)), _Description(form, kinds, nbytes=nbytes)

    @property
    def memory(self) -> list[Any]:
        """Memory of the node with the state of these parameters; alike on all ranks."""
        return list({id(place.memory): place.memory for place in self._places.values()}.values())

    def complete(self) -> None:
        """Let the optimizer have numbers of other ranks as the last step has made them. Local."""
        for (parameter, name), place in self._places.items():
            if place.form == _NUMBER:
                self._optimizer.state[parameter][name] = place.value(place.whole)

    def release(self) -> None:
        """Let the optimizer have no more state than it needs. Local."""

    def make_own(self) -> None:
        """Let the optimizer have all state in memory of its own, as far as this rank knows it. Local."""
        for (parameter, name), place in self._places.items():
            self._optimizer.state[parameter][name] = place.value([each.clone() for each in place.whole])
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
        made = {
            (number, name): (piece, value)
            for number, piece in self._own_pieces()
            for name, value in self._state.get(piece.value, {}).items()
        }
        self._make_places({key: self._described(piece, key[1], value) for key, (piece, value) in made.items()})
        mine: dict[tuple[int, str], tuple[int, Any]] = {}
        for key, (piece, value) in made.items():
            place = self._places[piece.parameter, key[1]]
            place.take(_apart(key[1], value), place.mine)
            if piece.elements is not None and piece.is_part(value):
                mine[key] = piece.elements.start * place.whole[0].element_size(), _bytes_of(place.mine[0])
            else:
                mine[key] = 0, place.data
        for (number, name), start, data in self._sharding.exchange(mine):
            self._places[self._parameters[number], name].data[start : start + data.nbytes] = data
        self._sharding.meet("put together")
        super().complete()

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


def _apart(name: str, value: Any) -> Apart:
    """Take state apart, where a Python number is one that changes in place."""
    dtype = _NUMBER_DTYPES.get(type(value))
    if dtype is None or (dtype is torch.int64 and not -_INT64 <= value < _INT64):
        return apart(name, value)
    return Apart(_NUMBER, [torch.tensor(value, dtype=dtype, device="cpu")])


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
