"""A state for programs in NumPy, and for all that keep what they train in plain values."""

from __future__ import annotations

from typing import Any

from ringreduce.elastic.handlers import HandlingState
from ringreduce.elastic.state import ObjectState


class NumpyState(HandlingState):
    """Arrays and other values that training goes on from.

    A commit copies all of them. Programs change values in place, or assign others. An object with ``state_dict()`` and
    ``load_state_dict()`` is kept by these; `Generators` keeps each rank's random numbers of its own. `keep_on_disk`
    writes commits as pickles.

    Args:
        **kwargs: the attributes and their first values: arrays, numbers, lists, anything that can be copied and
            pickled. Their names and types must agree on all ranks; where values differ, rank 0's count.

    Raises:
        ConfigError: a name begins with an underscore, or is that of a method.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        empty = [name for name, value in kwargs.items() if value is None]
        self._names += empty
        for name in empty:
            setattr(self, name, None)
        ObjectState.save(self)
