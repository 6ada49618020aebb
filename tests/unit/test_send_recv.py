"""Arrays from one rank to another, as users send them: between ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from suites.conformance import assert_equal, sample

import ringreduce as rr
from ringreduce.buffers import Operand
from ringreduce.common.config import Config
from ringreduce.native.layout import TAKING
from ringreduce.testing import caught, run_ranks
from ringreduce.transport import control
from ringreduce.transport.control import NoteStream


def in_world(size: int, function, timeout_s: float = 20.0, node_size: int | None = None) -> list:
    return run_ranks(size, function, config=Config(timeout_s=timeout_s), node_size=node_size)


@pytest.mark.parametrize(("size", "node_size"), [(2, None), (3, None), (3, 1), (4, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(0,), (), (7,), (33, 101)])
def test_what_is_sent_is_received(shape: tuple[int, ...], dtype: str, size: int, node_size: int | None) -> None:
    """Along a ring: the right values, from the rank that was named or from any, with arrays of either library."""

    def check(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        for turn, source in enumerate((behind, None)):
            mine, answer = sample(rank, shape, dtype, turn), sample(behind, shape, dtype, turn)
            for make in (np.empty_like, lambda like: torch.from_numpy(np.empty_like(like))):
                out = make(mine)
                if rank == 0:
                    communicator.send(mine, ahead, 5)
                    assert communicator.recv(out, source, 5) == behind
                else:
                    assert communicator.recv(out, source, 5) == behind
                    communicator.send(mine, ahead, 5)
                assert_equal(np.asarray(out), answer)
                out = make(mine)
                assert communicator.sendrecv(mine, ahead, out, source, tag=6) is out
                assert_equal(np.asarray(out), answer)

    in_world(size, check, node_size=node_size)


def test_arrays_may_have_any_strides() -> None:
    """What is not contiguous is sent and received as what is, and nothing beside it is touched."""

    def check(communicator: rr.Communicator) -> None:
        whole = np.arange(60.0).reshape(10, 6) * (1 + communicator.rank)
        out = np.zeros((6, 10))
        communicator.sendrecv(whole[::2, 1::3], 1 - communicator.rank, out.T[::2, 1::3], 1 - communicator.rank)
        assert_equal(out.T[::2, 1::3], (np.arange(60.0).reshape(10, 6) * (2 - communicator.rank))[::2, 1::3])
        assert np.count_nonzero(out) == 10

    in_world(2, check)


def test_a_rank_exchanges_with_itself() -> None:
    """A ring of one rank is a copy; a send to itself alone would wait for ever, and is refused."""

    def check(communicator: rr.Communicator) -> None:
        out = np.zeros(3)
        communicator.sendrecv(np.arange(3.0), 0, out, 0)
        assert out.tolist() == [0, 1, 2]
        with pytest.raises(rr.MismatchError, match="to itself"):
            communicator.sendrecv(np.arange(4.0), 0, out, 0)
        with pytest.raises(rr.ConfigError, match="messages go to other ranks"):
            communicator.send(out, 0)

    in_world(1, check)


def test_wrong_arguments_concern_one_rank_alone() -> None:
    """They are typed errors, nobody else hears of them, and collectives and messages go on."""

    def check(communicator: rr.Communicator) -> None:
        array, peer = np.ones(3), 1 - communicator.rank
        frozen = np.ones(3)
        frozen.flags.writeable = False
        if communicator.rank == 0:
            for call, kind in (
                (lambda: communicator.send(array, 2), rr.ConfigError),
                (lambda: communicator.send(array, "1"), rr.ConfigError),
                (lambda: communicator.send(array, 1, -1), rr.ConfigError),
                (lambda: communicator.send([1.0], 1), rr.UnsupportedBufferError),
                (lambda: communicator.recv(frozen, 1), rr.UnsupportedBufferError),
                (lambda: communicator.sendrecv([1.0], 1, np.ones(3), 1), rr.UnsupportedBufferError),
            ):
                assert isinstance(caught(call), kind)
        out = np.zeros(3)
        communicator.sendrecv(array, peer, out, peer)
        assert out.tolist() == [1, 1, 1]
        assert communicator.allreduce(array).tolist() == [2, 2, 2]

    in_world(2, check)


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("wrong", [(3, "float32"), (6, "int32"), ((3, 1), "float64"), (3000, "float64")])
@pytest.mark.parametrize("count", [3, 3000])
def test_what_does_not_fit_is_an_error_at_the_receiver(
    count: int, wrong: tuple[int | tuple[int, ...], str], node_size: int | None
) -> None:
    """Of another dtype, of as many bytes or not, or shape. It names both sides; what comes next is received."""
    if wrong[0] == count and wrong[1] == "float64":
        return

    def check(communicator: rr.Communicator) -> None:
        if communicator.rank == 0:
            communicator.send(np.ones(count), 1)
            communicator.send(np.full(count, 2.0), 1)
        else:
            room = np.full(wrong[0], 7, wrong[1])
            error = caught(communicator.recv, room, 0)
            assert isinstance(error, rr.MismatchError)
            assert f"rank 0: send to rank 1 (float64, shape {count}, tag 0)" in str(error)
            assert (room == 7).all()
            out = np.zeros(count)
            communicator.recv(out)
            assert (out == 2).all()

    in_world(2, check, node_size=node_size)


def test_what_nobody_sends_is_a_time_out_and_can_be_received_later() -> None:
    """The error says who is waited for; the array that comes afterwards goes to the next receive."""
    over = threading.Event()

    def check(communicator: rr.Communicator) -> None:
        first, second = np.zeros(3), np.zeros(3)
        if communicator.rank == 1:
            with pytest.raises(rr.CollectiveTimeoutError, match=r"receive from rank 0 \(float64, shape 3, tag 4\)"):
                communicator.recv(first, 0, 4)
            over.set()
            communicator.recv(second, 0, 4)
            assert (first.tolist(), second.tolist()) == ([0, 0, 0], [1, 1, 1])
        else:
            assert over.wait(30.0)
            communicator.send(np.ones(3), 1, 4)

    in_world(2, check, timeout_s=0.3)


@pytest.mark.parametrize(("size", "node_size"), [(2, None), (2, 1), (3, None), (4, None), (4, 2)])
def test_many_messages_wait_for_their_receivers(size: int, node_size: int | None) -> None:
    """Of all lengths and tags, before anybody receives; each tag in its order, on threads of its own."""
    tags, count = 5, 200

    def sent(sender: int, receiver: int) -> list[tuple[int, np.ndarray]]:
        draw = np.random.default_rng([sender, receiver])
        lengths = draw.choice([0, 1, 7, 500, 512, 513], count)
        return [(int(draw.integers(tags)), draw.integers(0, 255, each)) for each in lengths]

    def check(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        peers = [peer for peer in range(size) if peer != rank]
        large = np.zeros((len(peers), 5000))
        begun = [
            communicator.point_to_point.recv(Operand.of(room), peer, tags)
            for peer, room in zip(peers, large, strict=True)
        ]
        for peer in peers:
            for tag, array in sent(rank, peer):
                if array.nbytes <= 4096:  # as others wait for their receiver
                    communicator.send(array, peer, tag)
        communicator.barrier()
        for peer in peers:
            communicator.send(np.full(5000, float(rank)), peer, tags)
        for each in begun:
            communicator.point_to_point.wait(each)
        assert (large == np.array(peers)[:, None]).all()

        def receive(tag: int) -> None:
            for peer in peers:
                for number, (its, array) in enumerate(sent(peer, rank)):
                    if its == tag and array.nbytes <= 4096:
                        out = np.empty_like(array)
                        from_any = len(peers) == 1 and number % 2
                        assert communicator.recv(out, None if from_any else peer, tag) == peer
                        assert_equal(out, array)

        with ThreadPoolExecutor(tags) as pool:
            for each in [pool.submit(receive, tag) for tag in range(tags)]:
                each.result()

    in_world(size, check, node_size=node_size)


def test_messages_are_counted() -> None:
    """Calls and bytes are among the totals of the rank."""

    def check(communicator: rr.Communicator) -> None:
        peer, out = 1 - communicator.rank, np.zeros(4)
        communicator.sendrecv(np.ones(4), peer, out, peer)
        communicator.send(np.ones(2), peer)
        communicator.recv(out[:2], peer)
        found = {name: (each.calls, each.nbytes) for name, each in communicator.message_tallies.items()}
        assert found == {"sendrecv": (1, 32), "send": (1, 16), "recv": (1, 16)}
        assert not communicator.instruments.calls  # which have the same numbers on all ranks

    in_world(2, check)


@pytest.mark.parametrize("node_size", [None, 2])
def test_no_sender_starves_another(node_size: int | None) -> None:
    """From any rank, what each has sent is received in turns, wherever they are."""

    def check(communicator: rr.Communicator) -> None:
        rank, out = communicator.rank, np.zeros(1)
        if rank:
            for _ in range(50):
                communicator.send(np.ones(1), 0)
        communicator.barrier()
        if not rank:
            senders = [communicator.recv(out) for _ in range(100)]
            assert set(senders[:4]) == {1, 2}
            assert abs(senders[:50].count(1) - 25) <= 1
        communicator.barrier()

    in_world(3, check, node_size=node_size)


@pytest.fixture
def little_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A send waits where 1 MiB is unread."""
    monkeypatch.setattr("ringreduce.transport.point_to_point._UNREAD", 1 << 20)


