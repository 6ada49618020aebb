"""Steps in which each rank updates some of the parameters, and all ranks get the results.

Ranks with equal gradients would all make the same updates. That is quick for most optimizers. Muon multiplies matrices
for each parameter, which takes longer than its result takes to another rank. So in a step

1. each rank updates parameters of its own, whole ones, by the wrapped optimizer's own step, from whose groups the
   parameters of other ranks are taken meanwhile,
2. the ranks exchange what they have updated, parameters with all of their state, by one allgather.

After each step every rank has all parameters and all state, with the bits that it would have made by itself. So any
rank can save them, and the ranks that survive a death lack nothing.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.common.partition import Partition
from ringreduce.engine import Refusal
from ringreduce.torch.own_state import Apart, apart, is_dense, together
from ringreduce.torch.private import call_first, version_of
from ringreduce.torch.spares import lacks_gradients, needs_spares, spare
from ringreduce.torch.wrapping import parameters_of
from ringreduce.training.binding.framework import remove_all
from ringreduce.training.gradients.buckets import padded
from ringreduce.training.optimizers.reducer import GradientReducer

_Bytes = npt.NDArray[np.uint8]
_Times = dict[tuple[bytes, bool], list[float]]

_ROW_NBYTES = 64  # what the ranks gather is rows of this length; each tensor begins with one
_TIMES = 3  # of each kind of steps are compared; ranks make one step more, in which they exchange the last time
_MOST_TIMES = 64  # if nothing is decided by then, no updates are split

#: Optimizers of which updates may take longer than the exchange.
_COSTLY = (getattr(torch.optim, "Muon", None),)  # torch has it from 2.9 on


def require_splittable(optimizer: torch.optim.Optimizer, wanted: bool | None) -> None:
    """Raise `ConfigError` for an optimizer whose updates cannot be split, if they are to be."""
    if not (wanted is None or isinstance(wanted, bool)):
        raise ConfigError(f"split_updates is True, False or None, got {wanted!r}")
    if not wanted:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "split_updates needs the hooks of torch.optim.Optimizer, and this optimizer is of no such class"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "split_updates lets each rank update some of the parameters, and LBFGS needs all of them at once"
        )
    if not is_on_host(optimizer):
        raise ConfigError("split_updates is for parameters in host memory, and some are on another device")


def may_split(optimizer: torch.optim.Optimizer, wanted: bool | None) -> bool:
    """Return whether updates are to be split, or whether to try it: where nobody has said it, for some optimizers."""
    return wanted if wanted is not None else type(optimizer) in _COSTLY


def is_on_host(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all parameters are in host memory."""
    return all(each.device.type == "cpu" for each in parameters_of(optimizer))


