"""Jobs whose hosts have disks of their own: killed, they begin again without one of these, and end in the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import launching
import pytest
from launching import Job

PROGRAM = launching.PROGRAMS / "copied_training.py"


def train(folder: Path, way: str, ranks: int, local: int, doomed: str) -> Job:
    """Train on so many ranks of hosts of ``local`` ranks each; ``doomed``: who dies when, as in 1@7."""
    folder.mkdir(exist_ok=True)
    settings = {"RINGREDUCE_NODE_SIZE": str(local)}
    if way == "torch-all":  # the first step of a job adds up in another order than later ones
        settings["RINGREDUCE_DETERMINISTIC"] = "1"
    return launching.run_job(ranks, PROGRAM, folder, way, doomed, **settings)


def weights(folder: Path, ranks: int) -> list[bytes]:
    return [(folder / f"weights-{rank}").read_bytes() for rank in range(ranks)]


def lose(disk: Path) -> None:
    shutil.rmtree(disk)


def damage(disk: Path) -> None:
    """Change a byte of each file of the last commit, and leave half of a file that is being written."""
    last = max(disk.glob("commit-*.json")).name[:19]
    for path in disk.glob(f"{last}*.pt"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    (disk / f".{last}.pt.999999999").touch()


#: Way, ranks, ranks of a host, who dies when, whose disk is harmed, and how.
CASES = [("numpy", 2, 1, "0@7", 0, lose), ("numpy", 3, 1, "2@7", 0, damage), ("torch-diloco", 2, 1, "0@7", 1, lose)]
MORE = [("numpy", 4, 2, "3@7", 0, lose), ("torch", 4, 2, "0@7", 1, lose), ("torch-node", 4, 2, "1@7", 0, lose)]
WAYS = ["numpy", "torch", "torch-node", "torch-all", "torch-local", "torch-diloco", "jax"]
ALL = MORE + [
    (way, ranks, 1, f"{dies % ranks}@{dies + 2}", lost, harm)
    for way in WAYS
    for ranks in (2, 3, 4)
    for dies, lost in enumerate(range(ranks))
    for harm in (lose, damage)
]


@pytest.mark.parametrize(
    ("way", "ranks", "local", "doomed", "lost", "harm"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.thorough) for each in ALL)],
)
def test_a_job_goes_on_without_a_disk(
    tmp_path: Path, way: str, ranks: int, local: int, doomed: str, lost: int, harm: Callable[[Path], None]
) -> None:
    """From its last commit: each rank has the weights of a job that nobody has killed."""
    needed = {"numpy": [], "jax": ["jax", "optax"]}.get(way, ["torch"])
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"it needs {' and '.join(missing)}")
    train(tmp_path / "undisturbed", way, ranks, local, doomed="0@-1").well()
    assert train(tmp_path / "killed", way, ranks, local, doomed=doomed).returncode != 0
    harm(tmp_path / "killed" / f"disk-{lost}")
    train(tmp_path / "killed", way, ranks, local, doomed=doomed).well()
    assert {(tmp_path / "killed" / f"begun-{rank}").read_text() for rank in range(ranks)} == {doomed.partition("@")[2]}
    assert weights(tmp_path / "killed", ranks) == weights(tmp_path / "undisturbed", ranks)


MOMENTS = range(0, 12_000, 400)  # microseconds; a step and its commit take some 3000


@pytest.mark.parametrize("moments", [pytest.param(MOMENTS[at::8], marks=pytest.mark.thorough) for at in range(8)])
def test_a_rank_may_be_killed_at_any_moment(tmp_path: Path, moments: range) -> None:
    """While it writes, or sends a copy: what it leaves is no commit, or one; and any disk may be lost."""
    assert train(tmp_path / "undisturbed", "numpy", 3, 1, doomed="0@-1").returncode == 0
    for number, moment in enumerate(moments):
        folder = tmp_path / f"killed-{moment}"
        assert train(folder, "numpy", 3, 1, doomed=f"{number % 3}@5:{moment}").returncode != 0
        lose(folder / f"disk-{moment // 400 % 3}")
        again = train(folder, "numpy", 3, 1, doomed="0@-1").well()
        assert "Traceback" not in again.stderr
        assert int((folder / "begun-0").read_text()) > 0
        assert weights(folder, 3) == weights(tmp_path / "undisturbed", 3)
