"""Messages from one rank to another: send, recv, sendrecv."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from ringreduce.buffers import Operand, operand_of, require_host
from ringreduce.collectives.comm_state import CallTimer
from ringreduce.collectives.context import Context
from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.common.instruments import Tally
from ringreduce.transport.checked import checked
from ringreduce.transport.control import SharedControlChannel
from ringreduce.transport.messages import Messages
from ringreduce.transport.point_to_point import PROC_NULL, NoRank, PeerTransfer, PointToPoint
from ringreduce.transport.waiting import Waiter


class PendingMessage:
    """An array that is on its way to or from another rank. Its memory belongs to this until `wait` or `test` says so.

    Args:
        carrier: carries it.
        transfer: it.
        call: what the program called.
    """

    def __init__(self, carrier: PointToPoint, transfer: PeerTransfer, call: str) -> None:
        self._carrier = carrier
        self._transfer = transfer
        self._call = call

    def __repr__(self) -> str:
        return f"<{self._call}: {self._transfer}>"

    def wait(self) -> int | NoRank:
        """Return the other rank, once the array was sent (more than 128 KiB were received, too) or received.

        Raises:
            as `Communicator.send` and `Communicator.recv`.
        """
        self._carrier.wait(self._transfer)
        assert self._transfer.peer is not None
        return self._transfer.peer

    def test(self) -> bool:
        """Return whether `wait` would return, or raise, at once; never blocks."""
        self._carrier.advance()
        return self._transfer.done


class SendRecv:
    """Sends and receives messages from one rank to another, in one process set: not collective, on any thread.

    `send`, `recv` and `sendrecv` are the methods of `Communicator`, which describes their arguments and errors.

    Args:
        context: the ranks.
        channel: a transport between them that nobody else uses; closed with this. None: there are no messages.

    Attributes:
        point_to_point: carries them; None: there are none.
        tallies: what these calls add up to, by name.
    """

    def __init__(self, context: Context, channel: Messages | None) -> None:
        self._rank = context.rank
        self._instruments = context.instruments
        self._lifetime = context.lifetime
        self.point_to_point = None if channel is None else _carrier(context, channel)
        self.tallies = {name: Tally() for name in ("send", "recv", "sendrecv")}
        self._sent, self._received, self._exchanged = self.tallies.values()

    def send(self, array: Any, dest: int | NoRank, tag: int) -> None:
        """Send an array to a rank that receives it."""
        carrier = self._open_carrier()
        if not self._instruments.observers:
            started = perf_counter()
            kind = carrier.send_now(array, dest, tag)
            if kind is not None:
                tally = self._sent  # `add` would be a call.
                tally.calls += 1
                tally.nbytes += kind.nbytes
                tally.seconds += perf_counter() - started
                return
        source = require_host(operand_of(array), "send")
        with self._timed("send", source.nbytes):
            carrier.wait(carrier.send(source, _peer("dest", dest), whole_number("tag", tag)))

    def recv(self, out: Any, source: int | NoRank | None, tag: int) -> int | NoRank:
        """Receive an array that a rank sends; return that rank."""
        carrier = self._open_carrier()
        if source is not None and not self._instruments.observers:
            started = perf_counter()
            kind = carrier.recv_now(out, source, tag)
            if kind is not None:
                tally = self._received
                tally.calls += 1
                tally.nbytes += kind.nbytes
                tally.seconds += perf_counter() - started
                return source
            # This was the polling; the rest of the call is counted below.
            self._received.seconds += perf_counter() - started
        target = require_host(operand_of(out), "recv")
        sender = None if source is None else _peer("source", source)
        with self._timed("recv", target.nbytes):
            return _receive(carrier, target, sender, whole_number("tag", tag))

    def isend(self, array: Any, dest: int | NoRank, tag: int) -> PendingMessage:
        """Begin to send an array; see `Communicator.isend`."""
        carrier = self._open_carrier()
        source = require_host(operand_of(array), "isend")
        transfer = carrier.send(source, _peer("dest", dest), whole_number("tag", tag))
        self._sent.add(source.nbytes, 0.0)
        return PendingMessage(carrier, transfer, "isend")

    def irecv(self, out: Any, source: int | NoRank | None, tag: int) -> PendingMessage:
        """Begin to receive an array; see `Communicator.irecv`."""
        carrier = self._open_carrier()
        target = require_host(operand_of(out), "irecv")
        sender = None if source is None else _peer("source", source)
        transfer = carrier.recv(target, sender, whole_number("tag", tag))
        self._received.add(target.nbytes, 0.0)
        return PendingMessage(carrier, transfer, "irecv")

    def sendrecv(self, array: Any, dest: int | NoRank, out: Any, *, source: int | NoRank | None, tag: int) -> Any:
        """Send an array to one rank, and receive another that a rank sends, at the same time; return ``out``."""
        carrier = self._open_carrier()
        expected = None if self._instruments.observers else carrier.exchanged_kind(array, out, source, tag)
        if expected is not None:
            started = perf_counter()
            kind = carrier.send_now(array, dest, tag)
            if kind is not None:
                if carrier.recv_now(out, source, tag, expected) is None:
                    _receive(carrier, Operand.of(out), source, tag)
                self._exchanged.add(kind.nbytes, perf_counter() - started)
                return out
        to = _peer("dest", dest)
        sender = None if source is None else _peer("source", source)
        tag = whole_number("tag", tag)
        given, taken = (require_host(operand_of(sent_or_received), "sendrecv") for sent_or_received in (array, out))
        with self._timed("sendrecv", given.nbytes):
            if to == sender == self._rank:
                self._copy_to_self(given, taken)
                return out
            if np.may_share_memory(given.view, taken.view):
                raise ConfigError("sendrecv takes two arrays that have no memory in common; send a copy")
            coming = carrier.recv(taken, sender, tag)
            try:
                carrier.wait(carrier.send(given, to, tag))
                carrier.wait(coming)
            except BaseException:
                carrier.withdraw(coming)
                raise
        return out

    def fail(self, error: BaseException) -> None:
        """End all messages under way with this error, and refuse later ones. Local."""
        if self.point_to_point is not None:
            self.point_to_point.fail(error)

    def close(self) -> None:
        """Give the channel back."""
        if self.point_to_point is not None:
            self.point_to_point.close()

    def _timed(self, name: str, nbytes: int) -> CallTimer:
        return CallTimer(self._instruments, self.tallies[name], name, algorithm="messages", nbytes=nbytes)

    def _open_carrier(self) -> PointToPoint:
        if not self._lifetime.open:
            self._lifetime.require_open()
        if self.point_to_point is None:
            raise ConfigError("this communicator has no messages from one rank to another")
        return self.point_to_point

    def _copy_to_self(self, source: Operand, target: Operand) -> None:
        target.require_writable()
        if source.describe() != target.describe():
            text = f"sendrecv from rank {self._rank} to itself ({source.describe()}, into {target.describe()})"
            raise MismatchError({self._rank: text})
        np.copyto(target.view, source.view)


def _carrier(context: Context, channel: Messages) -> PointToPoint:
    """Return what carries messages between two of these ranks over a channel. Collective."""
    shares = len(context.topology.nodes) < context.topology.size
    return PointToPoint(
        checked(channel) if context.config.checksum else channel,
        waiter=Waiter(context.waiter.timeout_s, context.waiter.crowded),
        find_failed=context.board.find_failed,
        lifetime=context.lifetime.child(),
        counts_decide=context.counts_decide,
        near=SharedControlChannel(context.node, context.messages) if shares else None,
        compiled=context.node.loops.library,
    )


def _peer(name: str, value: Any) -> int | NoRank:
    return PROC_NULL if value is PROC_NULL else whole_number(name, value)


def _receive(carrier: PointToPoint, target: Operand, source: int | NoRank | None, tag: int) -> int | NoRank:
    """Receive an array; return the rank that has sent it."""
    transfer = carrier.recv(target, source, tag)
    try:
        carrier.wait(transfer)
    except BaseException:
        carrier.withdraw(transfer)
        raise
    assert transfer.peer is not None
    return transfer.peer
