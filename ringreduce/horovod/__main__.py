"""``python -m ringreduce.horovod script.py ...``: run a script as python would, with Horovod's module names."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader

_USAGE = """\
usage: python -m ringreduce.horovod script.py [arguments ...]
       python -m ringreduce.horovod -m module [arguments ...]

Runs a script, a folder or zip file with a __main__.py, or a module, in which `import horovod.torch` gives
ringreduce.torch. Under mpirun:

       mpirun -np 2 python -m ringreduce.horovod train.py
"""


def main(arguments: Sequence[str]) -> None:
    """Run what the command line names; its arguments are those behind ``-m ringreduce.horovod``."""
    match [*arguments]:
        case ["-m", module, *_]:
            sys.argv[:] = arguments  # as python itself does, with the module's file in place of -m later
            del sys.argv[1]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-h" | "--help", *_]:
            sys.stdout.write(_USAGE)
        case [path, *_] if not path.startswith("-"):
            sys.argv[:] = arguments
            _run_path(path)
        case _:
            sys.stderr.write(_USAGE)
            sys.exit(2)


def _run_path(path: str) -> None:
    """Run a file, or a folder or zip file with a ``__main__.py``, as ``python path`` does."""
    added = not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))
    if added:
        del sys.path[0]  # python has put the current folder there, because of its -m
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file, which goes to the path itself
        runpy.run_path(os.path.abspath(path), run_name="__main__")
        return
    if added:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    _run_file(path)


def _run_file(path: str) -> None:
    """Run a file as ``__main__``, for good: `runpy` takes the module away at the end, before exit handlers run."""
    file = os.path.join(os.getcwd(), path)
    try:
        with io.open_code(file) as stream:
            source = stream.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {file!r}: [Errno {error.errno}] {error.strerror}\n")
        sys.exit(2)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __builtins__=builtins, __cached__=None, __file__=file, __loader__=SourceFileLoader("__main__", file)
    )
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:  # multiprocessing's second name for it, if that was imported already
        sys.modules["__mp_main__"] = module
    exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
