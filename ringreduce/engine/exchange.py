"""The exchange of notes between the ranks: what this rank sends, and what is decided for all."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable

from ringreduce.common.call_sites import AbortReason
from ringreduce.common.config import Config
from ringreduce.engine.coordinator import Coordinator, StallWatch
from ringreduce.engine.decisions import Decision, Note
from ringreduce.engine.participant import Participant
from ringreduce.transport.control import ControlChannel

#: The rank that decides for all.
COORDINATOR = 0

# Marshal is many times faster than JSON, for lists, numbers and strings; every Python has this version of its format.
_FORMAT = 2


class Exchange:
    """Passes notes between this rank's participant and the coordinator. Used by one thread at a time.

    Args:
        channel: carries the notes.
        rank, size: of the process set.
        config: the settings.
        clock: in seconds.

    Attributes:
        participant: turns what this rank's program does into notes.
        decisions: what this rank has to do, in order; the user of this removes what it has done.
        followers: the ranks that this one decides for, besides itself.
    """

    def __init__(
        self, channel: ControlChannel, rank: int, size: int, config: Config, clock: Callable[[], float]
    ) -> None:
        coordinates = rank == COORDINATOR
        self.participant = Participant(size, plans=coordinates)
        self.decisions: deque[Decision] = deque()
        self.followers = range(1, size) if coordinates else range(0)
        self._channel = channel
        self._clock = clock
        self._coordinator = Coordinator(size, config.fusion_nbytes) if coordinates else None
        self._stall = StallWatch(config.stall_warning_s, config.timeout_s)

    @property
    def coordinates(self) -> bool:
        """Whether this rank decides for all."""
        return self._coordinator is not None

    def send(self, notes: list[Note]) -> None:
        """Pass notes of this rank's participant to the coordinator."""
        if len(notes) > 1:
            notes = _merged(notes)
        if self._coordinator is None:
            self._channel.post(marshal.dumps(notes, _FORMAT), COORDINATOR)
        else:
            self._receive(COORDINATOR, notes)

    def poll(self) -> bool:
        """Read one message of another rank, if there is one; return whether there was.

        One at a time: the thread that drives may then have what it waits for.
        """
        message = self._channel.poll()
        if message is None:
            return False
        rank, data = message
        notes = marshal.loads(data)
        if self._coordinator is None:
            self._decided(notes)
        else:
            self._receive(rank, notes)
        return True

    def check_timeouts(self, now: float) -> None:
        """Where this rank decides: warn about operations that wait for long, and give up one that has for too long."""
        if self._coordinator is not None:
            late, expired = self._stall.check(self._coordinator.waiting(), now)
            self._announce([self._coordinator.stalled(each, now) for each in late])
            self._announce([self._coordinator.expire(each, now) for each in expired[:1]])  # which ends everything

    def detach(self, why: AbortReason) -> None:
        """Let all ranks know that this one takes part in nothing any more."""
        self.send(self.participant.detach(why))

    def abandon(self) -> None:
        """Leave the channel open, as messages may be under way, and let nobody wait for this rank to close it."""
        self._channel.abandon()

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def _receive(self, rank: int, notes: list[Note]) -> None:
        """Let the coordinator, which is here, decide what follows from the notes of a rank."""
        assert self._coordinator is not None
        now = self._clock()
        decided: list[Note] = []
        for note in notes:
            decided += self._coordinator.receive(rank, note, now)
        if decided:  # as one message: this rank reads and sends nothing more before it has done all of it
            self._announce(decided)

    def _announce(self, notes: list[Note]) -> None:
        """Let all ranks know what the coordinator has decided."""
        if notes and self.followers:
            data = marshal.dumps(notes, _FORMAT)
            for rank in self.followers:
                self._channel.post(data, rank)
        self._decided(notes)

    def _decided(self, notes: list[Note]) -> None:
        for note in notes:
            decision = self.participant.receive(note)
            if decision is not None:
                self.decisions.append(decision)


def _merged(notes: list[Note]) -> list[Note]:
    """Make one note of several in a row that announce known operations."""
    merged: list[Note] = []
    for note in notes:
        if note[0] == "known" and merged and merged[-1][0] == "known":
            merged[-1] = merged[-1] + note[1:]
        else:
            merged.append(note)
    return merged
