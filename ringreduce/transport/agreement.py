"""Do all ranks call the same collective? Signatures are compared when one is met for the first time.

Every call has a number and a signature (the collective, its op, dtype and shape, as text). A rank that meets a
signature for the first time announces it to all and waits until it has heard everyone's. Ranks that run the same
program meet it in the same call. A rank that already knows the signature of its own call goes on to wait for data,
and answers there when it hears the announcement: so a mismatch is seen by all at once, and not at the time limit.

Two known signatures can be confused too. Their messages do not match (the signature is part of the tag), so both
ranks wait; one that waits for long announces what it waits in, and the mismatch comes out. By then ranks that did
agree may have exchanged data.
"""

from __future__ import annotations

import json
from collections import OrderedDict

from ringreduce.errors import MismatchError, PeerLostError
from ringreduce.transport.messages import Messages
from ringreduce.transport.waiting import Waiter

__all__ = ["Agreement"]

_REMEMBERED = 4096  # calls; a rank cannot be further ahead of a peer that still asks, but for broadcast roots
_PATIENCE = 4096  # watcher rounds without data (about half a second) before a rank announces what it waits in


class Agreement:
    """Compares signatures over a transport's control notes; one for each communicator of several nodes.

    Attributes:
        call: the number of the call that this rank is in, or was in last.
        patience: how often `watch` is called without data before a rank announces what it waits in.
    """

    def __init__(self, messages: Messages, waiter: Waiter, patience: int = _PATIENCE) -> None:
        self._messages = messages
        self._waiter = waiter
        self.patience = patience
        self.call = 0
        self._settled_up_to = 0  # notes about calls up to this one are old
        self._known: set[str] = set()
        self._mine: OrderedDict[int, str] = OrderedDict()
        self._heard: dict[int, dict[int, str]] = {}
        self._announced: set[int] = set()
        self._left: dict[int, int] = {}
        self._checks = 0

    def enter(self, signature: str, *, meet: bool = False) -> None:
        """Begin the next call; compare its signature with the other ranks' if it is new.

        Args:
            signature: what this rank calls.
            meet: wait for all ranks to enter, known or not: a barrier.

        Raises:
            MismatchError: another rank's call has another signature.
            PeerLostError: a rank has left the world.
        """
        self.call += 1
        self._mine[self.call] = signature
        self._checks = 0
        if len(self._mine) > _REMEMBERED:
            self._mine.popitem(last=False)
        if meet or signature not in self._known:
            self.settle()

    def settle(self) -> None:
        """Announce the call that this rank is in and wait until all ranks have announced theirs.

        Raises:
            MismatchError, PeerLostError: as `enter`.
        """
        self._announce(self.call)
        self._waiter.until(self._settled, self._missing)

    def resume(self, call: int) -> None:
        """Count on from ``call``, the furthest that any rank had come to when a mismatch ended it."""
        self.call = self._settled_up_to = call
        self._heard.clear()
        self._announced.clear()

    def watch(self) -> None:
        """Look at what peers announce; called again and again by whoever waits for data.

        Raises:
            MismatchError, PeerLostError: as `enter`.
        """
        self._listen()
        self._checks += 1
        if self._checks == self.patience and self.call > self._settled_up_to:
            self._announce(self.call)

    def leave(self) -> None:
        """Tell the others that this rank takes part in no further call."""
        for peer in self._peers():
            self._messages.post(json.dumps({"left_after": self.call}).encode(), peer)

    def _settled(self) -> bool:
        self._listen()
        return len(self._heard.get(self.call, ())) == self._messages.size

    def _missing(self) -> str:
        heard = self._heard.get(self.call, {})
        missing = [rank for rank in range(self._messages.size) if rank not in heard]
        return f"ranks {missing} to call a collective; this rank called {self._mine[self.call]}"

    def _announce(self, call: int) -> None:
        if call in self._announced or call not in self._mine:  # what ended so long ago did not end in a mismatch
            return
        self._announced.add(call)
        signature = self._mine[call]
        note = json.dumps({"call": call, "signature": signature}).encode()
        for peer in self._peers():
            self._messages.post(note, peer)
        self._hear(call, self._messages.rank, signature)

    def _listen(self) -> None:
        while (arrived := self._messages.poll()) is not None:
            peer, note = arrived
            said = json.loads(note)
            if "left_after" in said:
                self._left[peer] = said["left_after"]
            elif said["call"] > self._settled_up_to:
                self._hear(said["call"], peer, said["signature"])
        # Peers may have announced calls before this rank entered them, and it may have left some behind since.
        for call in [each for each in self._heard if each <= self.call and each not in self._announced]:
            self._announce(call)
        for peer, last in self._left.items():
            if self._settled_up_to <= last < self.call:
                raise PeerLostError(peer, f"it has shut down; this rank called {self._mine[self.call]}")

    def _hear(self, call: int, rank: int, signature: str) -> None:
        heard = self._heard.setdefault(call, {})
        heard[rank] = signature
        if len(heard) < self._messages.size:
            return
        if len(set(heard.values())) > 1:
            raise MismatchError(heard)
        self._known.add(signature)
        for old in [each for each in self._heard if each < call]:
            del self._heard[old]
            self._announced.discard(old)

    def _peers(self) -> list[int]:
        return [rank for rank in range(self._messages.size) if rank != self._messages.rank]
