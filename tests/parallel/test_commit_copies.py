"""Commits on the disks of several hosts: each rank is a host with its own folder, unless a test says otherwise."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.elastic.handlers import HandlingState
from ringreduce.elastic.runs import ReplacedError, following
from ringreduce.training.data.generators import Generators

SHAPE = (300, 70)


@pytest.fixture
def base(nodes_of_one: None, tmp_path: Path) -> Path:
    """The folder of the disks of all hosts."""
    return Path(rr.broadcast_object(str(tmp_path)))


def disk(base: Path, rank: int | None = None) -> Path:
    return base / f"disk-{rr.rank() if rank is None else rank}"


def kept(folder: Path, **options: Any) -> tuple[Any, int | None]:
    """Return a state that is kept on disk, and the commit with which it begins."""
    state = HandlingState(matrix=np.zeros(SHAPE), step=0, generators=Generators())
    return state, state.keep_on_disk(folder, **{"replicas": 2, **options})


def train(state: Any, *values: int) -> float:
    """Commit each of some values, and wait until it is on disk; return what this rank draws next."""
    for value in values:
        np.random.rand(rr.rank() + 1)  # the generator that is kept
        state.matrix = np.full(SHAPE, value, float)
        state.step = value
        state.commit()
        state._disk.settle()
        rr.barrier()
    return float(np.random.rand())


def begin(folder: Path, number: int | None, value: int, **options: Any) -> Any:
    """Begin again; require that it is with a commit, in which all was this."""
    state, found = kept(folder, **options)
    assert (found, state.step) == (number, value)
    assert (state.matrix == value).all()
    return state


def on_rank_0(function: Any, *arguments: Any) -> None:
    rr.barrier()
    if rr.rank() == 0:
        function(*arguments)
    rr.barrier()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def commits(base: Path, *numbers: int) -> Iterator[Path]:
    for number in numbers:
        yield from base.glob(f"disk-*/commit-{number:012}*")


def names(rank: int, size: int, *numbers: int) -> set[str]:
    """Return the files of a host: the common part on the first two, its own part, and that of the rank before; and the
    one that says who may write.
    """
    owners = {f".rank-{rank}", f".rank-{(rank - 1) % size}", *([""] if rank < 2 else [])}
    parts = {f"commit-{number:012}{part}.{kind}" for number in numbers for part in owners for kind in ("pt", "json")}
    return parts | {"commit-last-run"}


@pytest.mark.sizes(2, 3, 4)
def test_any_host_may_be_lost(base: Path) -> None:
    """A job begins with the last commit, each rank with its random numbers; what was lost is copied again."""
    state, found = kept(disk(base))
    assert found is None
    drawn = train(state, 1, 2, 3, 4)
    for lost in range(rr.size()):
        on_rank_0(shutil.rmtree, disk(base, lost))
        begin(disk(base), 4, 4)
        assert float(np.random.rand()) == drawn
        rr.barrier()
        there = {each.name for each in disk(base).iterdir()}
        assert names(rr.rank(), rr.size(), 4) <= there <= names(rr.rank(), rr.size(), 2, 3, 4)


@pytest.mark.sizes(3, 4)
def test_what_more_hosts_had_is_not_made_up(
    base: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both copies of what is common are lost, the job does not begin, and says so on all ranks; where one is,
    and both of a rank's own, an error says it, and the weights are those of the commit.
    """
    state, _ = kept(disk(base))
    train(state, 1, 2, 3)
    for lost in (0, 1):
        on_rank_0(disk(base, lost).rename, base / f"away-{lost}")
    with pytest.raises(rr.ConfigError, match=r"commit 2 is on none of these hosts: .* replicas=2 .* Begin again with"):
        kept(disk(base))
    monkeypatch.setenv("RINGREDUCE_COMMITS", str(disk(base)))
    monkeypatch.setenv("RINGREDUCE_COMMIT_REPLICAS", "2")
    with pytest.raises(rr.ConfigError, match="commit 2 is on none"):
        rr.elastic.run(train)(HandlingState(matrix=np.zeros(SHAPE), step=0))
    for lost in (0, 1):
        on_rank_0((base / f"away-{lost}").rename, disk(base, lost))
    for lost in (1, 2):
        on_rank_0(shutil.rmtree, disk(base, lost))
    begin(disk(base), 3, 3)
    assert caplog.text.count("of commit 3, parts of single ranks are lost") == (rr.rank() == 0)


