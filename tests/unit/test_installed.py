"""Environments made by `scripts/install`: what they offer to programs outside, and when one is made anew."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import PAGES, ROOT, name_of


def test_type_checkers_find_the_package(tmp_path: Path):
    """A program anywhere is checked against the types of this package, installed as it is here."""
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text("import ringreduce\n")
    # Whether the module is found is all that is asked: what it holds would take half a minute.
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--cache-dir=/dev/null", program]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stdout
    assert said == "Success: no issues found in 1 source file\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with an environment of scripts/install that is up to date, where making one only says so."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/install", "constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts" / "_environment.py").write_text("raise SystemExit('made anew')\n")
    metadata = tmp_path / ".venv" / "lib" / "python3.10" / "site-packages" / "ringreduce-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "direct_url.json").write_text('{"dir_info": {"editable": true}, "url": "file:///checkout"}')
    (stamp,) = re.findall(r"^stamp=.*$", (ROOT / "scripts" / "install").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(["bash", "-c", f'{stamp}; echo "$stamp" >.venv/.stamp'], cwd=tmp_path, check=True, timeout=30)
    return tmp_path


def install(checkout: Path) -> tuple[int, str]:
    done = subprocess.run(
        [checkout / "scripts" / "install"], capture_output=True, text=True, timeout=30, check=False, cwd=checkout
    )
    return done.returncode, done.stdout + done.stderr


def test_an_environment_that_is_up_to_date_is_left_alone(checkout: Path) -> None:
    """`scripts/install` says and does nothing."""
    assert install(checkout) == (0, "")


def test_an_environment_with_a_copy_of_the_package_is_made_anew(checkout: Path) -> None:
    """`pip install .` in it would let scripts run the package as it was then."""
    (url,) = checkout.glob(".venv/**/direct_url.json")
    url.write_text('{"dir_info": {}, "url": "file:///checkout"}')
    status, said = install(checkout)
    assert status == 1
    assert "made anew" in said


def test_an_environment_of_somebody_else_is_kept(checkout: Path) -> None:
    """One that `scripts/install` has not made is not overwritten; the error names it and the remedy."""
    (checkout / ".venv" / ".stamp").unlink()
    status, said = install(checkout)
    assert status == 1
    assert said.startswith(".venv is for the scripts of this repository")
    assert list(checkout.glob(".venv/**/direct_url.json"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_install_into_no_environment_of_the_scripts(page: Path) -> None:
    """What a reader makes by hand has another name than what `scripts/install` makes."""
    made = re.findall(r"-m venv (\S+)", page.read_text(encoding="utf-8"))
    own = set(re.findall(r"venv=(\S+)", (ROOT / "scripts" / "install").read_text(encoding="utf-8")))
    assert ".venv" in own
    assert own.intersection(made) == set()


@pytest.mark.parametrize("status", [0, 3])
def test_what_fills_an_environment_says_what_it_is_and_ends_like_its_command(tmp_path: Path, status: int) -> None:
    """Output of the command passes."""
    command = [ROOT / "scripts" / "_progress", tmp_path, "some packages", "sh", "-c", f"echo hello; exit {status}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "  some packages\nhello\n", "")
