"""A strategy of `pytorch_lightning`: its Trainer on the ranks of MPI and on ringreduce.

    import ringreduce.torch.lightning.pytorch_lightning

    trainer = Trainer(strategy="ringreduce", accelerator="cpu")

    mpirun -np 2 python train.py

As `ringreduce.torch.lightning`, for programs that import Lightning by its older name.
"""

from __future__ import annotations

from typing import Any

try:
    import pytorch_lightning  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "pytorch_lightning":
        raise
    raise ModuleNotFoundError(
        "ringreduce.torch.lightning.pytorch_lightning needs Lightning, which is not installed: "
        "pip install pytorch-lightning",
        name="pytorch_lightning",
    ) from None

from lightning_fabric.plugins import ClusterEnvironment
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry

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
