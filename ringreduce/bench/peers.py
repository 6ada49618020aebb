"""Other libraries on the same job: what ``bench --vs`` and ``benchmarks/training.py`` measure ringreduce against.

The one place outside the transports that imports mpi4py, and outside the torch binding that imports torch; both only
when a peer is asked for. Each peer gets the treatment that suits it best: blocking calls on private, contiguous,
touched memory, in place where its interface has that and gains by it, on a communicator of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.bench.cases import TYPES, Case
from ringreduce.bench.contenders import Device, LibraryMessages, OnGpu, giving, in_one, pattern, room
from ringreduce.bench.measure import Contender
from ringreduce.buffers import DType
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import gather
from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.libraries import INSTALL_MPI
from ringreduce.common.quantities import plural
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM

Array = npt.NDArray[Any]


class Peer(Protocol):
    """A library that can do some of our jobs."""

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        """Prepare one case; None where the library does not offer it for these elements and this operation.

        Args:
            case: what to do.
            new_results: let calls return new arrays, where the library can.
        """

    def close(self) -> None:
        """Give back what the library holds; collective."""


class MpiPeer:
    """The MPI library's own blocking collectives, called through mpi4py."""

    def __init__(self, world: Communicator) -> None:
        """Duplicate the world's communicator; collective.

        Raises:
            ConfigError: mpi4py or an MPI library is missing.
        """
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ConfigError(f"--vs mpi takes an MPI library: {error}; {INSTALL_MPI}") from None
        if MPI.COMM_WORLD.size != world.size:
            raise ConfigError(f"--vs mpi: MPI has {plural(MPI.COMM_WORLD.size, 'rank')}, ringreduce {world.size}")
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._ops = {SUM: MPI.SUM, PRODUCT: MPI.PROD, MIN: MPI.MIN, MAX: MPI.MAX}

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        if not self._can(case):
            return None
        rank = self._comm.rank
        in_place = case.collective.in_place and not new_results
        if in_place:
            source, result = in_one(case, self._new(case.buffer_count, case.dtype), rank)
        else:
            source = self._new(case.input_count, case.dtype)
            result = self._new(case.output_count, case.dtype)
        if in_place and case.collective.name == "reduce_scatter":  # MPI puts the result first
            result = source[: case.count]
        new = room(case, None if new_results else result)
        if case.collective.point_to_point:
            return Contender("mpi", source, pattern(case, rank, through=self._messages(), source=source, new=new))
        call = self._call(case, source, in_place=in_place)
        gets = case.collective.has_result(rank, case.root)

        def run() -> Any:
            target = new() if gets else None
            call(target)
            return target

        return Contender("mpi", source, run)

    def close(self) -> None:
        self._comm.Free()

    def _new(self, count: int, dtype: np.dtype[Any]) -> Array:
        return np.empty(count, dtype)

    def _call(self, case: Case, source: Array, *, in_place: bool) -> Callable[[Any], object]:
        """Return what carries out a collective, given where the result goes."""
        comm = self._comm
        root = case.root
        mpi = self._mpi
        at_root = comm.rank == root
        given = mpi.IN_PLACE if in_place else source
        op: Any = self._ops.get(case.op)  # None: nothing is reduced

        def broadcast(result: Array) -> None:
            if at_root and not in_place:
                np.copyto(result, source)
            comm.Bcast(result, root)

        calls: dict[str, Callable[[Any], object]] = {
            "allreduce": lambda result: comm.Allreduce(given, result, op),
            "reduce_scatter": lambda result: comm.Reduce_scatter_block(given, source if in_place else result, op),
            "allgather": lambda result: comm.Allgather(given, result),
            "broadcast": broadcast,
            "alltoall": lambda result: comm.Alltoall(source, result),
            "reduce": lambda result: comm.Reduce(given if at_root else source, result, op, root),
            "gather": lambda result: comm.Gather(given if at_root else source, result, root),
            "scatter": lambda result: comm.Scatter(
                source if at_root else None, mpi.IN_PLACE if in_place and at_root else result, root
            ),
        }
        return calls[case.collective.name]

    def _messages(self) -> LibraryMessages:
        comm = self._comm
        wait = self._mpi.Request.Waitall

        def exchange(sent: Array, to: int, got: Array, source: int) -> None:
            comm.Sendrecv(sent, to, 0, got, source, 0)

        return LibraryMessages(comm.Send, comm.Recv, exchange, comm.Isend, comm.Irecv, wait, np.zeros(1, np.uint8))

    def _can(self, case: Case) -> bool:
        """Try the operation on one element: what MPI takes depends on the library and how it was built."""
        if case.type_name == "bfloat16" or (case.op_name and case.op is AVERAGE):
            return False
        one = np.zeros(1, case.dtype)
        two = np.zeros(1, case.dtype)
        try:
            self._ops[case.op].Reduce_local(one, two)
        except (self._mpi.Exception, KeyError, ValueError, BufferError):
            return not case.collective.reduces
        return True


