"""Secrets in files: what is sealed on its way or on disk is sealed by keys that are derived from one of them.

The library `cryptography` does what is cryptography here, and is imported only where there is a secret.
"""

from __future__ import annotations

import base64
import os
import secrets
import stat
from pathlib import Path
from typing import NoReturn

from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.libraries import require_library

KEY_VARIABLE = "RINGREDUCE_KEY_FILE"
#: Of a secret, and of each key that is derived from it: AES-256 takes so many.
KEY_NBYTES = 32
_HEADER = b"ringreduce key 1\n"
_MOST_NBYTES = 1024  # The most bytes of a file; a longer one is no key, and is not read whole.


class Secret:
    """The secret of a file. It shows itself in no text, and cannot be pickled.

    Args:
        raw: 32 bytes.
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) != KEY_NBYTES:
            raise ValueError(f"a secret has {KEY_NBYTES} bytes, and these are {len(raw)}")
        try:
            require_library("cryptography", "cryptography", needed_by="a key", remedy="pip install cryptography")
        except ImportError as error:  # An error of a setting reaches all ranks.
            raise ConfigError(str(error)) from None
        self._raw = raw

    def derive(self, purpose: str, salt: bytes = b"") -> bytes:
        """Return a key for one purpose, by HKDF-SHA256 (RFC 5869); it gives away neither the secret nor other keys.

        Args:
            purpose: what it is for, with all that the two sides have to agree on: HKDF's info.
            salt: not secret; another one gives another key.
        """
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(algorithm=SHA256(), length=KEY_NBYTES, salt=salt, info=purpose.encode()).derive(self._raw)

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits by which people tell secrets apart; it may be printed."""
        return self.derive("fingerprint")[:4].hex()

    def __repr__(self) -> str:
        return f"<Secret {self.fingerprint}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret is not pickled: it stays in its file")


def write_secret(path: Path) -> Secret:
    """Make a new secret in a new file, which this user alone may read.

    Args:
        path: of the file; its folder is made, if there is none.

    Returns:
        The secret.

    Raises:
        ConfigError: there is such a file: whatever it is, it stays as it is; or the library `cryptography` is missing.
        OSError: it cannot be written.
    """
    raw = secrets.token_bytes(KEY_NBYTES)
    secret = Secret(raw)  # Comes before there is a file, as it needs a library.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and a key is not overwritten: name another file") from None
    try:
        with open(descriptor, "wb") as file:
            file.write(_HEADER + base64.b64encode(raw) + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink()  # It may hold half a key.
        raise
    return secret


def read_secret(path: str | Path, variable: str) -> Secret:
    """Read a file that `write_secret` has made.

    Args:
        path: of the file. Links are followed, as those of a mounted Kubernetes secret.
        variable: the setting that names it, for errors.

    Raises:
        ConfigError: it cannot be read, or it is no key.
        ForeignFileError: it belongs to another user, or others may read or write it.
    """
    try:
        text = read_private(path, variable, _MOST_NBYTES)
    except OSError as error:
        remedy = f"; `ringreduce keygen {path}` makes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{variable}={path}: {error.strerror}{remedy}") from None
    try:
        raw = base64.b64decode(text.removeprefix(_HEADER).strip(), validate=True)
    except ValueError:
        raw = b""
    if not text.startswith(_HEADER) or len(raw) != KEY_NBYTES:
        raise ConfigError(f"{variable}={path} is no key that `ringreduce keygen` has made")
    return Secret(raw)


def read_private(path: str | Path, variable: str, most_nbytes: int) -> bytes:
    """Read the first bytes of a file that this user alone may read and write.

    Args:
        path: of the file.
        variable: the setting that names it, for errors.
        most_nbytes: how many bytes.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is no file.
        ForeignFileError: it belongs to another user, or others may read or write it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # Waits for no writer, if it is a pipe.
    try:
        # The open file is asked: nobody can exchange it in between.
        _require_private(os.fstat(descriptor), path, variable)
        return os.read(descriptor, most_nbytes)
    finally:
        os.close(descriptor)


def _require_private(found: os.stat_result, path: str | Path, variable: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{variable}={path} is no file")
    if found.st_uid != os.geteuid():
        raise ForeignFileError(
            f"{variable}={path} belongs to user {found.st_uid}, and this is user {os.geteuid()}: its owner can read and"
            f" change it; chown {os.geteuid()} {path}, or make a key of your own"
        )
    if found.st_mode & 0o077:
        raise ForeignFileError(
            f"{variable}={path}: other users may read or write it (mode {stat.S_IMODE(found.st_mode):03o});"
            f" chmod 600 {path}, and make a new key if others have had access"
        )
