"""The binding of torch."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from trainees.toy import RATE

import ringreduce.torch as hvd


class Torch:
    """See `suites.trainees.Trainee`.

    Args:
        values: weights by name.
        momentum: of the steps.
        passes: as ``backward_passes_per_step``.
        compression: one of torch's, or its name.
        **options: of what wraps.
    """

    wrap: Any = hvd.DistributedOptimizer

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        momentum: float = 0.0,
        passes: int = 1,
        compression: Any = hvd.Compression.none,
        **options: Any,
    ) -> None:
        pairs = [(name, torch.from_numpy(np.copy(value))) for name, value in values.items()]
        self.model = torch.nn.ParameterDict(pairs)  # in this order, while those of a dict are sorted
        sgd = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=momentum)
        if isinstance(compression, str):
            compression = getattr(hvd.Compression, compression)
        if passes != 1:
            options["backward_passes_per_step"] = passes
        self.optimizer = self.wrap(sgd, self.model, compression=compression, **options)

    def weights(self) -> list[Any]:
        return [weight.detach().numpy() for weight in self.model.values()]

    def give(self, gradients: Mapping[str, Any]) -> None:
        sum((self.model[name] * torch.tensor(each)).sum() for name, each in gradients.items()).backward()

    def step(self, samples: Any = None) -> None:
        self.optimizer.step(**({} if samples is None else {"samples": samples}))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def synchronize(self) -> None:
        self.optimizer.synchronize()

    def no_sync(self) -> Any:
        return self.optimizer.no_sync()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class LocalTorch(Torch):
    """See `suites.local_training.LocalTrainee`."""

    wrap = hvd.DiLoCo

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it as a checkpoint does that may hold tensors and numbers alone."""
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        super().load_state_dict(torch.load(file, weights_only=True))

    def rejoin(self) -> None:
        self.optimizer.rejoin()
