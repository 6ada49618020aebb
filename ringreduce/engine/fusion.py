"""Which operations travel together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["plan"]


def plan(items: Sequence[tuple[Hashable, int]], limit_nbytes: int) -> list[list[int]]:
    """Group items: one kind in each group, in order; the item that fills a group to the limit closes it.

    Args:
        items: kind (dtype, op, ...) and size (bytes) of each.
        limit_nbytes: a group that holds so many bytes is closed.

    Returns:
        The indices of the items of each group; groups in the order of their first items.
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(items):
        members, filled = open_groups.pop(kind, ([], 0))
        if not members:
            groups.append(members)
        members.append(index)
        if filled + nbytes < limit_nbytes:
            open_groups[kind] = members, filled + nbytes
    return groups
