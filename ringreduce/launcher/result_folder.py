"""The folder of a call of `ringreduce.run`, on hosts that share none: they get the call, and send back results.

What a rank leaves comes as soon as it is whole, over what also starts mpirun's daemons. So the folder here looks as
if all ranks saw it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from ringreduce.launcher import result_sender
from ringreduce.launcher.cargo import base_python
from ringreduce.launcher.reach import (
    MARK,
    PIECE_NBYTES,
    Errand,
    HostProcess,
    ToAll,
    close_inputs,
    end_all,
    let_open,
    others,
    reaches,
)
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

_NAME = re.compile(rf"[0-9]{{1,9}}-[0-9]{{1,9}}({'|'.join(map(re.escape, result_sender.DONE))})")
_LOOK_EVERY_S = 1.0
#: How long hosts may send nothing at the end.
_STALL_LOOKS = 60


class Incoming:
    """What a host sends: files, each after a line that names it.

    Args:
        folder: where they go to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._line = b""
        self._path = folder
        self._file: IO[bytes] | None = None
        self._left_nbytes = 0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            OSError: they cannot be written.
            ValueError: that host has failed, or a file has a name that no rank gives.
        """
        while piece:
            if self._file is not None:
                self._file.write(piece[: self._left_nbytes])
                piece, self._left_nbytes = piece[self._left_nbytes :], max(self._left_nbytes - len(piece), 0)
            else:
                line, end, piece = piece.partition(b"\n")
                self._line += line
                if not end:
                    return
                self._begin(self._line)
                self._line = b""
            if self._file is not None and not self._left_nbytes:
                self.close()
                self._path.with_suffix(".coming").rename(self._path)

    def _begin(self, line: bytes) -> None:
        if not line.startswith(MARK.encode()):
            return
        what, value = json.loads(line[len(MARK) :])
        if what != "file":
            raise ValueError(value)
        name, nbytes = value
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no result")
        self._path = self._folder / name
        self._file = self._path.with_suffix(".coming").open("xb")
        self._left_nbytes = nbytes

    def close(self) -> None:
        """Close the file that is coming, if one is."""
        if self._file is not None:
            self._file.close()
            self._file = None


class _Receiver(threading.Thread):
    """Takes what hosts send, until all of them have ended, or sent nothing for too long at the end.

    Args:
        errand: what they are for.
        hosts: their processes.
        folder: where files go to.
    """

    def __init__(self, errand: Errand, hosts: Sequence[HostProcess], folder: Path) -> None:
        super().__init__(name="ringreduce receives results", daemon=True)
        self._errand = errand
        self._hosts = {host.output.fileno(): host for host in hosts}
        self._incoming = {number: Incoming(folder) for number in self._hosts}
        self._is_ending = False

    def run(self) -> None:
        waiting = select.poll()
        for number, host in self._hosts.items():
            waiting.register(number, select.POLLIN)
            self._take(number, host.rest)
        silent = 0
        while self._incoming and silent < _STALL_LOOKS:
            ready = waiting.poll(_LOOK_EVERY_S * 1000)
            silent = 0 if ready or not self._is_ending else silent + 1
            for number, _ in ready:
                if not self._take(number, os.read(number, PIECE_NBYTES)):
                    waiting.unregister(number)
                    self._incoming.pop(number).close()
        for incoming in self._incoming.values():
            incoming.close()

    def _take(self, number: int, piece: bytes) -> bool:
        """Take bytes of a host; return whether more may come."""
        host = self._hosts[number]
        try:
            self._incoming[number].feed(piece)
        except (OSError, ValueError) as error:
            say(f"{self._errand.name}: what ranks on {host.name} return is lost: {error}")
            return False
        return bool(piece)

    def end(self) -> None:
        """Take what still comes."""
        self._is_ending = True
        self.join()


@contextmanager
def with_results(start: Start) -> Iterator[Start]:
    """Have the folder of a call on all hosts of a job, as long as this context lasts; this one's gets all results.

    Where hosts share the folder, nothing is copied. Hosts that cannot be reached, or come later, have to share it.

    Args:
        start: what starts the job; of one without such a folder, it is returned.

    Yields:
        What starts the job.

    Raises:
        ConfigError: a host can have no such folder.
    """
    spec = start.spec
    names = others(start)
    if spec.results is None or not names or not reaches(start):
        yield start
        return
    folder = Path(spec.results)
    token = f"shared-{secrets.token_hex(8)}"
    (folder / token).touch()
    call = folder / result_sender.CALL
    python = base_python() if spec.ship else spec.program[0]
    errand = Errand("ringreduce.run", python, "the Python that ranks need", result_sender)
    request = {"folder": str(folder), "token": token, "nbytes": call.stat().st_size}
    let_open(len(names))
    hosts: list[HostProcess] = []
    receiver = None
    try:
        for name in names:
            hosts.append(errand.begin(name, request, start))
        apart = _send(errand, hosts, call)
        if apart:
            receiver = _Receiver(errand, apart, folder)
            receiver.start()
        yield replace(start, has_copies=start.has_copies or bool(apart))
    finally:
        if receiver is not None:
            close_inputs(hosts, start)
            receiver.end()
        late = end_all(hosts, start)
        if late:
            say(f"ringreduce.run: {' and '.join(late)} may still have {folder}")


def _send(errand: Errand, hosts: Sequence[HostProcess], call: Path) -> list[HostProcess]:
    """Send the call to the hosts that do not see it; return these."""
    apart = [host for host in hosts if host.answer() == "wants"]
    if apart:
        stream = ToAll(errand, apart)
        with call.open("rb") as file:
            while piece := file.read(PIECE_NBYTES):
                stream.write(piece)
        stream.flush()
        for host in apart:
            host.answer()
    return apart
