"""Makes ``torch.distributed.init_process_group("ringreduce")`` work without an import of ringreduce.

Torch calls `register` at ``import torch``, in every program of an environment in which ringreduce is installed; most of
these do not use it. So this is no module of the package, whose import takes NumPy and more: it loads nothing that torch
has not loaded, starts nothing, and never raises. The package itself is imported when a process group is made.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, cast

__all__ = ["register"]

_NAME = "ringreduce"


def register() -> None:
    """Register the backend; does nothing the second time, or where torch cannot do distributed work."""
    try:
        _register()
    except Exception as error:  # or no program here could import torch
        logging.getLogger(__name__).debug("not registered as a backend of torch.distributed: %r", error)


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, _NAME.upper()):
        return
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import register_rendezvous_handler

    register_rendezvous_handler(_NAME, _rendezvous)  # type: ignore[no-untyped-call]
    dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu"])
    # Without a store and an init_method torch looks for MASTER_ADDR and RANK, whatever the backend; only its own MPI
    # backend is spared. The ranks of this one know each other already. `ringreduce run` hears who looks for others.
    dist.init_process_group = distributed_c10d.init_process_group = _knowing_its_ranks(dist.init_process_group)
    # This one asks for Gloo by name.
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _for_ours_too(dist.monitored_barrier)


def _knowing_its_ranks(init: Callable[..., None]) -> Callable[..., None]:
    """Return ``init_process_group`` with this backend's rendezvous as the default for this backend."""
    import torch.distributed as dist

    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_process_group(*arguments: Any, **options: Any) -> None:
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError:
            return init(*arguments, **options)  # which says what is wrong
        given = bound.arguments
        unnamed = not {"backend", "init_method", "store"} & {name for name, value in given.items() if value is not None}
        if unnamed and not _has_own_variables() and _is_launched():
            given["backend"] = _NAME  # nothing else finds the ranks of mpirun without those variables
        ours = _NAME in str(given.get("backend")).lower().replace(",", ":").split(":")
        if given.get("init_method") is None and given.get("store") is None:
            if ours:
                given["init_method"] = f"{_NAME}://"
            elif given.get("backend") is not None and given.get("rank", -1) < 0 and _is_launched():
                _require_known(str(given["backend"]), [each.lower() for each in dist.Backend.backend_list])
        init(*bound.args, **bound.kwargs)
        if os.environ.get("RINGREDUCE_MESSAGES"):
            from ringreduce.common.launch import report_begin

            report_begin()
        return None

    return init_process_group


def _has_own_variables() -> bool:
    """Return whether the program, or its user, has set torch's variables for ranks, and not `ringreduce run`."""
    if "RINGREDUCE_MASTER_ADDR" not in os.environ:
        return not {"RANK", "MASTER_ADDR"}.isdisjoint(os.environ)
    names = ("MASTER_ADDR", "MASTER_PORT")
    return any(os.environ.get(name) not in (None, os.environ.get(f"RINGREDUCE_{name}")) for name in names)


def _require_known(backend: str, known: list[str]) -> None:
    """Raise a `ConfigError` if a backend is unknown, or finds ranks by variables that are not set.

    Args:
        backend: as it was given, such as ``gloo`` or ``cpu:gloo,cuda:nccl``.
        known: the names of all backends.
    """
    from ringreduce.common.errors import ConfigError

    names = [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"init_process_group({backend!r}): torch.distributed has no backend {name!r}; "
                + (f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}")
            )
    if "mpi" not in names and not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise ConfigError(
            f"init_process_group({backend!r}): {backend} finds its ranks by RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT, which mpirun does not set, and `ringreduce run` only without --encrypt and "
            f"--no-rank-variables, until a rank fails; use init_process_group({_NAME!r}) here, or start the program by "
            "torchrun"
        )


def _is_launched() -> bool:
    """Return whether a launcher of MPI programs has started this process."""
    from ringreduce.common.launch import launch

    return launch().size is not None


def _for_ours_too(monitored_barrier: Callable[..., None]) -> Callable[..., None]:
    """Return ``monitored_barrier`` for groups of this backend, and what it was for others."""
    signature = inspect.signature(monitored_barrier)

    @functools.wraps(monitored_barrier)
    def monitored_barrier_of_any(*arguments: Any, **options: Any) -> None:
        import torch
        import torch.distributed as dist

        bound = signature.bind(*arguments, **options)
        group, timeout = bound.arguments.get("group") or dist.group.WORLD, bound.arguments.get("timeout")
        ours = None
        with contextlib.suppress(AttributeError, RuntimeError):  # this rank is no member; no backend is for the CPU
            ours = cast("Any", group)._get_backend(torch.device("cpu"))
        if ours is not None and ours.name() == _NAME:
            ours.monitored_barrier(timeout)
        else:
            monitored_barrier(*arguments, **options)

    return monitored_barrier_of_any


def _rendezvous(url: str, **options: Any) -> Iterator[Any]:
    from ringreduce.torch.distributed import process_group

    return process_group.rendezvous(url)


def _create(options: Any, backend_options: Any = None) -> Any:
    from ringreduce.torch.distributed import process_group

    return process_group.create(options)
