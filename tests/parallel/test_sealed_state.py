"""With RINGREDUCE_DISK_KEY_FILE, what ranks write to disk is sealed, and a job with another key does not begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import write_secret
from ringreduce.common.sealed_files import DISK_VARIABLE, disk_keys
from ringreduce.elastic.handlers import HandlingState
from ringreduce.observe.seen.trace_file import read_trace
from ringreduce.training.data.generators import Generators

KNOWN = b"what nobody else is to read"
PREFIX = b"ringreduce sealed 1\n"


@pytest.fixture
def base(no_world: None, tmp_path: Path) -> Iterator[Path]:
    """A folder that all ranks share, with two keys."""
    rr.init()
    base = Path(rr.broadcast_object(str(tmp_path)))
    if rr.rank() == 0:
        for name in ("key", "other"):
            write_secret(base / name)
    rr.barrier()
    rr.shutdown()
    yield base
    rr.shutdown()


@pytest.fixture
def with_key(base: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that begins a world with the key of such a name; None: without one."""

    def begin(name: str | None) -> None:
        rr.shutdown()
        monkeypatch.delenv(DISK_VARIABLE, raising=False)
        if name is not None:
            monkeypatch.setenv(DISK_VARIABLE, str(base / name))
        rr.init()

    return begin


def kept(folder: Path) -> tuple[Any, int | None]:
    state = HandlingState(text=np.frombuffer(KNOWN, np.uint8), step=0, generators=Generators())
    return state, state.keep_on_disk(folder)


def test_commits_are_sealed_and_gone_on_from(base: Path, with_key: Any) -> None:
    """With the same key; what each rank has of its own, too."""
    with_key("key")
    state, found = kept(base / "commits")
    assert found is None
    for step in (1, 2, 3):
        state.step = step
        state.commit()
        state._disk.settle()
        rr.barrier()
    files = {each.name: each.read_bytes() for each in (base / "commits").iterdir()}
    assert len(files) == 3 * 2 * (1 + rr.size()) + 1  # the last says who may write
    for content in files.values():
        assert content.startswith(PREFIX)
        assert KNOWN not in content
    rr.barrier()
    again, found = kept(base / "commits")
    assert (found, again.step, again.text.tobytes()) == (3, 3, KNOWN)
    rr.barrier()


@pytest.mark.parametrize(
    ("written", "read", "said"),
    [
        ("key", None, f"name the file of that key in {DISK_VARIABLE}"),
        ("key", "other", f"and that of {DISK_VARIABLE} is"),
        (None, "key", "it is not sealed"),
    ],
)
def test_another_key_is_refused_before_training_begins(
    base: Path, with_key: Any, written: str | None, read: str | None, said: str
) -> None:
    """On all ranks; no commit is touched."""
    with_key(written)
    state, _ = kept(base / "commits")
    state.commit()
    state._disk.settle()
    rr.barrier()
    before = {each.name: each.read_bytes() for each in (base / "commits").iterdir()}
    with_key(read)
    with pytest.raises(ConfigError, match=f"commits cannot be kept in .*commit-000000000001.*{said}"):
        kept(base / "commits")
    rr.barrier()
    assert {each.name: each.read_bytes() for each in (base / "commits").iterdir()} == before
    rr.barrier()


def test_a_key_that_cannot_be_read_ends_init(base: Path, with_key: Any) -> None:
    """Ranks do not train on without it."""
    with pytest.raises(ConfigError, match=r"`ringreduce keygen .*none` makes one"):
        with_key("none")
    (base / "key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"\(mode 644\); chmod 600 "):
        with_key("key")


def test_a_trace_is_sealed(base: Path, with_key: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of all ranks, as one file."""
    path = base / "trace.json"
    monkeypatch.setenv("RINGREDUCE_TIMELINE", str(path))
    with_key("key")
    rr.allreduce(np.ones(3))
    monkeypatch.delenv("RINGREDUCE_TIMELINE")
    with_key("key")
    rr.barrier()  # all have ended the trace
    content = path.read_bytes()
    assert content.startswith(PREFIX)
    assert b"allreduce" not in content
    assert b"allreduce" in read_trace(path, disk_keys(str(base / "key")))


def test_a_checkpoint_is_sealed(base: Path, with_key: Any) -> None:
    """And read with its key alone."""
    torch = pytest.importorskip("torch")
    import ringreduce.torch as hvd

    with_key("key")
    model = torch.nn.Linear(3, 2)
    hvd.save_checkpoint(base / "checkpoint.pt", model=model, step=7)
    content = (base / "checkpoint.pt").read_bytes()
    assert content.startswith(PREFIX)
    assert model.weight.detach().numpy().tobytes() not in content
    other = torch.nn.Linear(3, 2)
    assert hvd.load_checkpoint(base / "checkpoint.pt", model=other)["step"] == 7
    rr.barrier()
    weights = rr.broadcast_object(model.weight.detach().numpy())
    assert (other.weight.detach().numpy() == weights).all()
    for name in (None, "other"):
        with_key(name)
        with pytest.raises(ConfigError, match=r"checkpoint.*sealed by the key"):
            hvd.load_checkpoint(base / "checkpoint.pt", model=other)
