"""Silent errors made loud: weights that differ between ranks, gradients that are no numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError, NotFiniteError, name_ranks
from ringreduce.training.framework import Parameters

__all__ = ["Checks"]


class _Ranks(Protocol):
    def allgather(self, rows: Any) -> Any: ...


class Checks:
    """What the settings ask to be looked at every so many steps, before the gradients are reduced.

    Args:
        framework: the parameters'.
        ranks: whose allgather tells all ranks what each has found.
        named: returns names and parameters, the same ones on all ranks.
        described: the optimizer, for errors.
        config: the settings.
    """

    def __init__(
        self,
        framework: Parameters,
        ranks: _Ranks,
        named: Callable[[], Sequence[tuple[str, Any]]],
        described: str,
        config: Config,
    ) -> None:
        self._framework, self._ranks, self._named, self._described = framework, ranks, named, described
        self._weights_every, self._finite_every = config.check_weights_every, config.check_finite_every

    @property
    def needs_own_gradients(self) -> bool:
        """Whether gradients must be this rank's own until they are looked at: none is reduced in the backward pass."""
        return self._finite_every is not None

    def look(self, step: int) -> None:
        """Look at what is due before a step. Collective.

        Args:
            step: how many came before it; the same on all ranks.

        Raises:
            MismatchError: on all ranks, if weights differ between them.
            NotFiniteError: on all ranks, if a gradient of any of them holds NaN or infinity.
        """
        if self._weights_every is not None and step % self._weights_every == 0:
            self._compare(step)
        if self._finite_every is not None and step % self._finite_every == 0:
            self._require_finite(step)

    def _compare(self, step: int) -> None:
        named = self._named()
        mine = np.array([[self._framework.checksum([parameter]) for _, parameter in named]], np.int64)
        everyone: npt.NDArray[np.int64] = self._ranks.allgather(mine)
        differing = np.flatnonzero((everyone != everyone[0]).any(axis=0))
        if differing.size:
            name, sums = named[differing[0]][0], everyone[:, differing[0]].tolist()
            usual, times = Counter(sums).most_common(1)[0]
            text = f"before step {step} of {self._described}, the values of {name} have the checksum"
            said = {
                rank: f"{text} {each:08x}" + " (unlike most)" * (each != usual and times > len(sums) / 2)
                for rank, each in enumerate(sums)
            }
            raise MismatchError(said)

    def _require_finite(self, step: int) -> None:
        named = self._named()
        gradients = ((number, self._framework.gradient(parameter)) for number, (_, parameter) in enumerate(named))
        wrong = [n for n, gradient in gradients if gradient is not None and not self._framework.is_finite(gradient)]
        everyone = self._ranks.allgather(np.array([[wrong[0] if wrong else -1]], np.int64))[:, 0].tolist()
        found = [(number, rank) for rank, number in enumerate(everyone) if number >= 0]
        if found:
            first = min(found)[0]
            ranks = [rank for number, rank in found if number == first]
            raise NotFiniteError(
                f"the gradient of {named[first][0]} holds NaN or infinity on {name_ranks(ranks)}, before it was "
                f"reduced for step {step} of {self._described}"
            )
