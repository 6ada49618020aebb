"""The arena and its segments: who owns which bytes, when they come back, and who else can see them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.common.errors import TransportError
from ringreduce.common.processes import Forked
from ringreduce.testing import run_threads
from ringreduce.transport.memory import MemorySegments, MemoryWorld
from ringreduce.transport.shared.arena import NOWHERE, Arena, Block, place_in, segment_and_offset
from ringreduce.transport.shared.segments import MemfdSegments, PrivateSegments

PAGE = 4096
UINT8 = np.dtype(np.uint8)


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def span(block: Block) -> tuple[int, int, int]:
    segment, offset = segment_and_offset(block.place)
    return segment, offset, offset + block.memory.nbytes


class CountingSegments(PrivateSegments):
    """Counts the segments that were made."""

    made = 0

    def create(self, nbytes: int) -> tuple[int, np.ndarray]:
        self.made += 1
        return super().create(nbytes)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3 << 20), st.booleans()), max_size=30))
def test_blocks_never_overlap(requests: list[tuple[int, bool]]) -> None:
    """Whatever is allocated and released in between, blocks in use are apart, page-aligned and large enough."""
    arena = Arena(PrivateSegments())
    used: list[Block] = []
    for nbytes, release in requests:
        if release and used:
            arena.release(used.pop(len(used) // 2))
        block = arena.allocate(nbytes)
        assert block.memory.nbytes >= max(1, nbytes)
        assert address(block.memory) % PAGE == 0
        used.append(block)
    spans = sorted(map(span, used))
    for (segment, _, stop), (other, start, _) in pairwise(spans):
        assert segment != other or stop <= start


@given(st.permutations(range(6)))
def test_holes_merge(order: list[int]) -> None:
    """Blocks that come back in any order leave one hole, which takes a block of their sizes together."""
    segments = CountingSegments()
    arena = Arena(segments)
    blocks = [arena.allocate(8 << 20) for _ in range(8)]  # all of a segment
    for index in order:
        arena.release(blocks[index])
    assert arena.allocate(48 << 20).place == blocks[0].place
    assert segments.made == 1


def test_a_large_block_gets_a_segment_of_its_size() -> None:
    """What is larger than a segment is allocated all the same, and found from its first to its last byte."""
    arena = Arena(PrivateSegments())
    block = arena.allocate((64 << 20) + 1)
    assert block.memory.nbytes > 64 << 20
    assert arena.locate(address(block.memory), block.memory.nbytes) == block.place


def test_memory_of_dropped_arrays_comes_back() -> None:
    """An array that is gone makes room: thousands of buffers, one after the other, need one segment."""
    segments = CountingSegments()
    arena = Arena(segments)
    places = set()
    for _ in range(200):
        array = arena.array(4 << 20)
        places.add(address(array))
        del array
    assert len(places) == 1
    assert segments.made == 1


def test_locate_knows_what_is_inside() -> None:
    """Addresses in the arena are found with their offset; what lies outside or straddles the end is not."""
    arena = Arena(PrivateSegments())
    blocks = [arena.allocate(64 << 20), arena.allocate(64 << 20)]
    for block in blocks:
        start, nbytes = address(block.memory), block.memory.nbytes
        segment, _ = segment_and_offset(block.place)
        assert arena.locate(start, nbytes) == place_in(segment, 0)
        assert arena.locate(start + 12, 5) == place_in(segment, 12)
        assert arena.locate(start + nbytes - 1, 1) == place_in(segment, nbytes - 1)
        assert arena.locate(start, 0) == place_in(segment, 0)
        assert arena.locate(start + nbytes - 1, 2) == NOWHERE
    private = np.empty(10)
    assert arena.locate(address(private), private.nbytes) == NOWHERE
    assert arena.locate(0, 1) == NOWHERE
    assert Arena(PrivateSegments()).locate(address(private), 1) == NOWHERE


@given(st.integers(0, (1 << 19) - 1), st.integers(0, (1 << 44) - 1))
def test_a_place_fits_into_a_flag(segment: int, offset: int) -> None:
    """A place is one number that is not negative and fits into 63 bits; segment and offset come back from it."""
    place = place_in(segment, offset)
    assert 0 <= place < 1 << 63
    assert segment_and_offset(place) == (segment, offset)


def test_own_views_show_the_blocks_bytes() -> None:
    """A view by its place is the memory itself, and keeps no array that users hold."""
    arena = Arena(PrivateSegments())
    block = arena.allocate(64)
    arena.view(block.place, np.dtype(np.int32), 4)[:] = [1, 2, 3, 4]
    assert block.memory[:16].view(np.int32).tolist() == [1, 2, 3, 4]


def test_a_memfd_segment_is_seen_through_another_mapping() -> None:
    """What one mapping of a segment stores the other one loads; they are different addresses of the same memory."""
    arena = Arena(MemfdSegments({0: os.getpid()}))
    block = arena.allocate(PAGE)
    mapped = arena.peer_view(0, block.place, UINT8, PAGE)
    assert address(mapped) != address(block.memory)
    block.memory[:3] = [1, 2, 3]
    assert mapped[:3].tolist() == [1, 2, 3]
    mapped[0] = 9
    assert block.memory[0] == 9
    assert address(arena.peer_view(0, block.place, UINT8, PAGE)) == address(mapped)
    arena.segments.close()


def test_fresh_segments_are_zero() -> None:
    """A segment starts as zeros, whatever makes it: flags must not be random."""
    for segments in (MemfdSegments({}), PrivateSegments(), MemorySegments(MemoryWorld(1), 0)):
        _, memory = segments.create(3 * PAGE)
        assert memory.nbytes == 3 * PAGE
        assert not memory.any()
        segments.close()


def test_memory_that_cannot_be_made_or_reached_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says why; where a peer's segment cannot be opened, it names the rank."""
    segments = MemfdSegments({1: os.getpid()})
    with pytest.raises(TransportError, match=r"memory of rank 1.*No such file"):
        segments.open(1, 10**6)
    with pytest.raises(TransportError, match="rank 1 shares no memory"):
        PrivateSegments().open(1, 1)
    monkeypatch.setattr(os, "memfd_create", lambda *_: os.stat("/not/there"))
    with pytest.raises(TransportError, match=r"cannot make 100 bytes .* No such file"):
        segments.create(100)


