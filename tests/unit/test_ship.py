"""`ringreduce run --ship`: what is copied, where to, and the process of each host that has a copy."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import unpack
from ringreduce.launcher.cargo import Cargo
from ringreduce.launcher.reach import MARK
from ringreduce.launcher.spec import LaunchSpec

VERSION = sys.version.partition("(")[0].strip()
#: What a shell adds to an answer, and what is no answer.
NOISE = "Welcome\n"


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


def cargo(*paths: Path, **options: Any) -> Cargo:
    """Return what a job of a script takes."""
    program = (f"{sys.prefix}/bin/python", "train.py")
    return Cargo.of(LaunchSpec(program=program, ship=True, ship_paths=tuple(map(str, paths)), **options))


def test_what_is_copied(folder: Path) -> None:
    """The environment, the script, what it can import from its folder, ringreduce and what is named: each once."""
    wanted = cargo(folder / "data", folder / "env" / "bin")
    project = folder / "project"
    mine = [folder / "data", folder / "env", *(project / name for name in ("beside.py", "package", "train.py"))]
    assert [Path(path) for path in wanted.paths if path.startswith(str(folder))] == sorted(mine)
    others = [Path(path).name for path in wanted.paths if not path.startswith(str(folder))]
    assert others == ["ringreduce", "ringreduce_torch_backend.py"]
    with pytest.raises(ConfigError, match=r"--ship-path .*nothing: it is not there"):
        cargo(folder / "nothing")
    with pytest.raises(ConfigError, match="holds the copies themselves"):
        cargo(folder)


def test_an_archive_leads_to_the_copies(folder: Path) -> None:
    """Scripts of the environment name its copy, links lead to copies, and all else is as it is here."""
    wanted = cargo(folder / "data")
    stream = io.BytesIO()
    wanted.write(stream)
    stream.seek(0)
    with tarfile.open(fileobj=stream) as archive:
        found = {f"/{each.name}": each for each in archive}
        tool = archive.extractfile(found[f"{folder}/env/bin/tool"])
        deep = archive.extractfile(found[f"{folder}/project/package/deep.txt"])
        assert tool is not None
        assert deep is not None
        assert tool.read().decode() == f"#!{wanted.store}{folder}/env/bin/python\n"
        assert deep.read() == b"package/deep.txt"
    assert found[f"{folder}/data/link"].linkname == f"{wanted.store}{folder}/project/beside.py"
    assert found[f"{folder}/env/bin/python"].linkname == sys.executable
    assert f"{folder}/project/notes.txt" not in found
    assert 0 < wanted.nbytes <= len(stream.getvalue())


def test_words_of_a_command_line(folder: Path) -> None:
    """Paths of what is copied lead to the copies, also behind an option; all others, and the folder of logs, stay."""
    wanted = cargo(folder / "data", folder=f"{folder}/data/logs")
    for word in (f"{folder}/data", f"{folder}/data/a/b", f"{folder}/env/bin/python"):
        assert wanted.there(word) == wanted.root + word
        assert wanted.there(f"--data={word}") == f"--data={wanted.root}{word}"
    assert wanted.there(f"{folder}/env/../data/x") == f"{wanted.root}{folder}/data/x"
    for word in (f"{folder}/dat", f"{folder}/project", "data", "-", "", "--x=1", f"{folder}/data/logs", wanted.root):
        assert wanted.there(word) == word


def test_a_version_is_that_of_the_files(folder: Path) -> None:
    """What changes a file, or adds one, makes another; modules that are compiled meanwhile do not."""
    first = cargo().name
    (folder / "env" / "__pycache__").mkdir()
    (folder / "env" / "__pycache__" / "module.pyc").write_bytes(b"compiled")
    assert cargo().name == first
    os.utime(folder / "env" / "pyvenv.cfg", ns=(0, 1))
    second = cargo().name
    (folder / "env" / "added").touch()
    assert len({first, second, cargo().name}) == 3
    assert len({name.partition("-")[0] for name in (first, second)}) == 1


def test_a_version_is_the_same_for_all_hosts_that_start_jobs_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies serve all of them, and name none; each has a folder of its own that leads there."""
    one = cargo(folder / "data")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="another"))
    two = cargo(folder / "data")
    assert one.store == two.store
    assert one.root != two.root
    archives = [io.BytesIO(), io.BytesIO()]
    for each, stream in zip((one, two), archives, strict=True):
        each.write(stream)
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
    found = Cargo.of(LaunchSpec(program=tuple(line.split()), ship=True)).paths
    mine = {os.path.relpath(path, project) for path in found if path.startswith(str(project))}
    beside = {"sub/x.py", "sub/near.py"} if script.startswith("sub") else {"beside.py", "package", "train.py"}
    assert mine == ({"package"} if script == "package" else {*beside, *filter(None, [script])})


def test_a_python_of_the_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the remedy."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(ConfigError, match=r"is in none: make one by python -m venv"):
        cargo()


@pytest.mark.parametrize(
    "options", [{"keep": True}, {"ship_paths": ("x",)}, {"ship": True, "script": "x", "elastic": True}]
)
def test_options_that_do_not_go_together(options: dict[str, Any]) -> None:
    """Without --ship there is no copy; hosts that are found later would have none."""
    with pytest.raises(ConfigError, match="--ship"):
        LaunchSpec(program=("x",), **options).require_sense()


# ---- the process of a host ----

