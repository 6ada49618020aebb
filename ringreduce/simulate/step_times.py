"""The time of a training step: computation, the exchange of gradients, and ranks that are late.

A rank ends the computation of a step, and waits for the exchange of that step, or of the one ``staleness`` steps
before. An exchange begins when all ranks have ended their computation and the one before has ended; with overlap, its
buckets begin during the backward pass, when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringreduce.common.config import Config
from ringreduce.common.quantities import format_nbytes, format_seconds, parse_nbytes, parse_seconds
from ringreduce.common.settings import WholeNumber, option, switch
from ringreduce.simulate.cluster import Cluster

#: Of the computation of a step, what the backward pass takes: twice the forward pass.
_BACKWARD = 2 / 3
#: Exchanges that are simulated, the first of which are not counted.
_EXCHANGES = 60
_SKIPPED = 20
_BUCKET = Config().bucket_nbytes


@dataclass(frozen=True)
class SimulatedTraining:
    """What a rank does in a step.

    Attributes:
        compute_s: forward and backward pass of a rank.
        update_s: the optimizer's step, on all parameters.
        nbytes: of the gradients.
        bucket_nbytes: of a bucket, where buckets overlap with the backward pass.
        overlap: whether they do.
        period: steps from one exchange to the next.
        staleness: steps after which the averages of a step are used.
        shard: whether the ranks of a node share the update.
    """

    compute_s: float = option("--compute", parse_seconds, None, "Forward and backward pass of a step of a training.")
    nbytes: int = option("--gradients", parse_nbytes, None, "Their size; takes K, M, G.")
    update_s: float = option("--update", parse_seconds, 0.0, "The optimizer's step.", unset="0s")
    bucket_nbytes: int = option("--bucket", parse_nbytes, _BUCKET, "Size of a bucket.", unset=f"{_BUCKET >> 20}M")
    overlap: bool = option("--overlap", switch, False, "Reduce buckets during the backward pass.")
    period: int = option("--period", WholeNumber(1), 1, "Steps from one exchange to the next.")
    staleness: int = option("--staleness", WholeNumber(0), 0, "Steps after which averages are used.")
    shard: bool = option("--shard", switch, False, "The ranks of a node share the update.")

    def describe(self) -> str:
        """Say it in one line."""
        said = {f"steps of {format_seconds(self.compute_s)}, gradients of {format_nbytes(self.nbytes)}": True}
        said |= {f"update {format_seconds(self.update_s)}": bool(self.update_s), "shared by a node": self.shard}
        said |= {f"buckets of {format_nbytes(self.bucket_nbytes)} overlap": self.overlap}
        said |= {f"period {self.period}": self.period > 1, f"staleness {self.staleness}": self.staleness > 0}
        return ", ".join(text for text, holds in said.items() if holds)


@dataclass(frozen=True)
class StepTimes:
    """What a step takes.

    Attributes:
        seconds: of a step, on average.
        own_s: what it takes of a rank that is alone and never late.
        exchange_s: of one exchange, if all ranks begin it together.
    """

    seconds: float
    own_s: float
    exchange_s: float

    @property
    def efficiency(self) -> float:
        """Samples per second, as a share of what so many ranks would do that never wait."""
        return self.own_s / self.seconds if self.seconds else 1.0


def simulate_step(training: SimulatedTraining, cluster: Cluster, exchange: Callable[[int], float]) -> StepTimes:
    """Return what a step of a training takes.

    Args:
        training: what each rank does.
        cluster: the ranks, and how late they are.
        exchange: returns the seconds that an allreduce of so many bytes takes.
    """
    topology = cluster.topology
    update_s = training.update_s / (topology.lanes if training.shard else 1)
    exchange_s = exchange(training.nbytes)
    waits_s = _exposed(training, exchange) if training.overlap and not training.staleness else exchange_s
    random = np.random.default_rng(1)
    ends = np.zeros(topology.size)
    available: dict[int, float] = {}
    last = 0.0
    begun = 0.0
    for step in range(_EXCHANGES * training.period):
        if step == _SKIPPED * training.period:
            begun = float(ends.max())
        ends = ends + training.compute_s + cluster.delays(random)
        if (step + 1) % training.period == 0:
            last = available[step + training.staleness] = max(float(ends.max()), last) + waits_s
        if step in available:
            ends = np.maximum(ends, available.pop(step))
        ends += update_s
    seconds = (float(ends.max()) - begun) / ((_EXCHANGES - _SKIPPED) * training.period)
    return StepTimes(seconds, training.compute_s + update_s, exchange_s)


def _exposed(training: SimulatedTraining, exchange: Callable[[int], float]) -> float:
    """Return by how much the last bucket is reduced after the end of the backward pass."""
    count = -(-training.nbytes // training.bucket_nbytes)
    sizes = np.diff([min(training.nbytes, each * training.bucket_nbytes) for each in range(count + 1)]).tolist()
    end = -np.inf
    done = 0
    for nbytes in sizes:
        done += nbytes
        complete = -training.compute_s * _BACKWARD * (1 - done / training.nbytes)
        end = max(end, complete) + exchange(nbytes)
    return float(end)
