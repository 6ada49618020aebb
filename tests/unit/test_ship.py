"""`ringreduce run --ship`: what is copied, where to, and the process of each host that has a copy."""

from __future__ import annotations

import io
import os
import re
import socket
import sys
import tarfile
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.connection import HostConnection
from ringreduce.launcher.host_agent import have_copy
from ringreduce.launcher.ship import Shipment
from ringreduce.launcher.spec import LaunchSpec

VERSION = sys.version.partition("(")[0].strip()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small environment, beside a project in which this process works; copies have a folder of their own."""
    environment = tmp_path / "env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    (environment / "bin" / "tool").write_text(f"#!{environment}/bin/python\n")
    (environment / "pyvenv.cfg").write_text("home = here\n")
    project = tmp_path / "project"
    (project / "package").mkdir(parents=True)
    for name in ("train.py", "beside.py", "package/__init__.py", "package/deep.txt", "notes.txt"):
        (project / name).write_text(name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(project / "beside.py")
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    monkeypatch.chdir(project)
    return tmp_path


def shipment(*paths: Path, **options: Any) -> Shipment:
    """Return what a job of a script takes."""
    program = (f"{sys.prefix}/bin/python", "train.py")
    return Shipment(LaunchSpec(program=program, ship=True, ship_paths=tuple(map(str, paths)), **options))


def test_what_is_copied(folder: Path) -> None:
    """The environment, the script, what it can import from its folder, ringreduce and what is named: each once."""
    wanted = shipment(folder / "data", folder / "env" / "bin")
    project = folder / "project"
    mine = [folder / "data", folder / "env", *(project / name for name in ("beside.py", "package", "train.py"))]
    assert [Path(path) for path in wanted.paths if path.startswith(str(folder))] == sorted(mine)
    others = [Path(path).name for path in wanted.paths if not path.startswith(str(folder))]
    assert others == ["ringreduce", "ringreduce_torch_backend.py"]
    with pytest.raises(ConfigError, match=r"--ship-path .*nothing: it is not there"):
        shipment(folder / "nothing")
    with pytest.raises(ConfigError, match="holds the copies themselves"):
        shipment(folder)


def test_an_archive_leads_to_the_copies(folder: Path) -> None:
    """Scripts of the environment name its copy, links lead to copies, and all else is as it is here."""
    wanted = shipment(folder / "data")
    stream = io.BytesIO()
    wanted.write(stream.write)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        found = {f"/{each.name}": each for each in archive}
        tool, deep = (
            archive.extractfile(found[f"{folder}/{name}"]).read()
            for name in ("env/bin/tool", "project/package/deep.txt")
        )
    assert tool.decode() == f"#!{wanted.store}{folder}/env/bin/python\n"
    assert deep == b"package/deep.txt"
    assert found[f"{folder}/data/link"].linkname == f"{wanted.store}{folder}/project/beside.py"
    assert found[f"{folder}/env/bin/python"].linkname == sys.executable
    assert f"{folder}/project/notes.txt" not in found
    assert 0 < wanted.nbytes <= len(stream.getvalue())


def test_words_of_a_command_line(folder: Path) -> None:
    """Paths of what is copied lead to the copies, also behind an option; all others, and the folder of logs, stay."""
    wanted = shipment(folder / "data", folder=f"{folder}/data/logs")
    for word in (f"{folder}/data", f"{folder}/data/a/b", f"{folder}/env/bin/python"):
        assert wanted.there(word) == wanted.root + word
        assert wanted.there(f"--data={word}") == f"--data={wanted.root}{word}"
    assert wanted.there(f"{folder}/env/../data/x") == f"{wanted.root}{folder}/data/x"
    for word in (f"{folder}/dat", f"{folder}/project", "data", "-", "", "--x=1", f"{folder}/data/logs", wanted.root):
        assert wanted.there(word) == word


def test_a_version_is_that_of_the_files(folder: Path) -> None:
    """What changes a file, or adds one, makes another; modules that are compiled meanwhile do not."""
    first = shipment().name
    (folder / "env" / "__pycache__").mkdir()
    (folder / "env" / "__pycache__" / "module.pyc").write_bytes(b"compiled")
    assert shipment().name == first
    os.utime(folder / "env" / "pyvenv.cfg", ns=(0, 1))
    second = shipment().name
    (folder / "env" / "added").touch()
    assert len({first, second, shipment().name}) == 3
    assert len({name.partition("-")[0] for name in (first, second)}) == 1


def test_a_version_is_the_same_for_all_hosts_that_start_jobs_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies serve all of them, and name none; each has a folder of its own that leads there."""
    one = shipment(folder / "data")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    two = shipment(folder / "data")
    assert one.store == two.store
    assert one.root != two.root
    archives = [io.BytesIO(), io.BytesIO()]
    for each, stream in zip((one, two), archives, strict=True):
        each.write(stream.write)
    assert archives[0].getvalue() == archives[1].getvalue()


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("python -W ignore sub/x.py", "sub/x.py"),
        ("python -Xdev -W ignore -u sub/x.py train.py", "sub/x.py"),
        ("python --check-hash-based-pycs default sub/x.py", "sub/x.py"),
        ("python -m cProfile -s time sub/x.py", "sub/x.py"),
        ("bash -e sub/run.sh", "sub/run.sh"),
        ("sub/run.sh package", "sub/run.sh"),
        ("python package", "package"),
        ("python -c pass sub/x.txt", ""),
        ("python -m package sub/x.txt", ""),
        ("ls package", ""),
        ("python -", ""),
    ],
)
def test_which_script_is_copied(folder: Path, line: str, script: str) -> None:
    """That which the program runs, with the modules beside it; without one, those of the working directory."""
    project = folder / "project"
    (project / "sub").mkdir()
    for name in ("x.py", "x.txt", "run.sh", "near.py"):
        (project / "sub" / name).touch()
    found = Shipment(LaunchSpec(program=tuple(line.split()), ship=True)).paths
    mine = {os.path.relpath(path, project) for path in found if path.startswith(str(project))}
    beside = {"sub/x.py", "sub/near.py"} if script.startswith("sub") else {"beside.py", "package", "train.py"}
    assert mine == ({"package"} if script == "package" else {*beside, *filter(None, [script])})


