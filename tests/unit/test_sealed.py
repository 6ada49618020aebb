"""Sealed messages: what somebody changes, repeats, drops, swaps or cuts off is an error, and never a result."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from doubles import Wrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from suites.conformance import check_collectives, check_messages

from ringreduce.buffers import Array
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.errors import TransportError
from ringreduce.common.keys import Secret
from ringreduce.testing import run_ranks, run_threads
from ringreduce.transport import sealed as module
from ringreduce.transport.checked import checked
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.sealed import Cipher, TagCounts, sealed
from ringreduce.transport.waiting import Waiter

KEY = Secret(bytes(range(32)))
CONFIG = Config(timeout_s=30.0, segment_nbytes=64 << 10)


def seal(inner: Messages) -> Messages:
    return sealed(inner, KEY, "test")


# ---- the primitives ----


def test_the_vector_of_the_cipher():
    """Test case 14 of McGrew and Viega, "The Galois/Counter Mode of Operation"; the nonce is a tag and a counter."""
    room = bytearray(32)
    Cipher(bytes(32)).seal((0, 0), bytes(16), room)
    assert room.hex() == "cea7403d4d606b6e074ec5d3baf39d18" + "d0d1c8a799996bf0265b98b5d48ab919"
    plain = bytearray(16)
    assert Cipher(bytes(32)).open((0, 0), bytes(room), plain)
    for nonce in ((1, 0), (0, 1)):
        assert not Cipher(bytes(32)).open(nonce, bytes(room), plain)


@given(st.lists(st.integers(0, 6), max_size=60))
def test_tags_are_counted(tags: list[int]):
    """Each one by itself, whatever the order."""
    counts = TagCounts()
    seen = defaultdict[int, int](int)
    for tag in tags:
        assert counts.next(tag) == seen[tag]
        seen[tag] += 1


def test_tags_in_a_row_take_no_memory():
    """As messages from one rank to another have, for as long as a job runs."""
    counts = TagCounts()
    for tag in range(1000):
        assert counts.next(tag) == 0
    assert len(counts._counts) == 0
    assert [counts.next(5), counts.next(999), counts.next(1000)] == [1, 1, 0]


def test_a_counter_does_not_run_over():
    """The last number is used; the next message is an error."""
    counts = TagCounts()
    counts._counts[3] = (1 << 64) - 1
    assert counts.next(3) == (1 << 64) - 1
    with pytest.raises(TransportError, match="no more can be sealed"):
        counts.next(3)


# ---- what is not touched arrives ----


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sealed_messages_conform(size: int):
    """Also with checksums inside."""
    world = MemoryWorld(size)
    run_threads(size, lambda rank: check_messages(seal(world.messages(rank))), on_error=world.meeting.abort)
    run_threads(size, lambda rank: check_messages(checked(seal(world.messages(rank)))), on_error=world.meeting.abort)


@pytest.mark.parametrize(("size", "node_size"), [(3, 1), (4, 2)])
def test_collectives_conform(size: int, node_size: int):
    """Every collective, dtype and op gives the known answer; where no ranks share memory, every algorithm does."""
    check = partial(check_collectives, algorithms=node_size == 1)
    run_ranks(size, check, node_size=node_size, config=CONFIG, wrap=seal)


def test_what_nobody_has_sealed_is_an_error():
    """A note that somebody on the network sends in the name of a rank, whichever that is."""
    world = MemoryWorld(3)

    def run(rank: int) -> None:
        messages = seal(world.messages(rank))
        for peer in range(3):
            world.notes[rank].append((peer, b'{"call": 1, "called": ["nothing", ""], "refused": true}'))
            with pytest.raises(TransportError, match=f"from rank {peer} .* does not open"):
                messages.poll()

    run_threads(3, run, on_error=world.meeting.abort)


class Watched(Wrapper):
    """A transport that keeps all that goes through."""

    def __init__(self, inner: Messages, seen: list[bytes]) -> None:
        super().__init__(inner)
        self._seen = seen
        self._sends: dict[int, tuple[Prequest, Array]] = {}

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        request = self._inner.send(data, peer, tag)
        self._sends[id(request)] = (request, data)
        return request

    def start(self, requests: Sequence[Prequest]) -> None:
        self._seen += [self._sends[id(each)][1].tobytes() for each in requests if id(each) in self._sends]
        self._inner.start(requests)

    def post(self, note: bytes, peer: int) -> None:
        self._seen.append(note)
        self._inner.post(note, peer)

    def exchange(self, payload: bytes) -> list[bytes]:
        self._seen.append(payload)
        return self._inner.exchange(payload)


@pytest.mark.parametrize("sealing", [False, True])
def test_nothing_can_be_read(sealing: bool):
    """What is known of arrays, notes and exchanges is found on the wire without the seal, and not with it."""
    seen: list[bytes] = []
    known = np.frombuffer(b"what nobody else may know" * 41, np.uint8)

    def wrap(inner: Messages) -> Messages:
        watched = Watched(inner, seen)
        return seal(watched) if sealing else watched

    def broadcast(communicator: Communicator) -> None:
        array = known.copy() if communicator.rank == 0 else np.zeros_like(known)
        communicator.broadcast(array, 0, out=array)
        assert np.array_equal(array, known)

    run_ranks(3, broadcast, node_size=1, config=CONFIG, wrap=wrap)
    wire = b"".join(seen)
    found = [text in wire for text in (b"nobody else may know", b"broadcast(", b'"pid"')]
    assert found == [not sealing] * 3


# ---- no key and nonce are used twice ----


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bytes, tuple[int, int]]]]:
    """Each pair of a key and a nonce that something was sealed with; at the end, none is there twice."""
    monkeypatch.setattr(Recording, "used", [], raising=False)
    monkeypatch.setattr(module, "Cipher", Recording)
    yield Recording.used
    assert len(Recording.used) == len(set(Recording.used))


def test_a_key_is_new_for_each_rank_whatever_comes(used: list[Any]):
    """Somebody repeats what all ranks gave to an earlier channel of the same name, this rank's own part too."""
    recorded: list[bytes] = []

    class Repeating:
        rank, size = 0, 2

        def exchange(self, payload: bytes) -> list[bytes]:
            recorded[:] = recorded or [payload, bytes(32)]
            return [*recorded]

        def post(self, note: bytes, peer: int) -> None:
            pass

    for _ in range(2):
        seal(Repeating()).post(b"note", 1)
    assert len(used) == 2


