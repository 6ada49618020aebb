"""Handlers that keep the objects of an elastic state by their state dicts, one class for each kind."""

from __future__ import annotations

import copy
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.runtime import rank, size
from ringreduce.training.calls.objects import allgather_object, broadcast_object


class StateHandler:
    """Keeps one object by its state dict: a learning-rate scheduler, a GradScaler.

    Subclasses keep objects of other kinds. A state saves an object as soon as it gets it. A subclass that overrides
    `save` or `restore` must also override `copy_small`, `is_unchanged` and `restore_small`, for states that do not
    copy the weights in each commit (`HandlingState.keep_in_memory`).

    Args:
        value: the object.

    Attributes:
        own: whether each rank has a state of its own.
        returns_new_state: whether `_read` returns, and `_load` takes, values that the object does not share, so that
            they need no copy.
        differs: whether this optimizer's replicas have different weights between their exchanges.
        notes_steps: whether `is_unchanged` notices what changes this optimizer's weights; None: it is no optimizer.
    """

    own = False
    returns_new_state = False
    differs = False
    notes_steps: bool | None = None
    _saved: Any = None  # The last copy, which nobody changes; subclasses may keep theirs elsewhere.

    def __init__(self, value: Any) -> None:
        self.value = value

    def _read(self) -> Any:
        """Return the object's state."""
        return self.value.state_dict()

    def _load(self, state: Any) -> None:
        """Give the object a state."""
        self.value.load_state_dict(state)

    def prepare_save(self) -> None:
        """Prepare for the copies of all objects of a state. Collective."""

    def save(self) -> None:
        """Take a copy."""
        self._saved = self._copied(self._read())

    def finish_save(self) -> None:
        """Finish after the copies of all objects of a state. Collective."""

    def for_disk(self) -> Any:
        """Return the last copy, in a form that no later `save` changes."""
        return self._saved

    def restore(self) -> None:
        """Load the last copy."""
        self._load(self._copied(self._saved))  # A copy: the object may keep these arrays.

    def _copied(self, state: Any) -> Any:
        return state if self.returns_new_state else copy.deepcopy(state)

    def copy_small(self) -> Any:
        """Return a copy of all that changes outside of steps; remember the place of the rest."""
        return self._copied(self._read())

    def is_unchanged(self) -> bool:
        """Return whether the part that the last `copy_small` left out is unchanged."""
        return True

    def restore_small(self, copied: Any) -> None:
        """Load the result of the last `copy_small`; the rest `is_unchanged`."""
        self._load(self._copied(copied))

    def sync(self) -> None:
        """Make it equal to rank 0's. Collective."""
        state = broadcast_object(self._read())
        if rank() != 0:
            self._load(state)

    def reset(self) -> None:
        """Prepare for other ranks. Collective."""


class SamplerStateHandler(StateHandler):
    """Keeps an `EpochDivision`."""

    returns_new_state = True

    def sync(self) -> None:
        """Unite the processed samples of rank 0's epoch from all ranks. Collective."""
        self.value.load_state_dict(self.value.together(allgather_object(self.value.progress())))

    def reset(self) -> None:
        self.value.reset()

    def share(self) -> None:
        """Exchange the samples that each rank has processed since the last call; otherwise a dead rank's are lost."""
        for news in allgather_object(self.value.news()):
            self.value.learn(news)


class OwnStateHandler(StateHandler):
    """Keeps the `Generators` that each rank has of its own."""

    own = returns_new_state = True

    def sync(self) -> None:
        pass


class LoaderStateHandler(OwnStateHandler):
    """Keeps a loader: each rank has its own place in the data, and it needs the ranks that have used it."""

    returns_new_state = False
    _size: int | None = None  # Size of the world in which it was used.

    def sync(self) -> None:
        """Prepare it for the present ranks. Collective."""
        if {*allgather_object(self._size)} not in ({None}, {size()}):
            raise self._refusal()
        self._size = size()

    def reset(self) -> None:
        self.sync()

    def leave(self) -> None:
        """Let its epoch go on when the program iterates again: the ranks leave the iteration that they are in."""

    def begin_elsewhere(self, state: Any) -> None:
        """Resume from rank 0's state, in a job of other ranks."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"a {type(self.value).__name__} goes on with the ranks that have used it, and there are others now: start "
            "as many ranks again, or use ResumableLoader, with the DistributedSampler of ringreduce.torch"
        )


class ResumableStateHandler(LoaderStateHandler):
    """Keeps a `ResumableLoader`, which knows whether it can resume on other ranks."""

    returns_new_state = True

    def sync(self) -> None:
        self._load(self.value.taken_over(allgather_object(self.value.place())))

    def leave(self) -> None:
        self._load(self._read())

    def begin_elsewhere(self, state: Any) -> None:
        self.value.load_state_dict(state)

    def _load(self, state: Any) -> None:
        self.value.go_on(state)