@pytest.mark.usefixtures("little_unread")
def test_a_sender_waits_for_a_receiver_that_lags_behind() -> None:
    """It goes on when that has received some."""

    def check(communicator: rr.Communicator) -> None:
        out = np.zeros(100, np.int64)
        for number in range(5000):
            if communicator.rank == 0:
                communicator.send(np.full(100, number), 1)
            else:
                communicator.recv(out, 0)
                assert (out == number).all()

    in_world(2, check)


@pytest.mark.usefixtures("little_unread")
def test_a_receiver_that_does_not_come_is_a_time_out_of_its_sender() -> None:
    """What was sent until then is received later, all of it, and what is sent after that."""
    full = threading.Event()
    sent = 0

    def check(communicator: rr.Communicator) -> None:
        nonlocal sent
        if communicator.rank == 0:
            while (error := caught(communicator.send, np.full(100, sent), 1)) is None and sent < 5000:
                sent += 1
            full.set()
            assert isinstance(error, rr.CollectiveTimeoutError)
            assert "rank 1 to receive some of" in str(error)
            assert 1 << 20 <= sent * 896 <= (1 << 20) + (64 << 10)  # 800 bytes, and what describes them, in lines of 64
            communicator.send(np.full(100, -1), 1, 9)
        else:
            assert full.wait(30.0)
            out = np.zeros(100, np.int64)
            for number in range(sent):
                communicator.recv(out, 0)
                assert (out == number).all()
            communicator.recv(out, 0, 9)
            assert (out == -1).all()

    in_world(2, check, timeout_s=2.0)


