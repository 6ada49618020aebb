"""Somebody on the network does something to one message: always an error within the time limit, never a wrong number.

Ranks are threads. Each message of each kind is attacked on the rank that receives it: in every collective and
algorithm, in objects, messages between two ranks, the engine, process sets, what ranks exchange when they set something
up, and what they do after a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from doubles import Wrapper

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array, Operand
from ringreduce.collectives import pickles
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.errors import ChangedMessageError, MismatchError, RingReduceError, TransportError
from ringreduce.common.keys import Secret
from ringreduce.common.lifetime import Lifetime
from ringreduce.testing import run_ranks, run_threads
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.point_to_point import PointToPoint
from ringreduce.transport.sealed import sealed
from ringreduce.transport.waiting import Waiter

KEY = Secret(bytes(range(32)))
LIMIT_S = 30.0
SHORT_LIMIT_S = 0.3  # where nothing may come in place of a message, and ranks wait so long
SHORTEST_LIMIT_S = 0.1  # where any rank may wait in vain, whatever has come by then
#: Of ranks; each case waits for limits, on each rank. Of three, there is one that takes no part in a message.
SIZES = [pytest.param(2, marks=pytest.mark.thorough), 3, pytest.param(4, marks=pytest.mark.thorough)]


def seal(inner: Messages) -> Messages:
    return sealed(inner, KEY, "test")


def sealed_under(attackers: dict[int, Callable[[Messages], Any]]) -> Callable[[Messages], Messages]:
    """Return what seals a rank's messages, around which an attacker is put on some ranks."""
    return lambda inner: seal(attackers[inner.rank](inner) if inner.rank in attackers else inner)


ACTIONS = ["change", "cut", "repeat", "drop", "swap"]


