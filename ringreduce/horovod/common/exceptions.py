"""The exceptions that Horovod scripts catch."""

from __future__ import annotations

from ringreduce.errors import CollectiveError as HorovodInternalError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """The ranks of an elastic job change; not a failure.

    Attributes:
        skip_sync: whether the ranks that stay hold the same state still, because there are only removals.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