def test_closing_leaves_arrays_valid_and_no_descriptor() -> None:
    """After close the segments' files are closed, arrays that users hold work, and dropping them is harmless."""
    arena = Arena(MemfdSegments({0: os.getpid()}))
    array = arena.array(2 * PAGE)
    place = arena.locate(address(array), 1)
    assert place != NOWHERE
    assert arena.segments.alive(0)
    fd, _ = segment_and_offset(place)
    mapped = arena.peer_view(0, place, UINT8, PAGE)
    os.fstat(fd)
    arena.segments.close()
    arena.segments.close()
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(fd)
    array[:] = 5
    assert (mapped == 5).all()
    del array, arena
    gc.collect()
    assert (mapped == 5).all()


def test_a_process_that_ended_is_not_alive() -> None:
    """A peer is alive while its process runs, and not once it has ended, seen before or not."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watching, late = MemfdSegments({1: child.pid}), MemfdSegments({1: child.pid})
    assert watching.alive(1)
    child.communicate(b"\n")
    assert not watching.alive(1)
    assert not late.alive(1)
    watching.close()
    late.close()


def test_threads_may_ask_at_once_whether_a_process_is_alive() -> None:
    """As they do where calls of two groups wait for the same rank."""
    segments = MemfdSegments({1: os.getpid()})
    assert all(run_threads(4, lambda _: all(segments.alive(1) for _ in range(2000))))
    segments.close()


def test_arena_survives_arrays_that_die_at_any_time() -> None:
    """Arrays dropped by the collector or by another thread never make two live arrays share memory.

    The finalizer changed the list of holes while `allocate` was reading it.
    """
    arena = Arena(PrivateSegments())
    stop = threading.Event()
    handed_over: list[object] = []

    def drop() -> None:
        while not stop.is_set():
            if handed_over:
                handed_over.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    live: list[np.ndarray] = []
    rng = np.random.default_rng(1)
    try:
        for turn in range(300):
            array = arena.array(int(rng.integers(1, 20_000)))
            array[:] = turn % 251
            cycle = [arena.array(100)]
            cycle.append(cycle)
            del cycle
            live.append(array)
            if len(live) > 20:
                handed_over.append(live.pop(int(rng.integers(len(live)))))
            if turn % 50 == 0:
                gc.collect()
            for each in live:
                assert (each == each[0]).all()
            spans = sorted((address(each), each.nbytes) for each in live)
            assert all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("shared", [True, False])
def test_arena_gives_free_memory_back_when_it_grows(shared: bool) -> None:
    """Ten arrays of growing size, one alive at a time, do not add up."""
    arena = Arena(MemfdSegments({0: 0}) if shared else PrivateSegments())
    resident = 0
    for number in range(10):
        array = arena.array((70 + number) << 20)
        array[::4096] = 1
        resident = resident_nbytes() if number == 0 else resident
        del array
    assert resident_nbytes() < resident + (200 << 20)
    arena.segments.close()


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_forked_process_writes_is_its_own(shared: bool) -> None:
    """Nor does it see, in memory that no other rank maps, what its parent writes later."""
    segments = MemfdSegments({0: os.getpid()}) if shared else PrivateSegments()
    _, memory = segments.create(16 * PAGE)
    memory[:] = 1
    written, read = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        segments.after_fork_in_child()
        memory[: 8 * PAGE] = 99
        os.write(written[1], b"x")
        os.read(read[0], 1)
        well = (memory[: 8 * PAGE] == 99).all() and (shared or (memory[8 * PAGE :] == 1).all())
        os._exit(0 if well else 1)
    os.read(written[0], 1)
    assert (memory == 1).all()
    memory[:] = 7
    os.write(read[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert (memory == 7).all()
    for end in (*written, *read):
        os.close(end)
    segments.close()


def test_results_are_private_beyond_their_limit() -> None:
    """Results that live take no more than their limit; what one gives back, another may take."""

    def result(arena: Arena, nbytes: int) -> np.ndarray | None:
        made = arena.result(np.dtype(np.uint16), nbytes // 2, nbytes)
        assert made is None or (made[0].shape == (nbytes // 2,) and address(made[0]) == made[1])
        return None if made is None else made[0]

    arena = Arena(PrivateSegments(), results_nbytes=10 * PAGE)
    first, second = result(arena, 6 * PAGE), result(arena, 4 * PAGE)
    assert first is not None
    assert second is not None
    assert result(arena, 2) is None
    assert arena.array(PAGE) is not None
    del first
    assert result(arena, 6 * PAGE) is not None
    assert result(Arena(PrivateSegments()), 2) is None


def test_results_are_private_when_descriptors_run_short() -> None:
    """Where segments use up a quarter of the files that a process may open, results make no more; buffers still do."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    arena = Arena(PrivateSegments(), results_nbytes=1 << 40)
    nsegments = 0
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        results = []
        while (result := arena.result(UINT8, 65 << 20, 65 << 20)) is not None:
            results.append(result)
            nsegments += 1
        assert nsegments == 64
        assert arena.array(65 << 20) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_is_kept_of_dropped_arrays_is_bounded() -> None:
    """Arrays of ever other sizes, dropped, leave no more than twice 256 MiB with their pages: blocks, and holes."""
    segments = MemfdSegments({0: os.getpid()})
    arena = Arena(segments)
    before = resident_nbytes()
    for number in range(40):
        array = arena.array((20 << 20) + number * PAGE)
        array[::PAGE] = 1
        del array
    assert resident_nbytes() < before + (512 << 20) + (40 << 20)
    arena.segments.close()