def test_a_python_of_the_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(ConfigError, match=r"is in none: make one by python -m venv"):
        shipment()


@pytest.mark.parametrize(
    "options", [{"keep": True}, {"ship_paths": ("x",)}, {"ship": True, "script": "x", "elastic": True}]
)
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    """Without --ship there is no copy; hosts that are found later would have none."""
    with pytest.raises(ConfigError, match="--ship"):
        LaunchSpec(program=("x",), **options).require_sense()


# ---- on a host ----


class Holder:
    """What an agent does for a job that has a copy.

    Args:
        folder: of this host.
        name: of the version.
        asked: the rest of the request.
    """

    def __init__(self, folder: Path, name: str = "e-1", **asked: Any) -> None:
        self._peers = socket.socketpair()
        self._at_end = ExitStack()
        self.sent = 0
        ours, theirs = self._peers
        host = threading.Thread(target=self._answer, args=(HostConnection(theirs), asked.pop("archive", archive())))
        host.start()
        request = {"base": f"{folder}/own", "name": name, "job": "e-one", "leads here": False, "keep": False}
        try:
            with self._at_end as at_end:
                have_copy({**request, "version": VERSION, **asked}, HostConnection(ours), at_end)
                self._at_end = at_end.pop_all()
        finally:
            ours.close()
            host.join(30)
            theirs.close()

    def _answer(self, connection: HostConnection, content: bytes) -> None:
        with suppress(EOFError):
            assert connection.receive_json() == ["wants", ""]
            self.sent += 1
            for at in range(0, len(content), 4099):
                connection.send(content[at : at + 4099])
            if content.endswith(bytes(512)):
                connection.send(b"")
            else:
                self._peers[1].shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """The job has ended."""
        self._at_end.close()


