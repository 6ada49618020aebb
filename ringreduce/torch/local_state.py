"""The state of an optimizer, averaged over replicas: each entry with the same one of the others, by parameter and name.

Optimizers make state for a parameter when they first have a gradient for it, so replicas that use different ones (a
mixture of experts) have different state. What is averaged is what has a value for each element, over the ranks that
have it: an average with zeros would make second moments too small, and steps too large. What a rank lacks it gets, the
rest of it too, such as the number of steps: from the first rank that has it.

Mostly all ranks have the same entries. Then an exchange needs no more than the allreduce, whose description says which
entries it is of; if they differ the engine refuses it, and the ranks agree on all entries that there are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import gather
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.engine import AS_THEY_ARE, About, CollectiveOp, InPlaceAllreduce, Travel
from ringreduce.torch import wrapping
from ringreduce.torch.own_state import apart, together
from ringreduce.torch.sharded.node_state import is_whole
from ringreduce.training.binding.framework import Named
from ringreduce.training.calls.requests import dtype_name
from ringreduce.training.compression import State
from ringreduce.training.optimizers.local import Average

_Flat = npt.NDArray[Any]
_LAYOUT = "layout"  # a key of states
_WIDE = "float64", "complex128"


class _ElementState(NamedTuple):
    """State that has a value for each element of a parameter.

    Attributes:
        parameter: its number, in the order of the groups.
        name: of the state.
        dtype: as torch calls it.
        length: in real numbers.
    """

    parameter: int
    name: str
    dtype: str
    length: int

    @property
    def key(self) -> tuple[int, str]:
        return self.parameter, self.name


class OptimizerState:
    """Entries of an optimizer's state as one flat array; see `ringreduce.training.optimizers.local.Leaves`.

    Args:
        optimizer: whose.

    Attributes:
        layout: the entries in the flat array; None: those that `find` finds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.layout: Sequence[_ElementState] | None = None

    def find(self) -> tuple[int, str]:
        if self.layout is None:
            self.layout = [
                _ElementState(number, name, dtype=dtype_name(value.dtype), length=reals(value).numel())
                for number, name, value in self._averaged()
            ]
        wide = any(entry.dtype in _WIDE for entry in self.layout)
        return sum(entry.length for entry in self.layout), "float64" if wide else "float32"

    def read(self, flat: _Flat) -> None:
        """Copy the values; zeros of entries that are not there."""
        parameters = wrapping.parameters_of(self._optimizer)
        for entry, place in self._places(flat):
            value = self._optimizer.state.get(parameters[entry.parameter], {}).get(entry.name)
            if value is None:
                place.zero_()
            else:
                place.copy_(reals(value).reshape(-1))

    def write(self, flat: _Flat) -> None:
        """Overwrite the values; entries that are not there are made."""
        parameters = wrapping.parameters_of(self._optimizer)
        for entry, place in self._places(flat):
            parameter = parameters[entry.parameter]
            state = self._optimizer.state[parameter]
            if state.get(entry.name) is None:
                dtype = getattr(torch, entry.dtype)
                state[entry.name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            value = reals(state[entry.name])
            value.copy_(place.view(value.shape))

    def described(self) -> list[tuple[int, str, str, bool]]:
        """Return all state: number of the parameter, name, what it is, and whether it is averaged."""
        averaged = {(number, name) for number, name, _ in self._averaged()}
        return [(*key, _described(value), key in averaged) for key, value in self._everything().items()]

    def take(self, keys: Sequence[tuple[int, str]]) -> dict[tuple[int, str], Any] | str:
        """Return state that is not averaged, to be sent; or why some of it cannot be."""
        everything = self._everything()
        try:
            return {key: _packed(key[1], everything[key]) for key in keys}
        except ConfigError as error:
            return str(error)

    def give(self, given: Mapping[tuple[int, str], Any]) -> None:
        """Add what another rank's `take` has returned where this rank has nothing."""
        parameters = wrapping.parameters_of(self._optimizer)
        for (number, name), (form, tensors) in given.items():
            parameter = parameters[number]
            state = self._optimizer.state[parameter]
            if state.get(name) is None:
                there = [each.to(parameter.device) if on_gpu else each for on_gpu, each in tensors]
                state[name] = together(form, there)

    def _everything(self) -> dict[tuple[int, str], Any]:
        parameters = enumerate(wrapping.parameters_of(self._optimizer))
        states = [(number, self._optimizer.state.get(each, {})) for number, each in parameters]
        return {
            (number, name): state[name] for number, state in states for name in sorted(state) if state[name] is not None
        }

    def _averaged(self) -> list[tuple[int, str, torch.Tensor]]:
        parameters = wrapping.parameters_of(self._optimizer)
        return [
            (number, name, value)
            for (number, name), value in self._everything().items()
            if is_whole(parameters[number], name, value) and (value.is_floating_point() or value.is_complex())
        ]

    def _places(self, flat: _Flat) -> list[tuple[_ElementState, torch.Tensor]]:
        assert self.layout is not None, "`find` comes first"
        places = torch.split(torch.from_numpy(flat), [entry.length for entry in self.layout])
        return list(zip(self.layout, places, strict=True))


class StateAverage(Average):
    """The average of an optimizer's state, in which an exchange begins and ends as those of other values.

    Args:
        optimizer: whose state.
        named: returns its parameters, with names for errors.
    """

    leaves: OptimizerState

    def __init__(self, optimizer: torch.optim.Optimizer, named: Callable[[], Named]) -> None:
        super().__init__(OptimizerState(optimizer), "state")
        self._named = named
        self._text = ""  # of the operation that was submitted last

    @property
    def _nothing(self) -> bool:
        return False  # other ranks may have some

    def begin(self, step: int, *, moving: bool) -> None:
        if self.then is None:
            self.leaves.layout = None
        super().begin(step, moving=moving)

    def average(self) -> None:
        self.leaves.layout = None
        super().average()

    def state_dict(self) -> State:
        kept = super().state_dict()
        if self.then is not None:
            assert self.leaves.layout is not None
            kept[_LAYOUT] = np.frombuffer(json.dumps(self.leaves.layout).encode(), np.uint8).copy()
        return kept

    def load_state_dict(self, state: Mapping[str, _Flat], own: bool) -> None:
        super().load_state_dict(state, own)
        saved = state.get(_LAYOUT)
        self.leaves.layout = None
        if saved is None:
            self.then = None
        else:
            self.leaves.layout = [_ElementState(*each) for each in json.loads(saved.tobytes())]

    def _submitted(self, flat: _Flat, kind: str, note: str = "", travel: Travel = AS_THEY_ARE) -> InPlaceAllreduce:
        self._text = f"{kind}{note}"
        assert self.leaves.layout is not None
        layout = zlib.crc32(json.dumps(self.leaves.layout).encode())
        return super()._submitted(flat, kind, f"{note}, of the entries {layout:08x}", travel)

    def _finish(self, operation: InPlaceAllreduce) -> _Flat:
        try:
            return super()._finish(operation)
        except MismatchError as error:
            operation.was_refused(error)
            return self._aligned(error)

    def _aligned(self, refused: MismatchError) -> _Flat:
        """Average the entries of all ranks, over the ranks that have them, and complete the state. Collective."""
        before = self.leaves.layout
        flat = self._flat
        then = self.then
        assert before is not None and flat is not None
        values = flat.copy() if then is None else then  # the same memory may be used again
        title = f"the agreement on {self._name}"
        agree = partial(self._agreed, mine=before, refused=refused)
        layout, holders, given = self._engine.run(
            CollectiveOp(f"{self._name}, entries", title, agree, about=About(title))
        )
        self.leaves.give(given)
        self.leaves.layout = layout
        self._flat = moved = self._memory()
        moved[:] = 0.0
        places = _places(layout)
        for entry, place in zip(before, _places(before).values(), strict=True):
            moved[places[entry.key]] = values[place]
        self.then = None if then is None else moved.copy()
        super()._finish(super()._submitted(moved, "aligned exchange"))
        for key, place in places.items():
            moved[place] *= self._engine.communicator.size / holders[key]
        return moved

    def _agreed(
        self, ranks: Communicator, mine: Sequence[_ElementState], refused: MismatchError
    ) -> tuple[list[_ElementState], dict[tuple[int, str], int], dict[tuple[int, str], Any]]:
        """Return all entries, how many ranks have each, and the rest of the state that this rank lacks."""
        everyone = gather(ranks, (self._text, list(mine), self.leaves.described()))
        if any(text != self._text for text, *_ in everyone):
            raise refused
        self._require_alike([described for *_, described in everyone])
        found: dict[tuple[int, str], _ElementState] = {}
        holders: dict[tuple[int, str], int] = {}
        for _, entries, _ in everyone:
            for entry in map(_ElementState._make, entries):
                known = found.setdefault(entry.key, entry)
                if known.dtype not in _WIDE and entry.dtype in _WIDE:
                    found[entry.key] = entry
                holders[entry.key] = holders.get(entry.key, 0) + 1
        have = [{(number, name) for number, name, _, averaged in said if not averaged} for *_, said in everyone]
        lacked = sorted(key for key in set().union(*have) if not all(key in each for each in have))
        donors = {key: next(rank for rank, each in enumerate(have) if key in each) for key in lacked}
        taken = gather(ranks, self.leaves.take([key for key in lacked if donors[key] == ranks.rank]))
        if problem := next((each for each in taken if isinstance(each, str)), ""):
            raise ConfigError(problem)
        given = {key: taken[donors[key]][key] for key in lacked if key not in have[ranks.rank]}
        return [found[key] for key in sorted(found)], holders, given

    def _require_alike(self, everyone: Sequence[Sequence[tuple[int, str, str, bool]]]) -> None:
        """Raise `MismatchError` if state has a value for each element on some ranks, and is another thing on others."""
        known = [{(number, name): (what, averaged) for number, name, what, averaged in said} for said in everyone]
        for key in sorted(set().union(*known)):
            if len({said[key][1] for said in known if key in said}) > 1:
                number, name = key
                which = f"state {name!r} of {self._named()[number][0]}"
                raise MismatchError(
                    {
                        rank: f"{which} is {said[key][0] if key in said else 'not there'}"
                        for rank, said in enumerate(known)
                    }
                )


def _places(layout: Sequence[_ElementState]) -> dict[tuple[int, str], slice]:
    """Return where entries are in a flat array."""
    ends = list(accumulate(entry.length for entry in layout))
    return {entry.key: slice(end - entry.length, end) for entry, end in zip(layout, ends, strict=True)}


def reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, complex numbers as pairs of real ones."""
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _described(value: Any) -> str:
    if torch.is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}, {dtype_name(value.dtype)}"
    return f"of type {type(value).__name__}"


def _packed(name: str, value: Any) -> tuple[bytes, list[tuple[bool, torch.Tensor]]]:
    """Return a value's form, and its tensors in host memory, each with whether it was on a GPU."""
    form, tensors = apart(name, value, torch.is_tensor)
    return form, [(each.is_cuda, each.detach().cpu()) for each in tensors]
