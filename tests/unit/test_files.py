"""Files that are written are for their owner alone; those that are read are files, bounded, and of whom they may be."""

from __future__ import annotations

import json
import os
import stat
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import open_file, read_file, replace_file, require_writable
from ringreduce.common.sealed_files import PLAIN
from ringreduce.doctor.dumps import diagnose, load
from ringreduce.launcher.growth import Discovery
from ringreduce.launcher.hosts import parse_hosts
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import make_folder
from ringreduce.launcher.stderr import say
from ringreduce.observe.job import job_report
from ringreduce.observe.seen.snapshots import SeenCall, SeenSet, Snapshot
from ringreduce.observe.seen.trace_file import read_trace

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def hostfile(path: Path) -> object:
    return LaunchSpec(program=("true",), hostfile=str(path)).named_hosts()


def script(path: Path) -> object:
    return LaunchSpec(program=("true",), script=str(path)).require_own_script()


def dump(path: Path) -> object:
    return load(path.parent)


READ: list[Callable[[Path], object]] = [
    hostfile,
    dump,
    lambda path: job_report.load(str(path)),
    lambda path: read_trace(path, PLAIN),
]
OURS: list[Callable[[Path], object]] = [hostfile, script, dump]


@pytest.mark.parametrize("read", READ)
def test_a_pipe_is_no_file(tmp_path: Path, read: Callable[[Path], object]) -> None:
    """Nobody waits for who might write to it."""
    os.mkfifo(tmp_path / "rank-0.json")
    with pytest.raises(ConfigError):
        read(tmp_path / "rank-0.json")


@pytest.mark.parametrize("read", OURS)
@pytest.mark.parametrize(
    "how", ["open to all", pytest.param("his", marks=only_root), pytest.param("his link", marks=only_root)]
)
def test_what_others_can_change_decides_nothing(tmp_path: Path, read: Callable[[Path], object], how: str) -> None:
    path = tmp_path / "rank-0.json"
    if how == "his link":
        (tmp_path / "ours").write_text("localhost")
        path.symlink_to(tmp_path / "ours")
        os.lchown(path, 12345, -1)
    else:
        path.write_text("localhost")
        os.chown(path, 12345 if how == "his" else -1, -1)
        path.chmod(0o646 if how == "open to all" else 0o644)
    with pytest.raises(ForeignFileError, match=r"chown|chmod"):
        read(path)


def test_a_map_of_kubernetes_is_read(tmp_path: Path) -> None:
    """Its files are links to links."""
    (tmp_path / "..1").mkdir()
    (tmp_path / "..1" / "hosts").write_text("h1 slots=2\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "hosts").symlink_to("..data/hosts")
    assert hostfile(tmp_path / "hosts") == {"h1": 2}


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    """A file that has no end that matters takes no memory either."""
    with (tmp_path / "rank-0.json").open("wb") as file:
        file.truncate(1 << 40)
    assert len(read_file(__file__, most_nbytes=1 << 20)) == os.path.getsize(__file__)
    for read in (hostfile, dump, READ[2]):
        with pytest.raises(ConfigError):
            read(tmp_path / "rank-0.json")
    with pytest.raises(ConfigError, match="no regular file"):
        open_file("/dev/zero")


def test_what_is_written_follows_no_link(tmp_path: Path) -> None:
    """The link goes, and what it leads to stays; the file is for its owner alone."""
    kept = tmp_path / "kept"
    kept.write_text("keep")
    (tmp_path / "out").symlink_to(kept)
    replace_file(tmp_path / "out", lambda file: file.write(b"new"))
    assert (kept.read_text(), (tmp_path / "out").read_text()) == ("keep", "new")
    assert stat.S_IMODE((tmp_path / "out").lstat().st_mode) == 0o600


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    """As root could: /dev/null would be a file from then on."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        for act in (require_writable, lambda path: replace_file(path, lambda file: None)):
            with pytest.raises(FileExistsError):
                act(path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    require_writable(tmp_path / "new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_logs_go_to_a_folder_of_ones_own(tmp_path: Path) -> None:
    """One that others may write to is refused: they could put links there."""
    folder = tmp_path / "logs"
    spec = LaunchSpec(program=("true",), folder=str(folder))
    make_folder(spec)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(ForeignFileError, match=r"--log-dir: other users may write to .*; chmod go-w"):
        make_folder(spec)


def test_a_dump_says_nothing_to_a_terminal(tmp_path: Path) -> None:
    """Nor does a size that nobody has make a list of all ranks."""
    evil = "\x1b]0;title\x07"
    sets = (SeenSet(0, evil, None, (SeenCall(1, evil, 1, 1.0),)),)
    said = Snapshot(rank=0, size=2, host=evil, pid=1, time=0.0, error=evil, sets=sets).to_json()
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(said))
    assert all(sentence.isprintable() for sentence in diagnose(load(tmp_path)))
    path.write_text(json.dumps({**said, "size": 10**9}))
    with pytest.raises(ConfigError, match="is not what a rank has written down"):
        load(tmp_path)


@pytest.mark.parametrize("program", ["exec cat /dev/zero", "sleep 1000 & echo h1:2", "echo h1:2"])
def test_a_script_that_finds_hosts_is_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str], program: str) -> None:
    """What it prints, and what it leaves behind: that ends with it, and nobody waits for it."""
    path = tmp_path / "hosts"
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    path.write_text(f"#!/bin/sh\nexec 3>{tmp_path}/held\n{program}\n")
    path.chmod(0o755)
    discovery = Discovery(str(path), partial(parse_hosts, slots=1), say)
    discovery.ask()
    assert discovery.hosts() == ({} if "zero" in program else {"h1": 2})
    assert ("prints more than 1 MiB" in capsys.readouterr().err) is ("zero" in program)
    os.set_blocking(held, True)
    assert os.read(held, 1) == b""  # once all that had it open have ended
    os.close(held)


def test_a_checkpoint_takes_no_more_memory_than_its_size(tmp_path: Path) -> None:
    """One that unpacks to more is refused, and so is a pipe; one of any owner is read."""
    torch = pytest.importorskip("torch")
    import ringreduce.torch as hvd

    good = tmp_path / "good.pt"
    hvd.save_checkpoint(good, weights=torch.ones(3), epoch=7)
    if os.geteuid() == 0:
        os.chown(good, 12345, -1)
    assert hvd.load_checkpoint(good)["epoch"] == 7
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in source.namelist():
            bomb.writestr(name, bytes(1 << 20) if name.endswith("data/0") else source.read(name))
    with pytest.raises(ConfigError, match="would unpack to more than its own size"):
        hvd.load_checkpoint(tmp_path / "bomb.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ConfigError, match="no regular file"):
        hvd.load_checkpoint(tmp_path / "pipe.pt")
