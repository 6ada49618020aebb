"""Excludes the code that communicates from `torch.compile`.

Compiled functions may call that code. They are cut there: it runs as ever, and what comes after it is compiled again.
Functions are marked and not wrapped, so that a call costs what it did, and torch's compiler is not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from ringreduce.torch.private import skip_in_compiler


def leave_uncompiled(*places: Any, callees: bool = True) -> None:
    """Let `torch.compile` leave functions as they are.

    Before torch 2.7 this does nothing: functions that communicate are not to be compiled there.

    Args:
        places: the functions; of classes and modules, all that are written there.
        callees: whether it leaves what they call alone, too. If not, it compiles that by itself.
    """
    for function in _functions(places):
        codes = _codes(inspect.unwrap(function).__code__)  # and not a decorator's, which is that of others too
        skip_in_compiler(function, list(codes), callees=callees)


def _functions(places: Iterable[Any]) -> Iterator[FunctionType]:
    for each in places:
        if isinstance(each, FunctionType):
            yield each
        elif isinstance(each, (staticmethod, classmethod)):
            yield from _functions([each.__func__])
        elif isinstance(each, property):
            yield from _functions([each.fget, each.fset])
        elif isinstance(each, (ModuleType, type)):
            home = each.__name__ if isinstance(each, ModuleType) else each.__module__
            written = (own for own in vars(each).values() if not isinstance(own, ModuleType))
            yield from _functions([own for own in written if getattr(own, "__module__", home) == home])


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Find a function's code, and that of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