@pytest.mark.sizes(2, 3)
def test_a_copy_counts_where_a_file_is_damaged(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By one byte; the log names that file, once. If both copies are, the commit before them counts."""
    state, _ = kept(disk(base))
    drawn = train(state, 1, 2, 3)
    common, part = "commit-000000000003.pt", f"commit-000000000003.rank-{rr.size() - 1}.pt"
    on_rank_0(flip, disk(base, 0) / common)
    on_rank_0(flip, disk(base, rr.size() - 1) / part)
    begin(disk(base), 3, 3)
    assert float(np.random.rand()) == drawn
    heard = "".join(rr.allgather_object(caplog.text))
    assert heard.count(f"{disk(base, 0) / common} cannot be used: its sha256") == 1
    assert heard.count(f"/{part} cannot") == 1
    for rank in range(2):
        on_rank_0(flip, disk(base, rank) / common)
    begin(disk(base), 2, 2)


def go_away(base: Path) -> None:
    """Train for five commits, of which host 1 keeps all in its absence, and the hosts that are there lose two."""
    state, _ = kept(disk(base))
    train(state, 1, 2, 3, 4, 5)
    on_rank_0(shutil.copytree, disk(base, 1), base / "away")
    for path in commits(base, 4, 5) if rr.rank() == 0 else ():
        path.unlink()
    rr.barrier()


@pytest.mark.sizes(2, 3, 4)
def test_a_host_that_was_away_brings_back_nothing(base: Path) -> None:
    """Neither a higher number than that of the last commit, nor parts of commits that have its number."""
    go_away(base)
    drawn = train(begin(disk(base), 3, 3), 40)
    on_rank_0(shutil.rmtree, disk(base, 1))
    on_rank_0(shutil.copytree, base / "away", disk(base, 1))
    begin(disk(base), 4, 40)
    assert float(np.random.rand()) == drawn


@pytest.mark.sizes(2)
def test_a_host_that_was_away_completes_no_commit(base: Path) -> None:
    """One of which a rank's part is lost gives way to that from which it has come, though a later one is whole."""
    go_away(base)
    train(begin(disk(base), 3, 3), 40)
    on_rank_0(shutil.rmtree, disk(base, 1))
    on_rank_0(shutil.copytree, base / "away", disk(base, 1))
    for path in disk(base, 0).glob("commit-000000000004.rank-1.*") if rr.rank() == 0 else ():
        path.unlink()
    rr.barrier()
    begin(disk(base), 3, 3)


def forget(folder: Path) -> None:
    """Let a host know nothing of the runs that have begun since it stood still."""
    (folder / "commit-last-run").unlink()


@pytest.mark.sizes(2, 3, 4)
def test_a_host_that_stood_still_brings_back_nothing(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It goes on by itself, in a run of its own, once others have begun again: what it makes there is thrown away, and
    that is said.
    """
    old, _ = kept(disk(base))
    train(old, 1, 2, 3)
    on_rank_0(shutil.copytree, disk(base, 1), base / "still")
    on_rank_0(shutil.rmtree, disk(base, 1))  # the job begins again without this host
    train(begin(disk(base), 3, 3), 40)
    if rr.rank() == 1:
        forget(base / "still")
    on_rank_0(shutil.rmtree, disk(base, 1))
    on_rank_0((base / "still").rename, disk(base, 1))
    old._disk._run = following(old._disk._run)
    if rr.rank() != 1:
        old._disk.folder = disk(base, rr.size() + rr.rank())  # the other ranks of that job have ended
        old._disk.prepare()
    train(old, 70, 80, 90)
    drawn = train(begin(disk(base), 4, 40), 50)
    assert caplog.text.count("thrown away: commits 4, 5, 6 of ranks that went on") == (rr.rank() == 0)
    assert caplog.text.count("commit 4 is used") == (rr.rank() == 0)
    begin(disk(base), 5, 50)
    assert float(np.random.rand()) == drawn


def test_ranks_of_an_earlier_start_write_nothing(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where others have begun again in the folder: they say so and end, on each rank, and the others lose nothing."""
    old, _ = kept(base / "shared", replicas=1)
    train(old, 1, 2)
    new = begin(base / "shared", 2, 2, replicas=1)
    train(new, 30)
    there = {each: each.read_bytes() for each in (base / "shared").iterdir()}
    rr.barrier()
    old.matrix = np.full(SHAPE, 70.0)
    old.commit()  # which is written in the background
    with pytest.raises(ReplacedError, match="have begun again with the commits in"):
        old._disk.settle()
    assert "commit 3 is not written" in caplog.text
    with pytest.raises(ReplacedError):
        old.commit()
    rr.barrier()
    assert {each: each.read_bytes() for each in (base / "shared").iterdir()} == there
    rr.barrier()
    train(new, 40)
    begin(base / "shared", 4, 40, replicas=1)
    assert "thrown away: " not in caplog.text


class Slow(HandlingState):
    """A state whose first commit is not written, on rank 0, before this is set."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self._disk_is_free = threading.Event()

    def _write(self, content: Any, file: Any) -> None:
        if rr.rank() == 0 and isinstance(content, dict) and content["values"].get("step") == 1:
            assert self._disk_is_free.wait(60)
        super()._write(content, file)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("every", [1, 2])
def test_the_last_commit_of_a_training_is_on_disk(base: Path, every: int) -> None:
    """Also if it was skipped, as a rank was still writing the one before."""
    state = Slow(matrix=np.zeros(SHAPE), step=0)
    state.keep_on_disk(disk(base), every=every, replicas=2)

    def training(state: Any) -> None:
        for number in range(1, 2 * every + 1):
            state.matrix = np.full(SHAPE, number, float)
            state.step = -(-number // every)
            if number == 2 * every and every > 1:  # this one waits
                state._disk_is_free.set()
            state.commit()
        state._disk_is_free.set()

    rr.elastic.run(training)(state)
    rr.barrier()
    again = HandlingState(matrix=np.zeros(SHAPE), step=0)
    assert again.keep_on_disk(disk(base), replicas=2) == 2 * every
    assert (again.matrix == 2 * every).all()


def test_a_shared_folder_holds_each_part_once(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where all ranks see the same files: as without copies, and a warning says so, once."""
    state, _ = kept(base / "shared")
    drawn = train(state, 1, 2)
    parts = {"", *(f".rank-{rank}" for rank in range(rr.size()))}
    there = {each.name for each in (base / "shared").glob("*.pt")}
    assert there == {f"commit-{number:012}{part}.pt" for number in (1, 2) for part in parts}
    assert caplog.text.count("replicas=2, but commits are on 1 disk") == (rr.rank() == 0)
    begin(base / "shared", 2, 2)
    assert float(np.random.rand()) == drawn
    begin(base / "shared", 2, 2, replicas=1)


@pytest.mark.sizes(4)
def test_a_host_of_several_ranks_has_one_disk(nodes_of_two: None, tmp_path: Path) -> None:
    """Of two hosts, each has every part once, and one of them is enough."""
    base = Path(rr.broadcast_object(str(tmp_path)))
    folder = disk(base, rr.rank() // 2)
    state, _ = kept(folder)
    drawn = train(state, 1, 2)
    parts = ["", *(f".rank-{rank}" for rank in range(4))]
    for host in range(2):
        there = {each.name for each in disk(base, host).glob("*.json")}
        assert there == {f"commit-{number:012}{part}.json" for number in (1, 2) for part in parts}
    for host in range(2):
        on_rank_0(shutil.rmtree, disk(base, host))
        begin(folder, 2, 2)
        assert float(np.random.rand()) == drawn


def test_commits_go_on_in_another_world(no_world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a new start without a new job, each part lies where it belongs among the ranks that there are then."""
    monkeypatch.setenv("RINGREDUCE_NODE_SIZE", "1")
    rr.init()
    base = Path(rr.broadcast_object(str(tmp_path)))
    state, _ = kept(disk(base))
    train(state, 1, 2)
    rr.shutdown()
    rr.init()
    drawn = train(state, 3)
    if rr.size() > 1:
        on_rank_0(shutil.rmtree, disk(base, rr.size() - 1))
    begin(disk(base), 3, 3)
    assert float(np.random.rand()) == drawn


@pytest.mark.sizes(2)
def test_ranks_that_ask_for_different_copies_are_refused(base: Path) -> None:
    """On all ranks, with what each asks for."""
    with pytest.raises(rr.ConfigError, match="rank 1: every=1, replicas=2 and not every=1, replicas=1"):
        kept(disk(base), replicas=1 + rr.rank())


@pytest.mark.sizes(2)
def test_commits_that_the_launcher_wants_are_copied(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By RINGREDUCE_COMMIT_REPLICAS, in folders that the hosts do not share."""
    monkeypatch.setenv("RINGREDUCE_COMMITS", str(disk(base)))
    monkeypatch.setenv("RINGREDUCE_COMMIT_REPLICAS", "2")
    state = HandlingState(matrix=np.zeros(SHAPE), step=0, generators=Generators())
    rr.elastic.run(lambda state: train(state, 1, 2))(state)
    assert {each.name for each in disk(base).iterdir()} == names(rr.rank(), rr.size(), 1, 2)
