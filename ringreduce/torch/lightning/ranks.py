"""The ranks, as `lightning.pytorch` and `pytorch_lightning` ask for them; the two packages share no classes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from ringreduce import runtime
from ringreduce.common.errors import ConfigError
from ringreduce.runtime.blocking import world
from ringreduce.torch.functions import broadcast_parameters
from ringreduce.torch.optimizer import DistributedOptimizer
from ringreduce.training.calls.objects import broadcast_object

BACKEND = "ringreduce"


class Ranks:
    """The ranks of the world, as a cluster environment of Lightning; starts the world if there is none. Collective.

    Numbers that Lightning works out from devices and nodes are ignored: those of MPI count.
    """

    def __init__(self) -> None:
        runtime.init()
        self._address: str = broadcast_object(socket.gethostname())

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        """Rank 0's host."""
        return self._address

    @property
    def main_port(self) -> int:
        """0, as the ranks connect by MPI, and no port is opened."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: Lightning asks only environments that it knows, and the strategy brings this one."""
        return False

    def world_size(self) -> int:
        return runtime.size()

    def set_world_size(self, size: int) -> None:
        """Ignored."""

    def global_rank(self) -> int:
        return runtime.rank()

    def set_global_rank(self, rank: int) -> None:
        """Ignored."""

    def local_rank(self) -> int:
        return runtime.local_rank()

    def node_rank(self) -> int:
        """Return the number of this rank's machine, in the order of their first ranks."""
        hosts = world().hosts
        return hosts.nodes.index(hosts.node_of(runtime.rank()))


class RanksStrategy:
    """What comes before Lightning's DDP strategy: its devices and nodes are those of MPI.

    Lightning's defaults stand for "not said": ``devices="auto"``, which is 1 on CPUs, and ``num_nodes=1``.

    Args:
        shard: as for `DistributedOptimizer`, in which the strategy then wraps the optimizers of the module; None: the
            model is wrapped in DDP. Buffers of the model stay each rank's own.
        options: as for Lightning's DDPStrategy (``find_unused_parameters``, ``static_graph``, ...).

    Attributes:
        environment: the class of the cluster environment.
    """

    strategy_name = BACKEND
    environment: type[Ranks]
    model: Any
    optimizers: list[Any]
    _parallel_devices: list[torch.device] | None

    def __init__(self, shard: Literal["node", "all"] | None = None, **options: Any) -> None:
        self._shard = shard
        environment = self.environment()
        super().__init__(cluster_environment=environment, process_group_backend=BACKEND, **options)  # type: ignore[call-arg]

    def configure_ddp(self) -> None:
        """Wrap the model in DDP, unless the optimizers reduce its gradients."""
        if self._shard is None:
            super().configure_ddp()  # type: ignore[misc]

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers of the module. Collective with ``shard``: then all ranks begin with rank 0's weights."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        if self._shard is not None:
            broadcast_parameters(self.model.state_dict(), root_rank=0)
            # Lightning clips gradients after the backward pass, before it calls `step`.
            self.optimizers = [
                DistributedOptimizer(each, self.model, reduce_in="backward", shard=self._shard)
                for each in self.optimizers
            ]

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Return what the module's step returns, and report its loss; see `ringreduce.report_value`."""
        output = super().training_step(*arguments, **options)  # type: ignore[misc]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            runtime.report_value("loss", loss)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes reduce nothing."""
        with ExitStack() as stack:
            stack.enter_context(super().block_backward_sync())  # type: ignore[misc]
            for each in self.optimizers if self._shard is not None else ():
                stack.enter_context(each.no_sync())
            yield

    # Lightning sets both after it has made the strategy, from the arguments of the Trainer.

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """As many CPUs as this machine has ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = None
        if not devices:
            return  # which the base class sets; Lightning sets them where it finds none
        for device in devices:
            if device.type != "cpu":
                raise ConfigError(
                    f'the strategy "{BACKEND}" takes CPUs alone, got {device}: give the Trainer accelerator="cpu"'
                )
        ranks = runtime.local_size()
        if len(devices) not in (1, ranks):
            raise ConfigError(
                f"the Trainer was given devices={len(devices)}, and MPI has started {ranks} ranks on this machine: "
                "leave devices out"
            )
        self._parallel_devices = [torch.device("cpu")] * ranks

    @property
    def num_nodes(self) -> int:
        """How many machines there are."""
        return len(world().hosts.nodes)

    @num_nodes.setter
    def num_nodes(self, count: int) -> None:
        if count not in (1, self.num_nodes):
            raise ConfigError(
                f"the Trainer was given num_nodes={count}, and MPI has started ranks on {self.num_nodes} machines: "
                "leave num_nodes out"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the data is this rank's; machines may have different numbers of ranks."""
        return {"num_replicas": runtime.size(), "rank": runtime.rank()}
