"""What is done when an object ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def when_ended(instance: Any, function: Callable[..., object], *arguments: Any) -> weakref.finalize[Any, Any]:
    """Call a function when an object ends, but not for those that are there when the program does.

    Args:
        instance: the object; neither the function nor its arguments may keep it.
        function: to be called.
        *arguments: of it.
    """
    finalizer = weakref.finalize(instance, function, *arguments)
    finalizer.atexit = False
    return finalizer