@pytest.mark.usefixtures("little_unread")
def test_what_a_sender_has_sent_before_it_shuts_down_in_order_is_received() -> None:
    """A burst of three times what may be unread, the last part of which is received when the sender has ended."""
    full, ended = threading.Event(), threading.Event()
    count = 4000  # of 896 bytes each
    limit = (1 << 20) // 896

    def check(communicator: rr.Communicator) -> None:
        if communicator.rank == 0:
            for number in range(count):
                communicator.send(np.full(100, number), 1)
                if number == limit - 100:
                    full.set()
            communicator.close()
            ended.set()
        else:
            assert full.wait(30.0)
            out = np.zeros(100, np.int64)
            for number in range(count):
                if number == count - 100:
                    assert ended.wait(30.0)
                communicator.recv(out, 0)
                assert (out == number).all()

    in_world(2, check)


@pytest.mark.parametrize("node_size", [None, 1])
@pytest.mark.parametrize("count", [0, 1, 33, 512, 5000, 16384, 16385])
def test_arrays_that_come_again(count: int, node_size: int | None) -> None:
    """The same arrays many times, under two tags that are received in another order, beside ones that are new."""

    def check(communicator: rr.Communicator) -> None:
        peer = 1 - communicator.rank
        mine, again, theirs, other = (np.zeros(count) for _ in range(4))
        for number in range(40):
            mine[:] = number + 100 * communicator.rank
            again[:] = -mine
            if communicator.rank == 0:
                communicator.send(mine, peer, 5)
                communicator.send(again, peer, number % 2)
                communicator.send(mine + 1, peer)
                communicator.recv(theirs, peer)
            else:
                if number % 3 or count > 512:  # a large one is sent when it is received
                    communicator.recv(theirs, peer, 5)
                    communicator.recv(other, peer, number % 2)
                else:  # what was sent first comes last
                    communicator.recv(other, peer, number % 2)
                    communicator.recv(theirs, peer, 5)
                assert (theirs == number).all()
                assert (other == -number).all()
                communicator.recv(theirs, peer)
                assert (theirs == number + 1).all()
                communicator.send(mine, peer)
        assert communicator.rank == 1 or (theirs == 139).all()

    in_world(2, check, node_size=node_size)


def test_an_array_that_comes_again_may_be_another() -> None:
    """Reshaped, of another dtype, moved, read-only, or freed and followed by one at its place: it is seen."""

    def check(communicator: rr.Communicator) -> None:
        peer = 1 - communicator.rank
        array = np.arange(6.0)

        def exchange(expected: np.ndarray) -> None:
            for _ in range(6):  # after three times, compiled
                if communicator.rank == 0:
                    communicator.send(array, peer)
                else:
                    array[...] = 0
                    communicator.recv(array, peer)
                    assert np.array_equal(array, expected)

        exchange(np.arange(6.0))
        array.shape = (2, 3)
        exchange(np.arange(6.0).reshape(2, 3))
        if communicator.rank == 0:
            array.shape = (3, 2)
            communicator.send(array, peer)
            array.shape = (2, 3)
        else:
            assert isinstance(caught(communicator.recv, array, peer), rr.MismatchError)
        exchange(np.arange(6.0).reshape(2, 3))
        for number in range(30):
            array = np.full((2, 3), float(number))
            exchange(np.full((2, 3), float(number)))
        if communicator.rank == 1:
            array.flags.writeable = False
            assert isinstance(caught(communicator.recv, array, peer), rr.UnsupportedBufferError)

    in_world(2, check)


