"""Somebody on the network of a job over MPI: a transport that does something to one message that a rank sends."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ringreduce.transport import mpi_job, mpi_messages
from ringreduce.transport.mpi_messages import MpiMessages

#: What is done to a message: one bit is changed, it is sent again in place of the next one, it is not sent, it is sent
#: after the next one, its end is cut off.
ACTIONS = ("change", "repeat", "drop", "swap", "cut")
KINDS = ("data", "note", "exchange")


class Attack:
    """What is done to which message. Until it is armed, messages are not counted.

    Attributes:
        counts: how many messages of each kind this rank has sent since it was armed.
        sent: all of them, in their order; kind and content.
        replay: what is sent in place of them, as `sent` of another job; None: they are sent as they are.
    """

    def __init__(self) -> None:
        self.replay: list[tuple[str, bytes]] | None = None
        self.arm("none", "", 0)
        self.disarm()

    def arm(self, kind: str, action: str, place: int) -> None:
        """Count from now on, and strike at a message of a kind; ``"none"``: at none."""
        self._kind, self._action, self._place = kind, action, place
        self._armed = True
        self.counts = dict.fromkeys(KINDS, 0)
        self.sent: list[tuple[str, bytes]] = []

    def disarm(self) -> None:
        """Strike no more; what was counted stays."""
        self._armed = False

    def strikes(self, kind: str, content: Any) -> str:
        """Return what is to be done to a message that is sent now; empty: nothing."""
        if not self._armed:
            return ""
        self.sent.append((kind, bytes(content)))
        self.counts[kind] += 1
        return self._action if kind == self._kind and self.counts[kind] == self._place + 1 else ""

    def other(self, kind: str) -> bytes | None:
        """Return the next message of the other job of a kind, which comes in place of one; None: its own."""
        for number, (each, content) in enumerate(self.replay or []):
            if each == kind and self.replay is not None:
                del self.replay[number]
                return content
        return None

    def save(self, path: Path) -> None:
        """Write down what was sent."""
        path.write_text(json.dumps([(kind, content.hex()) for kind, content in self.sent]))

    def load(self, path: Path, *kinds: str) -> None:
        """Send what another job has sent, of these kinds."""
        self.replay = [(kind, bytes.fromhex(text)) for kind, text in json.loads(path.read_text()) if kind in kinds]


ATTACK = Attack()


class AttackedMessages(MpiMessages):
    """Messages over MPI, of which what this rank sends is attacked by `ATTACK`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._sends: dict[int, tuple[Any, tuple[int, int], Any]] = {}  # by id: the request, its route, the memory
        self._gone: set[int] = set()  # sends that were not started, or that end unseen
        self._held: dict[Any, Any] = {}  # by route, what is sent after the next one
        self._kept: list[Any] = []
        self._last: dict[str, bytes] = {}
        self._post, self._exchange = self.post, self.exchange
        self.post = self._attacked_post  # type: ignore[method-assign]
        self.exchange = self._attacked_exchange  # type: ignore[method-assign]

    def send(self, data: Any, peer: int, tag: int) -> Any:
        request = super().send(data, peer, tag)
        self._sends[id(request)] = request, (peer, tag), data.reshape(-1).view(np.uint8)
        return request

    def start(self, requests: Sequence[Any]) -> None:
        untouched = []
        for each in requests:
            if id(each) not in self._sends:
                untouched.append(each)
                continue
            _, route, memory = self._sends[id(each)]
            action = ATTACK.strikes("data", memory)
            other = ATTACK.other("data")
            if other is not None:
                memory[:] = np.resize(np.frombuffer(other, np.uint8), memory.size)
            if action in ("drop", "swap", "cut"):
                self._gone.add(id(each))
                if action == "swap":
                    self._held[route] = memory.copy()
                elif action == "cut":
                    self._send_besides(memory[:-1], route)
                continue
            if action == "change":
                memory[memory.size // 2] ^= 4
            untouched.append(each)
            super().start([each])
            untouched.pop()
            if action == "repeat":
                self._send_besides(memory, route)
            if (held := self._held.pop(route, None)) is not None:
                self._send_besides(held, route)
        if untouched:
            super().start(untouched)

    def _send_besides(self, content: Any, route: tuple[int, int]) -> None:
        copy = content.copy()
        self._kept.append((self._data.Isend([copy, MPI.BYTE], *route), copy))

    def test_all(self, requests: Sequence[Any]) -> bool:
        if not super().test_all([each for each in requests if id(each) not in self._gone]):
            return False
        self._gone.difference_update(map(id, requests))
        return True

    def test_some(self, requests: Sequence[Any]) -> Sequence[int]:
        gone = [place for place, each in enumerate(requests) if id(each) in self._gone]
        self._gone.difference_update(id(requests[place]) for place in gone)
        there = [place for place in range(len(requests)) if place not in gone]
        return gone + [there[place] for place in super().test_some([requests[place] for place in there])]

    def free(self, requests: Sequence[Any]) -> None:
        for each in requests:
            self._sends.pop(id(each), None)
            self._gone.discard(id(each))
        super().free(requests)

    def _attacked_post(self, note: bytes, peer: int) -> None:
        action = ATTACK.strikes("note", note)
        note = ATTACK.other("note") or note
        if action == "swap":
            self._held["note", peer] = note
            return
        if action == "drop":
            return
        self._post(_damaged(note, action), peer)
        if action == "repeat":
            self._post(note, peer)
        if (held := self._held.pop(("note", peer), None)) is not None:
            self._post(held, peer)

    def _attacked_exchange(self, payload: bytes) -> list[bytes]:
        action = ATTACK.strikes("exchange", payload)
        given = ATTACK.other("exchange") or payload
        if action == "drop":
            given = b""
        elif action in ("repeat", "swap"):  # that of an exchange before, or none's
            given = self._last.get("exchange", bytes(len(payload)))
        self._last["exchange"] = payload
        arrived = self._exchange(_damaged(given, action))
        arrived[self.rank] = payload  # which has not travelled
        return arrived


def _damaged(content: bytes, action: str) -> bytes:
    if action == "change":
        place = len(content) // 2
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    return content[:-1] if action == "cut" else content


def install() -> None:
    """Let this process use `AttackedMessages` for all worlds that begin from now on."""
    for module in (mpi_job, mpi_messages):
        module.MpiMessages = AttackedMessages  # type: ignore[misc]
