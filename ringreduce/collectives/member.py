"""A communicator without its collectives: rank and topology, buffers, what would run, closing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from time import perf_counter
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import DType, new
from ringreduce.collectives import NCCL, BoundCalls, Call, Choice, Context, Operands, Standing, close_all
from ringreduce.collectives.devices import DevicesOf, NoDevices, ordinal
from ringreduce.collectives.selection import Selection, forced
from ringreduce.collectives.tuning import Table
from ringreduce.common.arguments import array_shape, whole_number
from ringreduce.common.call_sites import GivenUp
from ringreduce.common.errors import ConfigError
from ringreduce.common.instruments import Tally
from ringreduce.common.processes import Forked
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.transport.messages import Messages
from ringreduce.transport.point_to_point import PointToPoint
from ringreduce.transport.waiting import Waiter

__all__ = ["Member", "Running"]


class Member:
    """All of a `Communicator` but its collectives; its attributes are described there."""

    def __init__(self, context: Context, channel: Messages | None = None, devices: DevicesOf = NoDevices) -> None:
        self._context = context
        self._point_to_point: PointToPoint | None = None
        if channel is not None:
            waiter = Waiter(context.waiter.timeout_s, context.waiter.crowded)
            self._point_to_point = PointToPoint(channel, waiter, context.board.find_lost)
            waiter.watchers.append(self._point_to_point.watch)
        self._selection = Selection(context)
        self._standing = Standing(context, self._selection.forget, lambda: self._bound.clear())
        self.gpu = devices(context, self._standing)
        self._operands = Operands(self._standing, self.gpu, context.arena, shares_results=context.topology.size > 1)
        self.instruments = context.instruments
        self.tallies = {each.value: Tally() for each in Collective}
        self.message_tallies = {name: Tally() for name in ("send", "recv", "sendrecv")}
        self._bound = BoundCalls(self._standing, self._operands, self.instruments, self.tallies)
        self.rank = context.rank
        self.topology = context.topology
        self.size = self.topology.size
        self.hosts = context.node.hosts
        self.config = context.config
        self.library = context.messages.library

    def wait_patiently(self, when: Callable[[], bool]) -> None:
        """Nap from the start of each wait, as long as ``when()`` holds; for `Engine`."""
        self._context.waiter.patient = when

    # ---- buffers, and what would run ----

    @overload
    def empty(
        self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None
    ) -> npt.NDArray[Any]: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None) -> Any: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None) -> Any:
        """Return an uninitialised array that collectives use without a copy: a communication buffer.

        It is in memory that the ranks of the node share, starts on a page, and is given back when the array and all its
        views are gone. Local: ranks may make different buffers, or none. ``dtype`` ``"bfloat16"`` takes ml_dtypes.

        Args:
            shape: of the array.
            dtype: of its elements.
            device: ``"cuda"``, or ``"cuda:1"``, for a CuPy array in device memory, which no other rank reaches.

        Returns:
            A NumPy array, or a CuPy array.

        Raises:
            UnsupportedBufferError: a device was asked for, and CuPy or the GPU is missing.
        """
        self._standing.require_open()
        row, dims = DType.of(dtype), array_shape(shape)
        if device not in (None, "cpu"):
            return self.gpu.empty(ordinal(device), dims, row)
        memory = self._context.arena.array(prod(dims) * row.itemsize)
        native: np.dtype[Any] = new((0,), row, "numpy").dtype
        return memory.view(native).reshape(dims)

    def empty_like(self, array: Any) -> Any:
        """Return an uninitialised array for a result: of the shape, dtype and library of one in host memory, C order.

        It is a communication buffer as long as the results that live together are not too large; see
        ``RINGREDUCE_RESULTS``. Local.
        """
        self._standing.require_open()
        dtype = DType.of(array.dtype)
        return self._operands.maker(array)(tuple(array.shape), dtype)[0]

    def algorithms(
        self, collective: Collective | str = Collective.ALLREDUCE, *, device: str | None = None
    ) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here.

        Args:
            collective: which.
            device: where the arrays are, as for `empty`. In device memory ``"nccl"`` can be asked for, too; where that
                cannot run, the ranks do without.
        """
        kind = _collective(collective)
        names = self._selection.names(kind)
        on_device = device not in (None, "cpu") and kind is Collective.ALLREDUCE
        return [*names, NCCL] if on_device else names

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules. All ranks must use the same."""
        self._bound.clear()
        self._selection.use(table)

    def choose(
        self,
        collective: Collective | str,
        nbytes: int,
        dtype: Any = np.float32,
        algorithm: str | None = None,
        *,
        op: ReduceOp | str = SUM,
    ) -> Choice:
        """Return what would carry out ``collective`` on arrays in host memory, and why.

        Args:
            collective: which.
            nbytes: of the array of each rank; of the largest, where they differ.
            dtype: of its elements.
            algorithm: as for `allreduce`.
            op: as for `allreduce`; without effect where nothing is reduced.
        """
        return self._selection.choose(self._described(collective, nbytes, dtype, op), algorithm)

    def path_on_device(self, dtype: Any, op: ReduceOp | str = SUM, algorithm: str | None = None) -> Choice:
        """Return what carries out an allreduce of arrays in device memory, once there was one with this ``algorithm``.

        Args:
            dtype: of their elements.
            op: as for `allreduce`.
            algorithm: as for `allreduce`. One for host memory is named in the choice, with the transport ``"staged"``.
        """
        if self.size == 1:
            return self.choose(Collective.ALLREDUCE, 0, dtype, op=op)
        return self.gpu.choice(DType.of(dtype), ReduceOp.parse(op), algorithm)

    def transport_name(self, algorithm: str, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Return what moves the bytes of ``algorithm`` here: ``"shared"``, ``"mpi"``, ``"shared+mpi"``, ...

        Args:
            algorithm: a name from `algorithms`; ``"messages"``: of `Communicator.send` and its kind.
            collective: of the algorithm.
        """
        if algorithm == "messages":
            return self._context.messages.name
        if algorithm == NCCL:
            return algorithm
        choice = forced(self._described(collective, 1), algorithm)
        return choice.transport.replace("messages", self._context.messages.name)

    def explain(
        self,
        nbytes: int,
        dtype: Any = np.float32,
        collective: Collective | str = Collective.ALLREDUCE,
        *,
        op: ReduceOp | str = SUM,
        device: str | None = None,
    ) -> str:
        """Say in words what would carry out ``collective`` on ``nbytes`` bytes per rank, why, and what else could.

        Args:
            nbytes: of the array.
            dtype: of its elements.
            collective: which.
            op: as for `choose`.
            device: ``"cuda"`` for an array in device memory; how that is reduced is known once there was one. None, or
                ``"cpu"``: in host memory, and device memory too where that was used.
        """
        call = self._described(collective, nbytes, dtype, op)
        if device not in (None, "cpu"):
            ordinal(device)
            where = f"{call.collective.value} of {call.nbytes} bytes in device memory on {self.topology.describe()}"
            return f"{where}: {self.gpu.explain(call.collective)}"
        return self._selection.explain(call) + self.gpu.remark(call.collective)

    # ---- the end ----

    def give_up(self, error: BaseException) -> None:
        """Refuse all further calls, as what the ranks have under way is no longer known. Local.

        Args:
            error: why; the errors of those calls say so.
        """
        self._standing.give_up(error)
        if self._point_to_point is not None:
            self._point_to_point.fail(error)

    def leave(self, why: GivenUp) -> bool:
        """Let nobody on this node wait for this rank any more; return whether it is the first of them that leaves."""
        return self._context.board.leave(why)

    def neighbours(self) -> list[int]:
        """Return the processes of the other ranks of this node."""
        context = self._context
        return [context.arena.pid(member) for member in context.board.peers]

    def forked(self, processes: Forked) -> None:
        """Take note that this process has just forked others; see `Arena`."""
        self._context.arena.forked(processes)

    def disown(self, reason: str) -> None:
        """Refuse all calls: this process was forked by the rank whose communicator this is.

        What this process writes to communication buffers stays its own.

        Args:
            reason: what the `ConfigError` of later calls says.
        """
        self._standing.disown(reason)
        self._bound.clear()
        if self._point_to_point is not None:
            self._point_to_point.disown(ConfigError(reason))
        self._context.arena.disown()

    def close(self) -> None:
        """Give everything back; collectives raise `ShutdownError` from here on. Collective, and safe to call twice."""
        if self._standing.ended:
            return
        self._standing.close()
        if self._point_to_point is not None:
            self._point_to_point.close()
        if self._standing.failed:
            self.gpu.abandon()
            self._context.abandon()
            return
        close_all(self.gpu.close, self._selection.close, self._context.close)

    def _described(
        self, collective: Collective | str, nbytes: int, dtype: Any = np.float32, op: ReduceOp | str = SUM
    ) -> Call:
        kind, count = _collective(collective), whole_number("nbytes", nbytes, 0)
        return self._selection.call(kind, count, DType.of(dtype), ReduceOp.parse(op))


