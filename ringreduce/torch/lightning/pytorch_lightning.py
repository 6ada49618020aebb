"""A strategy of `pytorch_lightning`: its Trainer on the ranks of MPI and on ringreduce.

    import ringreduce.torch.lightning.pytorch_lightning

    trainer = Trainer(strategy="ringreduce", accelerator="cpu")

    mpirun -np 2 python train.py

As `ringreduce.torch.lightning`, for programs that import Lightning by its older name.
"""

from __future__ import annotations

from ringreduce.common.libraries import require_library

require_library("pytorch_lightning", "Lightning", needed_by=__name__, remedy="pip install pytorch-lightning")

# ruff: noqa: E402  # what follows imports Lightning
from lightning_fabric.plugins import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

from ringreduce.torch.lightning.ranks import BACKEND, Ranks, RanksStrategy


class RingreduceEnvironment(Ranks, ClusterEnvironment):
    """The ranks of MPI; the strategy brings one. See `Ranks`."""


class RingreduceStrategy(RanksStrategy, DDPStrategy):
    """The strategy ``strategy="ringreduce"``; see `RanksStrategy`. To make it is collective."""

    environment = RingreduceEnvironment


StrategyRegistry.register(
    BACKEND, RingreduceStrategy, description="DDP on ringreduce, with the ranks of MPI", override=True
)
