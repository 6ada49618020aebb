"""The backend of `torch.distributed`: what its process groups call, on a `Group`.

A group of torch's is a `Group`: its collectives run in the order of the program, on this thread where the program waits
for them and nothing is before them, else on one thread of the group. Torch has two ways for a backend that is written
in Python: a `ProcessGroup` that stands in for torch's own, in all versions; and a `Backend` (torch 2.15) that torch's
own calls, beside others for other devices. The latter passes less of a work on: neither whether it is done, nor who has
sent a message. So it is taken for groups with other backends alone. `Collectives` is what both call, and knows neither.
"""

from __future__ import annotations

import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.autograd import profiler

from ringreduce import runtime
from ringreduce.common.config import accelerate_uses_cpus, find_ranks_of_cpus
from ringreduce.common.errors import ConfigError, TransportError, UnsupportedBufferError
from ringreduce.common.launch import launch
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.runtime.groups import Group
from ringreduce.torch.arrays import TENSORS
from ringreduce.torch.distributed import works
from ringreduce.torch.distributed.works import CollectiveWork, MessageWork, seconds
from ringreduce.torch.uncompiled import leave_uncompiled
from ringreduce.transport.point_to_point import Transfer

__all__ = ["Collectives", "begin_anew", "create", "group_of", "rendezvous"]

if TYPE_CHECKING:  # which has other signatures than torch calls
    _Base = object
else:
    _Base = dist.ProcessGroup

_NAME = "ringreduce"
_KIND = "custom"  # torch's word for all backends but its own

_Kind: Any = dist.ReduceOp.RedOpType
_OPS: dict[Any, ReduceOp | str] = {
    _Kind.SUM: SUM,
    _Kind.AVG: AVERAGE,
    _Kind.PRODUCT: PRODUCT,
    _Kind.MIN: MIN,
    _Kind.MAX: MAX,
    _Kind.BAND: "bitwise_and",
    _Kind.BOR: "bitwise_or",
    _Kind.BXOR: "bitwise_xor",
}

_Tensors = Sequence[torch.Tensor]

_FLOATS_OF_8_BITS = {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}

#: Groups that are not shut down. Torch keeps the C++ half of them, which must not outlive this one.
_groups: set[Any] = set()
#: Where the ranks of one machine keep torch's store; removed with the process.
_folders: list[tempfile.TemporaryDirectory[str]] = []


# ---- how groups come into being ----


def rendezvous(url: str) -> Iterator[tuple[Any, int, int]]:
    """Find the other ranks: those of the world, which is started if there is none. Collective.

    Yields:
        A store that all ranks share, for what torch and other backends put there, this rank, and how many there are.
    """
    runtime.init()
    _, _, query = url.partition("?")
    for name, mine in ("rank", runtime.rank()), ("world_size", runtime.size()):
        given = next((each.partition("=")[2] for each in query.split("&") if each.startswith(f"{name}=")), str(mine))
        if given != str(mine):
            raise ConfigError(
                f"init_process_group was given {name}={given}, and MPI says {mine}; leave it out with this backend"
            )
    yield _store(), runtime.rank(), runtime.size()


def _store() -> Any:
    """Return a store that all ranks of the world reach. Collective."""
    size = runtime.size()
    if size == 1:
        return c10d.HashStore()
    single_host = runtime.local_size() == size or len(runtime.world().hosts.nodes) == 1
    server = None
    said = b""
    if runtime.rank() == 0:
        if single_host:  # no port is opened
            _folders.append(tempfile.TemporaryDirectory(prefix="ringreduce-", dir=launch().job_folder))
            said = f"{_folders[-1].name}/store".encode()
        else:
            server = c10d.TCPStore(socket.gethostname(), 0, size, is_master=True, wait_for_workers=False)
            said = f"{socket.gethostname()}:{server.port}".encode()
    place = np.zeros(1024, np.uint8)
    place[: len(said)] = np.frombuffer(said, np.uint8)
    place = runtime.broadcast(place)
    text = place.tobytes().rstrip(b"\0").decode()
    if single_host:
        return c10d.FileStore(text, size)
    host, _, port = text.rpartition(":")
    return server or c10d.TCPStore(host, int(port), size, is_master=False, wait_for_workers=False)


