"""Blocking collectives on one process set: check the arguments, choose, run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar, overload

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, Operand, as_given, operand_of, require_host
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives import DETERMINISTIC, Choice, Chosen, Feedback, Signature, codec_for
from ringreduce.collectives.member import Running
from ringreduce.collectives.messaging import Messaging
from ringreduce.collectives.operands import AnyOperand, PartReceived, RowsReceived, apart, flat_target, same, with_rows
from ringreduce.collectives.path import Offer, part_offer
from ringreduce.collectives.repeat import NOTHING
from ringreduce.common.arguments import row_counts, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import SUM, ReduceOp

__all__ = ["Communicator"]

#: An array of any library; a number, where these are taken.
A = TypeVar("A")

_BARRIER = Signature.of("barrier", waits=False)


class Communicator(Messaging):
    """The collectives of one process set.

    The methods named after collectives, `meet`, `refuse` and `close` are collective: all ranks call them, in the same
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
      other ranks get a `MismatchError` with the reason. The same holds for every wrong argument: the rank meets the
      others to tell them, and the call is over for all.
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

    Attributes:
        rank, size: this rank's number, and how many there are.
        topology: which ranks share memory.
        hosts: which ranks run on one machine; they need not share memory, as those of a node of `topology` do.
        config: the settings, equal on all ranks.
        library: what moves messages between the ranks, with its version; ``"none"`` where no library does.
        gpu: this rank's, once it is used.
        instruments: the observers of its collectives.
        tallies: what the calls of each collective add up to, by its name.
        message_tallies: the same of what goes from one rank to another.
    """

    # ---- collectives ----

    def allreduce(
        self,
        array: A,
        op: ReduceOp | str = SUM,
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool = False,
        wire: str | None = None,
        feedback: Feedback | None = None,
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
            wire: a format in `ringreduce.buffers.codecs.CODECS` in which ranks of different nodes send each other
                floats, for sums and averages; must agree. Every element is encoded twice: when it is sent to the rank
                that sums it up, in float32, and when that one sends the sum to all. On one node nothing is encoded.
                None: as they are. Where ``RINGREDUCE_DETERMINISTIC`` is set no format can be asked for, on one node
                either: what is rounded depends on which ranks share a node.
            feedback: keeps what rounding lost, and adds it the next time, for an array that is reduced again and
                again; on all ranks or none.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: no such op, algorithm or format, or they do not go together or cannot run here.
            UnsupportedBufferError: a wire format was asked for, and the array is not of floats.
        """
        if deterministic and algorithm is None and wire is None:
            algorithm, deterministic = DETERMINISTIC, False
        if not (deterministic or wire):
            repeated: A | None = self._bound.repeat("allreduce", array, out, op, algorithm)
            if repeated is not None:
                return repeated
        result: A = self._standing.call(
            "allreduce", self._allreduce, array, op, out, algorithm, deterministic, wire, feedback
        )
        return result

    def reduce_scatter(self, array: A, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> A:
        """Reduce arrays over all ranks and give every rank its part of the result.

        Parts are cut along the first dimension as `numpy.array_split` does: the first ranks get one row more where it
        does not divide.

        Args:
            array: at least one dimension; shape and dtype must agree.
            op: as for `allreduce`.
            algorithm: as for `allreduce`.
            out: where this rank's part goes; None: a new array.
        """
        repeated: A | None = self._bound.repeat("reduce_scatter", array, out, op, algorithm)
        if repeated is not None:
            return repeated
        result: A = self._standing.call("reduce_scatter", self._reduce_scatter, array, op, out, algorithm)
        return result

    def reduce(
        self,
        array: A,
        root: int = 0,
        op: ReduceOp | str = SUM,
        *,
        out: Any = None,
        algorithm: str | None = None,
    ) -> A | None:
        """Reduce arrays over all ranks, element by element; the root alone gets the result.

        Args:
            array: any shape, in host memory; shape and dtype must agree on all ranks.
            root: a rank; must agree.
            op: as for `allreduce`.
            out: where the result goes, at the root, as for `allreduce`; without a meaning on the other ranks.
            algorithm: as for `allreduce`.

        Returns:
            ``out``, or the new array, at the root; None on the other ranks, whose arrays stay as they are.

        Raises:
            ConfigError: there is no such rank, op or algorithm; or it cannot run here.
            UnsupportedBufferError: the array is in device memory.
        """
        if type(root) is int:
            repeated: A | None = self._bound.repeat(
                "reduce", array, out if root == self.rank else None, op, algorithm, root
            )
            if repeated is not None:
                return None if repeated is NOTHING else repeated
        result: A | None = self._standing.call("reduce", self._reduce_to_root, array, root, op, out, algorithm)
        return result

    def gather(self, array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A | None:
        """Concatenate the ranks' arrays along the first dimension, in rank order; the root alone gets the result.

        Args:
            array: at least one dimension, in host memory. The first may differ between ranks, and be 0; the others and
                the dtype must agree.
            root: a rank; must agree.
            out: where the result goes, at the root; ``array`` may be its part of it. None: a new array. Without a
                meaning on the other ranks.
            algorithm: as for `allreduce`.

        Returns:
            ``out``, or the new array, at the root; None on the other ranks.

        Raises:
            ConfigError: there is no such rank or algorithm.
            UnsupportedBufferError: the array is in device memory.
            MismatchError: at the root, ``out`` has not as many rows as all arrays together.
        """
        if type(root) is int:
            repeated: A | None = self._bound.repeat(
                "gather", array, out if root == self.rank else None, None, algorithm, root
            )
            if repeated is not None:
                return None if repeated is NOTHING else repeated
        result: A | None = self._standing.call("gather", self._gather, array, root, out, algorithm)
        return result

    def scatter(self, array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Any:
        """Cut the root's array into equal parts along the first dimension, and give each rank one, in rank order.

        Args:
            array: at the root, at least one dimension, in host memory, as many rows for each rank. On the other ranks
                None, or an array of the same shape and dtype, whose content does not matter.
            root: a rank; must agree.
            out: where this rank's part goes; at the root, it may be its part of ``array``. None: a new array, of the
                library of ``array``, or NumPy's where that is None.
            algorithm: as for `allreduce`.

        Returns:
            ``out``, or the new array.

        Raises:
            ConfigError: there is no such rank or algorithm, the root has no array, or its rows do not divide equally.
            UnsupportedBufferError: the array is in device memory, or has more than 32 dimensions.
            MismatchError: on some rank, ``out`` or ``array`` has not the shape or the dtype that comes from the root.
        """
        if type(root) is int:
            repeated = self._bound.repeat("scatter", array, out, None, algorithm, root)
            if repeated is not None:
                return repeated
        return self._standing.call("scatter", self._scatter, array, root, out, algorithm)

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
        repeated: A | None = self._bound.repeat("allgather", array, out, None, algorithm)
        if repeated is not None:
            return repeated
        result: A = self._standing.call("allgather", self._allgather, array, out, algorithm)
        return result

    def broadcast(self, array: A, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> A:
        """Give every rank the root's array.

        Args:
            array: any shape; shape and dtype must agree, the content matters at the root only.
            root: a rank; must agree.
            out: as for `allreduce`.
            algorithm: as for `allreduce`.

        Raises:
            ConfigError: there is no such rank.
        """
        repeated: A | None = self._bound.repeat("broadcast", array, out, root, algorithm)
        if repeated is not None:
            return repeated
        result: A = self._standing.call("broadcast", self._broadcast, array, root, out, algorithm)
        return result

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
            repeated = self._bound.repeat("alltoall", array, out, None, algorithm)
            if repeated is not None:
                return repeated
        return self._standing.call("alltoall", self._alltoall, array, splits, out, algorithm)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._standing.call(_BARRIER.text, self._meet, _BARRIER)

    # ---- of calls that are made of several collectives ----

    def meet(self, text: str) -> None:
        """Return when every rank has called it with this text: before a call that is made of several collectives.

        Args:
            text: what is called, with all that must agree: the name, and the rest in brackets.
        """
        self._standing.call(text.partition("(")[0], self._meet, Signature.of(text, waits=False))

    def refuse(self, name: str, error: Exception) -> None:
        """Meet the others in place of a call of this name, made of several collectives, that this rank cannot make.

        Args:
            name: of the call, which begins with `meet`.
            error: why.
        """
        self._standing.refuse(name, error)

    # ---- how calls are carried out ----

    def _allreduce(
        self,
        array: Any,
        op: ReduceOp | str,
        out: Any,
        algorithm: str | None,
        deterministic: bool,
        wire: str | None,
        feedback: Feedback | None,
    ) -> Any:
        if deterministic:
            other = f"wire={wire!r}" if algorithm is None else f"algorithm={algorithm!r}"
            raise ConfigError(f"give deterministic=True or {other}, not both")
        kind = ReduceOp.parse(op)
        source, in_place, is_new = operand_of(array), out is array, out is None
        if wire is not None:
            if algorithm is not None:
                raise ConfigError(
                    f"a wire format is an algorithm of its own; give wire={wire!r} or algorithm, not both"
                )
            codec = codec_for(wire, source.dtype, kind, deterministic=self.config.deterministic)
            if not self.topology.single_node:
                out, target = self._operands.result(array, source, source.shape, out)
                chosen = self._selection.in_format(source, kind, codec, feedback=feedback is not None)
                lent = self._operands.on_host(source, target)
                with Running(self, "allreduce", chosen.choice.algorithm, source.nbytes), lent as (given, taken):
                    chosen.run(given, taken, feedback)
                return as_given(array, out) if is_new else out
            if feedback is not None:
                feedback.begin(0, 0)
        out, target = self._operands.result(array, source, source.shape, out)
        if isinstance(source, DeviceOperand):
            assert isinstance(target, DeviceOperand)
            self._reduce_on_device(source, target, kind, algorithm)
            return out
        assert isinstance(target, Operand)
        if not (is_new or in_place) and np.may_share_memory(source.view, target.view) and not same(source, target):
            source = Operand(source.view.copy(), source.dtype)
        chosen = self._reduce(source, target, kind, algorithm)
        assert chosen.reduction is not None
        given_out = None if is_new else out
        self._bound.bind_reduction(array, given_out, (op, algorithm), chosen.reduction, source, target)
        return as_given(array, out) if is_new else out

    def allreduce_operands(
        self, source: AnyOperand, target: AnyOperand, op: ReduceOp, algorithm: str | None = None
    ) -> tuple[Choice, Signature]:
        """Do what `allreduce` does for operands that were checked: of equal shape and dtype.

        The target is writable, and the same memory as the source or apart from it. Both are in host memory, or both in
        device memory in C order.

        Returns:
            What carried it out.
        """
        reduce = self._reduce_on_device if isinstance(source, DeviceOperand) else self._reduce
        chosen: Chosen = self._standing.call("allreduce", reduce, source, target, op, algorithm)
        return chosen.choice, chosen.signature

    def _reduce(self, source: Operand, target: Operand, op: ReduceOp, algorithm: str | None) -> Chosen:
        self._standing.require_open()
        chosen = self._selection.reduction(source, op, algorithm)
        with Running(self, "allreduce", chosen.choice.algorithm, source.view.nbytes):
            chosen.run(source, target)
        return chosen

    def _reduce_on_device(
        self, source: DeviceOperand, target: DeviceOperand, op: ReduceOp, algorithm: str | None
    ) -> Chosen:
        self._standing.require_open()
        reducers = partial(self._selection.segments, source, op=op, algorithm=algorithm)
        running = partial(Running, self, "allreduce", nbytes=source.nbytes)
        return self.gpu.allreduce(source, target, op, algorithm, reducers, running)

    def _reduce_scatter(self, array: Any, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        kind, is_new = ReduceOp.parse(op), out is None
        source = with_rows(array, "reduce_scatter")
        rows, row = Partition.first_larger(source.shape[0], self.size).segment, prod(source.shape[1:])
        shape = (_length(rows[self.rank]), *source.shape[1:])
        out, target = self._operands.result(array, source, shape, out)
        counts = [_length(part) * row for part in rows]
        chosen = self._selection.other(
            Collective.REDUCE_SCATTER, source.dtype, source.shape, algorithm, kind.value, kind, source.nbytes
        )
        running = Running(self, "reduce_scatter", chosen.choice.algorithm, source.nbytes)
        with running, self._operands.on_host(source, target) as (given, taken), flat_target(taken) as flat:
            flat_source = apart(given.flat(), flat, -sum(counts[: self.rank]))
            again = chosen.run(flat_source, counts, flat)
        used, given_out = Operand(flat_source, source.dtype), None if is_new else out
        self._bound.bind("reduce_scatter", array, given_out, (op, algorithm), again, used, target, source.nbytes)
        return out

    def _reduce_to_root(self, array: Any, root: int, op: ReduceOp | str, out: Any, algorithm: str | None) -> Any:
        root, kind, is_new = self._require_root(root), ReduceOp.parse(op), out is None
        source, target = require_host(operand_of(array), "reduce"), None
        if self.rank == root:
            out, target = self._operands.result(array, source, source.shape, out)
        self._standing.require_open()
        nbytes = source.nbytes
        chosen = self._selection.other(
            Collective.REDUCE, source.dtype, source.shape, algorithm, f"{kind.value}, root {root}", kind, nbytes
        )
        with Running(self, "reduce", chosen.choice.algorithm, nbytes):
            flat = source.flat()
            if target is None:
                again = chosen.run(flat, None, root)
            else:
                with flat_target(require_host(target, "reduce")) as into:
                    flat = apart(flat, into, 0)
                    again = chosen.run(flat, into, root)
        used, given_out = Operand(flat, source.dtype), None if is_new else out
        if target is None:
            self._bound.bind_for_others("reduce", array, (op, algorithm), again, used, root)
            return None
        self._bound.bind("reduce", array, given_out, (op, algorithm), again, used, target, nbytes, root)
        return as_given(array, out) if is_new else out

    def _gather(self, array: Any, root: int, out: Any, algorithm: str | None) -> Any:
        root = self._require_root(root)
        source, am_root = require_host(with_rows(array, "gather"), "gather"), self.rank == root
        self._operands.require_usable(source)
        shape, row = ("*", *source.shape[1:]), prod(source.shape[1:])
        received = RowsReceived(self._operands, array, source, out if am_root else None)
        chosen = self._selection.other(Collective.GATHER, source.dtype, shape, algorithm, f"root {root}")
        running = Running(self, "gather", chosen.choice.algorithm, source.nbytes * (self.size if am_root else 1))
        with running:
            flat = source.flat()
            again = chosen.run(flat, Offer(received.room, (source.shape[0],)), row, received, root)
            if received.target is not None:
                running.nbytes = received.target.nbytes
        used = Operand(flat, source.dtype)
        if not am_root:
            self._bound.bind_for_others("gather", array, (None, algorithm), again, used, root)
            return None
        result, nbytes = received.store(), running.nbytes
        self._bound.bind("gather", array, out, (None, algorithm), again, used, received.target, nbytes, root)
        return result

    def _scatter(self, array: Any, root: int, out: Any, algorithm: str | None) -> Any:
        root = self._require_root(root)
        self._standing.require_open()
        source = target = part = None
        if array is not None:
            source = require_host(with_rows(array, "scatter"), "scatter")
            rows = source.shape[0]
            if rows % self.size:
                raise ConfigError(f"scatter: {rows} rows do not divide into {self.size} equal parts")
            part = (rows // self.size, *source.shape[1:]), source.dtype
        elif self.rank == root:
            raise ConfigError("scatter: the root has to pass an array")
        if out is not None:
            if source is None or part is None:
                target = require_host(operand_of(out), "scatter")
                target.require_writable()
                part = target.shape, target.dtype
            else:
                target = require_host(self._operands.result(array, source, part[0], out)[1], "scatter")
        flat, used = np.empty(0, np.uint8), None
        if source is not None and self.rank == root:
            used = Operand(source.flat(), source.dtype)
            flat = used.view.view(np.uint8)
        make = self._operands.maker(0 if array is None else array)
        received, offer = PartReceived(make, target, out), part_offer(part)
        chosen = self._selection.other(Collective.SCATTER, DTYPES["uint8"], None, algorithm, f"root {root}")
        known = flat.nbytes or (0 if part is None else prod(part[0]) * part[1].itemsize)
        running = Running(self, "scatter", chosen.choice.algorithm, known)
        with running:
            again = chosen.run(flat, offer, received, root)
            assert received.target is not None
            running.nbytes = flat.nbytes or received.target.nbytes
        self._bound.bind_scatter(array, out, algorithm, again, used, received, make, root)
        return received.store()

    def _require_root(self, root: int) -> int:
        """Return the number of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        root = whole_number("root", root)
        if not 0 <= root < self.size:
            raise ConfigError(f"root must be a rank, 0 to {self.size - 1}, got {root}")
        return root

    def _allgather(self, array: Any, out: Any, algorithm: str | None) -> Any:
        source = with_rows(array, "allgather")
        self._operands.require_usable(source)
        shape, row = ("*", *source.shape[1:]), prod(source.shape[1:])
        received = RowsReceived(self._operands, array, source, out)
        chosen = self._selection.other(Collective.ALLGATHER, source.dtype, shape, algorithm)
        running = Running(self, "allgather", chosen.choice.algorithm, source.nbytes * self.size)
        with running, self._operands.on_host(source, source, store=False) as (given, _):
            flat = given.flat()
            again = chosen.run(flat, Offer(received.room, (source.shape[0],)), row, received)
            assert received.target is not None
            running.nbytes = received.target.nbytes
        result = received.store()
        used = Operand(flat, source.dtype)
        self._bound.bind("allgather", array, out, (None, algorithm), again, used, received.target, running.nbytes)
        return result

    def _broadcast(self, array: Any, root: int, out: Any, algorithm: str | None) -> Any:
        given_root, is_new = root, out is None
        root = self._require_root(root)
        source, am_root = operand_of(array), self.rank == root
        out, target = self._operands.result(array, source, source.shape, out)
        nbytes = source.nbytes
        chosen = self._selection.other(
            Collective.BROADCAST, source.dtype, source.shape, algorithm, f"root {root}", nbytes=nbytes
        )
        lent = self._operands.on_host(source, target, fetch=am_root, store=not am_root or source is not target)
        running = Running(self, "broadcast", chosen.choice.algorithm, nbytes)
        with running, lent as (given, taken), flat_target(taken) as flat:
            flat_source = apart(given.flat(), flat, 0) if am_root and not same(given, taken) else flat
            again = chosen.run(flat_source, flat, root)
        used, given_out = Operand(flat_source, source.dtype) if am_root else None, None if is_new else out
        self._bound.bind("broadcast", array, given_out, (given_root, algorithm), again, used, target, nbytes)
        return as_given(array, out) if is_new else out

    def _alltoall(self, array: Any, splits: Sequence[int] | None, out: Any, algorithm: str | None) -> Any:
        source = with_rows(array, "alltoall")
        self._operands.require_usable(source)
        shape, row = ("*", *source.shape[1:]), prod(source.shape[1:])
        received = RowsReceived(self._operands, array, source, out)
        offer = Offer(received.room, tuple(row_counts(splits, source.shape[0], self.size)))
        chosen = self._selection.other(Collective.ALLTOALL, source.dtype, shape, algorithm)
        running = Running(self, "alltoall", chosen.choice.algorithm, source.nbytes)
        with running, self._operands.on_host(source, source, store=False) as (given, _):
            flat = given.flat()
            if isinstance(received.target, Operand):
                flat = apart(flat, received.target.view)
            again = chosen.run(flat, offer, row, received)
        result = received.store()
        if splits is None:
            used = Operand(flat, source.dtype)
            self._bound.bind("alltoall", array, out, (None, algorithm), again, used, received.target, source.nbytes)
            return result
        return result, received.rows

    def _meet(self, signature: Signature) -> None:
        self._standing.require_open()
        try:
            self._context.meet(signature)
        except BaseException as error:
            self._standing.fail(error)
            raise


def _length(part: slice) -> int:
    return int(part.stop - part.start)
