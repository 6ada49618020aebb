"""The rank that has failed, found in the output of all ranks; and its own output, if that is in a file."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

#: So much of the end of what is written is looked at.
KEPT_NBYTES = 1 << 16

#: What a rank says that ends the job; see `ringreduce.runtime.termination`. Ranks that only notice its end say "ends:".
_ENDING = re.compile(r"ringreduce: rank ([0-9]+) of [0-9]+ .*; ending the job")
#: Of mpirun: the rank that it names as the first to fail.
_BLAMED = re.compile(
    r"(?:Process name: +\[[^\]]*,|MPI_ABORT was invoked on rank |due to process rank |"
    r"Abort\([0-9]+\) on node [0-9]+ \(rank )([0-9]+)"
)
_KILLED = re.compile(r"process rank ([0-9]+) with PID [0-9]+ on node \S+\s+exited on\s+signal ([0-9]+)")
#: Of Open MPI's mpirun: a rank that has ended with status 0 before or after the others, and not by MPI's end.
_UNFINISHED = re.compile(r"process rank ([0-9]+) with PID [0-9]+ on node \S+\s+exiting\s+improperly")
#: Of Open MPI, ssh and the agent: the host that a daemon was lost on, or could not be started on.
_LOST = re.compile(
    r"Remote daemon: \[[^\]\n]*\] on node (\S+)|Remote host: +(\S+)|ssh: connect to host (\S+) port|"
    r"ssh: Could not resolve hostname (\S+?):|ringreduce: what mpirun has started on (\S+) is lost"
)
#: Of Open MPI: the number of a daemon that was lost.
_DAEMON = re.compile(r"Remote daemon: \[[^\]\n]*,([0-9]+)\] on node ")
#: Of ssh, which asks nobody under mpirun.
_UNKNOWN_KEY = "Host key verification failed."
_NO_KEY = re.compile(r"^(?:\S+@)?(\S+): Permission denied \(", re.MULTILINE)
_NO_HOROVOD = re.compile(r"^ModuleNotFoundError: No module named 'horovod[.']", re.MULTILINE)
_NO_PACKAGE = re.compile(r"No module named '?ringreduce\b")
_TRACEBACK = "Traceback (most recent call last):\n"
#: In front of a traceback, another one belongs to it.
_CHAINED = re.compile(r"(?:During handling of the above|The above exception was)[^\n]*\s*\Z")
#: Of a Python that cannot begin with its program.
_NO_PROGRAM = re.compile(
    r'  File "[^\n]*", line [0-9]+\n(?:[^\n]*\n)*?(?:Syntax|Indentation|Tab)Error: |'
    r"[^:\n]*python[^:\n]*: (?:can't (?:open file|find)|No module named|Error while finding) "
)
#: What does not belong to the message of a rank: lines of ringreduce, and of MPI libraries.
_OTHER = re.compile(r"^(?:ringreduce: |-{20,}|Abort\([0-9]+\) on node|Fatal error in |=+$)", re.MULTILINE)


def find(text: str) -> int | None:
    """Return the rank that has failed: it writes itself that it ends the job, or mpirun names it; None if neither.

    Args:
        text: output of ranks and mpirun, mixed line by line.
    """
    found = _ENDING.search(text) or _BLAMED.search(text)
    return None if found is None else int(found[1])


def find_killed(text: str) -> tuple[int, int] | None:
    """Return the first rank that a signal has ended, and that signal, by the output of Open MPI's mpirun."""
    found = _KILLED.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


def has_ended_job(text: str) -> bool:
    """Return whether a rank of a job that is not elastic has said that it ends the job by an error."""
    return _ENDING.search(text) is not None


def find_unfinished(text: str) -> int | None:
    """Return the rank that has ended with status 0, but without `init` or the end of MPI; None if there is none."""
    found = None if _ENDING.search(text) or _TRACEBACK in text else _UNFINISHED.search(text)
    return None if found is None else int(found[1])


def find_lost_hosts(text: str) -> list[str]:
    """Return the hosts that mpirun has lost, or has not reached, by their names there."""
    return list(dict.fromkeys(next(filter(None, found)) for found in _LOST.findall(text)))


def find_lost_daemons(text: str) -> list[int]:
    """Return the numbers of the daemons that mpirun has lost: 1 for that of its first host but its own."""
    return list(dict.fromkeys(map(int, _DAEMON.findall(text))))


def has_lost_daemon(text: str) -> bool:
    """Return whether Open MPI's mpirun says that it has lost a daemon, or the connection to one."""
    lost = "PRTE has lost communication with a remote daemon." in text and "Remote daemon: [" in text
    return lost or "A daemon failed to report back after being spawned." in text


def is_told(text: str) -> bool:
    """Return whether any rank has written why it failed."""
    return _TRACEBACK in text or _NO_PROGRAM.search(text) is not None


