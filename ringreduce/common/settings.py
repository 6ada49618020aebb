"""What a setting is: a row of one of two tables, `Config` of what ranks read, and `LaunchSpec` of what starts them.

All else is made of these rows: what reads variables, the options of ``ringreduce run``, those of ``horovodrun`` and the
arguments of `ringreduce.run` that stand for them, and the table of docs/settings.md. A new setting is a row, and the
code that uses it.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from threading import TIMEOUT_MAX
from typing import Any

from ringreduce.common.errors import ConfigError

_ON = ("1", "on", "true", "yes")
_OFF = ("0", "off", "false", "no")
#: A link in Markdown, and what docstrings have in its place.
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_LINKED = r"\1"


@dataclass(frozen=True, slots=True)
class Setting:
    """A row: how the setting of one field is given, and what it means.

    Attributes:
        parse: returns what a text says, or raises a `ValueError` that says what was expected.
        variable: the variable of ranks that has it; empty: what starts ranks knows it alone.
        meaning: what it does, in Markdown, for docs/settings.md and for the docstring of `Config`.
        unset: what is so where it is not set; empty: the default of the field.
        may_differ: whether ranks may have different values: it steers nothing that they do together.
        observes: whether it changes no number of a training: commands that make a run again leave it out.
        of_horovod: variables of Horovod that have it where ours is not set: our text by theirs, empty: nothing.
        moved: of what the variable once had behind a comma, as ``,NAME:VALUE``: the new variable by the name.
        options: names of the option of ``ringreduce run``; none: it has none.
        help: of the option.
        metavar: what help calls the value of the option; empty: by the kind of the value.
        told: of an option that sets a variable: returns the text of that, or raises a `ValueError`.
        switch: of an option without a value: the text of the variable.
        always: the text of the variable that ``ringreduce run`` sets unless it has another one.
        needs: the option without which this one means nothing, and what this one is for.
        several: whether the option can be given several times.
        hidden: whether help leaves the option out.
        horovodrun: names of the option of ``horovodrun`` for it; with low lines, of the argument of `ringreduce.run`.
    """

    parse: Callable[[str], Any]
    variable: str = ""
    meaning: str = ""
    unset: str = ""
    may_differ: bool = False
    observes: bool = False
    of_horovod: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    help: str = ""
    metavar: str = ""
    told: Callable[[str], str] = str
    switch: str = ""
    always: str = ""
    needs: tuple[str, str] | None = None
    several: bool = False
    hidden: bool = False
    horovodrun: str = ""

    @property
    def option(self) -> str:
        """The name of the option in messages."""
        return self.options[0].partition("/")[0]

    @property
    def arguments(self) -> list[str]:
        """The arguments of `ringreduce.run` for it, and its keys in files of ``horovodrun``."""
        return [name.strip("-").replace("-", "_") for name in self.horovodrun.split()]

    def read(self, source: str, text: str, shown: str) -> Any:
        """Return what the text of a variable says.

        Args:
            source: the variable.
            text: of it, as ours would have it.
            shown: the text that it has.

        Raises:
            ConfigError: it says nothing, or has a part that another variable has now.
        """
        parts = (part.partition(":") for part in text.split(","))
        moved = " ".join(f"{self.moved[name]}={value}" for name, _, value in parts if name in self.moved)
        try:
            if moved:
                raise ValueError(f"a part of this has a variable of its own: {moved}")
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}={shown!r} in the environment: {error}") from None


def setting(variable: str, parse: Callable[[str], Any], default: Any, meaning: str = "", **row: Any) -> Any:
    """Declare a field of a table that a variable of ranks has.

    Args:
        variable, parse, meaning: as for `Setting`.
        default: of the field.
        row: the other attributes of its `Setting`.
    """
    return field(default=default, metadata={"setting": Setting(parse, variable=variable, meaning=meaning, **row)})


def option(names: str, parse: Callable[[str], Any], default: Any, help: str, **row: Any) -> Any:
    """Declare a field of a table that an option has; arguments as for `setting`, the names with spaces between."""
    return field(default=default, metadata={"setting": Setting(parse, options=tuple(names.split()), help=help, **row)})


def rows(table: type) -> Iterator[tuple[str, Any, Setting]]:
    """Yield the fields of a table that are settings: name, default and row."""
    for attribute in fields(table):
        if "setting" in attribute.metadata:
            yield attribute.name, attribute.default, attribute.metadata["setting"]


def described(table: type) -> str:
    """Return the docstring of a table with an entry for each row."""
    entries = [
        f"    {name}: {_LINK.sub(_LINKED, row.meaning)}. ``{row.variable}``"
        for name, _, row in rows(table)
        if row.meaning
    ]
    return "\n".join([inspect.cleandoc(table.__doc__ or ""), *entries])


# ---- what reads texts ----


@dataclass(frozen=True, slots=True)
class WholeNumber:
    """Reads a whole number from the least to the most that there may be."""

    least: int
    most: int | None = None

    def __call__(self, text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < self.least:
            kind = "a positive whole number" if self.least == 1 else f"a whole number, {self.least} or more"
            raise ValueError(f"expected {kind}")
        return int(text)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Reads a time: positive, and at least as long as it must be; 0 may have a meaning of its own."""

    least_s: float = 0.0
    zero: bool = False

    def __call__(self, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number of seconds") from None
        if value == 0 and self.zero:
            return 0.0
        if not max(value, 0) or not self.least_s <= value < TIMEOUT_MAX:
            kind = f"at least {self.least_s:g} seconds" if self.least_s else "a positive number of seconds"
            raise ValueError(f"expected {kind}{', or 0' * self.zero}")
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """Reads one of some words, in small letters."""

    words: tuple[str, ...]

    def __call__(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError(f"expected {', '.join(self.words[:-1])} or {self.words[-1]}")
        return text.lower()


@dataclass(frozen=True, slots=True)
class PathOf:
    """Reads a path; `ringreduce run` sees whether what it names can be used.

    Attributes:
        exists: whether it must be there.
        is_folder: whether it is a folder; else it is a file.
        is_program: whether it must be one that this user may run.
        whole: whether what it names stays the same in another folder; links in it stay, as they may change.
    """

    exists: bool = False
    is_folder: bool = False
    is_program: bool = False
    whole: bool = False

    def __call__(self, text: str) -> str:
        return os.path.abspath(text) if self.whole else text


def switch(text: str) -> bool:
    """Read 1 or 0."""
    if text.lower() not in (*_ON, *_OFF):
        raise ValueError("expected 1 or 0")
    return text.lower() in _ON


def is_on(text: str) -> bool:
    """Return whether a text, which may say more than 1 or 0, is no 0."""
    return text.lower() not in _OFF


def or_zero(parse: Callable[[str], Any], zero: Any) -> Callable[[str], Any]:
    """Return what reads a text like another function, but ``0`` as this."""
    return lambda text: zero if text == "0" else parse(text)


def parse_address(text: str) -> tuple[str, int]:
    """Read where something listens: ``HOST:PORT``, ``[::1]:PORT``, or ``:PORT`` and ``PORT`` of this machine alone.

    Raises:
        ValueError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 1 < int(port) < 1 << 16):
        raise ValueError("expected [HOST:]PORT, with a port from 2 to 65535")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"expected the host in brackets, as in [{host}]:{port}")
    return host.strip("[]") or "127.0.0.1", int(port)


def address_unless_switch(text: str) -> tuple[str, int] | None:
    """Read where something listens, or 1 or 0, which say that nothing does."""
    if text.lower() in (*_ON, *_OFF):
        return None
    try:
        return parse_address(text)
    except ValueError as error:
        raise ValueError(f"{error}; or 1 or 0") from None


def address_told(text: str) -> str:
    """Return the text of an address with its host."""
    host, port = parse_address(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
