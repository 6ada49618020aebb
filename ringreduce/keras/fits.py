"""What the ranks agree on in a `Model.fit`: with which epoch it begins, and that it ends on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.common.errors import MismatchError
from ringreduce.common.reduce_ops import SUM
from ringreduce.keras.backends import as_numpy
from ringreduce.runtime.blocking import world
from ringreduce.training.binding.keras_private import passes_made
from ringreduce.training.calls.requests import RequestBuilder


def passes_of(model: Any) -> int:
    """Return how many passes the optimizer of a model has made."""
    optimizer = model.optimizer
    return int(as_numpy(passes_made(getattr(optimizer, "inner_optimizer", optimizer))))


def differs_anywhere(differs: bool) -> bool:
    """Return whether something holds on any rank. Collective."""
    return bool(world().allgather(np.array([differs])).any())


def began_alike(epoch: int) -> None:
    """Raise `MismatchError` on all ranks if `fit` begins with another epoch on some. Collective."""
    epochs = world().allgather(np.array([epoch])).tolist()
    if len(set(epochs)) > 1:
        raise MismatchError(
            {rank: f"fit() begins with epoch {epoch}" for rank, epoch in enumerate(epochs)},
            advice="if a BackupAndRestore of some ranks has set the epoch, let it stand before "
            "BroadcastGlobalVariablesCallback in the list of callbacks: all ranks then go on from the backup",
        )


def end_together(model: Any, place: tuple[int, int], logs: Any) -> None:
    """Return if all ranks end `fit` now; if others go on, all raise `MismatchError`. Collective.

    Ranks that have joined are done. Where the optimizer reduces no gradients, each rank ends as it likes.

    Args:
        model: that is trained.
        place: the epoch, and the last batch that is done; it and the metrics may differ between ranks.
        logs: the metrics.
    """
    distribution = getattr(model.optimizer, "distribution", None)
    if distribution is None or not distribution.process_set.included() or distribution.process_set.size() == 1:
        return
    epoch, batch = place
    loss = (logs or {}).get("loss")
    reason = f"the end of fit() after batch {batch} of epoch {epoch}: a callback has set model.stop_training"
    if loss is not None and not np.isfinite(as_numpy(loss)).all():
        reason += f", and the loss is {float(as_numpy(loss))}"
    arrays = [np.zeros(1)]
    with RequestBuilder("fit", "the end of fit", distribution.process_set, title=reason) as prepare:
        request = prepare.allreduce(arrays, arrays, SUM, 1.0, 1.0)  # A reduction, as ranks may have joined.
    request.carry_out()
