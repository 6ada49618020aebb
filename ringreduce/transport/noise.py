"""Two ranks that have one secret agree on keys that nobody else has, by the pattern NNpsk0 of Noise.

By revision 34 of its specification, https://noiseprotocol.org/noise.html, whose names are given in the comments::

    NNpsk0:
      -> psk, e
      <- e, ee

Each side makes a pair of keys for X25519 that serves once. Who does not have the secret can neither send nor read a
message, and who learns the secret later cannot read what was recorded before.
"""

from __future__ import annotations

import hashlib

from ringreduce.common.errors import TransportError
from ringreduce.common.keys import KEY_NBYTES

_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # The name is as long as a hash, so it is the first hash itself.
_PUBLIC_NBYTES = 32
_NONCE = bytes(12)  # Always the first one: of this pattern, each key seals one message.


class _Transcript:
    """What both sides have mixed of all that they know and have exchanged: the specification's SymmetricState.

    Args:
        psk: what both have: 32 bytes.
        prologue: what both must agree on, and need not keep secret.
        private: this side's key for X25519, which must serve once; None: a new one.
    """

    def __init__(self, psk: bytes, prologue: bytes, private: bytes | None) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.hash = self._chaining = _NAME
        self._mix_hash(prologue)
        self._chaining, mixed, self._key = self._hkdf(psk, 3)  # The token psk: MixKeyAndHash.
        self._mix_hash(mixed)
        private_key = X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        self._ephemeral = private_key

    def write_key(self) -> bytes:
        """Return this side's public key: the token e."""
        public = self._ephemeral.public_key().public_bytes_raw()
        self.mix_public(public)
        return public

    def mix_public(self, public: bytes) -> None:
        """Take a public key: the token e, as in all patterns with a psk."""
        self._mix_hash(public)
        self._mix_key(public)

    def agree(self, public: bytes) -> None:
        """Mix what both have agreed on by X25519: the token ee."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:  # It has another length, or is a point that makes the result the same for all.
            raise TransportError(f"this is no public key: {error}") from None
        self._mix_key(shared)

    def seal(self, plain: bytes) -> bytes:
        """Encrypt: EncryptAndHash."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        sealed = AESGCM(self._key).encrypt(_NONCE, plain, self.hash)
        self._mix_hash(sealed)
        return sealed

    def open(self, sealed: bytes) -> bytes:
        """Decrypt: DecryptAndHash; a `TransportError` if the other side has not sealed this with the same secret."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            plain = AESGCM(self._key).decrypt(_NONCE, sealed, self.hash)
        except InvalidTag:
            raise TransportError("it was sealed with another key, or has changed on its way") from None
        self._mix_hash(sealed)
        return plain

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining, self._key = self._hkdf(material, 2)

    def _hkdf(self, material: bytes, count: int) -> list[bytes]:
        """Return keys of 32 bytes; the specification's HKDF is that of RFC 5869 without an info."""
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(algorithm=SHA256(), length=count * KEY_NBYTES, salt=self._chaining, info=b"").derive(material)
        return [derived[start : start + KEY_NBYTES] for start in range(0, len(derived), KEY_NBYTES)]


class Initiator:
    """The side that writes first. Serves once.

    Args:
        psk, prologue, private: see `_Transcript`; tests alone give a private key.
    """

    def __init__(self, psk: bytes, prologue: bytes, private: bytes | None = None) -> None:
        self._transcript = _Transcript(psk, prologue, private)

    def write(self, payload: bytes = b"") -> bytes:
        """Return the first message."""
        return self._transcript.write_key() + self._transcript.seal(payload)

    def read(self, message: bytes) -> bytes:
        """Return the payload of the answer.

        Raises:
            TransportError: it is no answer to this side's message by who has the same secret and prologue.
        """
        public = message[:_PUBLIC_NBYTES]
        self._transcript.mix_public(public)
        self._transcript.agree(public)
        return self._transcript.open(message[_PUBLIC_NBYTES:])


def answer(psk: bytes, prologue: bytes, message: bytes, payload: bytes, private: bytes | None = None) -> bytes:
    """Return the answer to an initiator's first message; arguments as for `Initiator`.

    Raises:
        TransportError: who has written the message has another secret or prologue, or it has changed on its way.
    """
    transcript = _Transcript(psk, prologue, private)
    public = message[:_PUBLIC_NBYTES]
    transcript.mix_public(public)
    transcript.open(message[_PUBLIC_NBYTES:])
    written = transcript.write_key()
    transcript.agree(public)
    return written + transcript.seal(payload)
