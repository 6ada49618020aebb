"""The backend of `torch.distributed`: what its process groups call, on a `Group`.

A group of torch's is a `Group`: its collectives run in the order of the program, on this thread where the program waits
for them and nothing is before them, else on one thread of the group. Torch has two ways for a backend that is written
in Python: a `ProcessGroup` that replaces torch's own, in all versions; and a `Backend` (torch 2.15) that torch's
own calls, beside others for other devices. The latter passes less of a work on: neither whether it is done, nor who has
sent a message. So it is taken for groups with other backends alone. `Collectives` is what both call, and knows neither.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from ringreduce import runtime
from ringreduce.common.config import accelerate_uses_cpus, find_ranks_of_cpus
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import launch
from ringreduce.runtime.blocking import world
from ringreduce.runtime.groups import Group
from ringreduce.torch.distributed import collectives, works
from ringreduce.torch.distributed.collectives import NAME, Collectives, open_groups
from ringreduce.torch.distributed.works import seconds
from ringreduce.torch.distributed.world_store import WorldStore
from ringreduce.torch.private import accelerate_state, backend_class, is_open_group
from ringreduce.torch.uncompiled import leave_uncompiled
from ringreduce.training.calls.objects import broadcast_object

if TYPE_CHECKING:  # which has other signatures than torch calls
    _Base = object
else:
    _Base = dist.ProcessGroup

_stores: Any = dist  # which has them, though not in its types

_KIND = "custom"  # torch's word for all backends but its own

#: Where the ranks of one machine keep torch's store; removed with the world.
_folders: list[tempfile.TemporaryDirectory[str]] = []


# ---- how groups come into being ----


def rendezvous(url: str) -> Iterator[tuple[Any, int, int]]:
    """Find the other ranks: those of the world, which is started if there is none. Collective.

    Yields:
        A store that all ranks share, for what torch and other backends put there, this rank, and how many there are.
    """
    runtime.init()
    query = dict(parse_qsl(urlsplit(url).query))
    for name, mine in ("rank", runtime.rank()), ("world_size", runtime.size()):
        given = query.get(name, str(mine))
        if given != str(mine):
            raise ConfigError(
                f"init_process_group was given {name}={given}, and MPI says {mine}; leave it out with this backend"
            )
    yield _store(), runtime.rank(), runtime.size()


def _store() -> Any:
    """Return a store that all ranks of the world reach. Collective."""
    size = runtime.size()
    if size == 1:
        return _stores.HashStore()
    if _is_on_one_host():
        if runtime.rank() == 0:
            _folders.append(tempfile.TemporaryDirectory(prefix="ringreduce-", dir=launch().job_folder))
            # Not before all ranks have come to the end: torch's store waits for minutes for a folder that goes as it
            # ends itself.
            runtime.when_shut_down(_folders[-1].cleanup)
        where = broadcast_object(f"{_folders[-1].name}/store" if runtime.rank() == 0 else "")
        return _stores.FileStore(where, size)
    messages, lifetime = runtime.transport()
    if messages.concurrent:
        return WorldStore(messages, lifetime)
    messages.close()
    if runtime.config().key_file is not None:
        raise ConfigError(
            "RINGREDUCE_KEY_FILE is set, and torch's store would listen and ask nobody for a password: the MPI library"
            " takes calls of one thread at a time only; use one with MPI_THREAD_MULTIPLE"
        )
    return _listening_store(size)


def _is_on_one_host() -> bool:
    return runtime.local_size() == runtime.size() or len(world().hosts.nodes) == 1


def _listening_store(size: int) -> Any:
    """Return torch's own store: where threads may not call MPI at the same time, none can answer for rank 0.

    It listens on the address by which the other hosts know rank 0's, and not on all. Its keys begin with a random text.
    """
    server = None
    place = ("", 0, "")
    if runtime.rank() == 0:
        host = socket.gethostname()
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        server = _stores.TCPStore(
            host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        place = host, port, secrets.token_hex(16)
    host, port, prefix = broadcast_object(place)
    store = server or _stores.TCPStore(host, port, size, is_master=False, wait_for_workers=False)
    return _stores.PrefixStore(prefix, store)


def create(options: Any) -> Any:
    """Make this rank's part of a group. Collective over its members.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        ConfigError: MPI does not connect the ranks, or counts them in another way.
    """
    runtime.init()
    # Torch's default limit means none was given: then the settings say how long to wait.
    default = dist.distributed_c10d.default_pg_timeout
    timeout_s = None if options.timeout == default else seconds(options.timeout)
    ranks = list(options.global_ranks_in_group) or list(range(runtime.size()))
    mine = ranks.index(runtime.rank()) if runtime.rank() in ranks else -1
    if (options.group_rank, options.group_size) != (mine, len(ranks)):
        raise ConfigError(
            f"torch takes this process for rank {options.group_rank} of {options.group_size} in the group of ranks "
            f"{ranks}, and MPI for rank {mine} of {len(ranks)}: leave rank and world_size out of init_process_group"
        )
    if len(ranks) > 1:
        if not torch.cuda.is_available():
            find_ranks_of_cpus()
        _warn_if_accelerate_is_alone()
    group = runtime.group(ranks, timeout_s)
    made = _backend(group, options) if _has_others(options) else _ProcessGroup(group)
    made.timeout = options.timeout
    open_groups.add(made)
    return made


def _warn_if_accelerate_is_alone() -> None:
    """Warn if Accelerate has taken, or will take, each rank for the only one."""
    state = accelerate_state()
    if state is None:
        return
    if state.get("num_processes") == 1:
        remedy = "call init_process_group before Accelerator() or TrainingArguments are made"
    elif state and "num_processes" not in state and state.get("backend") is None:  # it makes this group, and drops it
        remedy = "torch sees no GPU: say Accelerator(cpu=True), or use_cpu=True, or set ACCELERATE_USE_CPU=true"
    elif torch.cuda.is_available() and not state and not accelerate_uses_cpus():
        remedy = "torch sees a GPU, which this backend does not use: say Accelerator(cpu=True), or use_cpu=True"
    else:
        return
    warnings.warn(f"with Accelerate each rank would train alone: {remedy}", stacklevel=2)


def _has_others(options: Any) -> bool:
    """Return whether the process group has backends for other devices, as with ``cpu:ringreduce,cuda:nccl``."""
    whole = getattr(options, "process_group", None)  # since torch 2.15
    return whole is not None and whole.name() != _KIND


# ---- in place of torch's ProcessGroup, or as a Backend of it ----


class _ProcessGroup(Collectives, _Base):
    """A process group of torch's, and the only backend that it has."""

    def __init__(self, group: Group) -> None:
        dist.ProcessGroup.__init__(self, group.rank, group.size)  # type: ignore[arg-type, call-arg]
        self._group = group
        self._name = self._description = ""

    # Those of the base class ask a backend, and this group has none but itself.

    def _get_backend(self, device: torch.device) -> _ProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        # While it makes a group, torch 2.15 takes devices for a sign of backends that its flight recorder can watch.
        return [torch.device("cpu")] if is_open_group(self) else []

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)


def _backend(group: Group, options: Any) -> Any:
    """Return a backend for a process group of torch's; the class is made where torch allows it."""
    base: Any = backend_class()

    class _Backend(Collectives, base):  # type: ignore[misc]
        def __init__(self) -> None:
            base.__init__(self, group.rank, group.size)
            self._group = group
            self._options = base.Options(NAME, timeout=options.timeout)
            self._options.global_ranks_in_group = group.ranks
            self._options.group_name = options.group_id

        @property
        def options(self) -> Any:
            return self._options

    return _Backend()


# Torch's C++ calls them, for example for DDP, from functions that are being compiled, too.
leave_uncompiled(works, collectives, _ProcessGroup)