class Attacker(Wrapper):
    """A transport in which somebody does something to one message that a rank receives.

    Args:
        inner: what carries the messages.
        kind: which messages: "data", "note" or "exchange".
        action: what is done to it.
        after: how many are left alone before it.

    Attributes:
        seen: how many messages of the kind have come.
    """

    def __init__(self, inner: Messages, kind: str, action: str, after: int) -> None:
        super().__init__(inner)
        self._kind = kind
        self._action = action
        self._after = after
        self.seen = 0
        self._places: dict[int, tuple[Prequest, tuple[int, int, int], Array]] = {}
        self._open: set[int] = set()
        self._last: dict[Any, bytes] = {}
        self._held: dict[Any, bytes] = {}
        self._notes: list[tuple[int, bytes]] = []

    def _strikes(self, kind: str) -> bool:
        if kind != self._kind:
            return False
        self.seen += 1
        return self.seen == self._after + 1

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        request = self._inner.recv(data, peer, tag)
        self._places[id(request)] = (request, (peer, tag, data.nbytes), data.reshape(-1).view(np.uint8))
        return request

    def start(self, requests: Sequence[Prequest]) -> None:
        for each in requests:
            self._open.add(id(each))
        self._inner.start(requests)

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        self.test_some(requests)
        return not any(id(each) in self._open for each in requests)

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        came = [place for place, each in enumerate(requests) if self._misfits(each)]
        came += [place for place in self._inner.test_some(requests) if self._arrives(requests[place])]
        self._open.difference_update(id(requests[place]) for place in came)
        return came

    @staticmethod
    def _misfits(request: Any) -> bool:
        """Receive a message of another length, which has come as one before it was dropped, as MPI does."""
        if request.is_send or request.done or not request.queue:
            return False
        sent = request.queue[0]
        if sent.copy.nbytes == request.data.nbytes:
            return False
        request.queue.popleft()
        if sent.copy.nbytes > request.data.nbytes:
            raise TransportError("MPI reports MPI_ERR_TRUNCATE")
        request.data[: sent.copy.nbytes] = sent.copy
        sent.copy = None
        request.done = True
        return True

    def _arrives(self, request: Prequest) -> bool:
        """Return whether a message has come now, as far as the attacker lets it."""
        if id(request) not in self._places:
            return True
        _, route, place = self._places[id(request)]
        came = place.tobytes()
        if route in self._held:
            place[:] = np.frombuffer(self._held.pop(route), np.uint8)
        elif self._strikes("data"):
            if self._action in ("drop", "swap"):
                if self._action == "swap":
                    self._held[route] = came
                self._inner.start([request])  # the next one comes in its place, if there is one
                return False
            if self._action == "change":
                place[place.size // 2] ^= 4
            elif self._action == "cut":
                place[-1] ^= 1  # what was there before the message: anything but its end
            else:
                earlier = self._last.get(route) or next(iter(self._last.values()), bytes(1))
                place[:] = np.resize(np.frombuffer(earlier, np.uint8), place.size)
        self._last[route] = came
        return True

    def poll(self) -> tuple[int, bytes] | None:
        if self._notes:
            return self._notes.pop()
        arrived = self._inner.poll()
        if arrived is None:
            return None
        peer, note = arrived
        if peer in self._held:
            self._notes.append((peer, self._held.pop(peer)))
            return arrived
        if self._strikes("note"):
            if self._action == "change":
                return peer, note[:3] + bytes([note[3] ^ 1]) + note[4:]
            if self._action == "cut":
                return peer, note[:-1]
            if self._action == "repeat":
                self._notes.append(arrived)
                return arrived
            if self._action == "swap":
                self._held[peer] = note
            return None
        return arrived

    def exchange(self, payload: bytes) -> list[bytes]:
        arrived = self._inner.exchange(payload)
        if self._strikes("exchange"):
            victim = (self._inner.rank + 1) % self._inner.size
            theirs = arrived[victim]
            arrived[victim] = {
                "change": theirs[:1] + bytes([theirs[1] ^ 1]) + theirs[2:],
                "cut": theirs[:-1],
                "repeat": self._last.get("exchange", bytes(len(theirs))),
                "drop": b"",
                "swap": arrived[self._inner.rank],
            }[self._action]
        self._last["exchange"] = arrived[(self._inner.rank + 1) % self._inner.size]
        return arrived


# ---- collectives ----


@dataclass(frozen=True)
class Called:
    """What each rank calls.

    Attributes:
        call: that.
        wanted: returns what a rank must get, of so many.
        said: what errors say of it, with the arguments.
        node_size: how many ranks share memory.
        segment_nbytes: the most bytes that travel at once.
    """

    call: Callable[[Communicator], Any]
    wanted: Callable[[int, int], Any]
    said: str
    node_size: int = 1
    segment_nbytes: int = 64 << 10


def rows(rank: int, count: int = 13) -> Array:
    """Return what a rank gives; whole numbers, usually so many rows that no number of ranks divides them."""
    return np.arange(2.0 * count).reshape(count, 2) * (rank + 1)


def everyone(size: int, count: int = 13) -> list[Array]:
    return [rows(rank, count) for rank in range(size)]


def total(rank: int, size: int) -> Any:
    return sum(everyone(size))


def share(rank: int, size: int) -> int:
    """Return how many of 13 rows are for a rank."""
    return 13 // size + (rank < 13 % size)


def part(array: Array, rank: int, size: int) -> Array:
    """Return the rows that are for a rank."""
    first = sum(share(each, size) for each in range(rank))
    return array[first : first + share(rank, size)]


def parts_of_all(rank: int, size: int) -> Array:
    return np.concatenate([part(each, rank, size) for each in everyone(size)])


def objects(rank: int, size: int) -> list[Any]:
    return [{"rank": each, "rows": rows(each).tolist()} for each in range(size)]


#: By name, the collectives, and other calls that send messages.
CALLS: dict[str, Called] = {
    "allreduce": Called(lambda ranks: ranks.allreduce(rows(ranks.rank), algorithm="ring"), total, "allreduce("),
    "segments": Called(
        lambda ranks: ranks.allreduce(rows(ranks.rank, 1003), algorithm="ring"),
        lambda rank, size: sum(everyone(size, 1003)),
        "allreduce(",
        segment_nbytes=1 << 10,
    ),
    "nodes": Called(lambda ranks: ranks.allreduce(rows(ranks.rank)), total, "allreduce(", node_size=2),
    "encoded": Called(lambda ranks: ranks.allreduce(rows(ranks.rank), compression="fp16"), total, "allreduce("),
    "deterministic": Called(lambda ranks: ranks.allreduce(rows(ranks.rank), deterministic=True), total, "allreduce("),
    "reduce": Called(
        lambda ranks: ranks.reduce(rows(ranks.rank), ranks.size - 1),
        lambda rank, size: total(rank, size) if rank == size - 1 else None,
        "reduce(",
    ),
    "reduce_scatter": Called(
        lambda ranks: ranks.reduce_scatter(rows(ranks.rank)),
        lambda rank, size: part(total(rank, size), rank, size),
        "reduce_scatter(",
    ),
    "allgather": Called(
        lambda ranks: ranks.allgather(part(rows(9), ranks.rank, ranks.size)), lambda rank, size: rows(9), "allgather("
    ),
    "gather": Called(
        lambda ranks: ranks.gather(part(rows(9), ranks.rank, ranks.size), 0),
        lambda rank, size: rows(9) if rank == 0 else None,
        "gather(",
    ),
    "scatter": Called(
        lambda ranks: ranks.scatter(rows(5, 3 * ranks.size) if ranks.rank == 0 else None, 0),
        lambda rank, size: np.split(rows(5, 3 * size), size)[rank],
        "scatter(",
    ),
    "broadcast": Called(
        lambda ranks: ranks.broadcast(rows(ranks.rank), ranks.size - 1), lambda rank, size: rows(size - 1), "broadcast("
    ),
    "alltoall": Called(
        lambda ranks: ranks.alltoall(rows(ranks.rank), [share(each, ranks.size) for each in range(ranks.size)])[0],
        parts_of_all,
        "alltoall(",
    ),
    "barrier": Called(lambda ranks: ranks.barrier(), lambda rank, size: None, "barrier"),
    "objects": Called(lambda ranks: pickles.gather(ranks, objects(0, ranks.size)[ranks.rank]), objects, "allgather("),
}


def attacked(size: int, called: Called, attackers: dict[int, Callable[[Messages], Any]], timeout_s: float) -> list[Any]:
    """Make a call twice; return for each rank the error that it got, or None after results that were right.

    A wrong result fails the test, and so does a rank that does not end.

    Args:
        size: how many ranks there are.
        called: what they call.
        attackers: by rank, what is put around its messages.
        timeout_s: how long ranks wait for each other in the call.
    """
    found: list[Any] = [None] * size

    def run(communicator: Communicator) -> None:
        rank = communicator.rank
        communicator._context.waiter.timeout_s = timeout_s
        try:
            for _ in range(2):
                result = called.call(communicator)
                np.testing.assert_equal(result, called.wanted(rank, size))
        except RingReduceError as error:
            found[rank] = error

    config = Config(timeout_s=LIMIT_S, segment_nbytes=called.segment_nbytes)
    run_ranks(size, run, node_size=called.node_size, config=config, wrap=sealed_under(attackers))
    return found


def watch(made: dict[int, Attacker], inner: Messages, kind: str, action: str = "", after: int = 1 << 30) -> Attacker:
    made[inner.rank] = Attacker(inner, kind, action, after)
    return made[inner.rank]


def received(size: int, called: Called, kind: str) -> dict[int, int]:
    """Return how many messages of a kind each rank gets, if nothing is done to any; only ranks that get some."""
    made: dict[int, Attacker] = {}
    watching = dict.fromkeys(range(size), partial(watch, made, kind=kind))
    assert attacked(size, called, watching, timeout_s=LIMIT_S) == [None] * size
    # Of notes there may be more, as ranks that wait announce their calls.
    most = size - 1 if kind == "note" else 1 << 30
    return {rank: min(made[rank].seen, most) for rank in range(size) if made[rank].seen}


def attacks(count: int, number: int) -> Iterator[tuple[int, str]]:
    """Yield places of so many messages and what is done there; ``number`` decides where one is dropped or held back."""
    places = sorted({0, count // 2, count - 1})
    yield from product(places, ("change", "cut", "repeat"))
    yield places[number % len(places)], "drop"
    yield places[-1 - number % len(places)], "swap"


def require_error(size: int, called: Called, victim: int, kind: str, action: str, place: int) -> None:
    """Attack a message, and require the error that names its sender and the call.

    Unless nothing has come in place of what was dropped or held back: then a rank has waited in vain.
    """
    made: dict[int, Attacker] = {}
    waits = action in ("drop", "swap")
    watching = {victim: partial(watch, made, kind=kind, action=action, after=place)}
    errors = attacked(size, called, watching, timeout_s=SHORTEST_LIMIT_S if waits else LIMIT_S)
    case = victim, action, place, errors
    assert made[victim].seen > place or waits, case  # another rank may have given up before
    if not any(errors) and kind == "note" and action in ("repeat", "drop", "swap"):
        return  # it comes, or is missing, after the calls, in which nobody looks for notes
    error = errors[victim]
    assert isinstance(error, RingReduceError), case
    if not waits:
        assert isinstance(error, ChangedMessageError), case
        assert "does not open" in str(error)
        assert "from rank" in str(error)
        assert called.said in str(error)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["data", "note"])
def test_what_is_done_to_a_message_is_an_error(kind: str, name: str, size: int):
    """At the first, middle and last message, on each rank that gets some."""
    called = CALLS[name]
    counts = received(size, called, kind)
    assert counts or (name, size) == ("nodes", 2)  # where all ranks share memory
    for victim, count in counts.items():
        for place, action in attacks(count, victim):
            require_error(size, called, victim, kind=kind, action=action, place=place)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "collective",
    [Collective.ALLREDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER, Collective.BROADCAST, Collective.ALLGATHER],
)
def test_what_is_done_to_a_message_of_any_algorithm_is_an_error(collective: Collective, size: int):
    """A changed one, the first or the last, on each rank that gets some."""
    base = CALLS[collective.value]
    names = run_ranks(size, lambda ranks: ranks.algorithms(collective), node_size=1)[0]
    assert names
    for name in names:
        made = {
            Collective.ALLREDUCE: lambda ranks, name=name: ranks.allreduce(rows(ranks.rank), algorithm=name),
            Collective.REDUCE: lambda ranks, name=name: ranks.reduce(rows(ranks.rank), ranks.size - 1, algorithm=name),
            Collective.REDUCE_SCATTER: lambda ranks, name=name: ranks.reduce_scatter(rows(ranks.rank), algorithm=name),
            Collective.BROADCAST: lambda ranks, name=name: ranks.broadcast(
                rows(ranks.rank), ranks.size - 1, algorithm=name
            ),
            Collective.ALLGATHER: lambda ranks, name=name: ranks.allgather(
                part(rows(9), ranks.rank, ranks.size), algorithm=name
            ),
        }
        called = Called(made[collective], base.wanted, base.said)
        for victim, count in received(size, called, "data").items():
            for place in {0, count - 1}:
                require_error(size, called, victim, kind="data", action="change", place=place)


# ---- what ranks exchange when they set something up ----


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("action", ACTIONS)
def test_what_is_done_to_an_exchange_is_an_error(action: str, size: int):
    """The first of all, in which the ranks agree on the key of these messages, and later ones; on each rank."""
    for place, victim in product(range(3), range(size)):
        world = MemoryWorld(size, timeout_s=LIMIT_S)
        errors: dict[int, TransportError] = {}

        def run(
            rank: int, world: MemoryWorld = world, place: int = place, victim: int = victim, errors: Any = errors
        ) -> None:
            inner: Any = world.messages(rank)
            if rank == victim:
                inner = Attacker(inner, "exchange", action, place)
            try:
                messages = seal(inner)
                for number in range(3):
                    given = [f"{number} of {each}".encode() for each in range(size)]
                    assert messages.exchange(given[rank]) == given
            except TransportError as error:
                errors[rank] = error
                world.meeting.abort()
            except RingReduceError:  # the others do not come any more
                pass

        run_threads(size, run, on_error=world.meeting.abort)
        assert errors
        assert all("does not open" in str(each) for each in errors.values())
        assert place == 0 or f"from rank {(victim + 1) % size}" in str(errors[victim])


@pytest.mark.parametrize(("size", "node_size"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 2), (4, 4)])
def test_what_is_done_while_a_communicator_is_made_is_an_error(size: int, node_size: int):
    """In each exchange by which ranks find hosts and shared memory, on each rank."""

    def made(attackers: dict[int, Any]) -> None:
        config = Config(timeout_s=LIMIT_S)
        run_ranks(size, lambda ranks: None, node_size=node_size, config=config, wrap=sealed_under(attackers))

    seen: dict[int, Attacker] = {}
    made({0: partial(watch, seen, kind="exchange")})
    assert seen[0].seen > 2
    for place, action, victim in product(range(seen[0].seen), ACTIONS, range(size)):
        with pytest.raises(ChangedMessageError, match="does not open"):
            made({victim: partial(watch, {}, kind="exchange", action=action, after=place)})


