"""The standard input of ranks: nothing, a program that all of them run, or on rank 0 that of this command.

mpirun reads all of its standard input and passes it on to rank 0, but does not pass on its end. Other readers of the
same input, such as a shell loop around the command, get nothing.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.python_line import STDIN, ProgramSource, PythonLine
from ringreduce.launcher.spec import LaunchSpec

#: Lets rank 0 read what a process of this host reads, from where that is in a file; takes its number.
_FILE = (
    *(sys.executable, "-I", "-S", "-c"),
    "import os, sys\n"
    "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK', '0')) == '0':\n"
    "    file = os.open(f'/proc/{sys.argv[1]}/fd/0', os.O_RDONLY | os.O_NONBLOCK)\n"
    "    os.set_blocking(file, True)\n"
    "    try: os.lseek(file, int(open(f'/proc/{sys.argv[1]}/fdinfo/0').readline().split()[1]), 0)\n"
    "    except OSError: pass\n"
    "    os.dup2(file, 0)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])",
)
#: The kernel takes no longer argument.
_MOST_NBYTES = 131_071


def is_passed_on(spec: LaunchSpec) -> bool:
    """Return whether mpirun passes on the standard input of this command: at a terminal, or as users tell it to."""
    if any(word.lstrip("-") == "stdin" for word in spec.more):
        return True
    try:
        return os.isatty(0)
    except OSError:
        return False


def with_program(spec: LaunchSpec) -> LaunchSpec:
    """Return options by which all ranks run the program on standard input, which is read to its end, if they are to.

    Raises:
        ConfigError: no command line can hold the program.
    """
    line = PythonLine.of(spec.program)
    if line is None or line.source is not ProgramSource.INPUT:
        return spec
    text = sys.stdin.buffer.read() if sys.stdin is not None else b""
    if len(text) > _MOST_NBYTES:
        raise ConfigError(f"the program on standard input has {len(text)} bytes, which is too much; put it in a file")
    try:
        program = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the program on standard input is not UTF-8 ({error}); put it in a file") from None
    options = [*spec.program[: len(spec.program) - len(line.arguments)]]
    while options[-1] in (*STDIN, "--"):
        del options[-1]
    return replace(spec, program=(*options, "-c", program, *line.arguments))


def reader(*, rank_0_is_here: bool) -> tuple[str, ...]:
    """Return words before the program by which rank 0 reads the standard input of this command.

    Args:
        rank_0_is_here: whether rank 0 runs on this host.

    Raises:
        ConfigError: rank 0 cannot read it.
    """
    if not rank_0_is_here:
        raise ConfigError("--stdin: rank 0 runs on another host, which standard input does not reach; use a file")
    try:
        os.close(os.open("/proc/self/fd/0", os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        raise ConfigError(
            f"--stdin: there is no standard input that another process can read ({error.strerror}); pipe it in, as "
            "in cat FILE | ringreduce run --stdin"
        ) from None
    return (*_FILE, str(os.getpid()))
