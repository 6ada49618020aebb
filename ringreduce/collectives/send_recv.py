"""Messages from one rank to another: send, recv, sendrecv."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.buffers import Operand, operand_of, require_host
from ringreduce.collectives.comm_state import CallTimer, CommState
from ringreduce.collectives.context import Context
from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError, MismatchError
from ringreduce.common.instruments import Tally
from ringreduce.transport.checked import checked
from ringreduce.transport.messages import Messages
from ringreduce.transport.point_to_point import PointToPoint
from ringreduce.transport.waiting import Waiter


class Messaging:
    """The part of a `Communicator` that sends messages from one rank to another: not collective, on any thread.

    Attributes:
        point_to_point: carries them; None: there are none.
        message_tallies: what these calls add up to, by name.
    """

    def __init__(self, context: Context, channel: Messages | None, state: CommState) -> None:
        self._context = context
        self._state = state
        self.rank = context.rank
        self.instruments = context.instruments
        self.lifetime = context.lifetime
        self.point_to_point: PointToPoint | None = None
        if channel is not None:
            checks = checked(channel) if context.config.checksum else channel
            self.point_to_point = PointToPoint(
                checks,
                Waiter(context.waiter.timeout_s, context.waiter.crowded),
                context.board.find_failed,
                context.lifetime.child(),
                counts_decide=context.counts_decide,
            )
        self.message_tallies = {name: Tally() for name in ("send", "recv", "sendrecv")}

    def send(self, array: Any, dest: int, tag: int = 0) -> None:
        """Send an array to a rank that receives it; not collective.

        More than 4 KiB were sent when this returns, which may take until that rank receives them; less may still be
        under way. Any thread may call this.

        Args:
            array: in host memory, of any strides.
            dest: another rank.
            tag: at least 0. What one rank sends another with one tag is received in that order.

        Raises:
            ConfigError: there is no such rank or tag, or it is this rank.
            UnsupportedBufferError: the array is in device memory.
            CollectiveTimeoutError: that rank did not receive it in time; the array is still to be sent, and must stay
                as it is.
            PeerLostError: a rank of this machine has failed.
        """
        point_to_point = self._to_one()
        source = require_host(operand_of(array), "send")
        with self._timed("send", source.nbytes):
            point_to_point.wait(point_to_point.send(source, whole_number("dest", dest), whole_number("tag", tag)))

    def recv(self, out: Any, source: int | None = None, tag: int = 0) -> int:
        """Receive an array that a rank sends; not collective. Any thread may call this.

        Args:
            out: where it goes, in host memory, of any strides; of the same shape and dtype.
            source: who sends it; None: any rank, the first whose array comes.
            tag: the one that it is sent with.

        Returns:
            The rank that has sent it.

        Raises:
            ConfigError, UnsupportedBufferError, PeerLostError: as for `send`.
            CollectiveTimeoutError: nothing came in time. What comes later can be received by another call; but if it
                had begun to come, ``out`` is overwritten later.
            MismatchError: what came has another shape or dtype, and is dropped; raised here, not at the sender.
        """
        point_to_point = self._to_one()
        target = require_host(operand_of(out), "recv")
        sender = None if source is None else whole_number("source", source)
        with self._timed("recv", target.nbytes):
            transfer = point_to_point.recv(target, sender, whole_number("tag", tag))
            try:
                point_to_point.wait(transfer)
            except BaseException:
                point_to_point.withdraw(transfer)
                raise
        assert transfer.peer is not None
        return transfer.peer

    def sendrecv(self, array: Any, dest: int, out: Any, source: int | None = None, tag: int = 0) -> Any:
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
        point_to_point = self._to_one()
        to = whole_number("dest", dest)
        sender = None if source is None else whole_number("source", source)
        tag = whole_number("tag", tag)
        given, taken = (require_host(operand_of(each), "sendrecv") for each in (array, out))
        with self._timed("sendrecv", given.nbytes):
            if to == sender == self.rank:
                self._copy_to_self(given, taken)
                return out
            if np.may_share_memory(given.view, taken.view):
                raise ConfigError("sendrecv takes two arrays that have no memory in common; send a copy")
            coming = point_to_point.recv(taken, sender, tag)
            try:
                point_to_point.wait(point_to_point.send(given, to, tag))
                point_to_point.wait(coming)
            except BaseException:
                point_to_point.withdraw(coming)
                raise
        return out

    def _timed(self, name: str, nbytes: int) -> CallTimer:
        return CallTimer(self.instruments, self.message_tallies[name], name, "messages", nbytes)

    def _to_one(self) -> PointToPoint:
        self.lifetime.require_open()
        if self.point_to_point is None:
            raise ConfigError("this communicator has no messages from one rank to another")
        return self.point_to_point

    def _copy_to_self(self, source: Operand, target: Operand) -> None:
        target.require_writable()
        if source.describe() != target.describe():
            text = f"sendrecv from rank {self.rank} to itself ({source.describe()}, into {target.describe()})"
            raise MismatchError({self.rank: text})
        np.copyto(target.view, source.view)
