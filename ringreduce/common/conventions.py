"""Where the chain rule's numbers differ from those that Horovod's scripts were tuned to: the one place that decides.

P is the number of ranks of the process set.

| what                                        | CHAIN_RULE                   | HOROVOD                             |
|---------------------------------------------|------------------------------|-------------------------------------|
| gradient through allgather and broadcast    | the ranks' sum               | the ranks' average: 1/P of that     |
| gradient through reducescatter              | what the ranks have (1)      | P times that                        |
| average once ranks have joined              | over the other ranks         | over all, the joined count as 0     |
| gradients after `broadcast_optimizer_state` | as they were                 | zeros, if the optimizer had no state |
| gradients of parameters that no rank used  | None, as on one rank         | zeros                               |
| integers averaged with a `postscale_factor` | averages, truncated, times it | sums times (factor / P), truncated (2) |
| rows of one index in allreduced slices      | one: their sum or average    | all; averages of integers float (3)  |
| averages of metrics in Keras's callback     | over all samples             | over the ranks                       |

(1) gathered; of an average, over P.
(2) so sums that do not fit their dtype wrap around.
(3) `tf.IndexedSlices`. What tapes and optimizers reduce has one in both.

All else is the same in both: gradients through allreduce and alltoall; and ranks that have joined count for nothing in
sums, products, minima and maxima.
"""

from __future__ import annotations

import enum

from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp


class Conventions(str, enum.Enum):  # Members are strings in JSON.
    """Whose numbers come out; the table is in the module's docstring."""

    CHAIN_RULE = "chain_rule"
    HOROVOD = "horovod"

    @classmethod
    def parse(cls, conventions: Conventions | str) -> Conventions:
        """Return ``conventions`` themselves, or those of that name.

        Raises:
            ConfigError: there are none of that name.
        """
        try:
            return cls(conventions)
        except ValueError:
            names = " or ".join(member.value for member in cls)
            raise ConfigError(f"conventions are {names}, got {conventions!r}") from None

    @property
    def gradient_op(self) -> ReduceOp:
        """How the ranks' gradients of what was gathered or broadcast become one."""
        return AVERAGE if self is Conventions.HOROVOD else SUM

    def scattered_gradient_factor(self, size: int) -> int:
        """By what to multiply the gradient of what ``size`` ranks have reduced and scattered."""
        return size if self is Conventions.HOROVOD else 1

    def averaged_over(self, active: int, size: int) -> int:
        """Return over how many ranks averages are, when ``active`` of ``size`` have not joined."""
        return size if self is Conventions.HOROVOD else active

    @property
    def zeroes_unused(self) -> bool:
        """Whether a step gives zeros as gradients to parameters that no rank used, so that weight decay moves them."""
        return self is Conventions.HOROVOD

    def scaled_average(self, postscale: float, size: int) -> tuple[ReduceOp, float]:
        """Return the op and the factor that make scaled averages of integers over ``size`` ranks."""
        return (SUM, postscale / size) if self is Conventions.HOROVOD else (AVERAGE, postscale)

    @property
    def adds_up_slices(self) -> bool:
        """Whether an allreduce of slices adds up rows of equal index."""
        return self is Conventions.CHAIN_RULE

    @property
    def weights_metrics(self) -> bool:
        """Whether averages of metrics are over the samples of all ranks, in place of the ranks' own averages."""
        return self is Conventions.CHAIN_RULE

    @property
    def broadcast_state_zeroes_gradients(self) -> bool:
        """Whether `broadcast_optimizer_state` leaves zeros as gradients where an optimizer has no state."""
        return self is Conventions.HOROVOD
