"""Jobs in slots that tasks of an engine hold: their deaths, and what is left of them, processes and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: In the environment of what a job starts: the daemons and ranks on nodes; mpirun, and what starts it.
_OF_JOBS = (b"_RINGREDUCE_SLOT=", b"PRTE_MCA_plm_ssh_agent=")
#: Parts of command lines, by what runs there.
_WORDS = {
    "rank": "work_there()",
    "daemon": "prted ",
    "slot": "launcher.host_agent",
    "agent": "agent.py",
    "mpirun": "prterun ",
    "launcher": "-m ringreduce run",
}
ROLES = tuple(_WORDS)
#: What a job gets to start, and to end (seconds): this machine may be busy.
START_S = 90.0
END_S = 45.0


def processes() -> dict[int, str]:
    """Return the command lines of the processes of jobs that have this folder for temporary files, by pid."""
    found = {}
    mine = f"TMPDIR={os.environ['TMPDIR']}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(each.startswith(mine) for each in variables) and any(each.startswith(_OF_JOBS) for each in variables):
            found[int(folder.name)] = line
    return found


def left_behind() -> list[str]:
    """Return the processes and files that are left of jobs."""
    folder = Path(os.environ["TMPDIR"])
    files = [*folder.glob("ringreduce-*"), *folder.glob("ompi*"), *folder.glob("prte*")]
    return [*processes().values(), *map(str, files)]


def is_eventually(true: Callable[[], object], limit_s: float) -> bool:
    """Return whether something gets to be true within a time limit."""
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # of asking again: there is nothing to wait on
    return True


def kill(role: str) -> None:
    """Kill one of the processes with a role in the one job that runs."""
    found = [pid for pid, line in processes().items() if _WORDS[role] in line and not line.startswith("sh -c")]
    os.kill(max(found), signal.SIGKILL)


def loop(file: str) -> None:
    """Exchange data for ever; each rank says in a file that it does."""
    import numpy as np

    import ringreduce as rr

    rr.init()
    while True:
        rr.allreduce(np.ones(4), op=rr.SUM)
        Path(f"{file}.{rr.rank()}").touch()
        time.sleep(0.01)  # leaves cores to others


def train(folder: str) -> tuple[int, int, int]:
    """Make steps until a file says so; return the number of ranks, that of steps, and how often steps counted."""
    import numpy as np

    import ringreduce as rr
    import ringreduce.torch as hvd

    hvd.init()
    restart = os.environ.get("RINGREDUCE_RESTART", "0")

    @hvd.elastic.run
    def steps(state: Any) -> None:
        while not state.ends:
            ends = np.array([float(Path(folder, "ends").exists())])
            state.ends = bool(rr.allreduce(ends, op=rr.MAX)[0])
            state.total += int(rr.allreduce(np.ones(1), op=rr.AVERAGE)[0])
            state.step += 1
            state.commit()
            Path(folder, f"seen-{restart}-{hvd.size()}.{hvd.rank()}").touch()
            time.sleep(0.05)  # leaves cores to others

    state: Any = hvd.elastic.TorchState(step=0, total=0, ends=False)
    state.keep_on_disk(f"{folder}/commits")
    steps(state)
    return hvd.size(), state.step, state.total


def deaths_survived(run: Callable[[str], Any], folder: Path, die: Callable[[], object], *, again: bool) -> int:
    """Let something die in a job of three ranks that runs `train`; return how many ranks have ended it.

    Args:
        run: runs it, with the folder.
        folder: for its files.
        die: lets something die.
        again: whether the ranks begin again from a commit; else two go on.
    """
    found: list[Any] = []

    def call() -> None:
        try:
            found.extend(run(str(folder)))
        except BaseException as error:
            found.append(error)

    def begun(restart: str, size: str) -> bool:
        return bool(found or [*folder.glob(f"seen-{restart}-{size}.0")])

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert is_eventually(lambda: begun("0", "3") and len([*folder.glob("commits/commit-*")]) > 1, START_S), found
    die()
    assert is_eventually(lambda: begun("[1-9]", "*") if again else begun("0", "2"), 2 * START_S), found
    (folder / "ends").touch()
    thread.join(2 * START_S)
    assert not thread.is_alive()
    assert found
    assert not isinstance(found[0], BaseException), found[0]
    assert len({step for _, step, _ in found}) == 1
    assert all(step == total for _, step, total in found), "a step counted twice, or not at all"
    return len(found)


class Job:
    """A call that runs `loop` on ranks until something ends it.

    Args:
        run: makes the call, with the name of the file.
        size: number of ranks.
        file: of which each rank writes one.
    """

    def __init__(self, run: Callable[[str], object], size: int, file: Path) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._call, args=(run, str(file)), daemon=True)
        self._thread.start()
        seen = [Path(f"{file}.{rank}") for rank in range(size)]
        assert is_eventually(lambda: self.error or all(each.exists() for each in seen), START_S)
        assert self.error is None, self.error

    def _call(self, run: Callable[[str], object], file: str) -> None:
        try:
            run(file)
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        """Wait for its end; return its error."""
        self._thread.join(END_S)
        assert not self._thread.is_alive()
        return self.error


def driver_ends(program: str, words: list[str], number: signal.Signals, file: Path, size: int) -> str:
    """Run a program that calls `loop` by an engine, send it a signal, and return what it wrote."""
    seen = [Path(f"{file}.{rank}") for rank in range(size)]
    with subprocess.Popen(
        [sys.executable, "-c", program, *words, str(file)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parent,
    ) as driver:
        try:
            assert is_eventually(lambda: driver.poll() is not None or all(each.exists() for each in seen), START_S)
            driver.send_signal(number)
            text, _ = driver.communicate(timeout=END_S)
        finally:
            driver.kill()
    return text
