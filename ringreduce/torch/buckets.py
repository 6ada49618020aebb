"""Gradients that travel together: buckets in communication memory, with every ``p.grad`` a part of one.

What a gradient *is* stays torch's affair: ``p.grad`` is None, or the tensor that autograd or the user put there, and
says all that there is to say about what was computed since `zero_grad`. A bucket only decides where it lies. Autograd
makes a fresh tensor wherever ``p.grad`` was None, so before a bucket is reduced its gradients are collected: copied
to their places in the bucket, which then become ``p.grad`` and stay it for as long as nobody sets it to None.

Places are lent: after `zero_grad` somebody may still hold the tensor that was ``p.grad``, or a view of it, as code does
that compares the gradients of several tasks. A place that is kept is not written to. Until it is free again, its bucket
is reduced in spare memory, and gradients come back from there as tensors of their own, as torch would make them.

On one node everything on the CPU is reduced when the caller says so, and not during the backward pass: that took as
long, as far as could be measured (25 M parameters, 2 ranks). Between nodes and on GPUs see `ringreduce.torch.early`.

Buckets of parameters on a GPU are in exportable memory there, and all that the step does with them is on the stream of
who makes it, whichever thread enqueues it.
"""

from __future__ import annotations

import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from time import perf_counter
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from ringreduce.communicator import Communicator
from ringreduce.engine import Operation
from ringreduce.engine.fusion import plan
from ringreduce.errors import ConfigError, ShutdownError, TransportError, UnsupportedBufferError
from ringreduce.reduce_ops import AVERAGE, MAX, SUM, ReduceOp
from ringreduce.torch.bucket import Bucket, padded_nbytes
from ringreduce.torch.compression import (
    BucketCompression,
    Compression,
    Compressor,
    NoneCompressor,
    Reducer,
    WireCompressor,
)
from ringreduce.torch.early import EarlyReduction, settled
from ringreduce.torch.streams import current_stream, on_host, working_on
from ringreduce.training.parameters import warn_of_differences

__all__ = ["GradientBuckets"]

_log = logging.getLogger(__name__)

# What a rank found in ``p.grad``; the maximum over the ranks is what they do about it. A sparse one says how many of
# its dimensions are.
_NONE, _DENSE, _SPARSE, _UNSUPPORTED = 0, 1, 2, 255


_UNSIGNED = bytes(8)  # what a rank that does not contribute says in place of `_signed`

_WRONG_GUESSES = 3  # steps in a row in which something was reduced too early, after which nothing more is


