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
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Kept, Sequence[Any]]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Kept]:
        return iter([kept for kept, _ in self._known.values()])

    def __contains__(self, key: Hashable) -> bool:
        return key in self._known

    @property
    def keys(self) -> list[Any]:
        """The keys, oldest first."""
        return list(self._known)

    def find(self, key: Hashable, make: Callable[[], Kept], variables: Sequence[Any] = ()) -> Kept:
        """Return the reduction of a key.

        Args:
            key: of the list.
            make: makes the reduction if there is none; maybe collective.
            variables: those of the gradients, which it keeps alive.
        """
        if key not in self._known:
            self._known[key] = make(), variables
        return self._known[key][0]

    def forget(self, key: Hashable) -> None:
        """Drop the reduction of a key."""
        del self._known[key]

    def pending(self) -> Iterator[tuple[list[Any], Sequence[Any]]]:
        """Yield the averages that are still to be applied, oldest first, and their variables. Collective."""
        for kept, variables in list(self._known.values()):
            for averages in kept.pending():
                yield averages, variables
