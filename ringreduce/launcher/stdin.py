"""The standard input of ranks: nothing, a program that all of them run, or on rank 0 that of this command.

mpirun reads all of its standard input and passes it on to rank 0, but does not pass on its end. Other readers of the
same input, such as a shell loop around the command, get nothing.
"""

from __future__ import annotations

import base64
import os
import sys
import zlib
from dataclasses import dataclass

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.python_line import ProgramSource, PythonLine
from ringreduce.launcher.spec import LaunchSpec

_PYTHON = (sys.executable, "-I", "-S", "-c")
_GO_ON = "os.execvp(sys.argv[2], sys.argv[2:])"
#: Gives each rank a text, as a file in memory; takes it.
_TEXT = (
    *_PYTHON,
    "import base64, os, sys, zlib; text = zlib.decompress(base64.b64decode(sys.argv[1])); "
    f"file = os.memfd_create('stdin'); os.write(file, text); os.lseek(file, 0, 0); os.dup2(file, 0); {_GO_ON}",
)
#: Lets rank 0 read what a process of this host reads, from where that is in a file; takes its number.
_FILE = (
    *_PYTHON,
    "import os, sys\n"
    "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0')) == '0':\n"
    "    file = os.open(f'/proc/{sys.argv[1]}/fd/0', os.O_RDONLY | os.O_NONBLOCK)\n"
    "    os.set_blocking(file, True)\n"
    "    try: os.lseek(file, int(open(f'/proc/{sys.argv[1]}/fdinfo/0').readline().split()[1]), 0)\n"
    "    except OSError: pass\n"
    "    os.dup2(file, 0)\n"
    f"{_GO_ON}",
)
#: Of an argument, for the kernel.
_MOST_NBYTES = 120_000


@dataclass(frozen=True)
class StandardInput:
    """The standard input of the ranks.

    Attributes:
        passes: whether mpirun reads the standard input of this command, as at a terminal.
        before: words before the program.
    """

    passes: bool = True
    before: tuple[str, ...] = ()

    @classmethod
    def take(cls, spec: LaunchSpec, *, rank_0_is_here: bool) -> StandardInput:
        """Return the standard input of the ranks; a program that they run is read now, to its end.

        Args:
            spec: options of the job.
            rank_0_is_here: whether rank 0 runs on this host.

        Raises:
            ConfigError: rank 0 cannot read it, or the program is too long.
        """
        if any(word.lstrip("-") == "stdin" for word in spec.more) or _is_terminal():
            return cls()
        line = PythonLine.of(spec.program)
        if line is not None and line.source is ProgramSource.INPUT:
            return cls(False, (*_TEXT, _packed(sys.stdin.buffer.read() if sys.stdin is not None else b"")))
        if not spec.stdin:
            return cls(False)
        if not rank_0_is_here:
            raise ConfigError("--stdin: rank 0 runs on another host, which standard input does not reach; use a file")
        try:
            os.close(os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            raise ConfigError(
                f"--stdin: there is no standard input that another process can read ({error.strerror}); pipe it in, as "
                "in cat FILE | ringreduce run --stdin"
            ) from None
        return cls(False, (*_FILE, str(os.getpid())))


def _is_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


def _packed(text: bytes) -> str:
    packed = base64.b64encode(zlib.compress(text, 9)).decode("ascii")
    if len(packed) > _MOST_NBYTES:
        raise ConfigError(f"the program on standard input has {len(text)} bytes, which is too much; put it in a file")
    return packed
