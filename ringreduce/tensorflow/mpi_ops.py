"""Horovod's name for the operations: importing this module gives `ringreduce.tensorflow` itself."""

import sys
from typing import Any

sys.modules[__name__] = sys.modules["ringreduce.tensorflow"]


def __getattr__(name: str) -> Any:
    """Let checks of types find all names here; nothing calls it, as Python keeps the other module."""
    raise AttributeError(name)
