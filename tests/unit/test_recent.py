"""The bounded store of what is made once and needed again."""

from __future__ import annotations

from ringreduce.common.recent import Recent


def store(recent: Recent[int, str], key: int) -> None:
    recent.make_room()
    recent[key] = str(key)


def test_what_was_stored_longest_ago_goes_first():
    """There are never more values than the limit."""
    recent = Recent[int, str](3)
    for key in range(5):
        store(recent, key)
        assert len(recent) <= 3
    assert list(recent.items()) == [(2, "2"), (3, "3"), (4, "4")]


def test_what_was_taken_out_and_stored_again_is_among_the_last():
    """And another value goes in its place, though that was stored later."""
    recent = Recent[int, str](3)
    for key in range(3):
        store(recent, key)
    recent[0] = recent.pop(0)
    store(recent, 3)
    assert list(recent) == [2, 0, 3]


def test_a_lower_number_of_values_needs_no_room():
    """A value that is in use counts as soon as it is stored again: then room is made for the next one."""
    recent = Recent[int, str](2)
    store(recent, 0)
    taken = recent.pop(0)
    store(recent, 1)
    store(recent, 2)
    recent[0] = taken
    store(recent, 3)
    assert list(recent) == [0, 3]
