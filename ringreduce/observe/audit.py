"""The audit record of a run: a file to which rank 0 appends a line of JSON for each thing that happens.

Each line has: event, world (a token that all lines of one world have), time (ISO 8601, UTC), host, pid, facts. Events:

    begin     of a world; facts: command (a list), versions, settings, size, hosts (host -> ranks)
    commit    of an elastic training, one that copies the weights; facts: number, and sha256 of models, optimizers and
              the like, by name, or why there is none
    any       what the program says itself (`ringreduce.audit`)
    end       of a world; facts: error, null if it was shut down, or its only process has ended with an exit code

A world without an end was cut off: by SIGKILL, or with its machine. After the death of rank 0 the new one appends to
the same path, on its machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import secrets
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from enum import Enum
from typing import Any

import numpy as np

from ringreduce.buffers import Operand
from ringreduce.common.arguments import shape_text
from ringreduce.common.config import VERSION, Config
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.transport.messages import Messages, StepFailedError, exchange_json, together

__all__ = ["AuditRecord", "fingerprint", "loaded_versions", "require_facts"]

_log = logging.getLogger(__name__)

_CHUNK_NBYTES = 1 << 20
#: Types of which `repr` says the whole value, on all machines.
_PLAIN = {type(None), bool, int, float, complex, str, bytes}


class AuditRecord:
    """The lines of one world, the first of which is appended at once.

    Args:
        path: the file; made if need be, for this user alone. A link is refused, and so is a pipe that nobody reads.
        facts: what the first line says.

    Raises:
        OSError: it cannot be appended.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._world = secrets.token_hex(8)
        self._append("begin", facts)
        self._running = True

    @classmethod
    def of_world(cls, config: Config, messages: Messages, library: str) -> AuditRecord | None:
        """Begin the record that the settings ask for; None: another rank keeps it, or none does. Collective.

        Args:
            config: the settings in force.
            messages: between all ranks.
            library: what carries them, with its version.

        Raises:
            ConfigError: it cannot be written.
        """
        if config.audit is None:
            return None
        hosts: dict[str, list[int]] = {}
        for rank, host in enumerate(exchange_json(messages, platform.node())):
            hosts.setdefault(host, []).append(rank)
        facts = {
            "command": sys.orig_argv,
            "versions": {
                "ringreduce": VERSION,
                "Python": platform.python_version(),
                **loaded_versions(),
                "MPI": library,
            },
            "settings": {each.name: getattr(config, each.name) for each in fields(Config)},
            "size": messages.size,
            "hosts": hosts,
        }
        path = config.audit
        try:
            return together(messages, lambda: cls(path, facts) if messages.rank == 0 else None)
        except StepFailedError as error:
            raise ConfigError(f"RINGREDUCE_AUDIT={config.audit} cannot be written: {error}") from None

    def _append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append a line, in one piece, as other jobs may append to the same file.

        Raises:
            OSError: that does not work.
        """
        line = {
            "event": event,
            "world": self._world,
            "time": datetime.now(timezone.utc).isoformat(),
            "host": platform.node(),
            "pid": os.getpid(),
            "facts": facts,
        }
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._path, flags, 0o600), "ab", buffering=0) as file:
            data = json.dumps(line, default=_plain).encode() + b"\n"
            if file.write(data) != len(data):
                raise OSError("a line was cut off, as the disk is full")

    def append(self, event: str, facts: Mapping[str, Any]) -> None:
        """Append a line; an error is logged, as the training shall not fail for it."""
        try:
            self._append(event, facts)
        except OSError as error:
            _log.error("the audit record %s lacks a line (%s): %s", self._path, event, error.strerror or error)

    def end(self, error: str | None) -> None:
        """Append that the world has ended; does nothing the second time."""
        if self._running:
            self._running = False
            self.append("end", {"error": error})


def loaded_versions() -> dict[str, str]:
    """Return the versions of those packages that matter and are loaded."""
    packages = ("numpy", "mpi4py", "torch", "ml_dtypes", "cupy")
    loaded = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: str(version) for name, version in loaded.items() if version is not None}


def require_facts(event: Any, facts: Mapping[str, Any]) -> None:
    """Check what a program wants to have recorded.

    Raises:
        ConfigError: JSON cannot say it, or the event is one of ringreduce's own.
    """
    if type(event) is not str or event in ("", "begin", "commit", "end"):
        raise ConfigError(f"the event of an audit is a word of the program's own, got {event!r}")
    for name, fact in facts.items():
        try:
            json.dumps(fact, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} cannot be recorded as JSON ({error}); give numbers, texts, lists and dicts, and of arrays and "
                "files ringreduce.fingerprint(...)"
            ) from None


def fingerprint(value: Any) -> str:
    """Return the SHA-256, in hexadecimal, of a file or of values; equal on all machines.

    Of a file it is what ``sha256sum`` says. Of values it is that of these lines. Each begins with where the value is:
    keys and places with ``/`` in between; in a key, ``~`` is written as ``~0`` and ``/`` as ``~1``, as in RFC 6901, and
    before one that is no text comes ``~`` and its type. Then, on a line of its own,

    - of an array its dtype and shape (``float32 2x3``), and after the line's end its bytes in C order;
    - of a dict, list, tuple or set which of these it is, and its length; what is in it follows, a dict in the order of
      its keys as text, a set in that of its elements as text;
    - of a number, a text, bytes or None its type and `repr`.

    Args:
        value: a path (``pathlib.Path``), an array or a tensor, a state dict, or dicts and lists of these.

    Raises:
        ConfigError: there is something that has no value to be seen, or an array that is not supported.
        OSError: the file cannot be read.
    """
    digest = hashlib.sha256()
    if isinstance(value, os.PathLike):
        with open(value, "rb") as file:
            while chunk := file.read(_CHUNK_NBYTES):
                digest.update(chunk)
    else:
        _add(digest, "", value)
    return digest.hexdigest()


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


def _plain(value: Any) -> Any:
    """Return a setting as JSON says it."""
    return value.value if isinstance(value, Enum) else str(value)
