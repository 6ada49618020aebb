"""Keys in files: `ringreduce keygen` makes them, and nobody else's are read."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import pickle
import resource
import stat
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.cli.keygen import command, default_key_file
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import KEY_NBYTES, Secret, read_secret, write_secret


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a key."""
    path = tmp_path / "key"
    write_secret(path)
    return path


def test_a_key_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "new" / "key"
    written = write_secret(path)
    assert read_secret(path, "KEY").derive("same") == written.derive("same")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["key"]


def test_a_mounted_secret_is_read_through_links(key_file: Path):
    link = key_file.with_name("link")
    link.symlink_to(key_file)
    assert read_secret(link, "KEY").derive("same") == read_secret(key_file, "KEY").derive("same")


def test_a_file_is_never_overwritten(key_file: Path):
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match=r"is there already, and a key is not overwritten"):
        write_secret(key_file)
    assert key_file.read_bytes() == before
    assert [each.name for each in key_file.parent.iterdir()] == ["key"]


def test_without_the_library_there_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The error comes before there is a file, so that the command works once the library is there."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    done = CliRunner().invoke(command, [str(tmp_path / "new" / "key")])
    assert isinstance(done.exception, ConfigError)
    assert "pip install cryptography" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_no_half_of_a_key_is_left(tmp_path: Path):
    """By a disk that is full, here: files of this process may not have so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_secret(tmp_path / "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_written_where_files_have_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on many file systems of networks and memory cards: there are no hard links."""

    def link(*names: object, **options: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    written = write_secret(tmp_path / "key")
    assert read_secret(tmp_path / "key", "KEY").derive("same") == written.derive("same")
    with pytest.raises(ConfigError, match=r"is there already"):
        write_secret(tmp_path / "key")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o640, 0o660, 0o644, 0o601])
def test_a_file_that_others_may_read_or_write_is_refused(key_file: Path, mode: int):
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:03o}\); chmod 600 "):
        read_secret(key_file, "KEY")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(key_file: Path):
    os.chown(key_file, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, and this is user 0"):
        read_secret(key_file, "KEY")


def test_what_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (("pipe", "is no file"), (".", "is no file"), ("none", r"`ringreduce keygen .*none` makes one")):
        with pytest.raises(ConfigError, match=said):
            read_secret(tmp_path / name, "KEY")


@given(st.binary(max_size=100) | st.text(max_size=60).map(str.encode).map(b"ringreduce key 1\n".__add__))
def test_what_is_no_key_is_refused(content: bytes):
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"ringreduce-test-key-{os.getpid()}")
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    try:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is no key that `ringreduce keygen` has made"):
            read_secret(path, "KEY")
    finally:
        path.unlink()


def test_the_secret_shows_itself_nowhere(key_file: Path):
    raw = bytes(range(KEY_NBYTES))
    secret = Secret(raw)
    for text in (repr(secret), str(secret), f"{secret}", f"{[secret]!r}"):
        assert raw.hex() not in text
        assert repr(raw) not in text
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(secret)


def test_derived_keys_are_those_of_hkdf():
    """Against RFC 5869's own construction, by hmac."""
    raw = bytes(range(100, 100 + KEY_NBYTES))
    extracted = hmac.new(b"salt", raw, hashlib.sha256).digest()
    first = hmac.new(extracted, b"purpose" + b"\x01", hashlib.sha256).digest()
    assert Secret(raw).derive("purpose", salt=b"salt") == first
    assert Secret(raw).derive("another", salt=b"salt") != first


def test_two_keys_differ(tmp_path: Path):
    first, second = (write_secret(tmp_path / name) for name in ("first", "second"))
    assert first.fingerprint != second.fingerprint
    assert first.derive("same") != second.derive("same")


def test_the_command_makes_a_key_where_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert default_key_file() == tmp_path / "ringreduce" / "key"
    made = CliRunner().invoke(command, [])
    secret = read_secret(default_key_file(), "KEY")
    assert made.exit_code == 0
    assert made.output == f"{default_key_file()}: a new key, {secret.fingerprint}\n"
    again = CliRunner().invoke(command, [str(default_key_file())])
    assert isinstance(again.exception, ConfigError)


def test_the_command_says_where_it_cannot_write(tmp_path: Path):
    (tmp_path / "file").touch()
    made = CliRunner().invoke(command, [str(tmp_path / "file" / "key")])
    assert made.exit_code == 1
    assert "cannot write" in made.output or "Not a directory" in made.output
