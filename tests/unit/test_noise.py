"""The pattern NNpsk0 of Noise, against the test vectors that its implementations share, and what does not fit."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import TransportError
from ringreduce.transport.noise import Initiator, answer

# Of vectors/cacophony.txt in https://github.com/haskell-cryptography/cacophony, which snow and others test with.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
PSK = bytes.fromhex("54686973206973206d7920417573747269616e20706572737065637469766521")
INITIATOR = bytes.fromhex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a")
RESPONDER = bytes.fromhex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b")
FIRST = bytes.fromhex("4c756477696720766f6e204d69736573")
FIRST_MESSAGE = bytes.fromhex(
    "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
    "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1"
)
SECOND = bytes.fromhex("4d757272617920526f746862617264")
SECOND_MESSAGE = bytes.fromhex(
    "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
    "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461"
)


def test_the_vector_of_the_pattern():
    """Noise_NNpsk0_25519_AESGCM_SHA256: both messages, byte by byte, and what the initiator reads."""
    initiator = Initiator(PSK, PROLOGUE, INITIATOR)
    assert initiator.write(FIRST) == FIRST_MESSAGE
    assert answer(PSK, PROLOGUE, FIRST_MESSAGE, SECOND, RESPONDER) == SECOND_MESSAGE
    assert initiator.read(SECOND_MESSAGE) == SECOND


def test_keys_serve_once():
    """Two handshakes of the same sides have no message in common."""
    assert Initiator(PSK, PROLOGUE).write() != Initiator(PSK, PROLOGUE).write()
    first = Initiator(PSK, PROLOGUE).write()
    assert answer(PSK, PROLOGUE, first, b"key") != answer(PSK, PROLOGUE, first, b"key")


@pytest.mark.parametrize(("psk", "prologue"), [(bytes(32), PROLOGUE), (PSK, b"another job")])
def test_who_has_another_secret_or_prologue_is_refused(psk: bytes, prologue: bytes):
    """By the responder; and by the initiator, if that does not refuse."""
    initiator = Initiator(psk, prologue)
    with pytest.raises(TransportError, match="another key"):
        answer(PSK, PROLOGUE, initiator.write(), b"key")
    theirs = Initiator(PSK, PROLOGUE)
    answered = answer(PSK, PROLOGUE, theirs.write(), b"key")
    with pytest.raises(TransportError, match="another key"):
        initiator.read(answered)


def test_any_changed_bit_is_found():
    """In either message, at every place; and so is a message that is too short, or of another handshake."""
    for place in range(8 * len(FIRST_MESSAGE)):
        with pytest.raises(TransportError):
            answer(PSK, PROLOGUE, flipped(FIRST_MESSAGE, place), b"key")
    for place in range(8 * len(SECOND_MESSAGE)):
        initiator = Initiator(PSK, PROLOGUE, INITIATOR)
        initiator.write(FIRST)
        with pytest.raises(TransportError):
            initiator.read(flipped(SECOND_MESSAGE, place))
    for length in range(len(FIRST_MESSAGE)):
        with pytest.raises(TransportError):
            answer(PSK, PROLOGUE, FIRST_MESSAGE[:length], b"key")
    late = Initiator(PSK, PROLOGUE)
    late.write()
    with pytest.raises(TransportError):
        late.read(SECOND_MESSAGE)


def test_a_key_that_makes_every_result_the_same_is_refused():
    """Points of small order, RFC 7748 section 6.1: the first message is well sealed, by somebody with the secret."""
    initiator = Initiator(PSK, PROLOGUE, INITIATOR)
    transcript = initiator._transcript
    transcript.mix_public(bytes(32))
    with pytest.raises(TransportError, match="no public key"):
        answer(PSK, PROLOGUE, bytes(32) + transcript.seal(b""), b"key")


def flipped(message: bytes, place: int) -> bytes:
    """Return a message with one bit changed."""
    changed = bytearray(message)
    changed[place // 8] ^= 1 << place % 8
    return bytes(changed)
