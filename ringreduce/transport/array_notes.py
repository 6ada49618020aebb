"""What a note from one rank to another says of an array."""

from __future__ import annotations

import struct
from collections.abc import Container
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ringreduce.buffers import DType, described

# A note: the tag, the head of the kind, then the array itself if it is small, else its number.
TAG = struct.Struct("<q")
LAST_TAG = (1 << 63) - 1

#: Tags from here on are the library's own; `ringreduce.scan` has the last.
OWN_TAGS = 1 << 62
HEAD = struct.Struct("<qH")  # How many bytes follow, and how long the description is.
NUMBER = struct.Struct("<q")
SMALL = 4096  # Up to so many bytes travel in the note itself;
SMALL_NEAR = 128 << 10  # within a node, where a note is two copies.


class ArrayKind(NamedTuple):
    """What sender and receiver must agree on.

    Attributes:
        what: dtype and shape, in words.
        nbytes: of such an array.
        head: the same in notes, after the tag.
        end: where that ends there.
    """

    what: str
    nbytes: int
    head: bytes
    end: int


@lru_cache(maxsize=1024)
def kind_of(what: str, nbytes: int) -> ArrayKind:
    """Return the kind of arrays that are described so."""
    text = what.encode()
    head = HEAD.pack(nbytes, len(text)) + text
    return ArrayKind(what, nbytes, head, end=TAG.size + len(head))


@lru_cache(maxsize=1024)
def small_kind(dtype: np.dtype[Any], shape: tuple[int, ...]) -> ArrayKind | None:
    """Return the kind of NumPy arrays that travel in notes; None: they do not.

    Raises:
        UnsupportedBufferError: their elements are not supported.
    """
    row = DType.of(dtype)
    nbytes = dtype.itemsize * prod(shape)
    return kind_of(described(row.name, shape), nbytes) if nbytes <= SMALL_NEAR else None


def small_kind_for(peers: Container[int], array: Any, peer: Any, tag: Any) -> ArrayKind | None:
    """Return the kind of a small NumPy array, if that is exchanged with one of these ranks."""
    if (
        type(array) is not np.ndarray
        or not type(peer) is type(tag) is int
        or peer not in peers
        or not 0 <= tag <= LAST_TAG
    ):
        return None
    return small_kind(array.dtype, array.shape)