def create(options: Any) -> Any:
    """Make this rank's part of a group. Collective over its members.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        ConfigError: MPI does not connect the ranks, or counts them in another way.
    """
    runtime.init()
    # Torch's default limit stands for none: then the settings say how long to wait.
    default = dist.distributed_c10d.default_pg_timeout
    timeout_s = None if options.timeout == default else seconds(options.timeout)
    ranks = list(options.global_ranks_in_group) or list(range(runtime.size()))
    mine = ranks.index(runtime.rank()) if runtime.rank() in ranks else -1
    if (options.group_rank, options.group_size) != (mine, len(ranks)):
        raise ConfigError(
            f"torch takes this process for rank {options.group_rank} of {options.group_size} in the group of ranks "
            f"{ranks}, and MPI for rank {mine} of {len(ranks)}: leave rank and world_size out of init_process_group"
        )
    if len(ranks) > 1:
        if not torch.cuda.is_available():
            find_ranks_of_cpus()
        _warn_if_accelerate_is_alone()
    group = runtime.group(ranks, timeout_s)
    made = _backend(group, options) if _has_others(options) else _ProcessGroup(group)
    made.timeout = options.timeout
    _groups.add(made)
    return made


def _warn_if_accelerate_is_alone() -> None:
    """Warn if Accelerate has taken, or will take, each rank for the only one."""
    state: Any = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None:
        return
    if state._shared_state.get("num_processes") == 1:
        remedy = "call init_process_group before Accelerator() or TrainingArguments are made"
    elif torch.cuda.is_available() and not state._shared_state and not accelerate_uses_cpus():
        remedy = "torch sees a GPU, which this backend does not use: say Accelerator(cpu=True), or use_cpu=True"
    else:
        return
    warnings.warn(f"with Accelerate each rank would train alone: {remedy}", stacklevel=2)


def begin_anew() -> None:
    """Make the default process group anew, of the ranks of the world that has begun, if ringreduce is its backend.

    Collective. Other groups are gone with the old one.
    """
    whole: Any = dist.group.WORLD
    ours = whole._get_backend(torch.device("cpu"))
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
    backend = given._get_backend(torch.device("cpu")) if hasattr(given, "_get_backend") else None
    if not isinstance(backend, Collectives):
        got = given if backend is None else f"one of {backend.name()}"
        raise ConfigError(f"this takes a process group of the backend {_NAME} that this rank is in, got {got}")
    return backend.group


def _has_others(options: Any) -> bool:
    """Return whether the process group has backends for other devices, as with ``cpu:ringreduce,cuda:nccl``."""
    whole = getattr(options, "process_group", None)  # since torch 2.15
    return whole is not None and whole.name() != _KIND


# ---- what torch calls ----


