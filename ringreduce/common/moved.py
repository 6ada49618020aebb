"""Former names of modules that documents have shown: they still import, with a warning, until the next release."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_MOVED = {
    "ringreduce.communicator": "ringreduce.collectives.communicator",
    "ringreduce.conventions": "ringreduce.common.conventions",
    "ringreduce.errors": "ringreduce.common.errors",
    "ringreduce.process_sets": "ringreduce.runtime.process_sets",
    "ringreduce.reduce_ops": "ringreduce.common.reduce_ops",
    "ringreduce.topology": "ringreduce.common.topology",
    "ringreduce.torch.ddp": "ringreduce.torch.distributed.ddp",
    "ringreduce.torch.pytorch_lightning": "ringreduce.torch.lightning.pytorch_lightning",
    "ringreduce.wire": "ringreduce.buffers.codecs",
}


class FormerNames(MetaPathFinder, Loader):
    """Finds a module by its former name and loads the module that it is now: the same object, under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _MOVED:
            return None
        warnings.warn(f"{fullname} is now {_MOVED[fullname]}", FutureWarning, stacklevel=2)
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(_MOVED[module.__name__])
