"""A strategy of `lightning.pytorch`: its Trainer on the ranks of MPI and on ringreduce.

    import ringreduce.torch.lightning

    trainer = Trainer(strategy="ringreduce", accelerator="cpu")

    mpirun -np 2 python train.py

Lightning has no entry points for strategies, so that the import registers it. Programs that import `pytorch_lightning`
import `ringreduce.torch.lightning.pytorch_lightning`: the two packages share no classes.
"""

from __future__ import annotations

from ringreduce.common.libraries import require_library

require_library("lightning", "Lightning", needed_by=__name__, remedy="pip install lightning")

# ruff: noqa: E402  # what follows imports Lightning
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from ringreduce.torch.lightning.ranks import BACKEND, Ranks, RanksStrategy


class RingreduceEnvironment(Ranks, ClusterEnvironment):
    """The ranks of MPI; the strategy brings one. See `Ranks`."""


class RingreduceStrategy(RanksStrategy, DDPStrategy):
    """The strategy ``strategy="ringreduce"``; see `RanksStrategy`. To make it is collective."""

    environment = RingreduceEnvironment


StrategyRegistry.register(
    BACKEND, RingreduceStrategy, description="DDP on ringreduce, with the ranks of MPI", override=True
)
