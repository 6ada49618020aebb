"""Objects of a framework's class of which some methods are others."""

from __future__ import annotations

from typing import Any, TypeVar

_T = TypeVar("_T")


def with_methods(instance: _T, **methods: Any) -> _T:
    """Give an object other methods; return it.

    Its class becomes a subclass of the same name and module, so that what the framework saves of it loads without this
    package, and it keeps its state.

    Args:
        instance: of a class that is written in Python.
        **methods: attributes of the new class, by name.
    """
    kind = type(instance)
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    instance.__class__ = type(kind.__name__, (kind,), {**named, **methods})
    return instance
