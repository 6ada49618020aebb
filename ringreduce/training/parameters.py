"""What must agree between the ranks before they train."""

from __future__ import annotations

from collections.abc import Mapping

from ringreduce.errors import name_ranks

__all__ = ["differences"]

_SHOWN = 3


def differences(said: Mapping[int, Mapping[str, str]]) -> str:
    """Return a warning that says which hyper-parameters differ between ranks.

    Args:
        said: for ranks, the hyper-parameters by name.
    """
    different = []
    for name in dict.fromkeys(name for each in said.values() for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in said.items():
            ranks.setdefault(each.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            values = ", ".join(f"{value} on {name_ranks(where)}" for value, where in ranks.items())
            different.append(f"{name} is {values}")
    more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
    return (
        f"the ranks step with different hyper-parameters, and end with different weights: {'; '.join(different[:_SHOWN])}"
        f"{more}. All ranks must change them alike: a schedule that follows the loss, for example, takes the loss averaged "
        "with allreduce"
    )
