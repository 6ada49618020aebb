"""Groups: some ranks of the world in an order of their own, with collectives and messages that nothing else uses.

A process set is registered by all ranks of the world, once; a group is made by its members alone, and there may be any
number of equal ones. Its collectives are those of a `Communicator` on arrays whose shapes the caller has fixed on both
sides, and those that are made of these: bitwise operations, lists of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Operand, like, operand_of, require_host
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.call_sites import CallSite, Stack, program_stack
from ringreduce.common.cleanup import close_all
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError, MismatchError, UnsupportedBufferError
from ringreduce.common.processes import Forked
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.common.serial import InOrder, Task
from ringreduce.gpu.devices import Gpu
from ringreduce.observe.flight_recorder import Observed
from ringreduce.runtime.bootstrap import Connection
from ringreduce.runtime.process_sets import context_of
from ringreduce.transport.checked import checked
from ringreduce.transport.point_to_point import Deliveries, PointToPoint, Transfer
from ringreduce.transport.waiting import Waiter

__all__ = ["BITWISE", "Group"]

#: Bit by bit: NumPy's names. Nothing between the ranks does these, so that all of them get all arrays.
BITWISE = ("bitwise_and", "bitwise_or", "bitwise_xor")


class _Place:
    """Says what the program calls, and where: it may have done so on another thread than the one that carries it out.

    Attributes:
        stack: where the program was; None: it is there now.
    """

    def __init__(self) -> None:
        self.stack: Stack | None = None

    def __call__(self, text: str) -> CallSite:
        return CallSite.here(text) if self.stack is None else CallSite.at(text, self.stack)


class Group:
    """One rank of a group.

    `submit` runs calls in the order of the program; the collectives themselves (all methods from `allreduce` to
    `barrier`) are to be called in such a task, and one at a time. All members make the same calls in the same order,
    and where they do not, all get a `MismatchError` or hear why a rank could not make its call. What else collectives
    raise is said for `Communicator`. Arrays are in host memory; results go into arrays of the caller, of any strides.

    Args:
        connection: connects the ranks of the world.
        ranks: of the world, in the order of the group; this rank is one of them.
        settings: those of the world.
        timeout_s: how long any wait for a peer may last; None: as the settings say.
        advance: called while this rank waits; moves on what is under way in all groups.

    Attributes:
        ranks: the argument.
        rank, size: this rank's number in the group, and how many there are.
        communicator: what its collectives are made of.
    """

    def __init__(
        self,
        connection: Connection,
        ranks: Sequence[int],
        settings: Config,
        timeout_s: float | None,
        advance: Callable[[], None],
    ) -> None:
        if timeout_s is not None:
            settings = replace(settings, timeout_s=timeout_s)
        self.ranks = list(ranks)
        self._place = _Place()
        self._waiter = Waiter(settings.timeout_s)  # of messages
        making = Waiter(settings.timeout_s)
        messages, channel = connection.messages_among(ranks, (making, self._waiter))
        self._context = context_of(lambda waiter: messages, settings, self._place, warn=False, counts_decide=True)
        self.communicator = Communicator(self._context, devices=Gpu)
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self._waiter.crowded = self._context.waiter.crowded
        channel = checked(channel) if settings.checksum else channel
        self._messages = PointToPoint(channel, self._waiter, self._context.board.find_lost, counts_decide=True)
        self._waiter.watchers += [self._messages.watch, advance]
        self._context.waiter.watchers.append(advance)
        self._in_order = InOrder(f"ringreduce group {self.ranks}", threads=messages.concurrent)
        self._deliveries = Deliveries(f"ringreduce messages {self.ranks}", self._messages, threads=messages.concurrent)
        self._closed = False

    # ---- the order of calls ----

    def submit(self, call: Callable[[], object], name: str, *, here: bool) -> Task:
        """Run a call after those that were submitted before it, and return what can be waited for.

        Args:
            call: of this group's collectives.
            name: for errors.
            here: whether the caller waits for it at once; then, if nothing is before it, it has run on return.
        """
        stack = None if here and not self._in_order.queues else program_stack()

        def run() -> None:
            self._place.stack = stack
            try:
                call()
            except MismatchError as error:
                error.remedy = "destroy this process group and make it anew on all its ranks"
                raise

        task = Task(run, name)
        self._in_order.submit(task, here=here)
        return task

    def delivered(self, transfer: Transfer) -> Task:
        """Return what is done when a message is, without anybody waiting for it."""
        return self._deliveries.add(transfer)

    # ---- reductions ----

    def allreduce(self, array: Any, op: ReduceOp | str = SUM, source: Any = None) -> None:
        """Reduce arrays into the same arrays.

        Args:
            array: the number of elements and the dtype must agree.
            op: of `reduce_ops`, or of `BITWISE`; must agree.
            source: what to reduce in its place; None: the array itself.
        """
        given = array if source is None else source
        if op in BITWISE:
            self._store(array, self._bitwise("allreduce", given, str(op)))
        else:
            self.communicator.allreduce(given, op, out=array)

    def reduce(self, array: Any, root: int, op: ReduceOp | str = SUM, source: Any = None) -> None:
        """Reduce arrays into that of the root; the others stay as they are. ``root`` must agree."""
        given = array if source is None else source
        if op not in BITWISE:
            self.communicator.reduce(given, root, op, out=array)
            return
        with self.preparing("reduce"):
            operand, room = _integers(given, str(op)), None
            if self.rank == root:
                _host(array).require_writable()
                room = like(given, (self.size, operand.count))
            text = f"reduce({op}, root {root}, {operand.describe(by_count=True)})"
        self.communicator.meet(text)
        self.communicator.gather(_rows(given, operand), root, out=room)
        if room is not None:
            self._store(array, _bit_by_bit(room, str(op)))

    def reduce_scatter(self, out: Any, array: Any, op: ReduceOp | str = SUM) -> None:
        """Reduce arrays and give each rank its part.

        Args:
            out: this rank's part; of the same number of elements on all ranks.
            array: as many times that as there are ranks, in any shape.
            op: as for `allreduce`.
        """
        with self.preparing("reduce_scatter"):
            target, source = _host(out), _host(array)
            _require_usable([target], [source])
            if source.count != self.size * target.count:
                raise ConfigError(
                    f"reduce_scatter takes {self.size} times the elements of the output, got an input of shape "
                    f"{source.shape} and an output of shape {target.shape}"
                )
            flat = _flat(array, source)
            room = _flat(out, target) if target.contiguous else like(out, (target.count,))
        if op in BITWISE:
            mine = slice(self.rank * target.count, (self.rank + 1) * target.count)
            self._store(room, self._bitwise("reduce_scatter", flat, str(op))[mine])
        else:
            self.communicator.reduce_scatter(flat, op, out=room)
        if not target.contiguous:
            self._store(out, room)

    def reduce_scatter_list(self, out: Any, arrays: Sequence[Any], op: ReduceOp | str = SUM) -> None:
        """Reduce the ranks' arrays for each rank into its ``out``; those for different ranks may differ in shape."""
        with self.preparing("reduce_scatter"):
            target, operands = _host(out), self._one_per_rank("reduce_scatter", arrays)
            _require_usable([target], operands)
            counts = [each.count for each in operands]
            if target.count != counts[self.rank]:
                raise ConfigError(
                    f"reduce_scatter: the output has {target.count} elements, and this rank's part of the input "
                    f"{counts[self.rank]}"
                )
            flat = self._joined(out, arrays, operands)
            even = len(set(counts)) == 1
            text = f"reduce_scatter({op}, {counts}, {target.dtype.name})"
        if even:
            self.reduce_scatter(out, flat, op)
            return
        self.communicator.meet(text)
        self.allreduce(flat, op)
        before = sum(counts[: self.rank])
        self._store(out, flat[before : before + target.count])

    def _bitwise(self, name: str, array: Any, op: str) -> Any:
        """Return what all ranks' arrays come to, bit by bit, as a NumPy array."""
        with self.preparing(name):
            source = _integers(array, op)
            every = like(array, (self.size, source.count))
            text = f"{name}({op}, {source.describe(by_count=True)})"
        self.communicator.meet(text)
        self.communicator.allgather(_rows(array, source), out=every)
        return _bit_by_bit(every, op).reshape(source.shape)

    # ---- moving ----

    def broadcast(self, array: Any, root: int) -> None:
        """Give every rank the root's array; the number of elements, dtype and ``root`` must agree."""
        self.communicator.broadcast(array, root, out=array)

    def allgather(self, out: Any, array: Any) -> None:
        """Give every rank all arrays, one after the other.

        Args:
            out: as many times the elements of ``array`` as there are ranks, in any shape.
            array: may be this rank's part of ``out``; the number of elements and the dtype must agree.
        """
        with self.preparing("allgather"):
            target, source = _host(out), _host(array)
            _require_usable([target], [source])
            if target.count != self.size * source.count:
                raise ConfigError(
                    f"allgather takes an output of {self.size} times the elements of the input, got an input of shape "
                    f"{source.shape} and an output of shape {target.shape}"
                )
            room = _flat(out, target) if target.contiguous else like(out, (target.count,))
            flat = _flat(array, source)
        self.communicator.allgather(flat, out=room)  # which finds out whether all have given as much
        if not target.contiguous:
            self._store(out, room)

    def allgather_list(self, outs: Sequence[Any], array: Any) -> None:
        """Give every rank all arrays, each in an array of its own; those of different ranks may differ in shape."""
        with self.preparing("allgather"):
            operands, source = self._one_per_rank("allgather", outs), _host(array)
            _require_usable(operands, [source])
            counts = [each.count for each in operands]
            if counts[self.rank] != source.count:
                raise ConfigError(
                    f"allgather: this rank's input has {source.count} elements, and output {self.rank} has "
                    f"{counts[self.rank]}"
                )
            room = like(array, (sum(counts),))
            even = len(set(counts)) == 1
            text = f"allgather({counts}, {source.dtype.name})"
            flat = array.reshape(source.count)
        if even:
            self.allgather(room, flat)
        else:
            self.communicator.meet(text)
            self.communicator.allgather(flat, out=room)
        self._store_parts(outs, room, counts)

    def gather(self, outs: Sequence[Any] | None, array: Any, root: int) -> None:
        """Give the root all arrays.

        Args:
            outs: at the root an array for each rank; None elsewhere.
            array: the number of elements and the dtype must agree.
            root: must agree.
        """
        with self.preparing("gather"):
            source, room = _host(array), None
            if self.rank == root:
                targets = self._one_per_rank("gather", outs)
                _require_usable(targets, [source])
                for each in targets:
                    if each.count != source.count:
                        raise ConfigError(
                            f"gather takes outputs of as many elements as the input, got an input of shape "
                            f"{source.shape} and an output of shape {each.shape}"
                        )
                room = like(array, (self.size, source.count))
            row = _rows(array, source)
        self.communicator.gather(row, root, out=room)
        if room is not None:
            self._store_parts(outs or (), room.reshape(self.size * source.count), [source.count] * self.size)

    def scatter(self, out: Any, arrays: Sequence[Any] | None, root: int) -> None:
        """Give each rank one of the root's arrays.

        Args:
            out: where it goes; the number of elements and the dtype must agree.
            arrays: at the root an array for each rank; None elsewhere.
            root: must agree.
        """
        with self.preparing("scatter"):
            target, rows = _host(out), None
            if self.rank == root:
                sources = self._one_per_rank("scatter", arrays)
                _require_usable([target], sources)
                for each in sources:
                    if each.count != target.count:
                        raise ConfigError(
                            f"scatter takes inputs of as many elements as the output, got an output of shape "
                            f"{target.shape} and an input of shape {each.shape}"
                        )
                rows = self._joined(out, arrays or (), sources).reshape(self.size, target.count)
            room = _rows(out, target) if target.contiguous else like(out, (1, target.count))
        self.communicator.scatter(rows, root, out=room)
        if not target.contiguous:
            self._store(out, room)

    def alltoall(self, out: Any, array: Any, received: Sequence[int], splits: Sequence[int]) -> None:
        """Send every rank its rows, and get those that the ranks send here.

        Args:
            out: at least one dimension; all but the first must agree, and the dtype.
            array: at least one dimension.
            received: rows of ``out`` that come from rank 0, 1, ...; empty: equal parts.
            splits: rows of ``array`` for rank 0, 1, ...; empty: equal parts.

        Raises:
            MismatchError: a rank sends another number of rows than this one expects. Where the sums agree, only this
                rank hears of it.
        """
        with self.preparing("alltoall"):
            target, source = _host(out), _host(array)
            _require_usable([target], [source])
            expected = self._splits("received rows", received, target)
            sent = self._splits("splits", splits, source)
        _, came = self.communicator.alltoall(array, sent, out=out)
        if came != expected:
            raise MismatchError({self.rank: f"alltoall(expects {expected} rows of the ranks, and they send {came})"})

    def alltoall_list(self, outs: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Send every rank one of this rank's arrays; the shapes may differ as long as both sides agree."""
        with self.preparing("alltoall"):
            targets, sources = self._one_per_rank("alltoall", outs), self._one_per_rank("alltoall", arrays)
            _require_usable(targets, sources)
            counts = [each.count for each in targets]
            flat = self._joined(outs[0], arrays, sources)
            room = like(outs[0], (sum(counts),))
            sent = [each.count for each in sources]
        self.alltoall(room, flat, counts, sent)
        self._store_parts(outs, room, counts)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it.

        Args:
            timeout_s: how long to wait at most; None: as the group does.

        Raises:
            CollectiveTimeoutError: a rank did not call it; the error names it, and the group cannot be used any more.
        """
        waiter = self._context.waiter
        usual, waiter.timeout_s = waiter.timeout_s, waiter.timeout_s if timeout_s is None else timeout_s
        try:
            self.communicator.barrier()
        finally:
            waiter.timeout_s = usual

    # ---- messages ----

    def send(self, array: Any, peer: int, tag: int = 0) -> Transfer:
        """Begin to send an array; it belongs to the transfer until that is done. Any thread may call this.

        Args:
            array: of any strides; the number of elements and the dtype must agree.
            peer: another rank of the group.
            tag: at least 0, at most 2^63 - 1.
        """
        return self._messages.send(require_host(operand_of(array), "send"), peer, tag)

    def recv(self, array: Any, peer: int | None, tag: int = 0) -> Transfer:
        """Begin to receive into an array; arguments as for `send`, and peer None: from any rank."""
        return self._messages.recv(require_host(operand_of(array), "recv"), peer, tag)

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> None:
        """Return once a message was sent or received; see `PointToPoint.wait`."""
        self._messages.wait(transfer, timeout_s)

    def advance(self) -> None:
        """Move on what is under way, without waiting. Any thread may call this."""
        self._messages.advance()

    # ---- the end ----

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long any wait for a peer may last from now on. Local."""
        for waiter in (self._context.waiter, self._waiter):
            waiter.timeout_s = timeout_s

    def give_up(self, error: BaseException) -> None:
        """Refuse all further calls, and end those under way. Local."""
        self.communicator.give_up(error)
        self._messages.fail(error)

    @property
    def closed(self) -> bool:
        """Whether nothing is left to close."""
        return self._closed

    def close(self) -> None:
        """Give everything back once all that was submitted is done. Collective, and safe to call twice."""
        if self._closed:
            return
        self._closed = True
        close_all(self._in_order.close, self._messages.close, self._deliveries.close, self.communicator.close)

    def observed(self, number: int) -> Observed:
        """Return what is seen of it; ``number``: how many equal groups there are, this one included."""
        name = f"group of ranks {', '.join(map(str, self.ranks))}" + (f" ({number})" if number > 1 else "")
        return Observed(name, name, self.ranks, {"blocking": self.communicator}, lambda: not self.closed)

    def forked(self, processes: Forked) -> None:
        """Take note that this process has just forked others."""
        self.communicator.forked(processes)

    def disown(self, reason: str) -> None:
        """Communicate no more, as this process was forked by the rank; ``reason`` is what the errors say."""
        self._in_order = InOrder("", threads=False)
        self._deliveries = Deliveries("", self._messages, threads=False)
        self._messages.disown(ConfigError(reason))
        self.communicator.disown(reason)
        self._closed = True

    # ---- checks and copies ----

    def preparing(self, name: str) -> CheckingArguments:
        """Return the context of what a call does before it communicates: a failure there is told to the others."""
        return CheckingArguments(self.communicator, name)

    def _one_per_rank(self, name: str, arrays: Sequence[Any] | None) -> list[Operand]:
        if arrays is None or len(arrays) != self.size:
            got = "none" if arrays is None else len(arrays)
            raise ConfigError(f"{name} takes an array for each of the {self.size} ranks, got {got}")
        return [_host(each) for each in arrays]

    def _splits(self, name: str, rows: Sequence[int], operand: Operand) -> list[int]:
        if not operand.shape:
            raise UnsupportedBufferError("alltoall takes arrays of at least one dimension")
        if not rows:
            if operand.shape[0] % self.size:
                raise ConfigError(f"alltoall: {operand.shape[0]} rows do not divide equally among {self.size} ranks")
            return [operand.shape[0] // self.size] * self.size
        listed = [int(each) for each in rows]
        if len(listed) != self.size or min(listed) < 0 or sum(listed) != operand.shape[0]:
            raise ConfigError(
                f"alltoall: {name} are {self.size} numbers that add up to the rows of the array, {operand.shape[0]}; "
                f"got {listed}"
            )
        return listed

    @staticmethod
    def _joined(model: Any, arrays: Sequence[Any], operands: Sequence[Operand]) -> Any:
        """Return the elements of several arrays, one after the other, in a new array of the model's kind."""
        flat = like(model, (sum(each.count for each in operands),))
        view, at = _host(flat).view, 0
        for each in operands:
            view[at : at + each.count].reshape(each.shape)[...] = each.view
            at += each.count
        return flat

    @staticmethod
    def _store_parts(outs: Sequence[Any], flat: Any, counts: Sequence[int]) -> None:
        view, at = _host(flat).view, 0
        for out, count in zip(outs, counts, strict=True):
            target = _host(out).view
            target[...] = view[at : at + count].reshape(target.shape)
            at += count

    @staticmethod
    def _store(target: Any, values: Any) -> None:
        view = _host(target).view
        source = values if isinstance(values, np.ndarray) else _host(values).view
        view[...] = source.reshape(view.shape)


def _host(array: Any) -> Operand:
    return require_host(operand_of(array), "a group")


def _flat(array: Any, operand: Operand) -> Any:
    """Return the elements in C order as one dimension: where they are so already, the same object, which is fastest."""
    return array if len(operand.shape) == 1 else array.reshape(operand.count)


def _rows(array: Any, operand: Operand) -> Any:
    """Return the elements in C order as one row: where they are so already, a view."""
    return array.reshape(1, operand.count)


def _integers(array: Any, op: str) -> Operand:
    """Look at an array that is reduced bit by bit.

    Raises:
        UnsupportedBufferError: it has no bits of that kind.
    """
    source = _host(array)
    if source.dtype.kind not in ("int", "uint", "bool"):
        raise UnsupportedBufferError(f"{op} takes integers and bool, got {source.dtype.name}")
    return source


def _bit_by_bit(rows: Any, op: str) -> npt.NDArray[Any]:
    """Reduce rows that come from the ranks, into one."""
    ufunc: Any = getattr(np, op)
    result: npt.NDArray[Any] = ufunc.reduce(_host(rows).view, axis=0)
    return result


def _require_usable(outputs: Sequence[Operand], inputs: Sequence[Operand]) -> None:
    """Raise `UnsupportedBufferError` unless all have one dtype and the outputs can be written."""
    names = {each.dtype.name for each in (*outputs, *inputs)}
    if len(names) > 1:
        raise UnsupportedBufferError(f"all arrays of a call must have one dtype, got {', '.join(sorted(names))}")
    for each in outputs:
        each.require_writable()
