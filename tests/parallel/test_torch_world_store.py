"""torch's store between hosts: rank 0 keeps it, and nothing listens for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.common.keys import write_secret

# isort: split

from mpi4py import MPI

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from ringreduce.torch.distributed import process_group  # noqa: E402
from ringreduce.torch.distributed.world_store import WorldStore  # noqa: E402


@pytest.fixture
def rank() -> int:
    """This rank's number."""
    return rr.rank() if rr.is_initialized() else 0


@pytest.fixture
def size() -> int:
    """The number of ranks."""
    return rr.size() if rr.is_initialized() else 1


@pytest.fixture
def store() -> Iterator[Any]:
    """A store of this world, which goes with it."""
    yield WorldStore(*runtime.transport())
    rr.barrier()


def test_what_one_rank_sets_all_get(store: Any, rank: int, size: int) -> None:
    """Also bytes that are no text; whoever comes first waits."""
    content = bytes(range(256)) * (rank + 1)
    store.set(f"from {rank}", content)
    for other in range(size):
        assert store.get(f"from {other}") == bytes(range(256)) * (other + 1)
    assert store.multi_get([f"from {other}" for other in range(size)])[-1] == bytes(range(256)) * size
    store.multi_set([f"more {rank}", f"text {rank}"], ["a", "ä"])
    store.wait([f"text {other}" for other in range(size)])
    assert store.get(f"text {size - 1}") == "ä".encode()


def test_additions_of_all_ranks_count_once_each(store: Any, rank: int, size: int) -> None:
    """No two get the same number."""
    numbers = [store.add("count", 1) for _ in range(50)]
    everyone = [number for theirs in rr.allgather_object(numbers) for number in theirs]
    assert sorted(everyone) == list(range(1, 50 * size + 1))
    assert int(store.get("count")) == 50 * size


def test_operations_are_those_of_torchs_own_stores(store: Any, rank: int) -> None:
    """The same calls on torch's store in memory give the same answers; each rank has keys of its own."""
    own = dist.HashStore()  # type: ignore[attr-defined]
    name = f"of {rank}: "
    for each in (store, own):
        each.set(name + "a", "1")
    found = [
        [
            each.check([name + "a"]),
            each.check([name + "a", name + "none"]),
            each.compare_set(name + "a", "0", "2"),
            each.compare_set(name + "a", "1", "2"),
            each.get(name + "a"),
            each.compare_set(name + "new", "", "first"),
            each.get(name + "new"),
            each.add(name + "number", 5),
            each.add(name + "number", -7),
            each.delete_key(name + "a"),
            each.delete_key(name + "a"),
            each.check([name + "a"]),
        ]
        for each in (store, own)
    ]
    assert found[0] == found[1]
    store.append(name + "list", "x")
    store.append(name + "list", b"y")
    assert store.get(name + "list") == b"xy"
    assert store.num_keys() >= 3


def test_keys_that_do_not_come_are_an_error_in_time(store: Any, rank: int) -> None:
    """It names them; the store can be used after that."""
    with pytest.raises(dist.DistStoreError, match=rf"waited 0\.1 s for none {rank} in torch's store"):
        store.wait([f"none {rank}"], timedelta(seconds=0.1))
    store.set(f"none {rank}", "late")
    assert store.get(f"none {rank}") == b"late"
    store.set(f"text {rank}", "no number")
    with pytest.raises(dist.DistStoreError, match="invalid literal"):
        store.add(f"text {rank}", 1)


def test_torchs_own_code_uses_it(store: Any, rank: int, size: int) -> None:
    """Through a prefix, from C++, with its limit."""
    prefixed = dist.PrefixStore("deep", dist.PrefixStore("er", store))  # type: ignore[attr-defined]
    prefixed.set(f"key {rank}", "value")
    prefixed.wait([f"key {other}" for other in range(size)])
    assert prefixed.add("sum", 2) % 2 == 0
    rr.barrier()
    assert store.get(f"er/deep/key {size - 1}") == b"value"
    assert int(prefixed.get("sum")) == 2 * size


def test_any_thread_may_use_it(store: Any, rank: int) -> None:
    """One waits, another one sets."""
    found = []
    waits = threading.Thread(target=lambda: found.append(store.get(f"by another thread {rank}")))
    waits.start()
    store.set(f"by another thread {rank}", "there")
    waits.join()
    assert found == [b"there"]


@pytest.mark.sizes(2, 3, 4)
def test_no_port_listens_between_hosts(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host stand in for those of several; tests/clusters has real ones."""
    before = listening()
    monkeypatch.setattr(process_group, "_is_on_one_host", lambda: False)
    dist.init_process_group("ringreduce")
    try:
        assert isinstance(process_group._store(), WorldStore)
        mine = torch.full((3,), float(rank))
        dist.all_reduce(mine)
        assert mine.tolist() == [size * (size - 1) / 2] * 3
        group = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            dist.barrier(group=group)
        assert listening() == before
    finally:
        dist.destroy_process_group()


@pytest.mark.sizes(2, 3, 4)
def test_where_mpi_takes_one_thread_a_store_of_torchs_listens_on_one_address(rank: int, size: int) -> None:
    """On that of rank 0's host; keys begin with a random text."""
    before = listening()
    store = process_group._listening_store(size)
    store.set(f"from {rank}", "there")
    assert [store.get(f"from {other}") for other in range(size)] == [b"there"] * size
    addresses = {each.partition(":")[0].strip("0") for each in listening() - before}
    assert len(addresses) == (rank == 0)
    assert "" not in addresses  # which is every address
    rr.barrier()


@pytest.mark.sizes(2)
def test_with_a_key_no_store_of_torchs_listens(no_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks get an error in its place."""
    path = MPI.COMM_WORLD.bcast(tmp_path / "key")
    if MPI.COMM_WORLD.rank == 0:
        write_secret(path)
    MPI.COMM_WORLD.barrier()
    monkeypatch.setenv("RINGREDUCE_KEY_FILE", str(path))
    monkeypatch.setenv("RINGREDUCE_NODE_SIZE", "1")
    monkeypatch.setattr("mpi4py.MPI.Query_thread", lambda: MPI.THREAD_SERIALIZED)
    before = listening()
    with pytest.raises(rr.ConfigError, match="RINGREDUCE_KEY_FILE is set, and torch's store would listen"):
        dist.init_process_group("ringreduce")
    assert listening() == before


def listening() -> set[str]:
    """Return the local addresses of this process's TCP sockets that listen."""
    inodes = {path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found