class GradientBuckets:
    """The gradients of one optimizer on all ranks: finds, places and reduces them.

    Parameters get their place when a reduction first meets their gradient on any rank. All ranks learn of that in the
    same reduction, so that they make the same buckets, whether a parameter was there from the start, was added or
    thawed later, or is never used and takes no memory.

    Args:
        communicator: the ranks that reduce together.
        op: `AVERAGE` or `SUM`.
        bucket_nbytes: a bucket that holds so many bytes is closed; must agree on all ranks.
        name_of: says what errors call a parameter.
        compression: what travels in place of a bucket; of those that keep something, float32 buckets alone.
        predivide_factor: of an average, what gradients are divided by before they are summed; the rest comes after.
        groups: the number of its group for each parameter, by id, that travels in a bucket with its group.
        skip_unused: whether trainable parameters that no rank used keep None instead of zeros.
        early: whether buckets are reduced during the backward pass; the same on all ranks.
        settings: returns what the ranks step with, which is compared with the others' in the first step and then ever
            more rarely, as that takes a while; see `ringreduce.training.parameters`. On all ranks or none.

    Attributes:
        start: lets all ranks call `reduce_early` with a part, once all have called this with it; returns at once. To be
            set before the second step if there are early reductions.
        communication_s: seconds spent in collectives so far.
        local_s: seconds spent on everything else here.
    """

    def __init__(
        self,
        communicator: Communicator,
        op: ReduceOp,
        bucket_nbytes: int,
        name_of: Callable[[torch.Tensor], str],
        *,
        compression: type[Compressor] | BucketCompression = Compression.none,
        predivide_factor: float = 1.0,
        groups: Mapping[int, int] | None = None,
        skip_unused: bool = True,
        early: bool = False,
        settings: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        self.communication_s = 0.0
        self.local_s = 0.0
        self._communicator = communicator
        self._op = op
        self._bucket_nbytes = bucket_nbytes
        self._name_of = name_of
        self._compression = compression
        # What has no reducer, because it is not float32, travels as it is.
        built_in = isinstance(compression, BucketCompression) and not _overridden(compression)
        self._compressor = NoneCompressor if built_in else cast("type[Compressor]", compression)
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self._predivide_factor = predivide_factor
        self._groups = groups or {}
        self._skip_unused = skip_unused
        self._settings = settings
        self.start: Callable[[str], Operation] | None = None
        # Those of the buckets that are reduced early; None: they are not, or not any more.
        self._early: dict[Bucket, EarlyReduction] | None = {} if early else None
        self._steps = 0  # so many calls of `reduce`, on all ranks
        self._wrong_guesses = 0  # in a row
        self._reducing = threading.Lock()  # held by who uses the reducers before the step
        self._buckets: list[Bucket] = []
        self._placed: set[int] = set()
        self._found = np.empty(0, np.uint8)
        self._stream: Any = None  # on a GPU, that of who called `follow_this_stream`
        weakref.finalize(self, _retire, self._buckets, self._early).atexit = False

    def options(self, parameters: Sequence[torch.Tensor]) -> dict[str, object]:
        """Return what must be equal on all ranks, by the names that users know, to be compared as it is printed.

        Args:
            parameters: all of the optimizer's, in registration order.
        """
        return {
            "bucket_nbytes": self._bucket_nbytes,
            "compression": _looks(self._compression),
            "gradient_predivide_factor": self._predivide_factor,
            "groups": [self._groups.get(id(parameter)) for parameter in parameters] if self._groups else None,
            "overlap": self._early is not None,
        }

    def reduce(
        self, parameters: Sequence[torch.Tensor], active: int | None = None, *, contributing: bool = True
    ) -> None:
        """Replace the gradients by their average or sum over the ranks. Collective.

        Gradients that some ranks lack count as zeros there.

        Args:
            parameters: all of the optimizer's, in registration order, equal on all ranks.
            active: how many ranks contribute; None: all. Averages are over these, or as `Conventions` say.
            contributing: whether this rank does. If not, its gradients stay as they are.

        Raises:
            UnsupportedBufferError: on all ranks, if some rank has a gradient that is neither on the CPU nor on a GPU
                that it can use, or of a layout that is neither strided nor sparse COO.
        """
        with working_on(self._stream):
            self._reduce(parameters, active, contributing)

    def follow_this_stream(self, device: torch.device | None) -> None:
        """Let `reduce` be ordered, from now on, as if it was done on the caller's current stream.

        Args:
            device: the GPU on which parameters are; None: there is none.
        """
        self._stream = None if device is None else current_stream(device)

    def _reduce(self, parameters: Sequence[torch.Tensor], active: int | None, contributing: bool) -> None:
        started, communicated = perf_counter(), self.communication_s
        active = self._communicator.size if active is None else active
        found, wrong = self._find(parameters, contributing)
        dense = [parameter for parameter, state in zip(parameters, found, strict=True) if state == _DENSE]
        ids = frozenset(map(id, dense))
        reduced_early = any(self._was_reduced_early(bucket) for bucket in self._buckets)
        for bucket, guess in zip(self._buckets, wrong, strict=True):
            self._conclude_early(bucket, ids, active, contributing, wrong=bool(guess))
        self._forget_outgrown()
        self._place([parameter for parameter in dense if id(parameter) not in self._placed])
        for bucket in self._buckets:
            wanted = any(id(slot.parameter) in ids for slot in bucket.slots)
            if wanted and not self._was_reduced_early(bucket):
                self._reduce_bucket(bucket, ids, active, contributing)
            if (early := self._early_of(bucket)) is not None:
                early.begin_step(wanted)
        self._steps += 1
        self._judge_guesses(reduced_early, any(wrong))
        for parameter, state in zip(parameters, found, strict=True):
            if state >= _SPARSE:
                self._reduce_sparse(parameter, state - _SPARSE, active, contributing)
        self.local_s += perf_counter() - started - (self.communication_s - communicated)

    def start_rest(self) -> None:
        """Start what is reduced early and was not started by the backward pass, before `reduce` on this rank."""
        for bucket in self._buckets:
            if (early := self._early_of(bucket)) is not None and early.should_start():
                self._start_early(early)

    def _start_early(self, early: EarlyReduction) -> None:
        """Start to reduce a bucket as it is now; if it is one of those that are reduced early still."""
        number = next((number for number, each in enumerate(self._buckets) if self._early_of(each) is early), None)
        if number is None or self.start is None:
            return
        early.fill()
        try:
            early.part = self.start(f"{self._steps}.{number}")
        except (ConfigError, ShutdownError, TransportError) as error:
            # This rank has joined, or nothing goes on any more. `reduce` will say what there is to say.
            early.started = False
            _log.debug("bucket %d is not reduced early: %s", number, error)

    def reduce_early(self, part: str, active: int, *, contributing: bool = True) -> None:
        """Reduce what was copied of a bucket, for `reduce` to use. Collective.

        Args:
            part: what ``start`` was given: the number of the step, so that a part that came to nothing is never taken
                for a later one, and that of the bucket.
            active: as in `reduce`.
            contributing: as in `reduce`.
        """
        step, _, number = part.partition(".")
        assert int(step) == self._steps, "ranks submit the parts of a step before the step"
        bucket = self._buckets[int(number)]
        early = self._early_of(bucket)
        assert early is not None, "all ranks give up in the same step"
        with self._reducing, early.reducing(self._communicator):
            if contributing:
                early.sign()
            else:
                early.copy.flat.zero_()
            if bucket.reducer is not None:
                early.reducer_state = bucket.reducer.state_dict()
            self._combine(bucket, early.copy.flat, active)
        early.active = active

    @property
    def compression_error(self) -> float:
        """The largest relative error that compressing a bucket made on this rank in the last step."""
        return max((bucket.reducer.error for bucket in self._buckets if bucket.reducer is not None), default=0.0)

    def state_dict(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return what compressing keeps on this rank, by the number of the bucket; empty where it keeps nothing."""
        with self._reducing:
            kept = {
                number: self._state_of(bucket, bucket.reducer)
                for number, bucket in enumerate(self._buckets)
                if bucket.reducer is not None
            }
        return {number: state for number, state in (self._saved | kept).items() if state}

    def load_state_dict(self, state: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Go on from what `state_dict` has returned, with buckets that are there and those that will be made.

        A bucket of which it holds nothing begins anew.

        Raises:
            ConfigError: it is of other buckets.
        """
        self._saved = dict(state)
        with self._reducing:
            for number, bucket in enumerate(self._buckets):
                if bucket.reducer is None:
                    continue
                bucket.reducer = self._new_reducer(number, bucket)
                if (early := self._early_of(bucket)) is not None:  # what was reduced with the old state is not used
                    early.spoil()
                    early.reducer_state = bucket.reducer.state_dict()

    def retire(self) -> list[Operation]:
        """Let go of the parameters: nothing is started any more. Takes no lock, for finalizers.

        Returns:
            What this rank has started, some of which may be under way still.
        """
        self.start = None
        _retire(self._buckets, self._early)
        return [early.part for early in (self._early or {}).values() if early.part is not None]

    def _early_of(self, bucket: Bucket) -> EarlyReduction | None:
        return None if self._early is None else self._early.get(bucket)

    def _was_reduced_early(self, bucket: Bucket) -> bool:
        early = self._early_of(bucket)
        return early is not None and early.active is not None

    def _state_of(self, bucket: Bucket, reducer: Reducer) -> dict[str, torch.Tensor]:
        """Return what a bucket's reducer keeps, as it was before a reduction that may not be used."""
        early = self._early_of(bucket)
        return early.reducer_state if early is not None and early.active is not None else reducer.state_dict()

    def _new_reducer(self, number: int, bucket: Bucket) -> Reducer:
        """Return what reduces a bucket from now on, with what was saved of it."""
        shapes = [_shape_in_memory(slot.place) for slot in bucket.slots]
        reducer = cast(BucketCompression, self._compression).reducer(shapes, bucket.places)
        if number in self._saved:
            reducer.load_state_dict(self._saved[number])
            del self._saved[number]
        return reducer

    def allreduce(self, array: Any, op: ReduceOp) -> None:
        """Reduce any array in place, on the clock of ``communication_s``. Collective."""
        started = perf_counter()
        self._communicator.allreduce(array, op, out=array)
        self.communication_s += perf_counter() - started

    def _conclude_early(
        self, bucket: Bucket, used: frozenset[int], active: int, contributing: bool, *, wrong: bool
    ) -> None:
        """Use what was reduced early, or forget it."""
        early = self._early_of(bucket)
        if early is None or early.active is None:
            return
        early.come_back()
        if wrong or early.active != active:
            early.active = None
            if bucket.reducer is not None:
                bucket.reducer.load_state_dict(early.reducer_state)
        elif contributing:
            bucket.fill(used)
            bucket.flat.copy_(early.copy.flat)

    def _judge_guesses(self, reduced_early: bool, wrong: bool) -> None:
        """Give up early reductions if guesses are wrong all the time."""
        if self._early is None:
            return
        if reduced_early:
            self._wrong_guesses = self._wrong_guesses + 1 if wrong else 0
        if self._wrong_guesses < _WRONG_GUESSES:
            return
        _log.info("gradients change between the backward pass and the step: from here on they are reduced in the step")
        for bucket, early in self._early.items():
            early.retire()
            bucket.free_spare()
        self._early = None

    def _reduce_bucket(self, bucket: Bucket, used: frozenset[int], active: int, contributing: bool) -> None:
        if not contributing:
            self._combine(bucket, bucket.spare(self._communicator).flat.zero_(), active)
        elif bucket.is_kept():
            self._reduce_apart(bucket, used, active)
        else:
            bucket.fill(used)
            self._combine(bucket, bucket.flat, active)

    def _reduce_apart(self, bucket: Bucket, used: frozenset[int], active: int) -> None:
        """Reduce a bucket that is kept without writing to it, but for the gradients that still are ``p.grad``."""
        placed = [slot for slot in bucket.slots if slot.parameter.grad is slot.place]
        spare = bucket.spare(self._communicator)
        spare.fill(used)
        self._combine(bucket, spare.flat, active)
        for slot in spare.slots:
            if slot.parameter.grad is slot.place:
                slot.parameter.grad = slot.place.clone()
        for slot in placed:
            slot.place.copy_(cast(torch.Tensor, slot.parameter.grad))
            slot.parameter.grad = slot.place

    def _combine(self, bucket: Bucket, flat: torch.Tensor, active: int) -> None:
        """Reduce a bucket's memory, or what stands for it, in place."""
        averages = self._op is AVERAGE
        averaged_over = self._averaged_over(active)
        plain = self._predivide_factor == 1.0 and averaged_over == self._communicator.size
        if self._predivide_factor != 1.0:
            flat.mul_(1.0 / self._predivide_factor)
        if bucket.reducer is not None:
            started = perf_counter()
            if flat.is_cuda and not _is_wire(self._compression):
                with on_host([flat]) as (lent,):
                    bucket.reducer.reduce(self._communicator, lent, average=plain and averages)
            else:
                bucket.reducer.reduce(self._communicator, flat, average=plain and averages)
            self.communication_s += perf_counter() - started
        else:
            self._allreduce_as(self._compressor, flat, self._op if plain else SUM)
        if averages and not plain:
            flat.mul_(self._predivide_factor / averaged_over)

    def _allreduce_as(self, compressor: type[Compressor], flat: torch.Tensor, op: ReduceOp) -> None:
        sent, context = compressor.compress(flat)
        self.allreduce(sent, op)
        if sent is not flat:
            flat.copy_(compressor.decompress(sent, context))

    def _reduce_sparse(self, parameter: torch.Tensor, sparse_dim: int, active: int, contributing: bool) -> None:
        """Sum or average a gradient that is sparse on some rank: gather what the ranks have, make nothing dense."""
        grad = parameter.grad if contributing else None
        if grad is None:
            indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
            values = parameter.new_empty(0, *parameter.shape[sparse_dim:])
            mine = _sparse(indices, values, parameter.shape)
        elif grad.is_sparse and grad.sparse_dim() == sparse_dim:
            mine = grad.detach().coalesce()
        else:
            mine = grad.detach().to_dense().to_sparse(sparse_dim).coalesce()
        started = perf_counter()
        places = self._communicator.allgather(mine.indices().t().contiguous())
        numbers = self._communicator.allgather(mine.values().contiguous())
        self.communication_s += perf_counter() - started
        if not contributing:
            return
        total = _sparse(places.t(), numbers, parameter.shape)
        parameter.grad = total / self._averaged_over(active) if self._op is AVERAGE else total

    def _averaged_over(self, active: int) -> int:
        return self._communicator.config.conventions.averaged_over(active, self._communicator.size)

    def _find(self, parameters: Sequence[torch.Tensor], contributing: bool) -> tuple[list[int], list[int]]:
        """Return for each parameter what the ranks found in its ``grad``, and for each bucket a wrong early guess."""
        if contributing:
            guesses = map(self._early_of, self._buckets)
            wrong = settled([early is not None and early.compare() for early in guesses])
            mine = bytes(self._state(parameter) for parameter in parameters) + bytes(wrong)
        else:
            mine = bytes(len(parameters) + len(self._buckets))
        nstates = len(mine)
        first = self._steps == 0
        settings = self._settings() if self._settings is not None and self._steps & (self._steps + 1) == 0 else None
        if first:
            mine += _signed(_checksum_of(parameters)) if contributing else _UNSIGNED
        if settings is not None:
            mine += _signed(zlib.crc32(repr(settings).encode())) if contributing else _UNSIGNED
        everyone = self._exchange(mine)
        signatures = everyone[nstates:].reshape(-1, len(_UNSIGNED))
        if first and not _all_alike(signatures[0]) and self._communicator.rank == 0:
            _log.warning(
                "the ranks begin with different weights, and will end with different ones; call broadcast_parameters("
                "model.state_dict(), root_rank=0) before the first step"
            )
        if settings is not None and not _all_alike(signatures[-1]):
            warn_of_differences(self._communicator, settings if contributing else None)
            self._settings = None
        found, anywhere_wrong = everyone[: len(parameters)], everyone[len(parameters) : nstates]
        if (found == _UNSUPPORTED).any():
            name = self._name_of(parameters[int((found == _UNSUPPORTED).argmax())])
            raise UnsupportedBufferError(
                f"the gradient of {name} is neither on the CPU nor on a GPU that can be used (one for each process), "
                "or of a layout that is neither strided nor sparse COO, on some rank"
            )
        return found.tolist(), anywhere_wrong.tolist()

    def _state(self, parameter: torch.Tensor) -> int:
        grad = parameter.grad
        if grad is None:
            return _NONE if self._skip_unused or not parameter.requires_grad else _DENSE
        if not (grad.is_cpu or self._has_gpu_of(grad)):
            return _UNSUPPORTED
        if grad.is_sparse:
            return _SPARSE + grad.sparse_dim()
        return _DENSE if grad.layout is torch.strided else _UNSUPPORTED

    def _has_gpu_of(self, grad: torch.Tensor) -> bool:
        if not grad.is_cuda:
            return False
        try:
            self._communicator.gpu.staging(grad.device.index)
        except UnsupportedBufferError as error:
            _log.warning("a gradient on %s cannot be reduced: %s", grad.device, error)
            return False
        return True

    def _exchange(self, mine: bytes) -> npt.NDArray[np.uint8]:
        """Return the maximum over the ranks, element by element."""
        if self._found.size != len(mine):
            self._found = self._communicator.empty(len(mine), np.uint8)
        self._found[:] = np.frombuffer(mine, np.uint8)
        self.allreduce(self._found, MAX)
        return self._found

    def _forget_outgrown(self) -> None:
        """Forget buckets of parameters that have another dtype or shape by now, as after ``model.double()``."""
        kept = []
        for bucket in self._buckets:
            if any(slot.is_outgrown() for slot in bucket.slots):
                self._placed.difference_update(id(slot.parameter) for slot in bucket.slots)
                bucket.retire()
                if self._early is not None:
                    self._early.pop(bucket).retire()
            else:
                kept.append(bucket)
        self._buckets[:] = kept

    def _place(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make buckets for parameters that have none, last registered first: in the order of the backward pass."""
        unique = list({id(parameter): parameter for parameter in reversed(parameters)}.values())
        items: list[tuple[Hashable, int]] = []
        for parameter in unique:
            group = self._groups.get(id(parameter))
            # A group's bucket is never full.
            items.append(
                ((parameter.dtype, parameter.is_cuda, group), padded_nbytes(parameter) if group is None else 0)
            )
        for members in plan(items, self._bucket_nbytes):
            bucket = Bucket([unique[index] for index in members], self._communicator)
            if _reduces(self._compression, bucket.flat.dtype):
                bucket.reducer = self._new_reducer(len(self._buckets), bucket)
            self._buckets.append(bucket)
            self._placed.update(id(slot.parameter) for slot in bucket.slots)
            if self._early is not None:
                self._early[bucket] = EarlyReduction(bucket, self._communicator)
                self._early[bucket].watch(weakref.WeakMethod(self._start_early))
            bucket.collect_at_once()


def _checksum_of(parameters: Sequence[torch.Tensor]) -> int:
    """Return a checksum of 32 bits of the values."""
    checksum = 0
    for parameter in parameters:
        if parameter.layout is torch.strided:
            values = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(values.numpy().data, checksum)
    return checksum


def _signed(checksum: int) -> bytes:
    """Return a checksum and its complement: the largest bytes of all ranks are complements, too, only if all agree."""
    said = checksum.to_bytes(len(_UNSIGNED) // 2, "little")
    return said + bytes(255 - each for each in said)


def _all_alike(largest: npt.NDArray[np.uint8]) -> bool:
    """Whether these are the largest bytes of equal results of `_signed`."""
    said, complement = largest.astype(np.int32).reshape(2, -1)
    return bool((said + complement == 255).all())


def _overridden(compression: type[Compressor] | BucketCompression) -> bool:
    """Whether a compression is a user's, made of one of ours by giving it other methods."""
    if not isinstance(compression, type):
        return False
    makers = {next(each for each in compression.__mro__ if name in vars(each)) for name in ("compress", "decompress")}
    return any(each.__module__ != Compressor.__module__ for each in makers)


def _reduces(compression: type[Compressor] | BucketCompression, dtype: torch.dtype) -> bool:
    """Whether a compression reduces buckets of a dtype itself."""
    if not isinstance(compression, BucketCompression) or _overridden(compression):
        return False
    return dtype.is_floating_point if _is_wire(compression) else dtype is torch.float32


def _is_wire(compression: type[Compressor] | BucketCompression) -> bool:
    """Whether a compression leaves it to the communicator, which takes buckets from any device."""
    return isinstance(compression, type) and issubclass(compression, WireCompressor)


def _looks(compression: type[Compressor] | BucketCompression) -> str:
    """Return what tells a compression from others, on all ranks alike: not where in memory it is."""
    if isinstance(compression, type):
        return compression.__qualname__
    return repr(compression) if is_dataclass(type(compression)) else type(compression).__qualname__


def _shape_in_memory(tensor: torch.Tensor) -> torch.Size:
    """Return the lengths of the dimensions of a dense tensor, from the one that goes farthest to the nearest."""
    strides = tensor.stride()
    return torch.Size(tensor.shape[dim] for dim in sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _sparse(indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    made = torch.sparse_coo_tensor(indices, values.detach(), tuple(shape), check_invariants=False)
    return made.coalesce()


def _retire(buckets: list[Bucket], early: dict[Bucket, EarlyReduction] | None) -> None:
    for bucket in buckets:
        bucket.retire()
    for each in (early or {}).values():
        each.retire()
