"""Blocking collectives on one process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeVar, cast, overload

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array, DType, new
from ringreduce.collectives.call import DETERMINISTIC, Call, Choice
from ringreduce.collectives.choice.selection import Chooser
from ringreduce.collectives.choice.tuning import Table
from ringreduce.collectives.comm_state import CommState
from ringreduce.collectives.compressed import Feedback
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import Devices, Operands, ordinal, with_rows
from ringreduce.collectives.running import Runner
from ringreduce.collectives.send_recv import PendingMessage, SendRecv
from ringreduce.common.arguments import CheckingArguments, array_shape
from ringreduce.common.call_sites import AbortReason
from ringreduce.common.errors import TransportError
from ringreduce.common.instruments import Tally
from ringreduce.common.lifetime import close_all
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.transport.messages import Messages
from ringreduce.transport.point_to_point import NoRank
from ringreduce.transport.shared.board import Signature

#: An array of any library; a number, where these are taken.
A = TypeVar("A")

_T = TypeVar("_T")

_BARRIER = Signature.of("barrier", waits=False)
_PARCEL_NBYTES = 1 << 10


class Communicator:
    """The collectives of one process set.

    The methods named after collectives, `rendezvous`, `refuse` and `close` are collective: all ranks call them in one
    order, with arguments that agree where the method says so. Calls block until this rank's result is there. Not
    thread-safe.

    Arrays are NumPy or CuPy arrays or torch tensors of any dtype in `ringreduce.buffers.DTYPES`, of any strides;
    results come in the library of the input. Anything else with ``__cuda_array_interface__`` is taken, too; new arrays
    are CuPy's then. Different libraries on different ranks are fine. `allreduce`, `broadcast` and `reduce` also take
    numbers: of NumPy as they are, of Python as int64, float64, complex128 or bool; the result is a number of the same
    type.

    Arrays in device memory are ordered by streams: a collective begins, for the GPU, after what the caller has
    enqueued on its current stream, and what the caller enqueues there after the call sees the result. Where the data
    goes through host memory, the call itself returns when this rank's input was read and reduced, and the result may
    still be on its way. An allreduce takes arrays in device memory on all ranks or on none; `reduce`, `gather` and
    `scatter` take none; in all other collectives the ranks may differ.

    All methods raise, besides what they list:

    * `UnsupportedBufferError`: an array cannot be used. Raised on the rank that has it, before anything moves; the
      other ranks get a `MismatchError` with the reason. The same holds for every wrong argument: the call ends for
      all ranks.
    * `MismatchError`: the ranks' calls disagree. Raised on all ranks, before any of the user's data moves; with one
      exception: between nodes, if ranks confuse two calls that all have made before, an array that is reduced in place
      may be partly reduced. The error says whether the ranks are in step; if not, all later calls raise a
      `TransportError`.
    * `ConfigError`: another call is under way in this process: on another thread, or below the signal handler that
      makes this one.
    * `CollectiveTimeoutError`, `PeerLostError`, `TransportError`: a peer did not take part. The contents of results
      are undefined then.
    * `ShutdownError`: the world was shut down.

    Args:
        context: the ranks and what connects them.
        channel: a transport between the same ranks that nobody else uses, for `send` and `recv`; closed with this.
            None: there are none.
        devices: makes this rank's device memory.

    Attributes:
        rank, size: this rank's number, and how many there are.
        topology: which ranks share memory.
        hosts: which ranks run on one machine; they need not share memory, as those of a node of `topology` do.
        config: the settings, equal on all ranks.
        library: what moves messages between the ranks, with its version; ``"none"`` where no library does.
        gpu: this rank's device memory.
        instruments: the observers of its collectives.
        lifetime: whether it can make calls.
        tallies: what the calls of each collective add up to, by its name.
        make: makes a call by the name of its collective, see `Runner.make`; without checks of options that it lacks.
        parcel: 1 KiB in which packed objects travel: a call with the same memory is quick.
        point_to_point: carries messages from one rank to another; None: there are none.
        message_tallies: the same of messages from one rank to another.
    """

    def __init__(
        self,
        context: Context,
        channel: Messages | None = None,
        devices: Callable[[Context, CommState], Devices] = Devices,
    ) -> None:
        state = CommState(context)
        self._context = context
        self._state = state
        self.rank = context.rank
        self.topology = context.topology
        self.size = context.topology.size
        self.hosts = context.node.hosts
        self.config = context.config
        self.library = context.messages.library
        self.instruments = context.instruments
        self.lifetime = context.lifetime
        self.gpu = devices(context, state)
        self.tallies = {collective.value: Tally() for collective in Collective}
        self._chooser = Chooser(context, self.gpu)
        self._operands = Operands(self.gpu, context.arena, shares_results=self.size > 1)
        self._runner = Runner(context, state, self._operands, chooser=self._chooser, tallies=self.tallies)
        self.make = self._runner.make
        self.parcel = np.zeros(_PARCEL_NBYTES, np.uint8)
        self._send_recv = SendRecv(context, channel)
        self.point_to_point = self._send_recv.point_to_point
        self.message_tallies = self._send_recv.tallies

    # ---- collectives ----

    def allreduce(
        self,
        array: A,
        op: ReduceOp | str = SUM,
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        compression: str | None = None,
        feedback: Feedback | None = None,
        weights: Sequence[float] = (),
    ) -> A:
        """Reduce arrays over all ranks, element by element; every rank gets the result, with the same bits.

        Args:
            array: any shape; shape and dtype must agree on all ranks.
            op: see `ringreduce.common.reduce_ops`; must agree.
            out: where the result goes, ``array`` itself for in place; same shape and dtype. None: a new array.
            algorithm: a name from `algorithms`, None for the best known; must agree.
            deterministic: add in the order of ranks, so that the bits depend on nothing but the ranks' values: not on
                size, algorithm, the nodes of the ranks, fusion or segments. Between nodes with several ranks each this
                sends more. Also by ``RINGREDUCE_DETERMINISTIC``; must agree.
            compression: a format in `ringreduce.buffers.codecs.CODECS` in which ranks of different nodes send each
                other floats, for sums and averages; must agree. Every element is encoded twice: when it is sent to the
                rank that sums it up, in float32, and when that one sends the sum to all. On one node nothing is
                encoded. None: as they are. Where ``RINGREDUCE_DETERMINISTIC`` is set no format can be asked for, on one
                node either: what is rounded depends on which ranks share a node.
            feedback: keeps the rounding errors, and adds them the next time, for an array that is reduced again and
                again; on all ranks or none.
            weights: on one node, of an average of floats: of each rank; their sum is 1. Must agree.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: no such op, algorithm or format, or they do not go together or cannot run here.
            UnsupportedBufferError: a format or weights were asked for, and the array is not of floats.
        """
        if deterministic and algorithm is None and compression is None:
            algorithm = DETERMINISTIC
            deterministic = False
        if not (deterministic or compression or len(weights)):
            return self._runner.make("allreduce", array, out, op, algorithm)  # type: ignore[no-any-return]
        call = Call(
            Collective.ALLREDUCE,
            array,
            out,
            op=op,
            algorithm=algorithm,
            deterministic=deterministic,
            compression=compression,
            feedback=feedback,
            weights=tuple(weights),
        )
        return self._runner.run(call)  # type: ignore[no-any-return]

    def reduce_scatter(
        self,
        array: A,
        op: ReduceOp | str = SUM,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> A:
        """Reduce arrays over all ranks and give every rank its part of the result.

        Args:
            array: at least one dimension, along the first of which it is cut; shape and dtype must agree.
            op, algorithm: as for `allreduce`.
            splits: rows for rank 0, 1, ..., which add up to all, else it raises a `ConfigError`; must agree. None: as
                of `numpy.array_split`: the first ranks get one row more where they do not divide.
            out: where this rank's part goes; None: a new array.
        """
        if splits is None:
            return self._runner.make("reduce_scatter", array, out, op, algorithm)  # type: ignore[no-any-return]
        call = Call(Collective.REDUCE_SCATTER, array, out, op=op, splits=splits, algorithm=algorithm)
        return self._runner.run(call)  # type: ignore[no-any-return]

    def reduce(
        self, array: A, root: int = 0, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None
    ) -> A | None:
        """Reduce arrays over all ranks, element by element; the root alone gets the result.

        Args:
            array: any shape, in host memory; shape and dtype must agree on all ranks.
            root: a rank; must agree.
            op, algorithm: as for `allreduce`.
            out: where the result goes, at the root, as for `allreduce`; ignored on the other ranks.

        Returns:
            ``out``, or the new array, at the root; None on the other ranks, whose arrays stay as they are.

        Raises:
            ConfigError: there is no such rank, op or algorithm; or it cannot run here.
            UnsupportedBufferError: the array is in device memory.
        """
        mine = out if root == self.rank else None
        return self._runner.make("reduce", array, mine, op, algorithm, root)  # type: ignore[no-any-return]

    def gather(self, array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A | None:
        """Concatenate the ranks' arrays along the first dimension, in rank order; the root alone gets the result.

        Args:
            array: at least one dimension, in host memory. The first may differ between ranks, and be 0; the others and
                the dtype must agree.
            root: a rank; must agree.
            out: where the result goes, at the root; ``array`` may be its part of it. None: a new array. Ignored on the
                other ranks.
            algorithm: as for `allreduce`.

        Returns:
            ``out``, or the new array, at the root; None on the other ranks.

        Raises:
            ConfigError: there is no such rank or algorithm.
            UnsupportedBufferError: the array is in device memory.
            MismatchError: at the root, ``out`` has not as many rows as all arrays together.
        """
        mine = out if root == self.rank else None
        return self._runner.make("gather", array, mine, None, algorithm, root)  # type: ignore[no-any-return]

    def scatter(
        self,
        array: Any,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> Any:
        """Cut the root's array into parts along the first dimension, and give each rank one, in rank order.

        Args:
            array: at the root, at least one dimension, in host memory; without ``splits``, as many rows for each rank.
                On the other ranks None, or an array of the same dtype and shape (with ``splits``, of any number of
                rows), whose content does not matter.
            root: a rank; must agree.
            splits: rows for rank 0, 1, ..., of which the root's are used; the others pass any list, an empty one, too.
                None on all ranks: equal parts.
            out: where this rank's part goes; at the root, it may be its part of ``array``. None: a new array, of the
                library of ``array``, or NumPy's where that is None.
            algorithm: as for `allreduce`; with ``splits``, one of `alltoall`.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: there is no such rank or algorithm, the root has no array, or its rows do not divide equally,
                or as ``splits`` says.
            UnsupportedBufferError: the array is in device memory, or has more than 32 dimensions.
            MismatchError: on some rank, ``out`` or ``array`` has not the shape or the dtype that comes from the root.
        """
        if splits is None:
            return self._runner.make("scatter", array, out, None, algorithm, root)
        with CheckingArguments(self, "scatter", f"scatter by splits(root {root})"):
            if array is not None:
                with_rows(array, "scatter")
            no_rows = None if array is None else array[:0]
        part = self.scatter(no_rows, root)  # No rows, with the root's dtype and other dimensions.
        if self.rank == root:
            return self.alltoall(array, splits, out=out, algorithm=algorithm)[0]
        return self.alltoall(part, [0] * self.size, out=out, algorithm=algorithm)[0]

    def allgather(self, array: A, *, out: Any = None, algorithm: str | None = None) -> A:
        """Concatenate the ranks' arrays along the first dimension, in rank order; every rank gets all of it.

        Args:
            array: at least one dimension. The first may differ between ranks, and be 0; the others and the dtype
                must agree.
            out: where the result goes; ``array`` may be this rank's part of it. None: a new array.
            algorithm: as for `allreduce`.

        Raises:
            MismatchError: on some rank, ``out`` has not as many rows as all arrays together.
        """
        return self._runner.make("allgather", array, out, None, algorithm)  # type: ignore[no-any-return]

    def broadcast(self, array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A:
        """Give every rank the root's array.

        Args:
            array: any shape; shape and dtype must agree, the content matters at the root only.
            root: a rank; must agree.
            out, algorithm: as for `allreduce`.

        Raises:
            ConfigError: there is no such rank.
        """
        return self._runner.make("broadcast", array, out, None, algorithm, root)  # type: ignore[no-any-return]

    @overload
    def alltoall(self, array: A, splits: None = None, *, out: Any = None, algorithm: str | None = None) -> A: ...

    @overload
    def alltoall(
        self, array: A, splits: Sequence[int], *, out: Any = None, algorithm: str | None = None
    ) -> tuple[A, list[int]]: ...

    def alltoall(
        self, array: Any, splits: Sequence[int] | None = None, *, out: Any = None, algorithm: str | None = None
    ) -> Any:
        """Send every rank its part of this rank's array, and return the parts that the ranks have sent here.

        Args:
            array: at least one dimension; all but the first must agree, and the dtype.
            splits: rows for rank 0, 1, ...; may differ between ranks. None: equal parts.
            out: where the result goes; None: a new array.
            algorithm: as for `allreduce`.

        Returns:
            What the ranks sent here, concatenated in rank order; with ``splits`` a pair of that and a list of the rows
            that came from each rank.

        Raises:
            ConfigError: the splits do not add up to the rows, or the rows do not divide equally.
            MismatchError: on some rank, ``out`` has not as many rows as come there.
        """
        if splits is None:
            return self._runner.make("alltoall", array, out, None, algorithm)
        call = Call(Collective.ALLTOALL, array, out, op=None, splits=splits, algorithm=algorithm)
        return self._runner.run(call)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._state.call(_BARRIER.text, self._rendezvous, _BARRIER)

    # ---- calls that consist of several collectives ----

    def rendezvous(self, text: str) -> None:
        """Return when every rank has called it with this text; begins a call that consists of several collectives.

        Args:
            text: all that must agree: the name of the call, and its arguments in brackets.
        """
        self._state.call(text.partition("(")[0], self._rendezvous, Signature.of(text, waits=False))

    def refuse(self, name: str, error: Exception) -> None:
        """Enter the call of this name in place of `rendezvous`, with the reason why this rank cannot make it."""
        self._state.refuse(name, error)

    def _rendezvous(self, signature: Signature) -> None:
        self.lifetime.require_open()
        try:
            self._context.rendezvous(signature)
        except BaseException as error:
            self._state.fail(error)
            raise

    # ---- calls as values ----

    def run(self, call: Call) -> Any:
        """Make a call, and return what the method of its collective returns."""
        return self._runner.run(call)

    def plan(self, call: Call) -> tuple[Call, str]:
        """Check, on all ranks, a call that is to be made again and again: a persistent collective. Collective.

        Returns:
            The call, with an array for its result, and what must agree in it, in words.

        Raises:
            UnsupportedBufferError: its array is a number.
        """
        return self._runner.plan(call)

    # ---- messages from one rank to another ----

    def send(self, array: Any, dest: int | NoRank, tag: int = 0) -> None:
        """Send an array to a rank that receives it; not collective.

        More than 4 KiB, 128 KiB to a rank of the node, were sent when this returns, which may take until that rank
        receives them; less may still be under way, and waits only where 16 MiB of such arrays, of at least 64 B each,
        fill the memory that the ranks share, until that rank receives some. What it has not received when this rank
        shuts down may be lost. Any thread may call this.

        Args:
            array: in host memory, of any strides.
            dest: another rank; `PROC_NULL`: this does nothing.
            tag: at least 0, and less than 2^62, from where on ringreduce uses them itself. What one rank sends another
                with one tag is received in that order.

        Raises:
            ConfigError: there is no such rank or tag, or it is this rank.
            UnsupportedBufferError: the array is in device memory.
            CollectiveTimeoutError: that rank did not receive it in time; if it has more than that, it is still to be
                sent, and must stay as it is. Or it did not receive what was sent before; then this is not sent.
            PeerLostError: a rank of this machine has failed.
        """
        self._send_recv.send(array, dest, tag)

    def recv(self, out: Any, source: int | NoRank | None = None, tag: int = 0) -> int | NoRank:
        """Receive an array that a rank sends; not collective. Any thread may call this.

        Args:
            out: where it goes, in host memory, of any strides; of the same shape and dtype.
            source: who sends it; None: any rank, the first whose array comes; `PROC_NULL`: ``out`` stays as it is.
            tag: the one that it is sent with.

        Returns:
            The rank that has sent it, or `PROC_NULL`.

        Raises:
            ConfigError, UnsupportedBufferError, PeerLostError: as for `send`.
            CollectiveTimeoutError: nothing came in time. What comes later can be received by another call; but if it
                had begun to come, ``out`` is overwritten later.
            MismatchError: what came has another shape or dtype, and is dropped; raised here, not at the sender.
        """
        return self._send_recv.recv(out, source, tag)

    def isend(self, array: Any, dest: int | NoRank, tag: int = 0) -> PendingMessage:
        """Begin to send an array; not collective. Arguments and errors are those of `send`.

        It moves on whenever this rank waits for a message, or tests one. What one rank sends another with one tag is
        received in the order in which it is begun, by `send` or by this.

        Returns:
            What waits for it. The array must stay as it is until then.
        """
        return self._send_recv.isend(array, dest, tag)

    def irecv(self, out: Any, source: int | NoRank | None = None, tag: int = 0) -> PendingMessage:
        """Begin to receive an array; not collective. Arguments are those of `recv`, and it moves on as `isend`.

        Returns:
            What waits for it, and returns the rank that has sent it.
        """
        return self._send_recv.irecv(out, source, tag)

    def sendrecv(
        self, array: Any, dest: int | NoRank, out: Any, source: int | NoRank | None = None, tag: int = 0
    ) -> Any:
        """Send an array to one rank, and receive another that a rank sends, at the same time; not collective.

        Args:
            array, dest, tag: as for `send`.
            out, source, tag: as for `recv`; apart from ``array``. Where ``dest`` and ``source`` are this rank, the
                array is copied.

        Returns:
            ``out``.

        Raises:
            RingReduceError: as for `send` and `recv`.
        """
        return self._send_recv.sendrecv(array, dest, out, source=source, tag=tag)

    # ---- algorithms and paths ----

    def algorithms(
        self, collective: Collective | str = Collective.ALLREDUCE, *, device: str | None = None
    ) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here.

        Args:
            collective: which.
            device: where the arrays are, as for `Communicator.empty`. In device memory ``"nccl"`` can be asked for,
                too; where NCCL cannot run, the ranks use another path.
        """
        return self._chooser.algorithms(collective, device=device)

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules. All ranks must use the same."""
        self._chooser.use(table)

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
            algorithm: as for `Communicator.allreduce`.
            op: as for `Communicator.allreduce`; without effect where nothing is reduced.
        """
        return self._chooser.choose(collective, nbytes, dtype, algorithm=algorithm, op=op)

    def path_on_device(self, dtype: Any, op: ReduceOp | str = SUM, algorithm: str | None = None) -> Choice:
        """Return what carries out an allreduce of arrays in device memory, once there was one with this ``algorithm``.

        Args:
            dtype: of their elements.
            op: as for `Communicator.allreduce`.
            algorithm: as for `Communicator.allreduce`. One for host memory is named in the choice, with the transport
                ``"staged"``.
        """
        return self._chooser.path_on_device(dtype, op, algorithm)

    def transport_name(self, algorithm: str, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Return what moves the bytes of ``algorithm`` here: ``"shared"``, ``"mpi"``, ``"shared+mpi"``, ...

        Args:
            algorithm: a name from `algorithms`; ``"messages"``: of `Communicator.send` and its kind.
            collective: of the algorithm.
        """
        return self._chooser.transport_name(algorithm, collective)

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
            device: ``"cuda"`` for an array in device memory, whose path is known after the first call. None, or
                ``"cpu"``: for one in host memory; a second line is about device memory, if that was used.
        """
        return self._chooser.explain(nbytes, dtype, collective, op=op, device=device)

    # ---- buffers ----

    def wait_patiently(self, when: Callable[[], bool]) -> None:
        """Sleep from the start of each wait, without polling, as long as ``when()`` holds; for `Engine`."""
        self._context.waiter.patient = when

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None) -> Array: ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None) -> Any: ...

    def empty(self, shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None) -> Any:
        """Return an uninitialised array that collectives use without a copy: a communication buffer.

        It is in memory that the ranks of the node share, starts on a page, and is freed with the array and all its
        views. Local: ranks may make different buffers, or none. ``dtype`` ``"bfloat16"`` takes ml_dtypes.

        Args:
            shape: of the array.
            dtype: of its elements.
            device: ``"cuda"``, or ``"cuda:1"``, for a CuPy array in device memory, which no other rank reaches.

        Returns:
            A NumPy array, or a CuPy array.

        Raises:
            UnsupportedBufferError: a device was asked for, and CuPy or the GPU is missing.
        """
        self.lifetime.require_open()
        row = DType.of(dtype)
        dims = array_shape(shape)
        if device not in (None, "cpu"):
            return self.gpu.empty(ordinal(device), dims, row)
        memory = self._context.arena.array(prod(dims) * row.itemsize)
        native: np.dtype[Any] = new((0,), row, "numpy").dtype
        return memory.view(native).reshape(dims)

    def empty_like(self, array: Any) -> Any:
        """Return an uninitialised array for a result: of the shape, dtype and library of one in host memory, C order.

        It is a communication buffer as long as the results that live together are not too large; see
        ``RINGREDUCE_RESULTS_BYTES``. Local.
        """
        self.lifetime.require_open()
        return self._operands.maker(array)(tuple(array.shape), DType.of(array.dtype))[0]

    def node_memory(self, nbytes: int) -> Array:
        """Return memory that the ranks of a node have in common: what one of them stores there, the others see.

        It begins as zeros, and lives as long as some rank has arrays of it: beyond the end of the world, too. What a
        forked process stores there stays its own. Collective.

        Args:
            nbytes: its length; must agree on the ranks of a node.

        Raises:
            TransportError: on all ranks: some node has no such memory.
        """
        segments = self._context.arena.segments
        first = self._context.topology.node_of(self.rank)[0]
        number, segment = self._together(lambda: segments.create_kept(nbytes) if first == self.rank else (0, None))
        numbers = self.allgather(np.array([number]))
        return self._together(lambda: segments.open_kept(first, int(numbers[first])) if segment is None else segment)

    def _together(self, step: Callable[[], _T]) -> _T:
        """Take a step that may fail, on all ranks or on none: after a failure all raise `TransportError`."""
        problem = ""
        result = None
        try:
            result = step()
        except TransportError as error:
            problem = str(error)
        failed = self.allgather(np.array([bool(problem)])).nonzero()[0]
        if failed.size:
            raise TransportError(problem or f"rank {failed[0]} has no memory for the ranks of its node to share")
        return cast(_T, result)

    # ---- the end ----

    def abort(self, error: BaseException) -> None:
        """Refuse all further calls, with this reason: which calls belong together is no longer known. Local."""
        self._state.abort(error)
        self._send_recv.fail(error)

    def detach(self, why: AbortReason) -> bool:
        """Tell the ranks of this node not to wait for this one; return whether it is the first of them to do so."""
        return self._context.board.detach(why)

    def neighbours(self) -> list[int]:
        """Return the processes of the other ranks of this node."""
        context = self._context
        return [context.arena.segments.pid(member) for member in context.board.peers]

    def close(self) -> None:
        """Give everything back; collectives raise `ShutdownError` from here on. Collective, and safe to call twice."""
        if not self.lifetime.close():
            return
        failed = self.lifetime.failure is not None
        self._context.plans.forget()
        if not failed:
            self._context.detach()
        self._send_recv.close()
        if failed:
            self.gpu.abandon()
            self._context.abandon()
            return
        close_all(self.gpu.close, self._context.close)
