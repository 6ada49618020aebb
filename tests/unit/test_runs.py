"""Which of several histories of a training counts: of earlier jobs, of worlds in place, of hosts that stood still."""

from __future__ import annotations

import itertools

import pytest

from ringreduce.common.launch import Launch
from ringreduce.elastic.commits import _Commit, _line
from ringreduce.elastic.runs import ReplacedError, following, may_commit, new_job, own_token

NOW = 1_764_000_000_000_000_000  # ns
OLD = f"00000041-{NOW:020}-5f2c9ab1"  # as earlier versions named them


def token(number: int, launcher: str = "aaaaaaaa") -> str:
    return f"{number:020}-{launcher}"


FIRST = new_job(token(NOW), [])
SECOND = new_job(token(NOW + 1), [FIRST])

#: What happens, the run that is to be given up, and the one that counts.
ORDER = {
    "a job after a commit that does not say of which run it is": ("", FIRST),
    "a job after one of an earlier version": (OLD, new_job(token(NOW), [OLD])),
    "a job after one of an earlier version that it does not find": (OLD, FIRST),
    "a later start of a job": (FIRST, SECOND),
    "a later start that does not find the commits of the one before": (FIRST, new_job(token(NOW + 1), [])),
    "an earlier start whose host stood still, and that went on alone": (following(FIRST), SECOND),
    "the same again and again": (following(following(following(FIRST))), SECOND),
    "it went on alone, and the later start has not found that": (following(FIRST), new_job(token(NOW + 1), [])),
    "a job that another launcher has begun, whose clock is late": (SECOND, new_job(token(NOW - 9, "bb" * 4), [SECOND])),
    "two such jobs, of which the second does not find the first": (
        new_job(token(NOW - 9, "bb" * 4), [SECOND]),
        new_job(token(NOW - 8, "bb" * 4), [SECOND]),
    ),
    "a world after a rank has died": (FIRST, following(FIRST)),
    "and after another one": (following(FIRST), following(following(FIRST))),
    "a job without a launcher": (OLD, new_job(own_token(), [OLD])),
}


@pytest.mark.parametrize("what", ORDER)
def test_of_two_runs_the_later_one_counts(what: str) -> None:
    """Whatever numbers their commits have."""
    given_up, counts = ORDER[what]
    assert given_up < counts
    commits = sorted([_Commit(given_up, 90), _Commit(counts, 13)])
    assert _line(commits, {}) == [_Commit(counts, 13)]


def test_a_start_that_stood_still_does_not_begin_after_a_later_one() -> None:
    """Its launcher has begun the job again: it ends, though its name would be greater. Another launcher's begins."""
    with pytest.raises(ReplacedError, match="has begun this job again"):
        new_job(token(NOW), ["", OLD, SECOND])
    assert new_job(token(NOW, "cccccccc"), [SECOND]) > SECOND
    assert new_job(token(NOW + 1), [SECOND]) > SECOND  # a program may ask for its commits twice


@pytest.mark.parametrize(
    ("before", "left", "doubtful", "may"),
    [
        (2, 1, 0, True),  # one of two is killed, and its process is gone
        (2, 1, 1, False),  # both stood still, and each takes the other for dead
        (3, 2, 1, True),
        (3, 1, 2, False),
        (3, 1, 1, False),  # of two that are missing one is known to be dead; the other may have gone on with it before
        (3, 1, 0, True),
        (4, 2, 2, False),
        (4, 2, 1, False),
        (4, 3, 1, True),
        (5, 3, 2, True),
        (1, 1, 0, True),
    ],
)
def test_who_may_commit_after_a_loss(before: int, left: int, doubtful: int, may: bool) -> None:
    """A majority of the ranks that there were, or all that live."""
    assert may_commit(before, left, doubtful) is may


@pytest.mark.parametrize("size", range(1, 8))
def test_no_two_worlds_may_commit(size: int) -> None:
    """However many ranks are dead, the living are divided, and each part knows or does not know of the dead."""
    for dead in range(size):
        for one in range(1, size - dead):
            parts = (one, size - dead - one)
            doubts = [range(size - part - dead, size - part + 1) for part in parts]  # who lives is doubtful to others
            for each in itertools.product(*doubts):
                allowed = [may_commit(size, part, doubtful) for part, doubtful in zip(parts, each, strict=True)]
                assert sum(allowed) <= 1, (size, dead, parts, each)


@pytest.mark.parametrize(
    ("runs", "counts"),
    [
        # by run: the commits from which it has come, and the numbers on disk
        ({"a": ([], [1, 2, 3])}, ["a1", "a2", "a3"]),
        ({"a": ([], [1, 2, 3]), "b": (["a2"], [3])}, ["a1", "a2", "b3"]),
        # Between them a world has begun and has written nothing.
        ({"a": ([], [1, 2, 3]), "c": (["b3", "a2"], [4])}, ["a1", "a2", "c4"]),
        # The second has gone back behind the end of the first.
        ({"a": ([], [1, 2, 3]), "b": (["a3"], [4, 5]), "c": (["b1", "a3"], [2])}, ["a1", "c2"]),
        # A job after those of another one.
        ({"a": ([], [1]), "b": (["a1"], [2, 3]), "d": (["b2"], [3])}, ["a1", "b2", "d3"]),
        # A host brings back what its rank has made alone.
        ({"a": ([], [12]), "b": (["a12"], [13, 14]), "d": (["a12"], [13])}, ["a12", "d13"]),
    ],
)
def test_which_commits_count(runs: dict[str, tuple[list[str], list[int]]], counts: list[str]) -> None:
    """The last one, and those from which it has come."""
    commits = sorted(_Commit(run, number) for run, (_, numbers) in runs.items() for number in numbers)
    begun = {run: [_Commit(each[0], int(each[1:])) for each in came] for run, (came, _) in runs.items()}
    assert [f"{commit.run}{commit.number}" for commit in _line(commits, begun)] == counts


def test_what_the_launcher_says() -> None:
    """Its number and name; anything else is none."""
    assert Launch.from_environ({"RINGREDUCE_FENCE": token(NOW)}).fence == token(NOW)
    for text in ("", "1", token(NOW) + "0", "x" * 29):
        assert Launch.from_environ({"RINGREDUCE_FENCE": text}).fence is None
    assert Launch.from_environ({"OMPI_MCA_mpi_ft_detector": "1"}).doubts_silent
    assert not Launch.from_environ({}).doubts_silent
