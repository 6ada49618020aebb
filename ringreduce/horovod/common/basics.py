"""The object through which Horovod's bindings ask who is there."""

from __future__ import annotations

from typing import Any


class HorovodBasics:
    """The functions of ``horovod.torch`` as methods: ``HorovodBasics().rank()``.

    Args:
        ignored: Horovod's path and name of a compiled library; there is none.
    """

    def __init__(self, *ignored: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        from ringreduce import torch

        return getattr(torch, name)