def archive() -> bytes:
    """Return an archive with an interpreter."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        link = tarfile.TarInfo("python")
        link.type = tarfile.SYMTYPE
        link.linkname = sys.executable
        made.addfile(link)
    return stream.getvalue()


def names(folder: Path) -> set[str]:
    """Return the copies that there are, and what leads to them."""
    return {each.name for each in (folder / "own").iterdir()}


def test_a_copy_stays_as_long_as_a_job_uses_it(tmp_path: Path) -> None:
    """Jobs of one version share it, also of two hosts, and the last one removes it; a kept one serves later jobs."""
    one = Holder(tmp_path)
    two = Holder(tmp_path)
    other = Holder(tmp_path, job="e-other")
    assert [one.sent, two.sent, other.sent] == [1, 0, 0]
    one.end()
    for job in ("one", "other"):
        assert (tmp_path / "own" / f"e-{job}" / "root").samefile(tmp_path / "own" / "e-1" / "root")
    two.end()
    assert names(tmp_path) == {"e-1", "e-other"}
    other.end()
    assert not (tmp_path / "own").exists()

    for sent in (1, 0):
        kept = Holder(tmp_path, keep=True)
        assert kept.sent == sent
        kept.end()
    for name, others in (("f-1", {"e-1", "f-1"}), ("e-2", {"e-2", "f-1"})):  # the latter is a new version of e-1
        Holder(tmp_path, name, keep=True).end()
        assert names(tmp_path) == others


def test_a_copy_that_was_broken_off_counts_as_none(tmp_path: Path) -> None:
    """Whether its process could remove it, or was killed."""
    with pytest.raises((EOFError, tarfile.TarError)):
        Holder(tmp_path, keep=True, archive=archive()[:700])
    assert not (tmp_path / "own").exists()
    (tmp_path / "own" / "e-1.killed" / "root").mkdir(parents=True, mode=0o700)
    (tmp_path / "own").chmod(0o700)
    again = Holder(tmp_path)
    assert again.sent == 1
    assert names(tmp_path) == {"e-1", "e-one"}
    again.end()
    assert not (tmp_path / "own").exists()


def test_the_host_that_starts_a_job_gets_a_link(tmp_path: Path) -> None:
    """Which goes at the end, and not what it leads to. A job that another host starts has a copy there, too."""
    here = Holder(tmp_path, **{"leads here": True})
    assert os.readlink(tmp_path / "own" / "e-one" / "root") == "/"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    by_another_name = Holder(tmp_path)
    of_another_host = Holder(tmp_path, job="e-other")
    assert [here.sent, by_another_name.sent, of_another_host.sent] == [0, 0, 1]
    assert not (tmp_path / "own" / "e-1" / "root").is_symlink()
    for each in (by_another_name, of_another_host, here):
        each.end()
    assert not (tmp_path / "own").exists()
    assert tmp_path.exists()


def test_a_folder_that_is_not_for_this_host_alone_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that others may write to, and one that another host of the job uses, too; both stay as they are."""
    (tmp_path / "own").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="is no folder of this user alone"):
        Holder(tmp_path)
    (tmp_path / "own").chmod(0o700)
    first = Holder(tmp_path)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    with pytest.raises(OSError, match=r"with .*; set TMPDIR to a folder that each host has for itself"):
        Holder(tmp_path)
    assert names(tmp_path) == {"e-1", "e-one"}
    first.end()


def test_another_python_is_refused(tmp_path: Path) -> None:
    """Its version is named, and nothing is copied."""
    with pytest.raises(OSError, match=rf"should be 2\.7\.18, and here it is {re.escape(VERSION)}"):
        Holder(tmp_path, version="2.7.18")
    assert not (tmp_path / "own").exists()
