"""Tracebacks that several ranks write are shown once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ringreduce.launcher.tracebacks import Tracebacks

HEAD = b"Traceback (most recent call last):\n"
ONE = [HEAD, b'  File "t.py", line 1, in <module>\n', b"    import horovod\n", b"ModuleNotFoundError: No module\n"]
OTHER = [HEAD, b'  File "t.py", line 1, in <module>\n', b"    import numpy\n", b"KeyError\n"]


def shown(*lines: bytes, ranks: int | None = 3) -> bytes:
    reader = Tracebacks(ranks)
    return b"".join(map(reader.feed, lines)) + reader.rest()


def note(which: str, words: str = "ModuleNotFoundError: No module") -> bytes:
    return f"ringreduce: {which} have written this traceback, which is shown once: {words}\n".encode()


def test_a_traceback_of_all_ranks_is_shown_once() -> None:
    """Whole, with what came before, between and after, and a line that says which ranks have written it."""
    between = [b"step 1\n", b"Warning of something: twice\n"]
    assert shown(*between, *ONE, *ONE, b"loss 0.3, \r", *ONE) == b"".join(
        [*between, *ONE, b"loss 0.3, \r", note("ranks 0-2")]
    )
    assert shown(*ONE, *ONE) == b"".join([*ONE, note("2 of 3 ranks")])
    assert shown(*ONE, *ONE, ranks=None) == b"".join([*ONE, note("2 ranks")])
    assert shown(*ONE) == b"".join(ONE)


def test_ranks_that_say_their_number_are_named() -> None:
    """As those do that have called init()."""

    def failed(rank: int) -> bytes:
        return f"ringreduce: rank {rank} of 4 failed; ending the job\n".encode()

    expected = [failed(3), *ONE, failed(1), note("ranks 1, 3")]
    assert shown(failed(3), *ONE, failed(1), *ONE, ranks=4) == b"".join(expected)


def test_a_message_of_several_lines_is_shown_once() -> None:
    """As that of a mismatch: the lines below its first one belong to the traceback, and those of another do not."""
    several = [HEAD, b'  File "t.py", line 1\n', b"E: the ranks disagree:\n", b"  rank 0: a\n", b"  rank 1: b\n"]
    expected = [
        b"1\n",
        *several,
        b"ringreduce: rank 1 of 3 failed; ending\n",
        b"2\n",
        note("2 of 3 ranks", "E: the ranks disagree:"),
    ]
    assert shown(b"1\n", *several, expected[6], *several, b"2\n") == b"".join(expected)
    assert shown(*several[:4], *several) == b"".join([*several, note("2 of 3 ranks", "E: the ranks disagree:")])
    assert shown(*several, *OTHER, b"  indented\n") == b"".join([*several, *OTHER, b"  indented\n"])


@pytest.mark.parametrize("seed", range(20))
def test_ranks_may_write_at_the_same_time(seed: int) -> None:
    """Their lines come in any order, and in pieces of any size: it is one traceback all the same."""
    rng = np.random.default_rng(seed)
    turns = rng.permutation(np.repeat(np.arange(3), len(ONE)))
    rows = [iter(ONE) for _ in range(3)]
    text = b"".join(next(rows[turn]) for turn in turns)
    reader, passed = Tracebacks(3), b""
    while text:
        count = int(rng.integers(1, 30))
        passed, text = passed + reader.feed(text[:count]), text[count:]
    assert passed + reader.rest() == b"".join([*ONE, note("ranks 0-2")])


def test_what_only_begins_alike_is_shown() -> None:
    """From its beginning on; so is what has no end."""
    assert shown(*ONE, *OTHER) == b"".join([*ONE, *OTHER])
    assert shown(*ONE, *OTHER, *OTHER) == b"".join([*ONE, *OTHER, note("2 of 3 ranks", "KeyError")])
    assert shown(*ONE, *ONE[:2]) == b"".join([*ONE, *ONE[:2]])
    assert shown(*ONE, HEAD[:9]) == b"".join([*ONE, HEAD[:9]])


def test_what_one_rank_writes_again_and_again_is_shown() -> None:
    """A copy comes within seconds, and from another rank."""
    now = itertools.count(0.0, 10.0)
    reader = Tracebacks(3, lambda: next(now))
    assert b"".join(map(reader.feed, ONE * 3)) == b"".join(ONE * 3)
    assert shown(*ONE * 4).count(HEAD) == 2
    assert shown(*ONE * 2, ranks=1).count(HEAD) == 2


def test_nothing_waits_that_is_no_traceback() -> None:
    """Lines without an end, such as of a progress bar, pass at once."""
    reader = Tracebacks(2)
    assert reader.feed(b"50 %") == b"50 %"
    assert reader.feed(b"\r60 %") == b"\r60 %"
    assert reader.feed(HEAD[:5]) == b""
    assert reader.idle() == HEAD[:5]