Holder = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def holder(tmp_path: Path) -> Holder:
    """Starts the process of a host for a version, kept or not."""

    def begin(name: str = "e-1", **request: Any) -> subprocess.Popen[bytes]:
        asked = {
            "base": str(tmp_path / "own"),
            "name": name,
            "job": f"{name}-one",
            "links": False,
            "keep": False,
            "mark": MARK,
            "count": 1,
            "version": VERSION,
        }
        asked["python"] = f"{tmp_path}/own/{name}/root/python"
        process = subprocess.Popen([sys.executable, unpack.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(json.dumps({**asked, **request}).encode() + b"\n")
        process.stdin.flush()
        return process

    return begin


def answer(process: subprocess.Popen[bytes]) -> list[str]:
    """Return the next answer; nothing once the process has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(MARK.encode()):
            found: list[str] = json.loads(line[len(MARK) :])
            return found
    return []


def archive() -> bytes:
    """Return an archive with an interpreter."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as made:
        link = tarfile.TarInfo("python")
        link.type = tarfile.SYMTYPE
        link.linkname = sys.executable
        made.addfile(link)
    return stream.getvalue()


def copied(process: subprocess.Popen[bytes]) -> None:
    """Give a process its files."""
    assert answer(process) == ["wants", ""]
    assert process.stdin is not None
    process.stdin.write(archive())
    process.stdin.flush()
    assert answer(process) == ["has", ""]


def end(process: subprocess.Popen[bytes]) -> int:
    """Close the input of a process, and return its status."""
    process.communicate(timeout=60)
    return process.returncode


def test_a_copy_stays_as_long_as_a_job_uses_it(holder: Holder, tmp_path: Path) -> None:
    """Jobs of one version share it, also of two hosts, and the last one removes it; a kept one serves later jobs."""
    one = holder()
    copied(one)
    two = holder()
    assert answer(two) == ["has", ""]
    assert end(one) == 0
    other = holder(job="e-1-other")
    assert answer(other) == ["has", ""]
    for job in ("one", "other"):
        tree = tmp_path / "own" / f"e-1-{job}" / "root"
        assert tree.samefile(tmp_path / "own" / "e-1" / "root")
    assert end(two) == 0
    assert {each.name for each in (tmp_path / "own").iterdir()} == {"e-1", "e-1-other"}
    assert end(other) == 0
    assert not (tmp_path / "own").exists()

    kept = holder(keep=True)
    copied(kept)
    assert end(kept) == 0
    later = holder(keep=True)
    assert answer(later) == ["has", ""]
    assert end(later) == 0
    for name, others in (("f-1", {"e-1", "f-1"}), ("e-2", {"e-2", "f-1"})):  # the latter is a new version of e-1
        kept = holder(name, keep=True)
        copied(kept)
        assert end(kept) == 0
        assert {each.name for each in (tmp_path / "own").iterdir()} == others


def test_a_copy_that_was_broken_off_counts_as_none(holder: Holder, tmp_path: Path) -> None:
    """Whether its process could remove it, or was killed."""
    broken = holder(keep=True, count=2)
    assert answer(broken) == ["wants", ""]
    assert broken.stdin is not None
    broken.stdin.write(archive()[:512])
    broken.stdin.close()
    assert answer(broken) == ["failed", "the copy was broken off after 1 of 2 files"]
    assert end_quietly(broken) == 1
    assert not (tmp_path / "own").exists()
    killed = holder()
    assert answer(killed) == ["wants", ""]
    killed.kill()
    end_quietly(killed)
    assert (tmp_path / "own" / "e-1").exists()
    again = holder()
    copied(again)
    assert end(again) == 0


def end_quietly(process: subprocess.Popen[bytes]) -> int:
    """Return the status of a process that has ended, whose pipes are closed."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()
    return process.wait(60)


def test_the_host_that_starts_a_job_gets_a_link(holder: Holder, tmp_path: Path) -> None:
    """Which goes at the end, and not what it leads to. A job that another host starts has a copy there, too."""
    here = holder(links=True)
    assert answer(here) == ["has", ""]
    root = tmp_path / "own" / "e-1-one" / "root"
    assert os.readlink(root) == "/"
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700
    by_another_name = holder()
    assert answer(by_another_name) == ["has", ""]
    of_another_host = holder(job="e-1-other")
    copied(of_another_host)
    assert not (tmp_path / "own" / "e-1" / "root").is_symlink()
    for each in (by_another_name, of_another_host, here):
        assert end(each) == 0
    assert not (tmp_path / "own").exists()
    assert tmp_path.exists()


def test_a_folder_that_is_not_for_this_host_alone_is_refused(holder: Holder, tmp_path: Path) -> None:
    """One that others may write to, and one that another host uses, too; both stay as they are."""
    (tmp_path / "own").mkdir(mode=0o755)
    process = holder()
    what, why = answer(process)
    assert (what, end(process)) == ("failed", 1)
    assert "is no folder of this user alone" in why
    (tmp_path / "own").chmod(0o700)
    (tmp_path / "own" / "e-1").mkdir()
    (tmp_path / "own" / "e-1" / "whole").write_text("elsewhere")
    process = holder()
    what, why = answer(process)
    assert (what, end(process)) == ("failed", 1)
    assert "with elsewhere; set TMPDIR to a folder that each host has for itself" in why
    assert (tmp_path / "own" / "e-1" / "whole").read_text() == "elsewhere"


def test_another_python_is_refused(holder: Holder, tmp_path: Path) -> None:
    """Its version is named, and the copy is removed."""
    process = holder(version="2.7.18")
    assert answer(process) == ["wants", ""]
    assert process.stdin is not None
    process.stdin.write(archive())
    process.stdin.flush()
    assert answer(process) == ["failed", f"the Python of the environment should be 2.7.18, and here it is {VERSION}"]
    end(process)
    assert not (tmp_path / "own").exists()