class Collectives:
    """The methods that torch calls on process groups and backends, by all names that they have had.

    All return a work. Tensors are on the CPU and of any strides; errors come out where the work is waited for, and in
    its future.

    Args:
        group: carries them out.

    Attributes:
        timeout: torch's, with which the process group was made.
    """

    timeout: timedelta
    supports_splitting = supports_coalescing = False  # into groups; in torch's own way
    _group: Group
    _sequence = 0

    @property
    def group(self) -> Group:
        """What carries the collectives out."""
        return self._group

    def _run(
        self, name: str, result: Sequence[Any], options: Any, call: Callable[[], object], given: Sequence[Any] = ()
    ) -> CollectiveWork:
        """Carry a collective out, after those before it.

        Args:
            name: of the collective.
            result: the tensors that are its result.
            options: torch's, which say whether the program waits for it at once. Torch keeps them only until this
                returns, so that ``call`` must not look at them.
            call: does it.
            given: the tensors that it reads besides.
        """
        self._sequence += 1
        group, here = self._group, not getattr(options, "asyncOp", True)

        def begin() -> CollectiveWork:
            if here:
                return CollectiveWork(group.submit(call, name, here=True), result)
            release = TENSORS.keep_in_place([*result, *given])
            try:
                task = group.submit(call, name, here=False)
            except BaseException:
                release()
                raise
            task.when_done(release)
            return CollectiveWork(task, result)

        if not profiler._is_profiler_enabled:
            return begin()
        with self._shown(name, result) as span:
            work = begin()
            if not here:
                span._call_end_callbacks_on_future(work.get_future())
        return work

    def _shown(self, name: str, tensors: Sequence[Any]) -> Any:
        """Return a context that torch's profiler shows."""
        nbytes = sum(each.nbytes for each in tensors if each.layout is torch.strided)
        ranks = ", ".join(map(str, self._group.ranks))
        return profiler.record_function(f"{_NAME}:{name} ({nbytes} bytes, group of ranks {ranks})")

    def _each(self, name: str, tensors: Sequence[Any], options: Any, call: Callable[..., object]) -> CollectiveWork:
        """As `_run`, for several tensors, or tuples of such, each of which is a call of its own."""
        listed = list(tensors)

        def run() -> None:
            for each in listed:
                call(*each) if isinstance(each, tuple) else call(each)

        pairs = [each if isinstance(each, tuple) else (each, ()) for each in listed]
        results, inputs = ([one for pair in pairs for one in _listed(pair[side])] for side in (0, 1))
        return self._run(name, results, options, run, inputs)

    # ---- reductions ----

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> CollectiveWork:
        op, factor = _op_of(opts)
        group = self._group

        def call(tensor: torch.Tensor) -> None:
            if tensor.layout is torch.sparse_coo:
                _sum_rows(group, tensor, op)
                return
            with group.preparing("allreduce"):
                source = _scaled(_usable(tensor), factor)
            group.allreduce(tensor, op, source)

        return self._each("allreduce", _listed(tensors), opts, call)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> CollectiveWork:
        (op, factor), root = _op_of(opts), opts.rootRank
        group = self._group

        def call(tensor: torch.Tensor) -> None:
            with group.preparing("reduce"):
                source = _scaled(_usable(tensor), factor)
            group.reduce(tensor, root, op, source)

        return self._each("reduce", _listed(tensors), opts, call)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        op, factor = _op_of(opts)
        group = self._group

        def call(output: torch.Tensor, given: torch.Tensor) -> None:
            with group.preparing("reduce_scatter"):
                source = _scaled(_usable(given, output), factor)
            group.reduce_scatter(output, given if source is None else source, op)

        return self._each("reduce_scatter", list(zip(outputs, inputs, strict=True)), opts, call)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> CollectiveWork:
        op, factor = _op_of(opts)
        group = self._group
        lists = [inputs] if isinstance(outputs, torch.Tensor) else inputs

        def call(output: torch.Tensor, given: _Tensors) -> None:
            with group.preparing("reduce_scatter"):
                _usable(output, *given)
                sources = given if factor is None else [_scaled(each, factor) for each in given]
            group.reduce_scatter_list(output, sources, op)

        return self._each("reduce_scatter", list(zip(_listed(outputs), lists, strict=True)), opts, call)

    # ---- moving ----

    def broadcast(self, tensors: Any, opts: Any = 0, timeout: timedelta | None = None) -> CollectiveWork:
        root = opts if isinstance(opts, int) else opts.rootRank
        group = self._group

        def call(tensor: torch.Tensor) -> None:
            with group.preparing("broadcast"):
                _usable(tensor)
            group.broadcast(_movable(tensor), root)

        return self._each("broadcast", _listed(tensors), opts, call)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> CollectiveWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> CollectiveWork:
        group = self._group

        def call(output: torch.Tensor, given: torch.Tensor) -> None:
            group.allgather(_movable(output), _movable(given))

        return self._each("allgather", list(zip(outputs, inputs, strict=True)), opts, call)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> CollectiveWork:
        lists = [outputs] if isinstance(inputs, torch.Tensor) else outputs
        return self._allgather_lists(list(zip(lists, _listed(inputs), strict=True)), opts)

    def allgather_coalesced(
        self, output_lists: Sequence[_Tensors], inputs: _Tensors, opts: Any = None
    ) -> CollectiveWork:
        pairs = [([each[index] for each in output_lists], tensor) for index, tensor in enumerate(inputs)]
        return self._allgather_lists(pairs, opts)

    def _allgather_lists(self, pairs: Sequence[tuple[_Tensors, torch.Tensor]], options: Any) -> CollectiveWork:
        group = self._group

        def call(outputs: _Tensors, given: torch.Tensor) -> None:
            group.allgather_list(_all_movable(outputs), _movable(given))

        return self._each("allgather", pairs, options, call)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> CollectiveWork:
        root, outs = opts.rootRank, list(outputs[0]) if outputs else None
        rooms, given = outs and _all_movable(outs), _movable(inputs[0])
        return self._run("gather", outs or [], opts, lambda: self._group.gather(rooms, given, root), [given])

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> CollectiveWork:
        root, given = opts.rootRank, _all_movable(inputs[0]) if inputs else None
        (output,) = outputs
        room = _movable(output)
        return self._run("scatter", [output], opts, lambda: self._group.scatter(room, given, root), given or ())

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> CollectiveWork:
        received, splits = list(output_split_sizes), list(input_split_sizes)
        room, given = _movable(output), _movable(input)
        return self._run(
            "alltoall", [output], opts, lambda: self._group.alltoall(room, given, received, splits), [given]
        )

    alltoall_base = all_to_all_single

    def alltoall(
        self, outputs: _Tensors, inputs: _Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> CollectiveWork:
        rooms, given = _all_movable(outputs), _all_movable(inputs)
        return self._run("alltoall", outputs, opts, lambda: self._group.alltoall_list(rooms, given), given)

    # ---- meeting ----

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> CollectiveWork:
        limit_s = seconds(timeout or getattr(opts, "timeout", None))
        return self._run("barrier", [], opts, lambda: self._group.barrier(limit_s))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; the error names those that do not come, all of them.

        Args:
            timeout: how long to wait at most, 0 too; None: as the group does.
            wait_all_ranks: means nothing, as all are named in any case.
        """
        limit_s = None if timeout is None else max(timeout.total_seconds(), 0.0)
        with self._shown("monitored_barrier", []):
            self._group.submit(lambda: self._group.barrier(limit_s), "monitored_barrier", here=True).wait()

    monitoredBarrier = monitored_barrier  # noqa: N815

    # ---- messages ----

    def send(self, tensors: Any, dst: int, tag: int = 0) -> MessageWork:
        (tensor,) = _listed(tensors)
        return self._message(f"send to {dst}", tensor, lambda: self._group.send(_movable(tensor), dst, tag))

    def recv(self, tensors: Any, src: int, tag: int = 0) -> MessageWork:
        return self._recv(tensors, src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> MessageWork:
        return self._recv(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815

    def _recv(self, tensors: Any, source: int | None, tag: int) -> MessageWork:
        (tensor,) = _listed(tensors)
        whom = "any rank" if source is None else source
        return self._message(f"recv from {whom}", tensor, lambda: self._group.recv(_movable(tensor), source, tag))

    def _message(self, name: str, tensor: torch.Tensor, begin: Callable[[], Transfer]) -> MessageWork:
        if not profiler._is_profiler_enabled:
            return MessageWork(self._group, begin(), tensor)
        with self._shown(name, [tensor]) as span:
            work = MessageWork(self._group, begin(), tensor)
            span._call_end_callbacks_on_future(work.get_future())
        return work

    # ---- coalescing: works come one after the other anyway, and the last of them stands for all ----

    def start_coalescing(self, device: Any = None) -> None:
        """Begin to collect works."""

    def end_coalescing(self, device: Any = None) -> CollectiveWork:
        """Return a work that is done when all that were begun before it are."""
        return CollectiveWork(self._group.submit(lambda: None, "the last of several collectives", here=False), [])

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # ---- the group itself ----

    def getBackendName(self) -> str:  # noqa: N802
        return _NAME

    def name(self) -> str:
        return _NAME

    def set_timeout(self, timeout: timedelta) -> None:
        limit_s = seconds(timeout)
        if limit_s is not None:
            self._group.set_timeout(limit_s)

    setTimeout = _set_default_timeout = set_timeout  # noqa: N815

    def abort(self) -> None:
        """Give up all that is under way. Local."""
        self._group.give_up(TransportError("the group was aborted"))

    def shutdown(self) -> None:
        """Finish what is under way, and give everything back. Collective."""
        _groups.discard(self)
        self._group.close()

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    setSequenceNumberForGroup = _set_sequence_number_for_group  # noqa: N815
    getSequenceNumberForGroup = _get_sequence_number_for_group  # noqa: N815


class _ProcessGroup(Collectives, _Base):
    """A process group of torch's, and the only backend that it has."""

    def __init__(self, group: Group) -> None:
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[arg-type, call-arg]
        self._group = group
        self._name = self._description = ""

    # Those of the base class ask a backend, and this group has none but itself.

    def _get_backend(self, device: torch.device) -> _ProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # While it makes a group, torch 2.15 takes devices for a sign of backends that its flight recorder can watch.
        return [torch.device("cpu")] if cast("Any", self) in dist.distributed_c10d._world.pg_map else []

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)


