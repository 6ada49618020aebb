"""What is said last of a job that has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringreduce.launcher.failures import LogFiles, find, find_unfinished, is_told, sentences

TRACEBACK = "Traceback (most recent call last):\n  File \"t.py\", line 5, in <module>\n    f()\nKeyError: 'why'"
NOISE = "-" * 74 + "\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Errorcode: 1\n" + "-" * 74
ENDING = f"ringreduce: rank 1 of 2 failed; ending the job\n{TRACEBACK}"
LOST = "ringreduce: rank 0 of 2 ends: rank 1 is lost: it failed: KeyError: 'why'"
CHAIN = f"{TRACEBACK}\n\nDuring handling of the above exception, another exception occurred:\n\n{TRACEBACK}"
SYNTAX = "  File \"/t.py\", line 3\n    x = (\n        ^\nSyntaxError: '(' was never closed"
BOX = "prterun has exited due to process rank 1 with PID 7 on node vm exiting\nimproperly. There are three reasons"
MISSING = "/my env/bin/python3.11: can't open file '/t.py': [Errno 2] No such file or directory"


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        (f"epoch 1\n{LOST}\n{ENDING}\n{NOISE.replace('1', '0')}\n", 1),
        ("\n".join(f"[1]<stderr>: {line}\n[0]<stderr>: step" for line in ENDING.splitlines()), 1),
        (f"x\nringreduce: rank 3 of 4 exits with code 5; ending the job\n{NOISE}", 3),
        (f"{CHAIN}\n{'-' * 74}\n   Process name: [prterun-h-1@1,2]\n   Exit code:    1\n", 2),
        (f"{LOST}\n{NOISE}", 1),
        (TRACEBACK, None),
        (LOST, None),
        ("", None),
    ],
)
def test_the_rank_that_failed_is_named(text: str, rank: int | None) -> None:
    """By itself, if it ends the job, whatever the others and mpirun have written before and after; else by mpirun."""
    assert find(text) == rank


def test_a_rank_that_has_ended_with_status_0_is_none_that_failed() -> None:
    """Mpirun names it as having exited improperly; unless a rank says why it ends the job, or shows a traceback."""
    assert find_unfinished(f"other ends\n{BOX}") == 1
    assert find_unfinished(f"{TRACEBACK}\n{BOX}") is None
    assert find_unfinished(f"{ENDING}\n{BOX}") is None
    assert find_unfinished("prterun has exited due to process rank 1 with PID 7 on node vm exited on signal 9") is None


def test_a_program_that_imports_horovod_is_seen() -> None:
    """Where Horovod is not there; in the line of the exception alone."""
    remedy = "the program imports horovod: start it by `horovodrun`, which gives it ringreduce by that name"
    for text in ("Traceback\nModuleNotFoundError: No module named 'horovod'\n",
                 "ModuleNotFoundError: No module named 'horovod.torch'"):  # fmt: skip
        assert list(sentences(text, 1, None, {})) == [remedy]
    text = "print: No module named 'horovod'\nModuleNotFoundError: No module named 'horovodrun'"
    assert list(sentences(text, 1, None, {})) == []


BY_SIGNAL = "prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal {}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENDING, "rank 1 on h2 failed, and the job has ended with status 3"),
        (BY_SIGNAL.format(15), "rank 1 on h2 was ended by SIGTERM, and the job has ended with status 3"),
        (BY_SIGNAL.format(99), "rank 1 on h2 was ended by signal 99, and the job has ended with status 3"),
        (
            BY_SIGNAL.format(9),
            "rank 1 on h2 was ended by SIGKILL, and the job has ended with status 3; if nobody sent that, "
            "memory ran out: see dmesg",
        ),
        (
            BOX,
            "rank 1 on h2 has ended, with status 0, without init() or by os._exit(), "
            "and the job has ended with status 3: all ranks call ringreduce.init(), and leave by the end of the "
            "program or sys.exit()",
        ),
        (TRACEBACK, "a rank failed, and the job has ended with status 3"),
    ],
)
def test_the_host_of_the_rank_that_failed_is_named(text: str, said: str) -> None:
    """Where there may be several."""
    assert list(sentences(text, 3, None, {0: "h1", 1: "h2"})) == [said]
    assert list(sentences(text, 3, None, {})) == [said.replace(" on h2", "")]


def test_what_helps_where_ssh_lets_nobody_in() -> None:
    """By the words of OpenSSH and mpirun; each host once."""
    (said,) = sentences("Host key verification failed.\r\n", 255, None, {}, others=["h2", "h3"])
    assert said == "the key of h2 or h3 is not known here, or has changed: log in once by ssh, which says more"
    refused = [f"ada@{host}: Permission denied (publickey,password).\r\n" for host in ("h2", "h3", "h2")]
    assert list(sentences("".join(refused), 255, None, {}, others=["h1", "h2", "h3"])) == [
        f"{host} takes no key that is here, and nobody can type a password: `ssh-copy-id {host}`"
        for host in ("h2", "h3")
    ]


def test_hosts_without_ringreduce_are_named() -> None:
    """If a rank has failed by that."""
    text = "ModuleNotFoundError: No module named 'ringreduce'\n"
    here = Path(__file__).parents[2] / "ringreduce"
    said = f"there is no ringreduce on h2 and h3; here it is in {here}: install it there, too, or share that folder"
    assert list(sentences(text, 1, None, {}, without_package=["h3", "h2"])) == [said]
    assert list(sentences("other", 1, None, {}, without_package=["h3", "h2"])) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [(f"hello\n{TRACEBACK}\n", True), (f"[0] {SYNTAX}", True), (MISSING, True), (f"step\n{LOST}\n", False)],
)
def test_a_rank_may_tell_why_though_nobody_names_it(text: str, told: bool) -> None:
    """By a traceback, or by what Python says where it cannot begin."""
    assert is_told(text) == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"epoch 1\n{ENDING}\n{LOST}\n{NOISE}", ENDING),
        (f"hello\n{TRACEBACK}\n{NOISE}", TRACEBACK),
        (f"{TRACEBACK.replace('why', 'handled')}\ngoing on\n{CHAIN}\n", CHAIN),
        (f"{SYNTAX}\n{NOISE}", SYNTAX),
        (f"{MISSING}\n", MISSING),
    ],
)
def test_what_a_rank_has_written_into_its_file_is_quoted(tmp_path: Path, text: str, words: str) -> None:
    """Its traceback with its causes, or why Python does not begin, and nothing of others."""
    logs = LogFiles(tmp_path)
    (tmp_path / "rank-3.log").write_text(text)
    assert logs.find() == (3, words)


def test_files_of_ranks_say_which_one_failed(tmp_path: Path) -> None:
    """The one that ends the job, not one with a handled error, nor one that Python is no part of."""
    logs = LogFiles(tmp_path)
    (tmp_path / "rank-0.log").write_text(f"{TRACEBACK}\nhandled\n{LOST}\n")
    (tmp_path / "rank-12.log").write_text(f"step\n{ENDING}\n")
    (tmp_path / "rank-x.log").write_text(ENDING)
    (tmp_path / "rank-1.log").write_text(f"loading\n{MISSING}\n{NOISE}")  # of something else that it has started
    assert logs.find() == (12, ENDING)
    assert LogFiles(tmp_path / "none").find() is None


@pytest.mark.parametrize("continues", [False, True])
def test_what_an_earlier_job_has_left_in_files_is_not_this_ones(tmp_path: Path, continues: bool) -> None:
    """Neither in the file of a rank that there is no more, nor in front of what a job has added."""
    for number in (0, 7):
        (tmp_path / f"rank-{number}.log").write_text(ENDING)
    logs = LogFiles(tmp_path, continues=continues)
    with (tmp_path / "rank-0.log").open("a" if continues else "w") as file:
        file.write("\nsaved\n")
    assert logs.find() is None
    assert not logs.have_ended_job()
    with (tmp_path / "rank-0.log").open("a") as file:
        file.write(ENDING)
    assert logs.find() == (0, ENDING)
    assert logs.have_ended_job()
