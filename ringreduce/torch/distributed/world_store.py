"""torch's store, kept by rank 0 and reached over the world: between hosts no port listens for it.

What torch needs of a store is described in its documentation, "Distributed Key-Value Store". A request is a control
note to rank 0, on a transport of the store's own, and so is the answer.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from ringreduce.common.errors import RingReduceError
from ringreduce.common.lifetime import Lifetime
from ringreduce.transport.messages import Messages

_Store: Any = dist.Store  # type: ignore[attr-defined]
_StoreError: Any = getattr(dist, "DistStoreError", RuntimeError)

_SHORT_S = 0.0002  # between two looks for notes, at first
_LONG_S = 0.02  # and once none has come for long
_HOT_S = 1.0  # so long after a request the next one is expected soon
_PENDING = object()  # in place of an answer


class _Request(NamedTuple):
    """What a rank asks for.

    Attributes:
        peer: that rank.
        number: its number for it.
        operation: of `_Table`.
        arguments: its own.
    """

    peer: int
    number: int
    operation: str
    arguments: Sequence[Any]


class _Table:
    """The keys and values of a store, texts both; bytes are letters of Latin-1. Answers requests of ranks."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[_Request] = []  # for keys

    def take(self, request: _Request) -> list[tuple[int, int, bool, Any]]:
        """Return what can be answered now: to whom, the number of the request, whether it went well, and the answer."""
        self._waiting.append(request)
        found: list[tuple[int, int, bool, Any]] = []
        before = -1
        while len(found) > before:  # what was set may be what another one waits for
            before = len(found)
            for each in tuple(self._waiting):
                is_right, answer = self._try(each)
                if answer is not _PENDING:
                    self._waiting.remove(each)
                    found.append((each.peer, each.number, is_right, answer))
        return found

    def _try(self, request: _Request) -> tuple[bool, Any]:
        try:
            return True, _OPERATIONS[request.operation](self, *request.arguments)
        except ValueError as error:  # what is there is no number
            return False, f"{request.operation}({', '.join(map(str, request.arguments))}): {error}"

    # ---- operations; they return `_PENDING` while they wait for keys ----

    def set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._values.update(zip(keys, values, strict=True))

    def get(self, keys: Sequence[str]) -> Any:
        return [self._values[key] for key in keys] if self.check(keys) else _PENDING

    def wait(self, keys: Sequence[str]) -> Any:
        return None if self.check(keys) else _PENDING

    def check(self, keys: Sequence[str]) -> bool:
        return self._values.keys() >= set(keys)

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def append(self, key: str, value: str) -> None:
        self._values[key] = self._values.get(key, "") + value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        found = self._values.get(key)
        if found == expected or (found is None and not expected):
            self._values[key] = desired
            return desired
        return expected if found is None else found

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)


_NAMES = ("add", "append", "check", "compare_set", "delete_key", "get", "num_keys", "set", "wait")
_OPERATIONS: dict[str, Callable[..., Any]] = {name: getattr(_Table, name) for name in _NAMES}


