"""Worlds whose messages are sealed, over MPI; each rank, or each two, has memory of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from suites.conformance import check_collectives, check_messages

import ringreduce as rr
from ringreduce.common.keys import read_secret, write_secret
from ringreduce.transport.mpi_messages import MpiMessages
from ringreduce.transport.sealed import Cipher, sealed
from ringreduce.transport.waiting import Waiter

# isort: split

from mpi4py import MPI

pytestmark = pytest.mark.sizes(2, 3, 4)


@pytest.fixture
def key_file(no_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key of all ranks, which the settings name."""
    comm = MPI.COMM_WORLD
    path = comm.bcast(tmp_path / "key")
    if comm.rank == 0:
        write_secret(path)
    comm.barrier()
    monkeypatch.setenv("RINGREDUCE_KEY_FILE", str(path))
    return path


@pytest.fixture
def seals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Returns how often this rank has sealed something; afterwards, no key and nonce were used twice by any ranks."""
    used: list[tuple[bytes, object]] = []

    class Recording(Cipher):
        def __init__(self, key: bytes) -> None:
            super().__init__(key)
            self._bytes = key

        def seal(self, nonce: tuple[int, int], *data: object) -> None:
            used.append((self._bytes, nonce))
            super().seal(nonce, *data)

    monkeypatch.setattr("ringreduce.transport.sealed.Cipher", Recording)
    yield lambda: len(used)
    assert len(used) == len(set(used))
    keys = MPI.COMM_WORLD.allgather({key for key, _ in used})
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_sealed_messages_over_mpi_conform(key_file: Path) -> None:
    """Those that were given up are ended, too."""
    inner = MpiMessages(MPI.COMM_WORLD, Waiter(30.0, crowded=True))
    for number in range(2):
        check_messages(sealed(inner, read_secret(key_file, "KEY"), str(number)))
    inner.close()


@pytest.mark.parametrize("node_size", [1, 2])
def test_collectives_conform(
    node_size: int, key_file: Path, monkeypatch: pytest.MonkeyPatch, seals: Callable[[], int]
) -> None:
    """All of a world: blocking and asynchronous calls, process sets, messages between two ranks, objects."""
    monkeypatch.setenv("RINGREDUCE_NODE_SIZE", str(node_size))
    rr.init()
    several = rr.size() > node_size
    check_collectives(rr.world(), algorithms=False)
    before = seals()
    rr.barrier()
    assert MPI.COMM_WORLD.allreduce(seals() > before, MPI.LOR) == several
    rank, size = rr.rank(), rr.size()
    ones = np.ones(100_003)
    plans = [rr.allreduce_init(ones * (number + rank)) for number in range(3)]
    for plan in plans:
        plan.start()
    for number, plan in enumerate(plans):
        assert (plan.wait() == number * size + sum(range(size))).all()
        plan.close()
    for count in (10, 100_003):
        out = np.zeros(count)
        rr.sendrecv(np.full(count, float(rank)), (rank + 1) % size, out, source=(rank - 1) % size)
        assert (out == (rank - 1) % size).all()
    assert rr.allgather_object({"rank": rank}) == [{"rank": each} for each in range(size)]
    members = sorted({0, size // 2}) if size > 2 else [1]  # a set of all ranks is there already
    some = rr.add_process_set(members)
    if some.included():
        assert (some.communicator.allreduce(ones, rr.SUM) == len(members)).all()
    rr.barrier()
    rr.shutdown()


def test_worlds_follow_each_other(key_file: Path, monkeypatch: pytest.MonkeyPatch, seals: Callable[[], int]) -> None:
    """Each has a key of its own. On one host only what goes through shared memory is not sealed."""
    for node_size in ("1", None, "1"):
        if node_size is None:
            monkeypatch.delenv("RINGREDUCE_NODE_SIZE")
        else:
            monkeypatch.setenv("RINGREDUCE_NODE_SIZE", node_size)
        rr.init()
        rank, size = rr.rank(), rr.size()
        before = seals()
        assert (rr.allreduce(np.ones(5), rr.SUM) == size).all()
        assert (seals() > before) == (node_size is not None)
        for count, data in ((10, 0), (100_003, 1)):  # after a note, which goes through memory that the ranks share
            before = seals()
            out = np.zeros(count)
            rr.sendrecv(np.full(count, float(rank)), (rank + 1) % size, out, source=(rank - 1) % size)
            assert (out == (rank - 1) % size).all()
            assert seals() - before == data + (node_size is not None)
        rr.shutdown()


@pytest.mark.parametrize("lacks", ["setting", "file", "key", "mode"])
def test_a_rank_that_does_not_fit_is_named_on_all(
    lacks: str, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `init`, at once; and with the right key on all ranks the next one begins a world."""
    comm = MPI.COMM_WORLD
    if comm.rank == comm.size - 1:
        path = tmp_path / "other"
        if lacks == "setting":
            monkeypatch.delenv("RINGREDUCE_KEY_FILE")
        else:
            monkeypatch.setenv("RINGREDUCE_KEY_FILE", str(path))
        if lacks in ("key", "mode"):
            write_secret(path)
        if lacks == "mode":
            os.chmod(path, 0o640)
    with pytest.raises(rr.ConfigError, match=rf"rank {comm.size - 1}\b"):
        rr.init()
    monkeypatch.setenv("RINGREDUCE_KEY_FILE", str(key_file))
    rr.init()
    assert (rr.allreduce(np.ones(5), rr.SUM) == rr.size()).all()


@pytest.mark.parametrize("size", [-1, 1 << 40])
def test_a_changed_size_of_an_exchange_is_an_error(size: int) -> None:
    """It travels in the open; before any memory is taken for it."""
    messages = MpiMessages(MPI.COMM_WORLD, Waiter(30.0, crowded=True))
    if messages.rank == 1:
        sizes = np.zeros(messages.size, np.int64)
        messages._control.comm.Iallgather(np.array([size]), sizes).Wait()
    else:
        with pytest.raises(rr.ChangedMessageError, match="a number has changed"):
            messages.exchange(b"")
    messages.close()


@pytest.mark.parametrize("text", [b"[[0, 1]]", b"[[0, 1, -1]]", b'[[0, "1", 1]]', b"7", b"[" * 100_000])
def test_a_changed_list_of_messages_that_were_given_up_is_an_error(text: bytes) -> None:
    """It travels in the open, too."""
    messages = MpiMessages(MPI.COMM_WORLD, Waiter(30.0, crowded=True))
    if messages.rank == 1:
        messages.exchange(text)
    else:
        with pytest.raises(rr.ChangedMessageError, match="what rank 1 gives to all cannot be read"):
            messages.renew()
    messages.close()
