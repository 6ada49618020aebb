"""What is shown last of a job that has failed."""

from __future__ import annotations

from pathlib import Path

from ringreduce.launcher.failures import Failure, find, find_in_files

TRACEBACK = "Traceback (most recent call last):\n  File \"t.py\", line 5, in <module>\n    f()\nKeyError: 'why'"
NOISE = "-" * 74 + "\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n" + "-" * 74
ENDING = f"ringreduce: rank 1 of 2 failed; ending the job\n{TRACEBACK}"
LOST = "ringreduce: rank 0 of 2 ends: rank 1 is lost: it failed: KeyError: 'why'"


def test_the_rank_that_ends_the_job_is_quoted() -> None:
    """Whatever the others and mpirun have written before, between and after."""
    text = f"epoch 1\n{LOST}\n{ENDING}\n{NOISE}\n"
    assert find(text) == Failure(1, ENDING)
    assert find(f"{ENDING}\n{LOST}\n{NOISE}") == Failure(1, ENDING)
    assert find(f"x\nringreduce: rank 3 of 4 exits with code 5; ending the job\n{NOISE}") == Failure(
        3, "ringreduce: rank 3 of 4 exits with code 5; ending the job"
    )


def test_lines_of_one_rank_are_told_apart_by_their_prefix() -> None:
    """Open MPI's or Hydra's; other ranks' lines in between are left out."""
    lines = ENDING.splitlines()
    for prefix in ("[{}]<stderr>: ", "[{}] "):
        mixed = "\n".join(f"{prefix.format(1)}{line}\n{prefix.format(0)}step" for line in lines)
        assert find(mixed) == Failure(1, ENDING)


def test_before_init_there_is_a_traceback_alone() -> None:
    """It is quoted with its causes, and mpirun may say whose it is."""
    chain = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
    assert find(f"hello\n{TRACEBACK}\nbye\n") == Failure(None, TRACEBACK)
    assert find(f"{chain}\n{'-' * 74}\n   Process name: [prterun-h-1@1,2]\n   Exit code:    1\n") == Failure(2, chain)
    handled = TRACEBACK.replace("why", "handled")
    assert find(f"{handled}\ngoing on\n{TRACEBACK}\n") == Failure(None, TRACEBACK)


def test_why_python_does_not_begin_is_quoted() -> None:
    """Where there is no traceback: the lines of one rank, though others write at once."""
    place, rest = '  File "/t.py", line 3', ["    x = (", "        ^", "SyntaxError: '(' was never closed"]
    own = "\n".join([place, *rest])
    assert find(f"{own}\n{NOISE}") == Failure(1, own)
    mixed = "\n".join(f"[0] {line}\n[1] {line}" for line in [place, *rest])
    assert find(mixed) == Failure(0, own)
    assert find("\n".join(f"{line}\n{line}\n{line}" for line in [place, *rest])) == Failure(None, own)
    missing = "python: can't open file '/t.py': [Errno 2] No such file or directory"
    assert find(f"{missing}\n{missing}\n") == Failure(None, missing)
    assert find(f"{place}\nwas read\n") is None
    assert find(f"loading\n{missing}\n{NOISE}") is None  # of something else that the program has started
    spaced = missing.replace("python", "/my env/bin/python3.11")
    assert find(spaced) == Failure(None, spaced)


def test_an_end_without_words_is_none() -> None:
    """There is nothing to repeat."""
    assert find("") is None
    assert find(f"{LOST}\n{NOISE}") is None


def test_files_of_ranks_say_which_one_failed(tmp_path: Path) -> None:
    """The one that ends the job, not one with a handled error."""
    (tmp_path / "rank-0.log").write_text(f"{TRACEBACK}\nhandled\n{LOST}\n")
    (tmp_path / "rank-12.log").write_text(f"step\n{ENDING}\n")
    (tmp_path / "rank-x.log").write_text(ENDING)
    assert find_in_files(tmp_path) == Failure(12, ENDING)
    assert find_in_files(tmp_path / "none") is None