class _Requests:
    """The requests of a rank, and on rank 0 the values, and a thread that answers the others.

    Args:
        messages, lifetime: as for `WorldStore`.
    """

    def __init__(self, messages: Messages, lifetime: Lifetime) -> None:
        self._messages = messages
        self._lifetime = lifetime
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # Guards what follows, and the transport.
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._forgotten: set[int] = set()  # requests whose answers nobody waits for
        self._table = _Table()  # of rank 0
        self._heard_s = time.monotonic()
        self._ended = threading.Event()
        lifetime.listen_while_held("closed", self._close)
        if messages.rank == 0 and messages.size > 1:
            threading.Thread(target=self._serve, name="ringreduce serves torch's store", daemon=True).start()

    def ask(self, operation: str, *arguments: Any, keys: Sequence[str], limit_s: float) -> Any:
        """Return the answer to a request.

        Args:
            operation: of `_Table`.
            arguments: its own.
            keys: for which it may wait.
            limit_s: how long.

        Raises:
            DistStoreError: keys were not there in time; or the request cannot be carried out.
            ShutdownError, TransportError: the world has ended.
        """
        number = next(self._numbers)
        deadline = time.monotonic() + limit_s
        self._lifetime.require_open("torch's store")
        with self._lock:
            if self._messages.rank == 0:
                self._receive(0, [number, operation, arguments])
            else:
                self._messages.post(json.dumps([number, operation, arguments]).encode(), 0)
        pause_s = _SHORT_S
        while True:
            with self._lock:
                self._advance()
                if number in self._answers:
                    is_right, answer = self._answers.pop(number)
                    break
                late = time.monotonic() > deadline
                if late:
                    self._forgotten.add(number)
            if late:
                missing = ", ".join(keys) or operation
                raise _StoreError(f"waited {limit_s:.3g} s for {missing} in torch's store, which rank 0 keeps")
            self._lifetime.require_open("torch's store")
            time.sleep(pause_s)  # MPI does not say when a note has come, and another thread may be the one to find it
            pause_s = min(2 * pause_s, _LONG_S)
        if not is_right:
            raise _StoreError(answer)
        return answer

    def _serve(self) -> None:
        while not self._ended.wait(_SHORT_S if time.monotonic() - self._heard_s < _HOT_S else _LONG_S):
            if not self._lifetime.open:
                return
            with suppress(RingReduceError), self._lock:  # a rank has died: its own calls say so
                self._advance()

    def _advance(self) -> None:
        """Take the notes that have come. The lock is held."""
        while not self._ended.is_set() and (arrived := self._messages.poll()) is not None:
            peer, note = arrived
            self._receive(peer, json.loads(note))

    def _receive(self, peer: int, content: Sequence[Any]) -> None:
        if self._messages.rank != 0:
            number, is_right, answer = content
            self._keep(number, is_right, answer)
            return
        self._heard_s = time.monotonic()
        for receiver, *answer in self._table.take(_Request(peer, *content)):
            if receiver == 0:
                self._keep(*answer)
            else:
                with suppress(RingReduceError):  # that rank has died
                    self._messages.post(json.dumps(answer).encode(), receiver)

    def _keep(self, number: int, is_right: bool, answer: Any) -> None:
        if number in self._forgotten:
            self._forgotten.remove(number)
        else:
            self._answers[number] = is_right, answer

    def _close(self) -> None:
        self._ended.set()
        with self._lock:
            self._messages.close()


class WorldStore(_Store):  # type: ignore[misc]
    """A rank's access to the store of its world, which rank 0 keeps; any thread may use it.

    Args:
        messages: between all ranks, for the store alone; it closes them.
        lifetime: of the world.
    """

    def __init__(self, messages: Messages, lifetime: Lifetime) -> None:
        super().__init__()
        self._requests = _Requests(messages, lifetime)

    def _ask(self, operation: str, *arguments: Any, keys: Sequence[str] = (), timeout: timedelta | None = None) -> Any:
        limit_s = (self.timeout if timeout is None else timeout).total_seconds()
        return self._requests.ask(operation, *arguments, keys=keys, limit_s=limit_s)

    # ---- what torch calls ----

    def set(self, key: str, value: Any) -> None:
        self._ask("set", [key], [_text(value)])

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self._ask("set", list(keys), [_text(each) for each in values])

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._ask("get", list(keys), keys=keys)
        return [each.encode("latin-1") for each in found]

    def add(self, key: str, value: int) -> int:
        total: int = self._ask("add", key, value)
        return total

    def append(self, key: str, value: Any) -> None:
        self._ask("append", key, _text(value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found: str = self._ask("compare_set", key, _text(expected), _text(desired))
        return found.encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), keys=keys, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> WorldStore:
        return self


def _text(value: Any) -> str:
    return (value.encode() if isinstance(value, str) else bytes(value)).decode("latin-1")
