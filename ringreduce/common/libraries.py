"""Libraries that a part of ringreduce is for, and that users may not have."""

from __future__ import annotations

import importlib
import re


def require_library(module: str, name: str, needed_by: str, remedy: str, lowest: tuple[int, int] = (0, 0)) -> None:
    """Raise ImportError unless a library is installed, and new enough.

    Args:
        module: what is imported.
        name: of the library, for the error.
        needed_by: our module, for the error.
        remedy: how to install it, for the error.
        lowest: the first two numbers of its lowest version.
    """
    try:
        version = str(getattr(importlib.import_module(module), "__version__", ""))
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(f"{needed_by} needs {name}, which is not installed: {remedy}", name=module) from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < lowest:
        raise ImportError(f"{needed_by} needs {name} {lowest[0]}.{lowest[1]} or newer, and this is {version}: {remedy}")
