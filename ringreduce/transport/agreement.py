"""Do all ranks call the same collective? Signatures are compared when one is seen for the first time.

Every call has a number and a signature (the collective, its op, dtype and shape, as text). A rank that sees a
signature for the first time announces it to all and waits for the announcements of all others. Ranks that run the same
program see it in the same call. A rank that already knows the signature of its own call goes on to wait for data,
and answers an announcement there: so all ranks find a mismatch at once, and not at the time limit.

Ranks can also make different calls whose signatures all know. Their messages do not match (the signature is part of the
tag), so the ranks wait; a rank that has waited for long announces its call, and the mismatch shows. By then ranks that
did agree may have exchanged data.

A call that a rank cannot make because of its arguments is announced like a new one.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import NoReturn

from ringreduce.common.call_sites import AbortReason, CallSite, disagreement
from ringreduce.common.errors import TransportError, during
from ringreduce.native.layout import CALLS
from ringreduce.transport.messages import Messages
from ringreduce.transport.waiting import Waiter

_REMEMBERED = 4096  # Calls that are remembered: no rank can be further ahead of a peer that still asks.
_PATIENCE_S = 0.5  # After this long a rank announces what it waits in.


class Agreement:
    """Compares signatures over a transport's control notes; one for each communicator of several nodes.

    Args:
        messages: carries the notes.
        waiter: how to wait for them.
        called: says what this rank calls, and where.

    Attributes:
        counters: the number of the call that this rank is in, or was in last.
        patience_s: how long a rank waits in a call, in seconds, before it announces what it waits in.
    """

    def __init__(self, messages: Messages, waiter: Waiter, called: Callable[[str], CallSite] = CallSite.here) -> None:
        self._messages = messages
        self._waiter = waiter
        self._called = called
        self.patience_s = _PATIENCE_S
        self.counters = [0]
        self._settled_up_to = 0  # Notes about calls up to this one are old.
        self._known: set[str] = set()
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._received: dict[int, dict[int, CallSite]] = {}
        self._refused: set[int] = set()  # Calls that some rank could not make.
        self._announced: set[int] = set()
        self._detached: dict[int, tuple[int, AbortReason]] = {}  # By rank, its last call, and why that was the last.
        self._waits_since: float | None = None  # When the wait in the present call began.

    def enter(self, signature: str) -> bool:
        """Begin the next call; compare its signature with the other ranks' if it is new.

        Args:
            signature: what this rank calls.

        Returns:
            Whether it was new: then all ranks have entered.

        Raises:
            MismatchError: another rank's call has another signature, or cannot be made.
            PeerLostError: a rank has ended.
            TransportError: a rank has given up this call or an earlier one.
        """
        self._begin(signature)
        if signature in self._known:
            return False
        self.settle()
        return True

    def refuse(self, reason: str) -> NoReturn:
        """Begin a call that this rank cannot make, and announce why.

        Raises:
            MismatchError: on all ranks.
            PeerLostError, TransportError: as `enter`.
        """
        self._begin(reason)
        self._refused.add(self.number)
        self.settle()
        raise AssertionError("a call that was refused is a mismatch")

    def settle(self) -> None:
        """Announce the call that this rank is in and wait until all ranks have announced theirs.

        Raises:
            MismatchError, PeerLostError, TransportError: as `enter`.
        """
        self._announce(self.number)
        self._waiter.until(self._settled, self._missing)

    def absent(self) -> str:
        """Return which ranks have not come to this call, for an error message; nothing, unless others were asked."""
        asked = self.number in self._announced
        return self._missing() if asked and len(self._received[self.number]) < self._messages.size else ""

    @property
    def number(self) -> int:
        """Of the call that this rank is in, or was in last."""
        return self.counters[CALLS]

    def resume(self, number: int) -> None:
        """Go on after a call of this number, which a mismatch has ended on all ranks."""
        self.counters[CALLS] = self._settled_up_to = number
        self._received = {
            call: received for call, received in self._received.items() if call > number
        }  # A peer may be there.
        self._refused = {call for call in self._refused if call > number}
        self._announced.clear()

    def watch(self) -> None:
        """Read what peers announce; called again and again while this rank waits for data.

        Raises:
            MismatchError, PeerLostError, TransportError: as `enter`.
        """
        self._listen()
        now = monotonic()
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since >= self.patience_s and self.number > self._settled_up_to:
            self._announce(self.number)

    def detach(self, why: AbortReason) -> None:
        """Announce that this rank takes part in no further call; to be called once."""
        self._post({"detached_after": self.number, "why": why})

    def _begin(self, signature: str) -> None:
        self.counters[CALLS] += 1
        self._mine[self.counters[CALLS]] = signature
        self._waits_since = None
        if len(self._mine) > _REMEMBERED:
            self._mine.popitem(last=False)

    def _settled(self) -> bool:
        self._listen()
        return len(self._received.get(self.counters[CALLS], ())) == self._messages.size

    def _missing(self) -> str:
        received = self._received.get(self.number, {})
        missing = [rank for rank in range(self._messages.size) if rank not in received]
        return f"ranks {missing} to call a collective; this rank called {self._mine[self.number]}"

    def _announce(self, number: int) -> None:
        # A call that ended so long ago did not end in a mismatch.
        if number in self._announced or number not in self._mine:
            return
        self._announced.add(number)
        text = self._mine[number]
        # The line of an older call is unknown by now.
        called = self._called(text) if number == self.number else CallSite(text)
        refused = number in self._refused
        self._post({"call": number, "called": called, "refused": refused})
        self._record(number, self._messages.rank, called, refused=refused)

    def _post(self, content: object) -> None:
        note = json.dumps(content).encode()
        for peer in range(self._messages.size):
            if peer != self._messages.rank:
                self._messages.post(note, peer)

    def _listen(self) -> None:
        while (arrived := self._poll()) is not None:
            peer, note = arrived
            content = json.loads(note)
            if "detached_after" in content:
                self._detached[peer] = content["detached_after"], AbortReason(*content["why"])
            elif content["call"] > self._settled_up_to:
                self._record(content["call"], peer, CallSite(*content["called"]), refused=content["refused"])
        # Peers may have announced calls before this rank entered them, and it may have entered some since.
        for number in [call for call in self._received if call <= self.number and call not in self._announced]:
            self._announce(number)
        for peer, (last, why) in self._detached.items():
            # One that gave up may have done so in the very call that this rank is in.
            if self._settled_up_to <= last < self.number + bool(why.reason):
                raise why.error(peer, f"this rank called {self._mine[self.number]}")

    def _poll(self) -> tuple[int, bytes] | None:
        try:
            return self._messages.poll()
        except TransportError as error:
            raise during(error, self._mine.get(self.number, "no call yet")) from error.__cause__

    def _record(self, number: int, rank: int, called: CallSite, refused: bool) -> None:
        if refused:
            self._refused.add(number)
        received = self._received.setdefault(number, {})
        received[rank] = called
        if len(received) < self._messages.size:
            return
        if number in self._refused or len({note.text for note in received.values()}) > 1:
            raise disagreement(received)
        self._known.add(called.text)
        for old in [call for call in self._received if call < number]:
            del self._received[old]
            self._announced.discard(old)
