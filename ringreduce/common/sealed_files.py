"""Files whose content is encrypted and authenticated, in pieces, so that none has to be in memory as a whole.

The construction is STREAM of Hoang, Reyhanitabar, Rogaway and Vizar (Online Authenticated-Encryption and its
Nonce-Reuse Misuse-Resistance, 2015) with AES-256-GCM, as the file formats of age and Tink have it. A file is

    magic | fingerprint of the secret | salt | length of the purpose | purpose | piece | piece | ... | last piece

Its key is derived from the secret, the salt, which is random, and the purpose: so a file cannot be put in the place of
one of another purpose. The nonce of a piece is its number, and whether it is the last one: pieces that were changed,
repeated, left out or swapped cannot be opened, nor can a file that was cut. An old file in the place of a newer one
with the same purpose is not noticed.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from ringreduce.common.errors import ForeignFileError
from ringreduce.common.files import sha256_of
from ringreduce.common.keys import Secret, read_secret

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DISK_VARIABLE = "RINGREDUCE_DISK_KEY_FILE"

_MAGIC = b"ringreduce sealed 1\n"
_FINGERPRINT_NBYTES = 8
_SALT_NBYTES = 32
_MOST_NBYTES = 1 << 10  # The most bytes of a head.
_PIECE_NBYTES = 1 << 20  # Larger pieces are not quicker.
_TAG_NBYTES = 16


class _Head(NamedTuple):
    """What a sealed file begins with.

    Attributes:
        fingerprint: of the secret.
        salt: random bytes.
        purpose: what the file is.
        nbytes: length of all this.
    """

    fingerprint: str
    salt: bytes
    purpose: str
    nbytes: int

    @classmethod
    def read(cls, file: BinaryIO) -> _Head | None:
        """Return the head of a file, which is read from its begin again later; None: it is not sealed.

        Raises:
            ValueError: it was cut.
        """
        head = io.BytesIO(file.read(_MOST_NBYTES))
        file.seek(0)
        if head.read(len(_MAGIC)) != _MAGIC:
            return None
        fingerprint = head.read(_FINGERPRINT_NBYTES)
        salt = head.read(_SALT_NBYTES)
        length = int.from_bytes(head.read(2), "big")
        purpose = head.read(length)
        if len(purpose) < length or not length:
            raise ValueError("it was cut")
        return cls(fingerprint.decode("ascii", "replace"), salt, purpose.decode("utf-8", "replace"), nbytes=head.tell())

    def to_bytes(self) -> bytes:
        """Return what `read` reads."""
        purpose = self.purpose.encode()
        return _MAGIC + self.fingerprint.encode() + self.salt + len(purpose).to_bytes(2, "big") + purpose

    def cipher(self, secret: Secret) -> AESGCM:
        """Return what seals and opens the pieces."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(secret.derive(f"file: {self.purpose}", salt=self.salt))


def is_sealed(head: bytes) -> bool:
    """Return whether a file that begins so is sealed."""
    return head.startswith(_MAGIC)


class KeyFile:
    """How files of one kind are written and read: sealed by a secret, or as they are.

    Args:
        secret: the secret; None: there is none.
        variable: setting that names the file of the secret, for errors.
    """

    def __init__(self, secret: Secret | None, variable: str) -> None:
        self._secret = secret
        self._variable = variable

    @property
    def seals(self) -> bool:
        """Whether there is a secret."""
        return self._secret is not None

    def write(self, file: BinaryIO, purpose: str, write: Callable[[BinaryIO], object]) -> None:
        """Write a file, sealed if there is a secret.

        Args:
            file: open for writing, and empty.
            purpose: what it is, as `opened` will be told.
            write: writes the content, from begin to end.
        """
        if self._secret is None:
            write(file)
            return
        sealing = _Sealing(file, self._secret, purpose)
        write(cast("BinaryIO", sealing))
        sealing.finish()

    def opened(self, file: BinaryIO, purpose: str | None = None) -> BinaryIO:
        """Return the content of a file: at any place, and never a byte that was changed.

        Args:
            file: open for reading, at its begin.
            purpose: what it has to be; None: anything.

        Raises:
            ForeignFileError: see `require_ours`.
            ValueError: also while it is read: it was changed or cut, or is another file than this.
        """
        self.require_ours(file)
        if self._secret is None:
            return file
        return cast("BinaryIO", io.BufferedReader(_Unsealed(file, self._secret, purpose)))

    def mark(self, file: BinaryIO, purpose: str) -> dict[str, str]:
        """Return what no other file has, after all of it was read: its SHA-256, or its salt, if there is a secret.

        The salt is enough: nobody without the secret can make pieces of a file that has it.

        Args:
            file, purpose: see `opened`.

        Raises:
            ConfigError, ValueError: see `opened`.
        """
        content = self.opened(file, purpose)
        if self._secret is not None:
            unsealed = cast("_Unsealed", cast("io.BufferedReader", content).raw)
            unsealed.open_all()
            return {"salt": unsealed.salt.hex()}
        return {"sha256": sha256_of(content)}

    def require_ours(self, file: BinaryIO) -> None:
        """Require that a file is sealed by the secret; where there is none, that it is not sealed.

        Raises:
            ForeignFileError: it is not so.
            ValueError: it was cut.
        """
        head = _Head.read(file)
        wanted = None if self._secret is None else self._secret.fingerprint
        key = None if head is None else head.fingerprint
        if key == wanted:
            return
        if wanted is None:
            raise ForeignFileError(f"it is sealed by the key {key}: name the file of that key in {self._variable}")
        if key is None:
            raise ForeignFileError(
                f"it is not sealed, and {self._variable} is set: others could have put it there; to use it, unset "
                f"{self._variable}"
            )
        raise ForeignFileError(f"it is sealed by the key {key}, and that of {self._variable} is {wanted}")