class Parted(Wrapper):
    """A transport of which somebody attacks what is made of it, and nothing else.

    Args:
        inner: the transport.
        attack: what is put around that.
    """

    def __init__(self, inner: Messages, attack: Callable[[Messages], Any]) -> None:
        super().__init__(inner)
        self._attack = attack

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Any:
        made = self._inner.subset(ranks, waiter)
        return None if made is None else self._attack(made)


def use_a_part(messages: Messages, waiter: Waiter) -> None:
    """Make messages between the first and the last rank, and use them: what comes is right."""
    some = messages.subset([0, messages.size - 1], waiter)
    if some is None:
        return
    rank, peer = some.rank, 1 - some.rank
    room = np.zeros(7)
    requests = [some.send(np.arange(7.0) + rank, peer, 3), some.recv(room, peer, 3)]
    for number in range(3):
        assert some.exchange(bytes([number, rank])) == [bytes([number, 0]), bytes([number, 1])]
        some.post(bytes([number, rank]), peer)
        notes: list[Any] = []
        waiter.until(lambda notes=notes: notes.extend(filter(None, [some.poll()])) or notes, str)
        assert notes == [(peer, bytes([number, peer]))]
        some.start(requests)
        waiter.until(lambda: some.test_all(requests), str)
        np.testing.assert_array_equal(room, np.arange(7.0) + peer)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["exchange", "note", "data"])