def _collective(name: Collective | str) -> Collective:
    try:
        return Collective(name)
    except ValueError:
        names = ", ".join(each.value for each in Collective)
        raise ConfigError(f"unknown collective {name!r}; choose one of {names}") from None


class Running:
    """The context of a collective that runs: tells the observers, counts it, and reports errors.

    A class, as a generator for a context manager would take a microsecond of the three that a small call has.
    Errors of messages from one rank to another concern these alone, and they are not among the calls that all make.
    """

    __slots__ = ("_algorithm", "_call", "_collective", "_fail", "_instruments", "_tally", "nbytes")

    def __init__(self, member: Member, collective: str, algorithm: str, nbytes: int) -> None:
        self._fail = member._standing.fail if collective in member.tallies else None
        self._instruments = member.instruments
        self._tally = (member.tallies if self._fail else member.message_tallies)[collective]
        self._collective = collective
        self._algorithm = algorithm
        self.nbytes = nbytes

    def __enter__(self) -> None:
        if self._instruments.observers:
            self._instruments.tell("collective_started", self._collective, self._algorithm, self.nbytes)
        self._call: list[Any] = [perf_counter(), 0.0, self._collective, self.nbytes]
        if self._fail is not None:  # the calls that are kept have the same numbers on all ranks
            self._instruments.calls.append(self._call)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            if self._fail is not None:
                self._fail(error)
            return
        self._call[1] = ended = perf_counter()
        seconds = ended - self._call[0]
        tally = self._tally
        tally.calls += 1
        tally.nbytes += self.nbytes
        tally.seconds += seconds
        instruments = self._instruments
        if instruments.observers:
            instruments.tell("collective_finished", self._collective, self._algorithm, self.nbytes, seconds)
