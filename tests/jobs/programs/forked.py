"""Runs programs in forks of one process that has imported torch; prints how they end, as JSON.

Usage: forked.py PROGRAMS

``PROGRAMS`` is JSON: by a name, the text of a program and its variables. How it ends: exit code, output, errors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch  # noqa: F401 what takes longest in each of them


def run(source: str, variables: dict[str, str]) -> tuple[int, str, str]:
    """Run a program in a fork."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.environ.update(variables)
            exec(source, {"__name__": "__main__"})
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        errors.seek(0)
        return code, output.read(), errors.read()


print(json.dumps({name: run(*program) for name, program in json.loads(sys.argv[1]).items()}))
