"""Horovod's module names for ringreduce, so that scripts written for Horovod run unchanged.

    mpirun -np 2 python -m ringreduce.horovod train.py --epochs 3

runs a script in which ``import horovod.torch as hvd`` gives `ringreduce.torch`, that very module. So does a script that
begins with ``import ringreduce.horovod``. Either way ``horovod.torch``, ``horovod.tensorflow`` and ``horovod.keras``
(``horovod.tensorflow.keras`` is the same) with all below them, ``horovod.ray``, ``horovod.spark``, ``horovod.common``
and ``horovod.runner`` are there from then on, also in processes that `multiprocessing` starts; a Horovod that is
installed is hidden. No framework is imported before its module is. From then on numbers are Horovod's, where they
differ from those of the chain rule; see `ringreduce.common.conventions`.

Horovod's environment variables are honoured with and without this module; see `ringreduce.common.config.HOROVOD`.
"""

import importlib
from typing import Any

from ringreduce.horovod.alias import install
from ringreduce.horovod.common.util import ENGINES, EXTENSIONS
from ringreduce.launcher.function import run

__all__ = ["run"]

#: The release of Horovod whose interface this is: what scripts and libraries compare with what they need.
__version__ = "0.28.1"

install()


def __getattr__(name: str) -> Any:
    # Libraries import horovod alone and ask what it has.
    if name in ("common", *EXTENSIONS, *ENGINES):
        try:
            return importlib.import_module(f"horovod.{name}")
        except ImportError as error:
            raise AttributeError(f"horovod.{name} cannot be imported: {error}") from error
    raise AttributeError(f"module 'horovod' has no attribute {name!r}")