def test_what_is_done_in_a_process_set_is_an_error(kind: str, size: int):
    """To messages that are made of others, between some of their ranks; on each of these."""
    for action, place, victim in product(ACTIONS, range(3), (0, size - 1)):
        world = MemoryWorld(size, timeout_s=LIMIT_S)
        found: dict[int, RingReduceError] = {}
        waits = action in ("drop", "swap") and kind != "exchange"

        def run(
            rank: int, case: Any = (action, place, victim), world: Any = world, found: Any = found, waits: bool = waits
        ) -> None:
            action, place, victim = case
            inner: Any = world.messages(rank)
            if rank == victim:
                inner = Parted(inner, lambda made: Attacker(made, kind, action, place))
            try:
                use_a_part(seal(inner), Waiter(SHORT_LIMIT_S if waits or rank != victim else LIMIT_S, crowded=True))
            except RingReduceError as error:
                found[rank] = error
                world.meeting.abort()
                for each in world.subworlds.values():
                    each.meeting.abort()

        run_threads(size, run, on_error=world.meeting.abort)
        if not found and (action, place) in (("repeat", 2), ("drop", 2), ("swap", 2)):
            continue
        assert victim in found, (action, place, victim, found)
        if not waits:
            assert any(isinstance(each, ChangedMessageError) for each in found.values()), (action, place, victim, found)


