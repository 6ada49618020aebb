"""Fingerprints of files, folders, arrays and values: equal on all machines, for the audit record."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from ringreduce.buffers import Operand
from ringreduce.common.arguments import shape_text
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.files import sha256_of

#: Types of which `repr` says the whole value, on all machines.
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


def fingerprint(value: Any) -> str:
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

    Args:
        value: a path (``pathlib.Path``) of a file or a folder, an array or a tensor, a state dict, or dicts and lists
            of these.

    Raises:
        ConfigError: there is something that has no value to be seen, an array that is not supported, in a folder a
            link to a folder, what is no file, or a name with a line end or a backslash.
        OSError: a file cannot be read.
    """
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        if not os.path.isdir(path):
            return _of_file(path)
        lines = (f"{_of_file(os.path.join(path, name))}  {name}\n" for name in _files(path))
        return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()
    digest = hashlib.sha256()
    _add(digest, "", value)
    return digest.hexdigest()


def _of_file(path: str) -> str:
    with open(path, "rb") as file:
        return sha256_of(file)


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
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        try:
            operand = Operand.of(_in_host_memory(value))
        except UnsupportedBufferError as error:
            raise ConfigError(f"{place or 'this'} has no fingerprint: {error}") from None
        digest.update(f"{place}\n{operand.dtype.name} {shape_text(operand.shape)}\n".encode())
        digest.update(operand.flat().view(np.uint8).data)
    elif type(value) in _PLAIN:
        digest.update(f"{place}\n{type(value).__name__} {value!r}\n".encode())
    else:
        raise ConfigError(f"{place or 'this'} has no fingerprint: nobody knows the value of a {type(value).__name__}")


def _named(key: Any) -> str:
    text = str(key).replace("~", "~0").replace("/", "~1")
    return text if type(key) is str else f"~{type(key).__name__} {text}"


def _in_host_memory(array: Any) -> Any:
    for copy in ("cpu", "get"):  # torch's and CuPy's names
        with suppress(AttributeError):
            return getattr(array, copy)()
    return array