def name_rank(rank: int, places: Mapping[int, str]) -> str:
    """Return the name of a rank for users; with its host, if that is among the places."""
    return f"rank {rank} on {places[rank]}" if rank in places else f"rank {rank}"


def sentences(
    written: str,
    status: int,
    logs: LogFiles | None,
    places: Mapping[int, str],
    *,
    without_package: Collection[str] = (),
    others: Collection[str] = (),
) -> Iterator[str]:
    """Yield what users read of a job that has failed: which rank, and its last output if that is in a file alone.

    Args:
        written: the end of what ranks and mpirun have written, mixed line by line.
        status: of the job.
        logs: the files of the ranks; None: there are none.
        places: the hosts of ranks, where there may be several.
        without_package: hosts that do not have ringreduce in the folder where this one has it.
        others: hosts that mpirun reaches by ssh.
    """
    ended = f"and the job has ended with status {status}"
    killed = find_killed(written)
    if killed is not None:
        rank, number = killed
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        hint = "; if nobody sent that, memory ran out: see dmesg" * (number == signal.SIGKILL)
        yield f"{name_rank(rank, places)} was ended by {name}, {ended}{hint}"
    elif (unfinished := find_unfinished(written)) is not None:
        yield (
            f"{name_rank(unfinished, places)} has ended, with status 0, without init() or by os._exit(), {ended}: all "
            "ranks call ringreduce.init(), and leave by the end of the program or sys.exit()"
        )
    elif logs is not None and (found := logs.find()) is not None:
        failed, words = found
        shown = words.rpartition("\n")[2] in written
        yield f"{name_rank(failed, places)} failed, {ended}" + ("" if shown else f":\n{words}")
        written += words
    elif (failed_rank := find(written)) is not None:
        yield f"{name_rank(failed_rank, places)} failed, {ended}"
    elif is_told(written):
        yield f"a rank failed, {ended}"
    if _UNKNOWN_KEY in written:
        yield f"the key of {' or '.join(others)} is not known here, or has changed: log in once by ssh, which says more"
    for host in dict.fromkeys(_NO_KEY.findall(written)):
        yield f"{host} takes no key that is here, and nobody can type a password: `ssh-copy-id {host}`"
    if without_package and _NO_PACKAGE.search(written):
        yield (
            f"there is no ringreduce on {' and '.join(sorted(without_package))}; here it is in "
            f"{Path(__file__).parents[1]}: install it there, too, or share that folder"
        )
    if _NO_HOROVOD.search(written):
        yield "the program imports horovod: start it by `horovodrun`, which gives it ringreduce by that name"


class LogFiles:
    """The files ``rank-N.log`` of a folder, as far as a job has written to them that begins now.

    Args:
        folder: their folder.
        continues: whether the job adds to the files of one before it; else its ranks begin them anew.
    """

    def __init__(self, folder: Path, *, continues: bool = False) -> None:
        self._folder = folder
        self._continues = continues
        self._before = {path: path.stat() for path in self._paths()}

    def find(self) -> tuple[int, str] | None:
        """Return the rank that has failed and its traceback, or its last line; None if there is neither."""
        found = []
        for path, text in self._ends():
            words = _words(text)
            if words:
                number = int(path.stem.removeprefix("rank-"))
                found.append((not _ENDING.match(words), path.stat().st_mtime, number, words))
        return min(found)[2:] if found else None

    def have_ended_job(self) -> bool:
        """Return whether a rank has written that it ends the job by an error."""
        return any(has_ended_job(text) for _, text in self._ends())

    def _paths(self) -> list[Path]:
        return [path for path in self._folder.glob("rank-*.log") if path.stem.removeprefix("rank-").isdigit()]

    def _ends(self) -> Iterator[tuple[Path, str]]:
        """Yield each file that the job has written to, with the end of what it has written."""
        for path in self._paths():
            now, before = path.stat(), self._before.get(path)
            if before is not None and (now.st_mtime_ns, now.st_size) == (before.st_mtime_ns, before.st_size):
                continue  # of a rank of an earlier job with more ranks
            first = before.st_size if before is not None and self._continues else 0
            with path.open("rb") as file:
                file.seek(max(now.st_size - KEPT_NBYTES, first))
                yield path, file.read().decode(errors="replace")


def _words(text: str) -> str:
    """Return the reason of a rank that has failed, from the end of its output; empty if it gives none."""
    ending = _ENDING.search(text)
    first = text.rfind(_TRACEBACK)
    if ending is not None:
        first = ending.start()
    elif first >= 0:  # the last one, as earlier ones may have been handled, with its causes
        while _CHAINED.search(text, 0, first) and (before := text.rfind(_TRACEBACK, 0, first)) >= 0:
            first = before
    elif _NO_PROGRAM.match(text):
        first = 0
    else:
        return ""
    end = _OTHER.search(text, text.find("\n", first) + 1 or len(text))
    return text[first : None if end is None else end.start()].rstrip()