class GlooPeer:
    """torch.distributed over Gloo; CUDA tensors it takes through host memory itself."""

    _TYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})

    def __init__(self, world: Communicator, device: Device) -> None:
        """Form a process group of all ranks; collective.

        Raises:
            ConfigError: torch is missing, or the ranks are on several machines.
        """
        self._device = device
        self._open = contextlib.ExitStack()
        self._open.enter_context(gloo_process_group(world))

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        """Prepare one case; None also where Gloo refuses tensors on a GPU, as for some collectives."""
        import torch.distributed as dist

        row = TYPES[case.type_name]
        rank = dist.get_rank()
        if row.name not in self._TYPES or (case.op_name and case.op is AVERAGE):
            return None
        source = _new(self._device, case.input_count, case)
        result = source if case.collective.overwrites else _new(self._device, case.output_count, case)
        given = _tensor(source, row)
        got = _tensor(result, row)
        if case.collective.point_to_point:
            carry_out: tuple[Any, ...] = (pattern(case, rank, through=_gloo_messages(), source=given, new=lambda: got),)
        else:
            carry_out = _gloo_call(case, rank, given=given, got=got)
        call = giving(result if case.collective.has_result(rank, case.root) else None, *carry_out)
        if isinstance(self._device, OnGpu) and not case.collective.point_to_point:
            try:
                call()
                self._device.watch.ready()
            except (RuntimeError, ValueError, NotImplementedError):  # torch's, on all ranks, before anything is sent
                return None
        return Contender("gloo", source, call)

    def close(self) -> None:
        self._open.close()


def _gloo_call(case: Case, rank: int, given: Any, got: Any) -> tuple[Any, ...]:
    """Return what carries out a collective on tensors, and its arguments."""
    import torch.distributed as dist

    names = {SUM: "SUM", PRODUCT: "PRODUCT", MIN: "MIN", MAX: "MAX"}
    op = getattr(dist.ReduceOp, names[case.op])  # meaningless where nothing is reduced
    at_root = rank == case.root
    # torch renamed these two; the old names warn.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, tuple[Any, ...]] = {
        "allreduce": (dist.all_reduce, got, op),
        "reduce_scatter": (scatter, got, given, op),
        "allgather": (gather_all, got, given),
        "broadcast": (dist.broadcast, got, case.root),
        "alltoall": (dist.all_to_all_single, got, given),
        "reduce": (dist.reduce, got, case.root, op),
        "gather": (dist.gather, given, list(got.chunk(case.nranks)) if at_root else None, case.root),
        "scatter": (dist.scatter, got, list(given.chunk(case.nranks)) if at_root else None, case.root),
    }
    return calls[case.collective.name]


