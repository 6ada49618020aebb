"""The audit record of a world, as one of its watchers."""

from __future__ import annotations

from ringreduce.audit.run_record import AuditRecord
from ringreduce.observe.watchers import Beginning, WorldWatcher


class Recording(WorldWatcher):
    """Begins and ends the record of the run.

    Attributes:
        record: of this world; None: the settings ask for none.
    """

    def __init__(self) -> None:
        self.record: AuditRecord | None = None

    def begin(self, world: Beginning) -> bool:
        self._values = world.values
        self.record = AuditRecord.of_world(world.config, world.messages, world.library)
        return False

    def refuse(self, what: str, error: BaseException) -> None:
        """Record that something was refused; see `AuditRecord.refuse`."""
        if self.record is not None:
            self.record.refuse(what, error)

    def end(self, error: str | None) -> None:
        """Record that the world ends, and why; the first reason counts."""
        if self.record is not None:
            self.record.end(error, self._values(error is not None))