def test_a_tag_for_each_message_takes_no_more_memory() -> None:
    """What is remembered of arrays that come again has a limit."""

    def check(communicator: rr.Communicator) -> None:
        array = np.zeros(3)
        for tag in range(3000):
            if communicator.rank == 0:
                communicator.send(array, 1, tag)
            else:
                communicator.recv(array, 0, tag)
        assert len(communicator.point_to_point._repeated.by_key) <= 256

    in_world(2, check)


def test_what_nobody_asks_for_takes_no_more_memory_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of one tag before one of another: from a limit on they stay where the sender put them, and it waits."""
    monkeypatch.setattr(control, "_MOST_ANNOUNCED", 100_000)

    def check(communicator: rr.Communicator) -> None:
        array = np.zeros(5000)
        if communicator.rank == 0:
            for number in range(10):
                array[:] = number
                communicator.send(array, 1)
            communicator.send(array, 1, 1)
            return
        assert isinstance(caught(communicator.recv, array, 0, 1), rr.CollectiveTimeoutError)
        assert communicator.point_to_point._streams[0].announced_nbytes < 150_000
        for number in range(10):
            communicator.recv(array, 0)
            assert (array == number).all()
        communicator.recv(array, 0, 1)

    in_world(2, check, timeout_s=1.0)


def test_order_stays_where_a_handler_receives_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It receives another tag before this rank takes a note that it has seen."""
    take = NoteStream.take
    handlers: list[Callable[[], None]] = []

    def interrupted(stream: NoteStream) -> bytes | None:
        if handlers:
            handlers.pop()()
        return take(stream)

    monkeypatch.setattr(NoteStream, "take", interrupted)

    def check(communicator: rr.Communicator) -> None:
        array = np.zeros(1)
        if communicator.rank == 0:
            for value, tag in ((0.0, 0), (9.0, 1), (1.0, 0), (2.0, 0)):
                communicator.send(np.full(1, value), 1, tag)
            communicator.barrier()
            return
        communicator.barrier()
        heard = np.zeros(1)
        handlers.append(lambda: communicator.recv(heard, 0, 1))
        for number in range(3):
            communicator.recv(array, 0)
            assert array == number
        assert heard == 9

    in_world(2, check)


@pytest.mark.parametrize("pending", [False, True])
def test_signal_handlers_may_send_and_receive(pending: bool) -> None:
    """One sends while its thread receives, and receives while that sends. What it cannot do is an error to it alone."""
    begun, sent = threading.Event(), threading.Event()

    def check(communicator: rr.Communicator) -> None:
        peer, out, room = 1 - communicator.rank, np.zeros(1), np.zeros(5000)
        if communicator.rank == 1:
            assert begun.wait(30.0)
            for number, tag in enumerate((0, 2, 2), 1):
                communicator.send(np.full(1, float(number)), 0, tag)
            assert sent.wait(30.0)  # until the handler has waited for its time limit
            for number in (10, 11):
                communicator.recv(out, 0)
                assert out == number
            communicator.send(np.ones(5000), 0, 7)
            return
        messages = communicator.point_to_point
        stream = messages._streams[1]
        large = messages.recv(Operand.of(room), 1, 7) if pending else None
        begun.set()
        messages.waiter.until(lambda: stream.put_there[0] == 3 * 64, lambda: "three notes")
        heard = np.zeros(1)

        def handler() -> None:  # where a processor other than x86 has a fence: in the midst of `take` and of `put`
            stream._fence = None
            if stream.state[TAKING]:
                communicator.send(np.full(1, 10.0), peer)
                wrong = caught(communicator.recv, heard, peer, 2)
                assert isinstance(wrong, rr.CollectiveTimeoutError if pending else rr.TransportError)
            else:
                communicator.recv(heard, peer, 2)

        stream._fence = handler
        communicator.recv(out, peer, 0)
        assert out == 1
        stream._fence = handler
        communicator.send(np.full(1, 11.0), peer)
        sent.set()
        assert heard == 2
        communicator.recv(out, peer, 2)
        assert out == 3
        if large is None:
            communicator.recv(room, peer, 7)
        else:
            messages.wait(large)
        assert (room == 1).all()

    in_world(2, check, timeout_s=2.0)