def _gloo_messages() -> LibraryMessages:
    import torch
    import torch.distributed as dist

    def exchange(sent: Any, to: int, got: Any, source: int) -> None:
        if to == source == dist.get_rank():
            got.copy_(sent)
            return
        coming: Any = dist.irecv(got, source)
        dist.send(sent, to)
        coming.wait()

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    answer = torch.zeros(1, dtype=torch.uint8)
    return LibraryMessages(dist.send, dist.recv, exchange, dist.isend, dist.irecv, wait, answer)


class StagedMpi(MpiPeer):
    """MPI on arrays of a GPU, as one does it by hand: down into pinned host memory, the collective, up again."""

    def __init__(self, world: Communicator, device: OnGpu) -> None:
        """Do what `MpiPeer` does; collective."""
        super().__init__(world)
        self._device = device
        self._pinned: list[Array] = []  # kept for as long as it is pinned

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        self._unpin()
        inner = super().contender(case)
        if inner is None:
            return None
        device = self._device
        source = _new(self._device, case.input_count, case)
        result = source if case.collective.overwrites else _new(device, case.output_count, case)

        def call() -> Any:
            device.down(inner.source, source)
            device.up(result, inner.call())
            return result

        return Contender("mpi", source, call)

    def close(self) -> None:
        self._unpin()
        super().close()

    def _new(self, count: int, dtype: np.dtype[Any]) -> Array:
        array = super()._new(count, dtype)
        with contextlib.suppress(TransportError):  # small arrays share pages; then it goes as it would without
            self._device.driver.register(array.ctypes.data, array.nbytes)
            self._pinned.append(array)
        return array

    def _unpin(self) -> None:
        while self._pinned:
            self._device.driver.unregister(self._pinned.pop().ctypes.data)


#: Name for ``--vs`` -> what makes it of the ranks and where the arrays are; collective.
PEERS: dict[str, Callable[[Communicator, Device], Peer]] = {
    "mpi": lambda world, device: StagedMpi(world, device) if isinstance(device, OnGpu) else MpiPeer(world),
    "gloo": GlooPeer,
}


@contextlib.contextmanager
def gloo_process_group(world: Communicator) -> Iterator[None]:
    """Make all ranks torch.distributed's default group over Gloo; collective.

    On one machine they talk over the loopback interface, and otherwise over the one that Gloo finds or
    ``GLOO_SOCKET_IFNAME`` names. They find each other through a file in a directory that only this user can enter, so
    nothing listens for strangers. Each rank's share of the cores is what torch may use.

    Raises:
        ConfigError: torch is missing, or the ranks are on several machines that do not see the same temporary files.
    """
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigError(f"measuring Gloo takes torch: {error}; pip install torch") from None
    if world.hosts.single_node:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    folder = gather(world, tempfile.mkdtemp(prefix="ringreduce-gloo-") if world.rank == 0 else None)[0]
    try:
        if not world.allreduce(np.array([os.path.isdir(folder)]), MIN)[0]:
            raise ConfigError("Gloo finds the ranks through a file: TMPDIR has to be a folder that all machines see")
        store = dist.FileStore(os.path.join(folder, "store"), world.size)  # type: ignore[attr-defined]
        limit = timedelta(seconds=world.config.timeout_s)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
        try:
            yield
        finally:
            dist.destroy_process_group()
            del store  # it writes to its file once more, and would try for ever if that were removed
            world.barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def mpi_library() -> str | None:
    """Return what the MPI library calls itself, or None if this process has not started one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None
    from ringreduce.transport.mpi import library

    return library()


def _new(device: Device, count: int, case: Case) -> Any:
    """Return an uninitialised array that no peer can reach."""
    return device.empty(count * case.dtype.itemsize, shared=False).view(case.dtype)


def _tensor(array: Any, row: DType) -> Any:
    """View an array, wherever it is, as a torch tensor; bfloat16, which torch does not read from NumPy, by its bits."""
    import torch

    device = "cpu" if isinstance(array, np.ndarray) else "cuda"
    if row.name == "bfloat16":
        return torch.as_tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return torch.as_tensor(array, device=device)
