"""What reduces lists of gradients: one reduction for each kind of list, made when the first one comes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar


class ReducesLists(Protocol):
    """What is kept for each kind of list, such as a `ListTraining`."""

    def pending(self) -> Iterator[list[Any]]:
        """Yield the averages that are still to be returned, oldest first. Collective."""


Kept = TypeVar("Kept", bound=ReducesLists)


class KnownLists(Generic[Kept]):
    """Reductions of lists by a key: what all lists of a kind have in common, such as shapes and variables.

    All ranks make theirs in one order.

    Attributes:
        kept: the reductions by key, oldest first.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, Kept] = {}
        self._variables: dict[Any, Sequence[Any]] = {}

    def find(self, key: Hashable, make: Callable[[], Kept], variables: Sequence[Any] = ()) -> Kept:
        """Return the reduction of a key.

        Args:
            key: of the list.
            make: makes the reduction if there is none; maybe collective.
            variables: those of the gradients, which it keeps alive.
        """
        if key not in self.kept:
            self.kept[key] = make()
            self._variables[key] = variables
        return self.kept[key]

    def forget(self, key: Hashable) -> None:
        """Drop the reduction of a key."""
        del self.kept[key], self._variables[key]

    def pending(self) -> Iterator[tuple[list[Any], Sequence[Any]]]:
        """Yield the averages that are still to be applied, oldest first, and their variables. Collective."""
        for kept, variables in list(zip(self.kept.values(), self._variables.values(), strict=True)):
            for averages in kept.pending():
                yield averages, variables
