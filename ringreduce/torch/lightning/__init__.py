"""A strategy of `lightning.pytorch`: its Trainer on the ranks of MPI and on ringreduce.

    import ringreduce.torch.lightning

    trainer = Trainer(strategy="ringreduce", accelerator="cpu")

    mpirun -np 2 python train.py

Lightning has no entry points for strategies, so that the import registers it. Programs that import `pytorch_lightning`
import `ringreduce.torch.lightning.pytorch_lightning`: the two packages share no classes.
"""

from __future__ import annotations

from typing import Any

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ModuleNotFoundError(
        "ringreduce.torch.lightning needs Lightning, which is not installed: pip install lightning", name="lightning"
    ) from None

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from ringreduce.torch.lightning.ranks import BACKEND, Ranks, RanksStrategy


class RingreduceEnvironment(Ranks, ClusterEnvironment):
    """The ranks of MPI; the strategy brings one. See `Ranks`."""


class RingreduceStrategy(RanksStrategy, DDPStrategy):
    """The strategy ``strategy="ringreduce"``; see `RanksStrategy`. To make it is collective.

    Args:
        options: as for Lightning's DDPStrategy (``find_unused_parameters``, ``static_graph``, ...).
    """

    strategy_name = BACKEND

    def __init__(self, **options: Any) -> None:
        super().__init__(cluster_environment=RingreduceEnvironment(), process_group_backend=BACKEND, **options)


StrategyRegistry.register(
    BACKEND, RingreduceStrategy, description="DDP on ringreduce, with the ranks of MPI", override=True
)