def owners(shapes: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the rank that updates each parameter, so that ranks multiply matrices for about as long.

    Args:
        shapes: of the parameters. More than two dimensions count as a matrix of which each row is all but the first.
        size: how many ranks there are.
    """
    loads = [0] * size
    chosen = [0] * len(shapes)
    costs = list(map(_cost, shapes))
    for number in sorted(range(len(shapes)), key=lambda each: -costs[each]):
        rank = loads.index(min(loads))
        chosen[number] = rank
        loads[rank] += costs[number]
    return chosen


def _cost(shape: Sequence[int]) -> int:
    """Return what a step of Newton and Schulz multiplies: X X^T, its square, and that with X."""
    rows = shape[0] if shape else 1
    columns = int(np.prod(shape[1:], dtype=np.int64))
    less, more = sorted((rows, columns))
    return less * less * (2 * more + less)


class _TensorLayout(NamedTuple):
    """A tensor of the state that travels as bytes."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


_State = dict[str, tuple[bytes, list[_TensorLayout]]]


class _Header(NamedTuple):
    """What a rank says of its bytes.

    Attributes:
        rank: its number.
        found: for each parameter, 1 if it has a gradient.
        times: seconds that steps have taken here, by ``found`` and whether updates were split.
        updated: the numbers of the parameters, each with its state by name: the form (see `Apart`), and what tensors
            it has; None: it has no state.
        lengths: bytes of the tensors, parameters with their state.
    """

    rank: int
    found: bytes
    times: _Times
    updated: list[tuple[int, _State | None]]
    lengths: list[int]


class SplitUpdates:
    """Makes the steps of an optimizer, each rank those of some parameters, and gives all ranks the results.

    Args:
        optimizer: the wrapped one.
        reducer: of the gradients, which are equal on all ranks.
        wanted: whether updates are split; None: steps of both kinds are timed, two of one kind after two of the other,
            until there are enough with gradients of the same parameters; the quicker kind stays.

    Attributes:
        reducer: the argument.
        splits: whether updates are split from now on; None: it is not known yet. The same on all ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reducer: GradientReducer, wanted: bool | None) -> None:
        self.reducer = reducer
        self._optimizer = optimizer
        self._ranks = reducer.ranks
        self._name = f"{self._ranks.name}, updates"
        self.splits = wanted
        self._memory: _Bytes = np.empty(0, np.uint8)
        self._needs_spares = needs_spares(optimizer)
        self._spares: list[torch.Tensor] = []
        self._begin()

    def _begin(self) -> None:
        """Count steps anew: ranks that had joined have made fewer. What all ranks have decided stays."""
        self._joins = self._ranks.engine.joins
        self._lacks_ranks = False  # as some have joined
        self._count = 0
        self._times: _Times = {}

    def step(self, *closure: Callable[[], Any]) -> Any:
        """Make a step. Collective."""
        if self._joins != self._ranks.engine.joins:
            self._begin()
        splits = self._count % 4 >= 2 if self.splits is None else self.splits
        self._count += 1
        self._whole: list[list[torch.Tensor]] | None = None  # parameters of the groups, while these have fewer
        self._versions: list[tuple[int, int]] = []  # of the parameters, after a closure
        self._given = False  # whether the exchange has begun
        self._missing: list[int] = []  # parameters that no rank has updated
        self._depth = 0  # of steps within the step
        self._splits_this = splits and not self._lacks_ranks
        if self.splits is None:
            self._look()
        self._begun_s = perf_counter()
        evaluated = [partial(self._evaluated, each) for each in closure]
        result = self._split_step(evaluated) if self._splits_this else self._optimizer.step(*evaluated)
        if self.splits is None and any(self._found):  # else there was nothing to update
            self._times.setdefault((self._found, self._splits_this), []).append(perf_counter() - self._begun_s)
        return result

    def _evaluated(self, closure: Callable[[], Any]) -> Any:
        """Call a closure, which makes and reduces gradients."""
        if self._whole is not None and self._versions != self._current_versions():
            raise ConfigError(
                "split_updates lets each rank update some of the parameters, and this optimizer has written to those "
                "of this rank before it called the closure again, which needs all of them: use split_updates=False"
            )
        self._give_back()
        loss = closure()
        self._begun_s = perf_counter()
        if self._splits_this:
            self._take_own()
            self._versions = self._current_versions()
        else:
            self._look()
        return loss

    def _split_step(self, closure: Sequence[Callable[[], Any]]) -> Any:
        optimizer = self._optimizer
        entered = bool(closure)  # else an optimizer that calls no hooks makes a whole step on all ranks

        def enter(*_: object) -> None:
            nonlocal entered
            entered = True
            self._depth += 1

        def begin(*_: object) -> None:
            if not closure and self._depth == 1:
                self._take_own()  # after all hooks of the program, which see all parameters

        def end(*_: object) -> None:
            self._depth -= 1
            if self._depth == 0:
                self._exchange()  # before the hooks of the program, which see all results

        hooks = [optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(end)]
        for hook in hooks:
            call_first(hook)
        hooks.append(optimizer.register_step_pre_hook(begin))
        try:
            result = optimizer.step(*closure)
            self._exchange()
        except Exception as error:
            if entered and not self._given:  # the others wait for it
                self._ranks.engine.refuse(Refusal(self._name, "step", error))
            raise
        finally:
            remove_all(hooks)
            self._give_back()
        if self._missing:
            self._lacks_ranks = True
            self._update_missing()
        return result

    # ---- this rank's part ----

    def _look(self) -> None:
        """Take note of which parameters there are, and which of them have a gradient."""
        self._parameters = parameters_of(self._optimizer)
        self._found = bytes(each.grad is not None for each in self._parameters)

    def _current_versions(self) -> list[tuple[int, int]]:
        """Return what differs once a parameter was written to, or moved to other memory."""
        return [(each.data_ptr(), version_of(each)) for each in self._parameters]

    def _take_own(self) -> None:
        """Let the optimizer have the parameters that this rank updates, and those without a gradient."""
        groups = self._optimizer.param_groups
        self._settings = [{name: _kept(value) for name, value in group.items() if name != "params"} for group in groups]
        self._look()
        self._due = [number for number, is_there in enumerate(self._found) if is_there]
        chosen = owners([self._parameters[number].shape for number in self._due], self._ranks.size)
        self._mine = [number for number, rank in zip(self._due, chosen, strict=True) if rank == self._ranks.rank]
        self._leave_out({*self._due} - {*self._mine})

    def _leave_out(self, numbers: Collection[int]) -> None:
        others = {id(self._parameters[number]) for number in numbers}
        self._whole = [group["params"] for group in self._optimizer.param_groups]
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = own = [each for each in parameters if id(each) not in others]
            if self._needs_spares and lacks_gradients(own, parameters):
                like = min((each for each in parameters if each.grad is not None), key=torch.Tensor.numel)
                made = spare(like)
                if like in self._optimizer.state:
                    self._optimizer.state[made] = copy.deepcopy(self._optimizer.state[like])
                own.append(made)
                self._spares.append(made)

    def _give_back(self) -> None:
        """Let the optimizer have all parameters."""
        if self._whole is not None:
            for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
        self._whole = None
        while self._spares:
            self._optimizer.state.pop(self._spares.pop(), None)

    def _update_missing(self) -> None:
        """Update the parameters of ranks that have joined. It is a second step, so what the first has counted goes."""
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=True):
            for name, value in settings.items():
                if isinstance(value, torch.Tensor) and isinstance(known := group.get(name), torch.Tensor):
                    known.detach().copy_(value)  # the program may hold it
                else:
                    group[name] = value
        self._leave_out({*self._due} - {*self._missing})
        try:
            self._optimizer.step()
        finally:
            self._give_back()

    # ---- the exchange ----

    @torch.no_grad()
    def _exchange(self) -> None:
        """Give all ranks what this one has updated, and take what they have. Collective.

        Nothing happens if all parameters are there, as in an optimizer that calls no hooks: each rank has updated them.

        Raises:
            MismatchError: on all ranks, if these have gradients of different parameters.
        """
        if self._whole is None or self._given:
            return
        packed = self._packed()
        self._given = True
        self._give_back()
        (gathered,) = self._ranks.gather("updates", self._name, [packed.reshape(-1, _ROW_NBYTES)])
        parts = list(_parts_of(gathered.reshape(-1)))
        headers = [header for header, _ in parts]
        if any(each.found != self._found for each in headers):
            raise MismatchError(
                {each.rank: f"gradients of parameters {_numbers(each.found)}" for each in headers},
                advice="with split updates each rank updates some of the parameters: once gradients are reduced, clear "
                "or replace them on all ranks alike",
            )
        for header, tensors in parts:
            if header.rank != self._ranks.rank:
                self._store(header, tensors)
        updated = {number for header in headers for number, _ in header.updated}
        self._missing = [number for number in self._due if number not in updated]
        self._decide([each.times for each in headers])

    def _packed(self) -> _Bytes:
        """Return what this rank has updated, in memory that the next call uses again."""
        updated: list[tuple[int, _State | None]] = []
        tensors: list[torch.Tensor] = []
        for number in self._mine:
            parameter = self._parameters[number]
            tensors.append(parameter)
            state = self._optimizer.state.get(parameter)
            described: _State = {}
            for name, value in (state or {}).items():
                form, found = apart(name, value, partial(_is_plain, parameter))
                tensors += found
                described[name] = form, list(map(_layout, found))
            updated.append((number, None if state is None else described))
        lengths = [each.numel() * each.element_size() for each in tensors]
        header = pickle.dumps(_Header(self._ranks.rank, self._found, self._times, updated, lengths))
        places = Partition.of_sizes([_ROW_NBYTES, *map(padded, (len(header), *lengths))]).segment
        total = places[-1].stop
        if len(self._memory) < total:
            self._memory = self._ranks.empty(total, np.uint8)
        memory = self._memory[:total]
        memory[:16].view(np.int64)[:] = total, len(header)
        memory[places[1]][: len(header)] = np.frombuffer(header, np.uint8)
        for tensor, place, length in zip(tensors, places[2:], lengths, strict=True):
            _as_tensor(memory[place][:length], tensor.dtype, tensor.shape).copy_(tensor)
        return memory

    def _store(self, header: _Header, parts: Iterator[_Bytes]) -> None:
        """Store what another rank has updated."""
        for number, described in header.updated:
            parameter = self._parameters[number]
            parameter.copy_(_as_tensor(next(parts), parameter.dtype, parameter.shape))
            if described is None:
                self._optimizer.state.pop(parameter, None)
                continue
            state = self._optimizer.state[parameter]
            for name in state.keys() - described.keys():
                del state[name]
            for name, (form, layouts) in described.items():
                known = None
                with suppress(ConfigError):  # pickle cannot copy what this rank has
                    known = apart(name, state[name], partial(_is_plain, parameter)) if name in state else None
                if known is None or (known.form, list(map(_layout, known.tensors))) != (form, layouts):
                    made = [
                        torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device="cpu") for each in layouts
                    ]
                    state[name] = together(form, made)
                    known = Apart(form, made)
                for each in known.tensors:
                    each.copy_(_as_tensor(next(parts), each.dtype, each.shape))

    def _decide(self, times: Sequence[_Times]) -> None:
        """Decide whether updates are split from now on, once enough steps like this one were timed on all ranks."""
        if self.splits is not None or len(times) < self._ranks.size:  # ranks that have joined would not know it
            return
        kinds = [(self._found, splits) for splits in (True, False)]
        if all(len(each.get(kind, ())) >= _TIMES for each in times for kind in kinds):
            split, whole = (max(min(each[kind]) for each in times) for kind in kinds)
            self.splits = split < whole
        elif any(sum(map(len, each.values())) >= _MOST_TIMES for each in times):
            self.splits = False
        if self.splits is not None:
            self._times = {}
        if self.splits is False:
            self._memory = np.empty(0, np.uint8)


def _kept(setting: Any) -> Any:
    """Return a setting as it is now, whatever a step does to it."""
    return setting.detach().clone() if isinstance(setting, torch.Tensor) else setting


def _is_plain(parameter: torch.Tensor, value: Any) -> bool:
    """Return whether state travels as the bytes of its elements; all else goes by pickle."""
    return is_dense(value) and (value.is_contiguous() or value.stride() == parameter.stride())


def _layout(tensor: torch.Tensor) -> _TensorLayout:
    return _TensorLayout(tensor.dtype, tensor.shape, tensor.stride())


def _as_tensor(part: _Bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(part).view(dtype).view(shape)


def _parts_of(gathered: _Bytes) -> Iterator[tuple[_Header, Iterator[_Bytes]]]:
    """Yield what each rank has packed: its header, and the bytes of its tensors."""
    start = 0
    while start < len(gathered):
        total, nbytes = gathered[start : start + 16].view(np.int64).tolist()
        begin = start + _ROW_NBYTES
        header: _Header = pickle.loads(gathered[begin : begin + nbytes].data)
        body = gathered[begin + padded(nbytes) : start + total]
        places = Partition.of_sizes(list(map(padded, header.lengths))).segment
        yield header, iter([body[place][:length] for place, length in zip(places, header.lengths, strict=True)])
        start += total


def _numbers(found: bytes) -> str:
    return ", ".join(str(number) for number, is_there in enumerate(found) if is_there) or "none"
