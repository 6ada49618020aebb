"""What torch calls on process groups and backends: the collectives of a `Group`, as works of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd import profiler

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.runtime import group_collectives
from ringreduce.runtime.groups import Group
from ringreduce.torch.distributed.works import CollectiveWork, MessageWork, Timeout, end_span_after, limit_of, seconds
from ringreduce.torch.private import cpu_backend_of, is_profiling
from ringreduce.torch.tensors.arrays import TENSORS, sparse_entries, sum_entries
from ringreduce.transport.point_to_point import PeerTransfer

NAME = "ringreduce"

#: Groups that are not shut down. Torch keeps the C++ half of them, which must not outlive this one.
open_groups: set[Any] = set()

_FLOATS_OF_8_BITS = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}

_Kind: Any = dist.ReduceOp.RedOpType
_OPS: dict[Any, ReduceOp | str] = {
    _Kind.SUM: SUM,
    _Kind.AVG: AVERAGE,
    _Kind.PRODUCT: PRODUCT,
    _Kind.MIN: MIN,
    _Kind.MAX: MAX,
    _Kind.BAND: "band",
    _Kind.BOR: "bor",
    _Kind.BXOR: "bxor",
}

_Tensors = Sequence[torch.Tensor]


# ---- arguments ----


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments, which may be lists of lists."""
    if isinstance(arguments, torch.Tensor):
        return [arguments]
    lists = map(_tensors, arguments) if isinstance(arguments, (list, tuple)) else ()
    return [tensor for each in lists for tensor in each]


def _movable(argument: Any) -> Any:
    """Return tensors of floats of 8 bits as bytes: nothing computes with them, and they can move all the same."""
    if isinstance(argument, (list, tuple)):
        return [_movable(each) for each in argument]
    is_small_float = isinstance(argument, torch.Tensor) and argument.dtype in _FLOATS_OF_8_BITS
    return argument.view(torch.uint8) if is_small_float else argument


def _require_host(tensor: torch.Tensor) -> None:
    """Raise `UnsupportedBufferError` for a tensor that is not in host memory."""
    if not tensor.is_cpu:
        raise UnsupportedBufferError(
            f"the backend {NAME} of torch.distributed takes CPU tensors, got one on {tensor.device}: no GPU has run it "
            "yet. Pass tensor.cpu(), or use the collectives of ringreduce.torch, which take CUDA tensors"
        )


def _reduction_of(options: Any) -> tuple[ReduceOp | str, Callable[[Any], Any]]:
    """Return the operation that torch's options name, and what multiplies tensors before it, if anything is to."""
    given = _Kind.SUM if options is None else getattr(options, "reduceOp", options)
    kind = given if isinstance(given, _Kind) else given.op
    if kind == _Kind.PREMUL_SUM:
        return SUM, partial(_scaled, given.__getstate__()[1])
    if kind not in _OPS:
        raise ConfigError(f"the backend {NAME} knows no reduce operation {kind}")
    return _OPS[kind], lambda tensors: tensors


def _scaled(factor: Any, given: Any) -> Any:
    """Return the products of a tensor, or of a list of them, with a factor, in new memory."""
    if not isinstance(given, torch.Tensor):
        return [_scaled(factor, each) for each in given]
    if not (given.is_floating_point() or given.is_complex()):
        raise UnsupportedBufferError(f"PREMUL_SUM takes floats, got {given.dtype}")
    with torch.no_grad():
        return torch.mul(given.detach(), factor).to(given.dtype)


# ---- what torch calls ----