def _backend(group: Group, options: Any) -> Any:
    """Return a backend for a process group of torch's; the class is made where torch allows it."""

    class _Backend(Collectives, c10d.Backend):
        def __init__(self) -> None:
            c10d.Backend.__init__(self, group.rank, group.size)
            self._group = group
            self._options = c10d.Backend.Options(_NAME, timeout=options.timeout)
            self._options.global_ranks_in_group = group.ranks
            self._options.group_name = options.group_id

        @property
        def options(self) -> Any:
            return self._options

    return _Backend()


# ---- arguments ----


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _usable(tensor: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return the tensor.

    Raises:
        UnsupportedBufferError: it, or one of the others, is not in host memory.
    """
    for each in (tensor, *others):
        if not each.is_cpu:
            raise UnsupportedBufferError(
                f"the backend {_NAME} of torch.distributed takes CPU tensors, got one on {each.device}: no GPU has run "
                "it yet. Pass tensor.cpu(), or use the collectives of ringreduce.torch, which take CUDA tensors"
            )
    return tensor


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, floats of 8 bits as bytes: nothing computes with them, and they can move all the same."""
    return tensor.view(torch.uint8) if tensor.dtype in _FLOATS_OF_8_BITS else tensor


def _all_movable(tensors: _Tensors) -> list[torch.Tensor]:
    return [_movable(each) for each in tensors]


def _sum_rows(group: Group, tensor: torch.Tensor, op: ReduceOp | str) -> None:
    """Reduce sparse tensors into the same tensors: each rank gets all ranks' rows, and adds them up.

    Args:
        group: carries it out.
        tensor: of layout ``sparse_coo``; shape and dtype must agree, the rows need not.
        op: SUM or AVERAGE; must agree.
    """
    with group.preparing("allreduce"):
        if op not in (SUM, AVERAGE):
            raise UnsupportedBufferError(f"sparse tensors can be summed and averaged, got {op}")
        given = _usable(tensor).detach().coalesce()
        indices, values = given.indices(), given.values()
        counts = torch.empty(group.size, dtype=torch.int64, device="cpu")
        text = f"allreduce({op}, sparse, shape {tuple(tensor.shape)}, {values.dtype}, {tensor.sparse_dim()} dimensions)"
    group.communicator.meet(text)
    group.allgather(counts, torch.tensor([values.shape[0]], device="cpu"))
    all_indices = [indices.new_empty((indices.shape[0], rows)) for rows in counts.tolist()]
    all_values = [values.new_empty((rows, *values.shape[1:])) for rows in counts.tolist()]
    group.allgather_list(all_indices, indices)
    group.allgather_list(all_values, values)
    total = torch.cat(all_values)
    if op is AVERAGE:
        total = total / group.size
    with torch.no_grad():
        indices = torch.cat(all_indices, 1)
        tensor.copy_(torch.sparse_coo_tensor(indices, total, tensor.shape, check_invariants=False).coalesce())


def _op_of(options: Any) -> tuple[ReduceOp | str, Any]:
    """Return the operation that torch's options name, and what tensors are multiplied with before it, if anything.

    Nothing of the options is kept: torch gives them the memory of a function that is about to return.
    """
    if options is None:
        return SUM, None
    given = getattr(options, "reduceOp", options)
    kind = given if isinstance(given, _Kind) else given.op
    op = _OPS.get(kind)
    if op is not None:
        return op, None
    if kind == _Kind.PREMUL_SUM:
        return SUM, given.__getstate__()[1]
    raise ConfigError(f"the backend {_NAME} knows no reduce operation {kind}")


def _scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor | None:
    """Return the product in a new tensor, None if there is no factor."""
    if factor is None:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedBufferError(f"PREMUL_SUM takes floats, got {tensor.dtype}")
    with torch.no_grad():
        return torch.mul(tensor.detach(), factor).to(tensor.dtype)


# Torch's C++ calls them, for example for DDP, from functions that are being compiled, too.
leave_uncompiled(works, Collectives, _ProcessGroup)
