"""What travels together, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.engine.coordinator import fuse


@pytest.mark.parametrize(
    ("items", "limit", "groups"),
    [
        ([], 10, []),
        ([("f", 4)], 10, [[0]]),
        ([("f", 4), ("f", 4)], 10, [[0, 1]]),
        ([("f", 4), ("f", 6), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 4), ("f", 99), ("f", 1)], 10, [[0, 1], [2]]),
        ([("f", 99), ("f", 1), ("f", 1)], 10, [[0], [1, 2]]),
        ([("f", 4), ("i", 4), ("f", 4), ("i", 4)], 10, [[0, 2], [1, 3]]),
        ([("f", 9), ("i", 1), ("f", 9), ("f", 1), ("i", 1)], 10, [[0, 2], [1, 4], [3]]),
        ([("f", 0), ("f", 0), ("f", 0)], 10, [[0, 1, 2]]),
        ([("f", 1), ("f", 1)], 1, [[0], [1]]),
    ],
)
def test_groups(items: list[tuple[str, int]], limit: int, groups: list[list[int]]) -> None:
    """Of one kind, in order, closed by the item that fills them; an item larger than the limit fills any."""
    assert fuse(items, limit) == groups


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 20))), st.integers(1, 40))
def test_every_item_has_one_place(items: list[tuple[str, int]], limit: int) -> None:
    """Groups hold all items, each once and in order, of one kind; all but the last of a kind are full, and no group
    was full before its last item came.
    """
    groups = fuse(items, limit)
    assert sorted(index for members in groups for index in members) == list(range(len(items)))
    assert [members[0] for members in groups] == sorted(members[0] for members in groups)
    last = {items[members[0]][0]: members for members in groups}
    for members in groups:
        (kind,) = {items[index][0] for index in members}
        assert members == sorted(members)
        assert sum(items[index][1] for index in members[:-1]) < limit
        assert sum(items[index][1] for index in members) >= limit or members is last[kind]