# ---- messages between two ranks ----


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(("kind", "nbytes"), [("note", 101), ("note", 100_003), ("data", 100_003)])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_done_to_a_message_between_two_ranks_is_an_error(size: int, kind: str, nbytes: int, action: str):
    """Each rank sends to the next one. Small arrays travel in notes, others as data."""
    for victim in range(size):
        world = MemoryWorld(size)
        found: dict[int, RingReduceError] = {}

        def run(rank: int, victim: int = victim, world: MemoryWorld = world, found: Any = found) -> None:
            inner: Any = world.messages(rank)
            if rank == victim:
                inner = Attacker(inner, kind, action, 1)
            # The others wait in vain for the one that has raised its error.
            limit_s = LIMIT_S if rank == victim and action not in ("drop", "swap") else SHORT_LIMIT_S
            side = PointToPoint(seal(inner), Waiter(limit_s), lambda doing: None, Lifetime())
            room = np.zeros(nbytes, np.uint8)
            source = (rank - 1) % size
            try:
                for number in range(4):
                    sent = side.send(Operand.of(np.full(nbytes, 10 * rank + number, np.uint8)), (rank + 1) % size, 0)
                    side.wait(side.recv(Operand.of(room), source, 0))
                    assert (room == 10 * source + number).all()
                    side.wait(sent)
                side.wait(side.recv(Operand.of(room), source, 0))  # where all four have come, there is another note
            except RingReduceError as error:
                found[rank] = error

        run_threads(size, run)
        assert victim in found
        if action not in ("drop", "swap") and (kind, action) != ("note", "repeat"):
            assert "does not open" in str(found[victim])