@pytest.mark.parametrize("lengths", [(31, 33), (0, 64), (32, 31), (64, 32)])
def test_parts_of_a_key_have_one_length(lengths: tuple[int, int]):
    """Or others could be cut from the same bytes."""

    class Cutting:
        rank, size = 0, 3

        def exchange(self, payload: bytes) -> list[bytes]:
            return [payload, *map(bytes, lengths)]

    with pytest.raises(TransportError, match="in a new key"):
        seal(Cutting())


class Recording(Cipher):
    """Keeps each pair of a key and a nonce that something was sealed with."""

    used: list[tuple[bytes, tuple[int, int]]]

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self._bytes = key

    def seal(self, nonce: tuple[int, int], plain: Any, sealed: Any) -> None:
        Recording.used.append((self._bytes, nonce))
        super().seal(nonce, plain, sealed)


def use(messages: Messages, steps: Sequence[str]) -> None:
    """Do what a program may do with messages; all ranks the same."""
    size = messages.size
    ahead, behind = (messages.rank + 1) % size, (messages.rank - 1) % size
    waiter = Waiter(30.0, crowded=True)
    room = np.zeros(3)
    requests = {tag: [messages.send(np.ones(3), ahead, tag), messages.recv(room, behind, tag)] for tag in (1, 2)}
    for step in steps:
        if step == "notes":
            messages.post(b"note", ahead)
            waiter.until(messages.poll, str)
        elif step == "exchange":
            messages.exchange(b"payload")
        elif step in ("1", "2"):
            messages.start(requests[int(step)])
            waiter.until(lambda step=step: messages.test_all(requests[int(step)]), str)
        elif step == "give up":
            if messages.rank == 0:  # the others have not come to it
                messages.start(requests[1])
                messages.give_up(requests[1])
            messages.renew()
        elif step == "subset":
            part = messages.subset([0, size - 1], waiter)
            if part is not None:
                use(part, ["1", "notes", "exchange"])


