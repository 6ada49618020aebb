"""One rank of `ringreduce.run`: ``python -m ringreduce.launcher.worker FOLDER``."""

from __future__ import annotations

import importlib
import multiprocessing
import multiprocessing.spawn
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from ringreduce.common.launch import launch
from ringreduce.launcher.function import find_pickle

__all__ = ["main"]


def main(folder: Path) -> None:
    """Make the call that the folder holds, and leave there what it returns, or the traceback."""
    place = f"{launch().restarts}-{launch().rank}"
    try:
        result = _call((folder / "call").read_bytes())
    except BaseException:
        _leave(folder / f"{place}.failure", traceback.format_exc().encode())
        raise
    _leave(folder / f"{place}.result", result)


def _call(pickled: bytes) -> bytes:
    modules, preparation, call = pickle.loads(pickled)
    for name in modules:
        importlib.import_module(name)
    # As in multiprocessing's own children: the script, if it is needed, runs under another name than __main__, and what
    # it starts on the way is refused.
    process: Any = multiprocessing.current_process()
    process._inheriting = True
    try:
        multiprocessing.spawn.prepare(preparation)
    finally:
        del process._inheriting
    function, args, kwargs = pickle.loads(call)
    result: bytes = find_pickle().dumps(function(*args, **kwargs))
    return result


def _leave(path: Path, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(content)
    unfinished.rename(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