class GroupBackend:
    """What torch calls on process groups and backends besides collectives; begins the works of both.

    Args:
        group: carries them out.

    Attributes:
        timeout: torch's, with which the process group was made.
    """

    timeout: timedelta
    _group: Group
    _sequence = 0

    @property
    def group(self) -> Group:
        """What carries the collectives out."""
        return self._group

    def _run(
        self,
        name: str,
        options: Any,
        collective: Callable[..., object],
        calls: Sequence[tuple[Any, ...]],
        prepare: Callable[[Any], Any] = _movable,
    ) -> CollectiveWork:
        """Carry out calls, one after the other and after those before them, as one work.

        Args:
            name: of the collective.
            options: torch's, which say whether the program waits for it at once.
            collective: of `group_collectives`.
            calls: the arguments of each: the tensors that are its result, those that it reads, and others.
            prepare: is given the tensors that it reads, and returns what it reads in their place.
        """
        self._sequence += 1
        group = self._group

        def run() -> None:
            for output, given, *others in calls:
                with CheckingArguments(group.communicator, name):
                    for each in _tensors((output, given)):
                        _require_host(each)
                    source = prepare(given)
                collective(group.communicator, _movable(output), source, *others)

        results = [each for first, *_ in calls for each in _tensors(first)]
        with self._shown(name, results) as span:
            if not getattr(options, "asyncOp", True):
                return CollectiveWork(group.submit(run, name, here=True), results)
            release = TENSORS.keep_in_place(_tensors(calls))
            try:
                task = group.submit(run, name, here=False)
            except BaseException:
                release()
                raise
            task.when_done(release)
            if span is not None:
                end_span_after(task, span)
            return CollectiveWork(task, results)

    def _shown(self, name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
        """Return a context that torch's profiler shows, if it is on."""
        if not is_profiling():
            return nullcontext()
        nbytes = sum(each.nbytes for each in tensors if each.layout is torch.strided)
        ranks = ", ".join(map(str, self._group.ranks))
        return profiler.record_function(f"{NAME}:{name} ({nbytes} bytes, group of ranks {ranks})")

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that do not come, all of them.

        Args:
            timeout: how long to wait at most, 0 too, a timedelta or seconds; None: as the group does.
            wait_all_ranks: means nothing, as all are named in any case.
        """
        limit_s = limit_of(timeout)
        limit_s = None if limit_s is None else max(limit_s, 0.0)
        with self._shown("monitored_barrier", []):
            self._group.submit(partial(self._group.barrier, limit_s), "monitored_barrier", here=True).wait()

    monitoredBarrier = monitored_barrier  # noqa: N815

    # ---- messages ----

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MessageWork:
        return self._message(f"send to {dst}", self._group.send, tensors=tensors, peer=dst, tag=tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MessageWork:
        return self._message(f"recv from {src}", self._group.recv, tensors=tensors, peer=src, tag=tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        return self._message("recv from any rank", self._group.recv, tensors=tensors, peer=None, tag=tag)

    recvAnysource = recv_anysource  # noqa: N815

    def _message(
        self, name: str, begin: Callable[..., PeerTransfer], tensors: Any, peer: int | None, tag: int
    ) -> MessageWork:
        (tensor,) = _tensors(tensors)
        with self._shown(name, [tensor]) as span:
            work = MessageWork(self._group, begin(_movable(tensor), peer, tag), tensor)
            if span is not None:
                end_span_after(work.task(), span)
        return work

    # ---- coalescing: works come one after the other anyway, and the last of them is returned for all ----

    def start_coalescing(self, device: Any = None) -> None:
        """Begin to collect works."""

    def end_coalescing(self, device: Any = None) -> CollectiveWork:
        """Return a work that is done when all that were begun before it are."""
        return CollectiveWork(self._group.submit(lambda: None, "the last of several collectives", here=False), [])

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # ---- the group itself ----

    def name(self) -> str:
        return NAME

    getBackendName = name  # noqa: N815

    def set_timeout(self, timeout: timedelta | float) -> None:
        limit_s = seconds(timeout)
        if limit_s is not None:
            self._group.set_timeout(limit_s)

    setTimeout = _set_default_timeout = set_timeout  # noqa: N815

    def abort(self) -> None:
        """Give up all that is under way. Local."""
        self._group.abort(TransportError("the group was aborted"))

    def shutdown(self) -> None:
        """Finish what is under way, and give everything back. Collective."""
        open_groups.discard(self)
        self._group.close()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    setSequenceNumberForGroup = _set_sequence_number_for_group  # noqa: N815
    getSequenceNumberForGroup = _get_sequence_number_for_group  # noqa: N815


class Collectives(GroupBackend):
    """The collectives that torch calls on process groups and backends, by all names that they have had.

    All return a work. Tensors are on the CPU and of any strides; errors come out where the work is waited for, and in
    its future. Torch gives options the memory of a function that is about to return, so nothing of them is kept.
    """

    supports_splitting = supports_coalescing = False  # into groups; in torch's own way

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Timeout = None) -> CollectiveWork:
        op, scaled = _reduction_of(opts)
        calls = [(each, each, op) for each in _listed(tensors)]
        return self._run("allreduce", opts, collective=_allreduce, calls=calls, prepare=scaled)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> CollectiveWork:
        op, scaled = _reduction_of(opts)
        calls = [(each, each, op, opts.rootRank) for each in _listed(tensors)]
        return self._run("reduce", opts, collective=group_collectives.reduce, calls=calls, prepare=scaled)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: _Tensors, inputs: Sequence[torch.Tensor | _Tensors], opts: Any = None
    ) -> CollectiveWork:
        op, scaled = _reduction_of(opts)
        calls = [(output, given, op) for output, given in zip(outputs, inputs, strict=True)]
        return self._run(
            "reduce_scatter", opts, collective=group_collectives.reduce_scatter, calls=calls, prepare=scaled
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CollectiveWork:
        lists = [inputs] if isinstance(outputs, torch.Tensor) else inputs
        return self.reduce_scatter_single_coalesced(_listed(outputs), lists, opts)

    # ---- moving ----

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: Timeout = None) -> CollectiveWork:
        root = opts if isinstance(opts, int) else opts.rootRank
        calls = [(each, each, root) for each in _listed(tensors)]
        return self._run("broadcast", opts, collective=group_collectives.broadcast, calls=calls)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor | _Tensors], inputs: _Tensors, opts: Any = None
    ) -> CollectiveWork:
        return self._run(
            "allgather", opts, collective=group_collectives.allgather, calls=list(zip(outputs, inputs, strict=True))
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Timeout = None) -> CollectiveWork:
        lists = [outputs] if isinstance(inputs, torch.Tensor) else outputs
        return self.all_gather_single_coalesced(lists, _listed(inputs), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> CollectiveWork:
        return self.all_gather_single_coalesced(list(zip(*output_lists, strict=True)), inputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> CollectiveWork:
        call = list(outputs[0]) if outputs else None, inputs[0], opts.rootRank
        return self._run("gather", opts, collective=group_collectives.gather, calls=[call])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> CollectiveWork:
        (output,) = outputs
        call = output, list(inputs[0]) if inputs else None, opts.rootRank
        return self._run("scatter", opts, collective=group_collectives.scatter, calls=[call])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Timeout = None,
    ) -> CollectiveWork:
        call = output, input, list(output_split_sizes), list(input_split_sizes)
        return self._run("alltoall", opts, collective=group_collectives.alltoall, calls=[call])

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: Timeout = None
    ) -> CollectiveWork:
        return self._run(
            "alltoall", opts, collective=group_collectives.alltoall_list, calls=[(list(outputs), list(inputs))]
        )

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> CollectiveWork:
        given = opts if isinstance(opts, (timedelta, float)) else getattr(opts, "timeout", None)
        limit_s = seconds(timeout or given)
        return self._run("barrier", opts, collective=lambda *_: self._group.barrier(limit_s), calls=[((), ())])


def recreate_default_group() -> None:
    """Recreate the default process group, of the ranks of the new world, if ringreduce is its backend.

    Collective. Other groups end with the old one.
    """
    whole: Any = dist.group.WORLD
    ours = cpu_backend_of(whole)
    if isinstance(ours, Collectives):
        backend = dist.get_backend()
        dist.destroy_process_group()
        dist.init_process_group(backend, timeout=ours.timeout)


def group_of(process_group: dist.ProcessGroup | None = None) -> Group:
    """Return what carries out the collectives of a process group; None: of the default one.

    Raises:
        ConfigError: it is none of ringreduce's.
    """
    given = cast("Any", process_group or dist.group.WORLD)
    backend = cpu_backend_of(given)
    if not isinstance(backend, Collectives):
        got = given if backend is given else f"one of {backend.name()}"
        raise ConfigError(f"this takes a process group of the backend {NAME} that this rank is in, got {got}")
    return backend.group


# ---- one call of a group ----


def _allreduce(communicator: Communicator, output: torch.Tensor, given: torch.Tensor, op: ReduceOp | str) -> None:
    reduce = _sum_rows if output.layout is torch.sparse_coo else group_collectives.allreduce
    reduce(communicator, output, given, op)


def _sum_rows(communicator: Communicator, output: torch.Tensor, given: torch.Tensor, op: ReduceOp | str) -> None:
    """Reduce sparse tensors: each rank gets all ranks' rows, and adds them up.

    Args:
        communicator: the ranks.
        output: of layout ``sparse_coo``.
        given: likewise; shape and dtype must agree, the rows need not.
        op: SUM or AVERAGE; must agree.
    """
    with CheckingArguments(communicator, "allreduce"):
        if op not in (SUM, AVERAGE):
            raise UnsupportedBufferError(f"sparse tensors can be summed and averaged, got {op}")
        entries = sparse_entries(given)
        dtype = entries[1].dtype
        text = f"allreduce({op}, sparse, shape {tuple(given.shape)}, {dtype}, {given.sparse_dim()} dimensions)"
    communicator.rendezvous(text)
    total = sum_entries(communicator, entries, shape=given.shape, op=op)
    with torch.no_grad():
        output.copy_(total)