STEPS = st.lists(st.sampled_from(["notes", "exchange", "1", "2", "give up", "subset"]), max_size=8)


@settings(max_examples=15)
@given(st.lists(STEPS, min_size=1, max_size=3), st.sampled_from([2, 3]))
def test_no_nonce_is_used_twice(channels: list[list[str]], size: int):
    """With one key: over several channels of each rank on threads of their own, renewals, subsets and worlds."""
    Recording.used = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Cipher", Recording)
        for _ in range(2):  # worlds, by chance with one key
            worlds = [MemoryWorld(size) for _ in channels]

            def run(rank: int, worlds: list[MemoryWorld] = worlds) -> None:
                run_threads(len(channels), lambda number: use(seal(worlds[number].messages(rank)), channels[number]))

            run_threads(size, run)
    assert len(Recording.used) == len(set(Recording.used))


class Interrupted(dict[int, int]):
    """Numbers of messages by tag; something else happens once, between reading one and writing the next.

    Args:
        what: that; does nothing the second time.
    """

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__()
        self._what = [what]

    def get(self, tag: Any, default: Any = None) -> Any:
        found = super().get(tag, default)
        while self._what:
            self._what.pop()()
        return found


def interrupt(messages: Messages, kind: str, what: Callable[[], object]) -> None:
    """Let something happen while rank 0 draws the number of its first message, to rank 1 or all."""
    messages._stream(kind, 0 if kind == "exchange" else 1, is_send=True).counts._counts = Interrupted(what)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["notes", "data"])
@pytest.mark.usefixtures("used")
def test_threads_of_one_channel_use_no_nonce_twice(kind: str):
    """As when one aborts a group in which another one waits: one of them waits, and all that is sent arrives."""
    world = MemoryWorld(2)
    waiter = Waiter(30.0, crowded=True)

    def send(messages: Messages, number: int) -> None:
        if kind == "notes":
            messages.post(bytes([number]), 1)
        else:
            messages.start([messages.send(np.full(3, number, np.uint8), 1, 0)])

    def receive(messages: Messages) -> int:
        if kind == "notes":
            waiter.until(lambda: world.notes[1], str)
            arrived = messages.poll()
            return arrived[1][0]
        room = np.zeros(3, np.uint8)
        requests = [messages.recv(room, 0, 0)]
        messages.start(requests)
        waiter.until(lambda: messages.test_all(requests), str)
        return int(room[0])

    def run(rank: int) -> None:
        messages = seal(world.messages(rank))
        if rank == 1:
            assert {receive(messages), receive(messages)} == {1, 2}
            return
        other = threading.Thread(target=send, args=(messages, 2), daemon=True)

        def begin() -> None:
            other.start()
            other.join(0.1)  # it waits for its turn; without turns it would send now, with this thread's number

        interrupt(messages, kind, begin)
        send(messages, 1)
        other.join()

    run_threads(2, run)


@pytest.mark.usefixtures("used")
def test_a_signal_handler_uses_no_nonce_of_what_it_interrupts():
    """One that communicates in the midst of that gets an error. One that raises an error leaves all as it was."""
    world = MemoryWorld(2)

    def run(rank: int) -> None:
        messages = seal(world.messages(rank))
        if rank == 0:

            def handle() -> None:
                with pytest.raises(TransportError, match="signal handler"):
                    messages.post(b"handler", 1)

            interrupt(messages, "notes", handle)
            messages.post(b"program", 1)
            interrupt(messages, "exchange", raise_interrupt)
            with pytest.raises(KeyboardInterrupt):
                messages.exchange(b"")
            messages.post(b"later", 1)
        messages.exchange(b"")
        if rank == 1:
            assert [messages.poll(), messages.poll(), messages.poll()] == [(0, b"program"), (0, b"later"), None]

    run_threads(2, run, on_error=world.meeting.abort)
