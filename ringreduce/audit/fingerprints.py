"""Fingerprints of files, folders, arrays and values: equal on all machines, for the audit record."""

from __future__ import annotations

import hashlib
import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from ringreduce.buffers import Operand
from ringreduce.common.arguments import shape_text, whole_number
from ringreduce.common.errors import ConfigError, UnsupportedBufferError

_CHUNK_NBYTES = 1 << 20
_BLOCK_NBYTES = 64 << 10  # of what is sampled
#: Types of which `repr` says the whole value, on all machines.
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


def fingerprint(value: Any, sample: int | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of a file, a folder or values; equal on all machines.

    Of a file it is what ``sha256sum`` says. Of a folder it is that of the lines ``HASH  PATH`` of all files in it, as
    ``sha256sum`` prints them, with paths from the folder on, in the order of their bytes. Of values it is that of these
    lines. Each begins with where the value is: keys and places with ``/`` in between; in a key, ``~`` is written as
    ``~0`` and ``/`` as ``~1``, as in RFC 6901, and before one that is no text comes ``~`` and its type. Then, on a line
    of its own,

    - of an array its dtype and shape (``float32 2x3``), and after the line's end its bytes in C order;
    - of a dict, list, tuple or set which of these it is, and its length; what is in it follows, a dict in the order of
      its keys as text, a set in that of its elements as text;
    - of a number, a text, bytes or None its type and `repr`.

    With ``sample``, only so many blocks of 64 KiB are read, and the result says so: ``HASH (1024 blocks of 64 KiB out
    of 107374182400 bytes)``. It is the SHA-256 of the length in bytes and the path of each file, a line each (of an
    array, of its line above), and of the blocks. These are evenly spaced, the first and the last included; of a folder,
    in the content of all files one after the other, and a block ends with its file. What changes between the blocks is
    not seen. What is no longer than the blocks together gets the result without ``sample``.

    Args:
        value: a path (``pathlib.Path``) of a file or a folder, an array or a tensor, a state dict, or dicts and lists
            of these.
        sample: at least 2; for a file, a folder or an array. None: everything is read.

    Raises:
        ConfigError: there is something that has no value to be seen, an array that is not supported, in a folder a
            link to a folder, what is no file, or a name with a line end or a backslash.
        OSError: a file cannot be read.
    """
    if sample is not None:
        sample = whole_number("sample", sample, 2)
    if isinstance(value, os.PathLike):
        return _of_path(os.fspath(value), sample)
    if sample is not None:
        if not _is_array(value):
            raise ConfigError(f"sample= is for a file, a folder or an array, got a {type(value).__name__}")
        operand = _operand("this", value)
        memory = operand.flat().view(np.uint8).data
        sampled = _sampled(_head("", operand), [memory.nbytes], lambda _, begin, end: memory[begin:end], count=sample)
        if sampled:
            return sampled
    digest = hashlib.sha256()
    _add(digest, "", value)
    return digest.hexdigest()


def _of_path(path: str, sample: int | None) -> str:
    names = _files(path) if os.path.isdir(path) else None
    paths = [path] if names is None else [os.path.join(path, each) for each in names]
    if sample is not None:
        sizes = [os.stat(each).st_size for each in paths]
        head = b"".join(b"%d %s\n" % (size, os.fsencode(each)) for size, each in zip(sizes, names or [""], strict=True))
        if sampled := _sampled(head, sizes, lambda place, *part: _part_of_file(paths[place], *part), count=sample):
            return sampled
    if names is None:
        return _of_file(path)
    lines = (
        b"%s  %s\n" % (_of_file(each).encode(), os.fsencode(name)) for each, name in zip(paths, names, strict=True)
    )
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _of_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _files(folder: str) -> list[str]:
    """Return the paths of all files in a folder, from there on, in the order of their bytes."""
    found = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        for name in [*names, *(each for each in folders if os.path.islink(os.path.join(place, each)))]:
            path = os.path.join(place, name)
            if not stat.S_ISREG(os.stat(path).st_mode) or {"\n", "\\"} & set(name):
                raise ConfigError(
                    f"{path!r} has no fingerprint: it is no file, or its name has a line end or backslash"
                )
            found.append(os.path.relpath(path, folder))
    return sorted(found, key=os.fsencode)


def _raise(error: OSError) -> NoReturn:
    raise error


def _part_of_file(path: str, begin: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(begin)
        return file.read(end - begin)


def _sampled(head: bytes, sizes: Sequence[int], read: Callable[[int, int, int], bytes | memoryview], count: int) -> str:
    """Return the fingerprint of some blocks of pieces that follow each other; empty: there is no more than these.

    Args:
        head: what is hashed before them.
        sizes: of the pieces, in bytes.
        read: returns a part of a piece, given which one, and where the part begins and ends in it.
        count: of the blocks.
    """
    total = sum(sizes)
    if total <= count * _BLOCK_NBYTES:
        return ""
    digest = hashlib.sha256(head)
    begins = [0, *accumulate(sizes)]
    for number in range(count):
        place = number * (total - _BLOCK_NBYTES) // (count - 1)
        piece = bisect_right(begins, place) - 1
        begin = place - begins[piece]
        digest.update(read(piece, begin, min(begin + _BLOCK_NBYTES, sizes[piece])))
    return f"{digest.hexdigest()} ({count} blocks of {_BLOCK_NBYTES >> 10} KiB out of {total} bytes)"


def _add(digest: Any, place: str, value: Any) -> None:
    inside = f"{place}/" if place else ""
    if isinstance(value, Mapping):
        digest.update(f"{place}\ndict {len(value)}\n".encode())
        for key in sorted(value, key=lambda each: (str(each), type(each).__name__)):
            _add(digest, f"{inside}{_named(key)}", value[key])
    elif isinstance(value, (set, frozenset, list, tuple)):
        kind = next(each for each in (set, frozenset, list, tuple) if isinstance(value, each))
        digest.update(f"{place}\n{kind.__name__} {len(value)}\n".encode())
        for number, each in enumerate(sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value):
            _add(digest, f"{inside}{number}", each)
    elif _is_array(value):
        operand = _operand(place or "this", value)
        digest.update(_head(place, operand))
        digest.update(operand.flat().view(np.uint8).data)
    elif type(value) in _PLAIN:
        digest.update(f"{place}\n{type(value).__name__} {value!r}\n".encode())
    else:
        raise ConfigError(f"{place or 'this'} has no fingerprint: nobody knows the value of a {type(value).__name__}")


def _named(key: Any) -> str:
    text = str(key).replace("~", "~0").replace("/", "~1")
    return text if type(key) is str else f"~{type(key).__name__} {text}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _operand(place: str, value: Any) -> Operand:
    try:
        return Operand.of(_in_host_memory(value))
    except UnsupportedBufferError as error:
        raise ConfigError(f"{place} has no fingerprint: {error}") from None


def _head(place: str, operand: Operand) -> bytes:
    return f"{place}\n{operand.dtype.name} {shape_text(operand.shape)}\n".encode()


def _in_host_memory(array: Any) -> Any:
    for copy in ("cpu", "get"):  # torch's and CuPy's names
        with suppress(AttributeError):
            return getattr(array, copy)()
    return array