#: Seals nothing, and opens nothing that is sealed.
PLAIN = KeyFile(None, DISK_VARIABLE)


def disk_keys(path: str | None) -> KeyFile:
    """Return how files are written and read that RINGREDUCE_DISK_KEY_FILE is for.

    Args:
        path: its value; None: it is not set.

    Raises:
        ConfigError: see `read_secret`.
    """
    return PLAIN if path is None else KeyFile(read_secret(path, DISK_VARIABLE), DISK_VARIABLE)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


class _Sealing(io.RawIOBase):
    """Writes a sealed file; a piece is written when a byte comes after it, as the last one has another nonce."""

    def __init__(self, file: BinaryIO, secret: Secret, purpose: str) -> None:
        head = _Head(secret.fingerprint, secrets.token_bytes(_SALT_NBYTES), purpose, nbytes=0)
        self._file = file
        self._cipher = head.cipher(secret)
        self._piece = bytearray()
        self._sealed = memoryview(bytearray(_PIECE_NBYTES + _TAG_NBYTES))
        self._number = 0
        file.write(head.to_bytes())

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        begin = 0
        while begin < len(view):
            if len(self._piece) == _PIECE_NBYTES:
                self._seal(self._piece, is_last=False)
                self._piece.clear()
            if not self._piece and len(view) - begin > _PIECE_NBYTES:
                end = begin + _PIECE_NBYTES
                self._seal(view[begin:end], is_last=False)  # A view, so that nothing is copied.
            else:
                end = begin + _PIECE_NBYTES - len(self._piece)
                self._piece += view[begin:end]
            begin = min(end, len(view))
        return len(view)

    def finish(self) -> None:
        """Write the last piece, which is empty if the content is."""
        self._seal(self._piece, is_last=True)

    def _seal(self, piece: bytearray | memoryview, *, is_last: bool) -> None:
        sealed = self._sealed[: len(piece) + _TAG_NBYTES]
        self._cipher.encrypt_into(_nonce(self._number, is_last=is_last), piece, None, sealed)
        self._file.write(sealed)
        self._number += 1


class _Unsealed(io.RawIOBase):
    """Reads a sealed file at any place."""

    def __init__(self, file: BinaryIO, secret: Secret, purpose: str | None) -> None:
        # Comes first: Python closes this object if a later line raises, and 3.14 reports that it cannot.
        self._file = file
        head = _Head.read(file)
        assert head is not None
        if purpose not in (None, head.purpose):
            raise ValueError(f"it is {head.purpose}, and not {purpose}")
        self.salt = head.salt
        self._begin = head.nbytes
        nbytes = file.seek(0, io.SEEK_END) - self._begin
        self._cipher = head.cipher(secret)
        self._count = max(1, -(-nbytes // (_PIECE_NBYTES + _TAG_NBYTES)))
        self._nbytes = nbytes - self._count * _TAG_NBYTES
        self._at = 0
        self._number = -1  # The number of the open piece.
        most = max(0, min(self._nbytes, _PIECE_NBYTES))
        self._piece = memoryview(bytearray(most))
        self._sealed = memoryview(bytearray(most + _TAG_NBYTES))
        self._keep(self._count - 1)  # Checked first, or a file that was cut would be read up to the cut.

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if begin + offset < 0:
            raise ValueError(f"negative place {begin + offset}")
        self._at = begin + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._nbytes:
            return 0
        number, begin = divmod(self._at, _PIECE_NBYTES)
        target = memoryview(buffer).cast("B")
        if begin == 0 and len(target) >= self._length(number) and number != self._number:
            piece = target[: self._length(number)]
            self._open(number, piece)
        else:
            piece = self._keep(number)[begin : begin + len(target)]
            target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()

    def open_all(self) -> None:
        """Raise a ValueError if anything was changed."""
        for number in range(self._count):
            self._keep(number)

    def _length(self, number: int) -> int:
        return max(0, min(_PIECE_NBYTES, self._nbytes - number * _PIECE_NBYTES))

    def _keep(self, number: int) -> memoryview:
        """Return a piece; it is valid until another one is asked for."""
        piece = self._piece[: self._length(number)]
        if number != self._number:
            self._number = -1
            self._open(number, piece)
            self._number = number
        return piece

    def _open(self, number: int, piece: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        sealed = self._sealed[: len(piece) + _TAG_NBYTES]
        self._file.seek(self._begin + number * (_PIECE_NBYTES + _TAG_NBYTES))
        nbytes = cast("io.BufferedIOBase", self._file).readinto(sealed)
        try:
            nonce = _nonce(number, is_last=number == self._count - 1)
            self._cipher.decrypt_into(nonce, sealed[:nbytes], None, piece)
        except (InvalidTag, ValueError):  # A ValueError means that the piece is shorter than it should be.
            piece[:] = bytes(len(piece))  # This erases what was opened before the seal was found wrong.
            raise ValueError("it was changed, cut, or put in the place of another file") from None
