"""Which parts of Horovod are there, and the small helpers that scripts import from the same place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, TypeVar

from ringreduce.common.partition import Partition
from ringreduce.horovod.common.exceptions import HorovodVersionMismatchError as HorovodVersionMismatchError
from ringreduce.horovod.common.exceptions import get_version_mismatch_message as get_version_mismatch_message
from ringreduce.runtime import built

_T = TypeVar("_T")

EXTENSIONS = ["torch", "tensorflow", "keras"]
#: What starts ranks, and is below ``horovod`` as well.
ENGINES = ["ray", "spark"]


def get_ext_suffix() -> str:
    """Return how the names of compiled modules end."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return where a compiled module would be: in folders beside a file, under a name without its ending."""
    return os.path.join(os.path.dirname(pkg_path), *args) + get_ext_suffix()


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Any, bool | None], Any]:
    """Return what chooses between ``op`` and the older ``average`` of a call.

    Args:
        reduce_ops: has the attributes ``Average`` and ``Sum``.
    """

    def choose(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError("give op or average, not both")
        if op is not None:
            return op
        return reduce_ops.Sum if average is False else reduce_ops.Average

    return choose


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is a binding for a framework, ``"torch"``, and it is installed."""
    return ext_base_name in EXTENSIONS and importlib.util.find_spec(ext_base_name) is not None


def check_extension(ext_name: str, *ignored: Any) -> None:
    """Raise ImportError unless there is a binding by this name: ``"horovod.torch"``."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"there is no {ext_name} here: its framework must be one of {EXTENSIONS}, and installed")


def check_installed_version(name: str, version: str, exception: BaseException | None = None) -> None:
    """Do nothing: ringreduce is compiled against no version of any library."""


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the binding for a framework can use GPUs."""
    return extension_available(ext_base_name) and bool(_binding(ext_base_name).cuda_built())


def cuda_built(verbose: bool = False) -> bool:
    """Return whether the framework in use is built for CUDA."""
    return bool(binding_in_use().cuda_built())


def binding_in_use() -> Any:
    """Return the binding of PyTorch or TensorFlow that was imported, or else that of PyTorch."""
    return _binding(next((each for each in ("torch", "tensorflow") if f"ringreduce.{each}" in sys.modules), "torch"))


def _binding(framework: str) -> Any:
    # This late, because who only asks for an exception need not have it.
    return importlib.import_module(f"ringreduce.{framework}")


def _built(library: str) -> Callable[..., bool]:
    def found(verbose: bool = False) -> bool:
        return bool(getattr(built, f"{library}_built")())

    found.__name__ = found.__qualname__ = f"{library}_built"
    found.__doc__ = f"Return whether {library} can be used, as ``horovod.torch.{library}_built()`` says."
    return found


mpi_built, gloo_built, nccl_built = map(_built, ("mpi", "gloo", "nccl"))
ddl_built, ccl_built, rocm_built = map(_built, ("ddl", "ccl", "rocm"))


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether a version is at least another, by their release numbers: 2.1.0+cpu and 2.1.0rc1 are 2.1.0."""
    pairs = zip_longest(_release(ver), _release(target), fillvalue=0)
    return next((ours > theirs for ours, theirs in pairs if ours != theirs), True)


def _release(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"a version begins with numbers, as 2.1.0 does; got {version!r}")
    return [int(number) for number in found.group().split(".")]


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for the time of a block; those that are None are left alone."""
    new = {name: value for name, value in kwargs.items() if value is not None}
    old = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(l: Sequence[_T], n: int) -> list[Sequence[_T]]:  # noqa: E741  # Horovod's name
    """Cut a list into ``n`` parts, the first of which are longer by one if it does not come out even."""
    return [l[part] for part in Partition.first_larger(len(l), n).segment]


def is_iterable(x: Any) -> bool:
    """Return whether ``iter`` takes it."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
