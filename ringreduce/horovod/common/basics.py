"""The object through which Horovod's bindings ask who is there."""

from __future__ import annotations

from typing import Any

from ringreduce.horovod.common.util import binding_in_use


class HorovodBasics:
    """The functions of the binding in use as methods: ``HorovodBasics().rank()``.

    Args:
        ignored: Horovod's path and name of a compiled library; there is none.
    """

    def __init__(self, *ignored: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(binding_in_use(), name)
