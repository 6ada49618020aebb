"""Groups: some ranks of the world in an order of their own, with collectives and messages that nothing else uses.

A process set is registered by all ranks of the world, once; a group is made by its members alone, and there may be any
number of equal ones. Its collectives are those of its `Communicator` and of `ringreduce.runtime.group_collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ringreduce.buffers import operand_of, require_host
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import CallSite, Stack, program_stack
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError
from ringreduce.common.lifetime import Lifetime, close_all
from ringreduce.common.serial import InOrder, SerialTask
from ringreduce.gpu.devices import Gpu
from ringreduce.observe.seen.recorder import Observed
from ringreduce.runtime.bootstrap import Connection
from ringreduce.runtime.deliveries import Deliveries
from ringreduce.runtime.process_sets import context_of
from ringreduce.transport.point_to_point import PeerTransfer
from ringreduce.transport.waiting import Waiter


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

    `submit` runs calls in the order of the program; collectives are called in such a task, one at a time. All members
    make the same calls in the same order, and where they do not, all get a `MismatchError` or the reason why a
    rank could not make its call.

    Args:
        connection: connects the ranks of the world.
        ranks: of the world, in the order of the group; this rank is one of them.
        settings: those of the world.
        timeout_s: how long any wait for a peer may last; None: as the settings say.
        advance: called while this rank waits; moves on what is under way in all groups.
        world: its lifetime.

    Attributes:
        ranks: the argument.
        rank, size: this rank's number in the group, and how many there are.
        communicator: what its collectives are made of.
        lifetime: of this group.
    """

    def __init__(
        self,
        connection: Connection,
        ranks: Sequence[int],
        settings: Config,
        timeout_s: float | None,
        advance: Callable[[], None],
        world: Lifetime,
    ) -> None:
        if timeout_s is not None:
            settings = replace(settings, timeout_s=timeout_s)
        self.ranks = list(ranks)
        self.lifetime = world.child("this group was destroyed; make a new one")
        self._place = _Place()
        messages, channel = connection.messages_among(ranks, [Waiter(settings.timeout_s) for _ in range(2)])
        context = context_of(
            lambda waiter: messages, settings, self._place, lifetime=self.lifetime, warn=False, counts_decide=True
        )
        self.communicator = Communicator(context, channel, Gpu)
        self.rank = self.communicator.rank
        self.size = self.communicator.size
        assert self.communicator.point_to_point is not None
        self._messages = self.communicator.point_to_point
        self._waiters = context.waiter, self._messages.waiter
        for waiter in self._waiters:
            waiter.watchers.append(advance)
        self._threads = messages.concurrent
        self._start_queues()
        self.lifetime.listen_while_held("forked", self._start_queues)

    # ---- the order of calls ----

    def submit(self, call: Callable[[], object], name: str, *, here: bool) -> SerialTask:
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
                error.remedy = "destroy this process group and create a new one on all its ranks"
                raise

        task = SerialTask(run, name)
        self._in_order.submit(task, here=here)
        return task

    def delivered(self, transfer: PeerTransfer) -> SerialTask:
        """Return what is done when a message is, without anybody waiting for it."""
        return self._deliveries.add(transfer)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return when every rank has called it.

        Args:
            timeout_s: how long to wait at most; None: as the group does.

        Raises:
            CollectiveTimeoutError: a rank did not call it; the error names it, and the group cannot be used any more.
        """
        waiter = self._waiters[0]
        usual = waiter.timeout_s
        waiter.timeout_s = waiter.timeout_s if timeout_s is None else timeout_s
        try:
            self.communicator.barrier()
        finally:
            waiter.timeout_s = usual

    # ---- messages ----

    def send(self, array: Any, peer: int, tag: int = 0) -> PeerTransfer:
        """Begin to send an array; it belongs to the transfer until that is done. Any thread may call this.

        Args:
            array: of any strides; the number of elements and the dtype must agree.
            peer: another rank of the group.
            tag: at least 0, at most 2^63 - 1.
        """
        return self._messages.send(require_host(operand_of(array), "send"), peer, tag)

    def recv(self, array: Any, peer: int | None, tag: int = 0) -> PeerTransfer:
        """Begin to receive into an array; arguments as for `send`, and peer None: from any rank."""
        return self._messages.recv(require_host(operand_of(array), "recv"), peer, tag)

    def wait(self, transfer: PeerTransfer, timeout_s: float | None = None) -> None:
        """Return once a message was sent or received; see `PointToPoint.wait`."""
        self._messages.wait(transfer, timeout_s)

    def advance(self) -> None:
        """Move on what is under way, without waiting. Any thread may call this."""
        self._messages.advance()

    # ---- the end ----

    def set_timeout(self, timeout_s: float) -> None:
        """Change how long any wait for a peer may last from now on. Local."""
        for waiter in self._waiters:
            waiter.timeout_s = timeout_s

    def _start_queues(self) -> None:
        # New ones in a forked process, where threads that do not exist there may hold the locks of the old ones.
        self._in_order = InOrder(f"ringreduce group {self.ranks}", self.lifetime, threads=self._threads)
        name = f"ringreduce messages {self.ranks}"
        self._deliveries = Deliveries(name, self._messages, self.lifetime, threads=self._threads)

    def abort(self, error: BaseException) -> None:
        """Refuse all further calls, and end those under way. Local."""
        self.communicator.abort(error)

    def close(self) -> None:
        """Give everything back once all that was submitted is done. Collective, and safe to call twice."""
        if self.lifetime.close():
            close_all(self._in_order.close, self._messages.close, self._deliveries.close, self.communicator.close)

    def observed(self, number: int) -> Observed:
        """Return what is seen of it; ``number``: how many equal groups there are, this one included."""
        name = f"group of ranks {', '.join(map(str, self.ranks))}" + (f" ({number})" if number > 1 else "")
        return Observed(name, name, self.ranks, {"blocking": self.communicator}, lambda: self.lifetime.open)