def test_a_block_of_the_same_size_comes_again() -> None:
    """Two arrays that are made and dropped in turn take two places, whatever else is free."""
    arena = Arena(PrivateSegments())
    arena.release(arena.allocate(5 * PAGE))
    places, last = set(), None
    for _ in range(10):
        last = arena.array(3 * PAGE)
        places.add(address(last))
    assert len(places) == 2


def test_threads_may_use_one_arena() -> None:
    """Blocks that several threads make and drop at once are never two arrays' at a time."""
    arena = Arena(PrivateSegments())

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(300):
            array = arena.array(int(rng.integers(1, 4 * PAGE)))
            array[:] = number
            assert (array == number).all()

    run_threads(4, work)


def test_what_lives_at_a_fork_is_not_handed_out_before_the_child_ends() -> None:
    """A child goes on seeing what its parent has dropped; when it has ended, the memory is used again."""
    arena = Arena(MemfdSegments({0: os.getpid()}))
    array = arena.array(8 * PAGE)
    array[:] = 3
    place = address(array)
    forked, go_on = Forked(), os.pipe()
    child = os.fork()
    if child == 0:
        forked.in_child()
        os.close(go_on[1])
        os.read(go_on[0], 1)  # ends when the parent closes its end
        os._exit(0 if (array == 3).all() else 1)
    forked.in_parent()
    arena.forked(forked)
    assert not forked.ended
    del array
    others = [arena.array(8 * PAGE) for _ in range(3)]
    for other in others:
        other[:] = 9
    assert place not in map(address, others)
    os.close(go_on[1])
    assert os.waitpid(child, 0)[1] == 0
    os.close(go_on[0])
    assert forked.ended
    late = arena.array(PAGE)
    del late  # what comes back is looked at when something does
    assert place in {address(arena.array(8 * PAGE)) for _ in range(2)}
    arena.segments.close()


@pytest.mark.parametrize("lives", [False, True], ids=["no array", "an array that lives"])
def test_a_process_that_forks_again_and_again_does_not_run_out_of_files(lives: bool) -> None:
    """As a training does whose DataLoader starts workers in each epoch: one file of an ended child may be left."""
    arena = Arena(MemfdSegments({0: os.getpid()}))
    array = arena.array(PAGE) if lives else None
    open_files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        forked = Forked()
        child = os.fork()
        if child == 0:
            os._exit(0)
        forked.in_parent()
        arena.forked(forked)
        os.waitpid(child, 0)
        del forked
    assert len(os.listdir("/proc/self/fd")) <= open_files + 1
    del array
    arena.segments.close()
