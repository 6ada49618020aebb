"""The import hook behind `ringreduce.horovod`: each module of Horovod is a module of ours under a second name."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ringreduce import runtime
from ringreduce.common.conventions import Conventions
from ringreduce.common.launch import launch
from ringreduce.horovod.common.util import ENGINES, EXTENSIONS, check_extension

_log = logging.getLogger(__name__)

#: Holds a package ``horovod`` for processes that get `sys.path` from this one and not its import hooks: the workers of
#: a DataLoader that are not forked, and those of `ringreduce.horovod.run`.
_PATH = str(Path(__file__).parent / "_path")


def install() -> None:
    """Make ``import horovod`` and all below it give our modules, and numbers Horovod's; nothing the second time.

    See `ringreduce.common.conventions` for the numbers, and `ringreduce.runtime.set_conventions` for who may choose
    others.

    Raises:
        ImportError: Horovod itself was imported before.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "horovod" in sys.modules:
        raise ImportError("horovod itself is imported already; import ringreduce.horovod before it, or not at all")
    hidden = importlib.util.find_spec("horovod")
    if hidden is not None and not (hidden.origin or "").startswith(_PATH) and launch().rank == 0:
        where = hidden.origin or ", ".join(hidden.submodule_search_locations or ())
        _log.warning("horovod is installed (%s) and hidden: ringreduce takes its place", where)
    sys.meta_path.insert(0, _Finder())
    if _PATH not in sys.path:
        sys.path.insert(1, _PATH)  # behind the script's folder, before an installed horovod
    if not runtime.is_initialized():
        runtime.set_conventions(Conventions.HOROVOD)
    elif (chosen := runtime.config().conventions) is not Conventions.HOROVOD and launch().rank == 0:
        _log.warning("numbers stay those of %s: import ringreduce.horovod before init()", chosen.value)


class _Finder(MetaPathFinder):
    """Finds ``horovod`` and all below it, and nothing else."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            return None
        ours = _counterpart(fullname)
        found = importlib.util.find_spec(ours)
        if found is None:
            raise ModuleNotFoundError(
                f"no {fullname} here: ringreduce, in Horovod's place, has "
                f"{', '.join(f'horovod.{each}' for each in (*EXTENSIONS, *ENGINES))}",
                name=fullname,
            )
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(ours), origin=found.origin, is_package=is_package)


class _Loader(Loader):
    """Loads a module of ours as the module of another name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has run already, under its own name; that is what reload, pickle and relative imports shall see.
        module.__spec__ = self._spec
        if self._ours in map("ringreduce.{}".format, EXTENSIONS):
            vars(module).setdefault("check_extension", check_extension)  # which scripts import from there, too


def _counterpart(name: str) -> str:
    """Return the name of our module for a module of Horovod, whether it exists or not."""
    _, *below = name.split(".")
    if below[:2] == ["tensorflow", "keras"]:
        del below[0]
    home = ["ringreduce"] if below[:1] and below[0] in (*EXTENSIONS, *ENGINES) else ["ringreduce", "horovod"]
    return ".".join([*home, *below])