# ---- after a mismatch ----


def mismatched(communicator: Communicator) -> None:
    """Make a call, then one that differs between the ranks, and go on with another one."""
    rank, size = communicator.rank, communicator.size
    for count in (13, 17):
        got = communicator.allreduce(rows(rank, count), algorithm="ring")
        np.testing.assert_array_equal(got, sum(everyone(size, count)))
        if count == 13:
            with pytest.raises(MismatchError):
                communicator.allreduce(np.ones(5 + (rank == 0)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["exchange", "note", "data"])
def test_what_is_done_after_a_mismatch_is_an_error(kind: str, size: int):
    """In the exchange by which ranks agree to go on, or in what they send then; on each rank."""

    def made(attackers: dict[int, Any], function: Callable[[Communicator], None]) -> list[Any]:
        found: list[Any] = [None] * size

        def run(communicator: Communicator) -> None:
            communicator._context.waiter.timeout_s = SHORT_LIMIT_S
            try:
                function(communicator)
            except RingReduceError as error:
                found[communicator.rank] = error

        run_ranks(size, run, node_size=1, config=Config(timeout_s=1.0), wrap=sealed_under(attackers))
        return found

    seen: dict[int, Attacker] = {}
    assert made({0: partial(watch, seen, kind=kind)}, lambda ranks: None) == [None] * size
    first = seen[0].seen
    assert made({0: partial(watch, seen, kind=kind)}, mismatched) == [None] * size
    last = seen[0].seen
    assert last > first
    for victim in (0, size - 1):
        for number, place in enumerate(sorted({first, (first + last) // 2, last - 1})):
            for action in ACTIONS[number % 2 :: 2]:
                one = {victim: partial(watch, seen, kind=kind, action=action, after=place)}
                errors = made(one, mismatched)
                if kind == "note" and not any(errors):
                    continue
                assert errors[victim] is not None, (victim, place, action, errors)


def test_what_does_not_open_is_in_no_array():
    """With AES-GCM, whoever changes a bit on the way chooses which bit of the array changes."""
    world = MemoryWorld(2)

    def run(rank: int) -> None:
        inner: Any = world.messages(rank)
        messages = seal(Attacker(inner, "data", "change", 0) if rank else inner)
        room = np.full(1000, 7.0)
        requests = [messages.recv(room, 0, 0) if rank else messages.send(room, 1, 0)]
        messages.start(requests)
        waiter = Waiter(30.0, crowded=True)
        if rank == 0:
            waiter.until(lambda: messages.test_all(requests), str)
            return
        with pytest.raises(TransportError, match="does not open"):
            waiter.until(lambda: messages.test_all(requests), str)
        assert not room.any()

    run_threads(2, run)
