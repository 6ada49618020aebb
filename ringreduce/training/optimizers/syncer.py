"""The syncer of DiLoCo with a quorum, a thread of one rank; see `ringreduce.training.optimizers.quorum`.

It receives the replicas' differences, makes the outer steps, and sends the weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.send_recv import PendingMessage
from ringreduce.common.errors import RingReduceError
from ringreduce.training.optimizers.local import Flat
from ringreduce.training.optimizers.outer_steps import Differences, OuterSteps, Wanted
from ringreduce.transport.array_notes import OWN_TAGS

#: In place of the number of outer steps.
FAILED = -1

_AT_ONCE = 0.5  # of the time of a step: a replica that is late by less gets weights at once
_GRACE = 0.1  # of the time since the last step, for replicas that are expected
_MOST_GRACE = 0.25  # of the time limit
_NAP_S = 1e-3  # between two looks for messages, which have nothing to sleep on


class Tags(NamedTuple):
    """The tags of differences to the syncer, of weights from it or a first rank, and of buffers to a first rank."""

    differences: int
    weights: int
    buffers: int


class TagCount:
    """How many optimizers there were in a world; equal on all ranks."""

    def __init__(self) -> None:
        self._trainings = 0

    def next_tags(self) -> Tags:
        """Return tags that no other optimizer has."""
        self._trainings += 1
        return Tags(*(OWN_TAGS + 3 * self._trainings + place for place in range(3)))


class _Incoming:
    """What a replica sends next, as it comes.

    Args:
        communicator: of all ranks.
        replica: its number.
        source: its first rank.
        like: arrays of the lengths and dtypes of its differences.
        tag: of its messages.
    """

    def __init__(self, communicator: Communicator, replica: int, source: int, like: Sequence[Flat], tag: int) -> None:
        self._replica = replica
        self._like = like
        self._receive = partial(communicator.irecv, source=source, tag=tag)
        self._head = np.zeros(2, np.int64)
        self._values: list[Flat] = []
        self._coming = [self._receive(self._head)]

    def poll(self) -> Differences | None:
        """Return differences that have come."""
        if not all(message.test() for message in self._coming):
            return None
        for message in self._coming:
            message.wait()
        since, wanted = self._head.tolist()
        count = len(self._like)
        if not self._values:
            self._values = [
                np.empty_like(each) for each in (*self._like, *(self._like if Wanted.LOADED & wanted else ()))
            ]
            self._coming = list(map(self._receive, self._values))
            if self._coming:
                return None
        come = Differences(self._replica, since, Wanted(wanted), self._values[:count], self._values[count:])
        self._values = []
        self._coming = [self._receive(self._head)]
        return come


class Syncer:
    """Keeps the weights that replicas agree on, in a thread of its rank.

    Args:
        communicator: of all ranks.
        leaders: the first rank of each replica; the first of them is this rank.
        steps: the weights, which belong to this from now on.
        tags: of the messages.

    Attributes:
        steps: as above.
    """

    def __init__(self, communicator: Communicator, leaders: Sequence[int], steps: OuterSteps, tags: Tags) -> None:
        self._communicator = communicator
        self._leaders = leaders
        self.steps = steps
        self._tags = tags
        self._changed = threading.Condition()
        self._gathered: dict[int, Differences] = {}  # for a step of all replicas
        self._answer: tuple[int, Sequence[Flat]] | None = None  # to the replica of this rank
        self._error: Exception | None = None
        self._over = False
        self._began = time.monotonic()  # when replicas got the weights of the last step
        self._took_s = 0.0  # from one step to the next
        self._deadline: float | None = None  # when to make the next step, even if expected replicas are missing
        self._thread = threading.Thread(target=self._work, name="ringreduce outer steps", daemon=True)
        self._thread.start()

    def exchange(self, differences: Differences) -> tuple[int, Sequence[Flat]]:
        """Take the difference of this rank's replica; return how many outer steps there are, and their weights."""
        messages = self._communicator.point_to_point
        assert messages is not None
        with self._changed:
            self._answer = None
            self._take(differences)
            self._changed.notify()
        messages.waiter.until(self._outcome, lambda: "other replicas")
        outcome = self._outcome()
        if isinstance(outcome, Exception):
            raise outcome
        assert outcome is not None
        return outcome

    def go_on_from(self, steps: OuterSteps) -> None:
        """Keep other weights, and forget what has come for the old ones."""
        with self._changed:
            self.steps = steps
            self._begin()

    def stop(self) -> None:
        """Let the thread end."""
        self._over = True

    def end(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.join()

    def _outcome(self) -> tuple[int, Sequence[Flat]] | Exception | None:
        return self._error or self._answer

    def _work(self) -> None:
        try:
            incoming = [
                _Incoming(self._communicator, replica, leader, self.steps.weights, self._tags.differences)
                for replica, leader in enumerate(self._leaders[1:], 1)
            ]
            while not self._over and self._communicator.lifetime.open:
                come = [differences for each in incoming if (differences := each.poll()) is not None]
                with self._changed:
                    for differences in come:
                        self._take(differences)
                    if not (self._make_if_due() or come):
                        self._changed.wait(_NAP_S)
        except Exception as error:
            self._error = error
            for leader in self._leaders[1:]:
                with suppress(RingReduceError):  # They may have failed, too.
                    self._communicator.isend(np.array([FAILED]), leader, self._tags.weights)

    def _take(self, differences: Differences) -> None:
        steps = self.steps
        loaded = any(Wanted.LOADED in each.wanted for each in (*self._gathered.values(), differences))
        if loaded:
            self._gathered |= {each.replica: each for each in steps.forget()}
        if loaded or Wanted.AVERAGE in differences.wanted:
            self._gathered[differences.replica] = differences
        elif not steps.take(differences) and time.monotonic() - self._began < _AT_ONCE * self._took_s:
            self._answer_to([differences.replica])
        if len(self._gathered) == len(self._leaders):
            steps.make_of_all([self._gathered[replica] for replica in range(len(self._leaders))])
            self._gathered = {}
            self._answer_to(range(len(self._leaders)))
            self._begin()
        elif not steps.possible(absent=len(self._gathered)):
            self._answer_to(steps.waiting)  # The step of all is the next.

    def _make_if_due(self) -> bool:
        if not self.steps.complete:
            return False
        now = time.monotonic()
        if self._deadline is None:
            most_s = _MOST_GRACE * self._communicator.config.timeout_s
            self._deadline = now + min(_GRACE * (now - self._began), most_s)
        if now < self._deadline and not self.steps.all_here:
            return False
        waiting = self.steps.waiting
        self.steps.make()
        self._answer_to(waiting)
        self._took_s = now - self._began
        self._begin()
        return True

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._deadline = None

    def _answer_to(self, replicas: Iterable[int]) -> None:
        answer = self.steps.count, list(self.steps.weights)
        for replica in list(replicas):
            self.steps.waiting.discard(replica)
            if replica == 0:
                self._answer = answer
            else:
                send_all(self._communicator, answer, self._leaders[replica], self._tags.weights)


def send_all(
    communicator: Communicator, answer: tuple[int, Sequence[Flat]], rank: int, tag: int
) -> list[PendingMessage]:
    """Begin to send a rank the number of outer steps and weights."""
    count, weights = answer
    arrays = [np.array([count]), *weights]
    return [communicator.isend(each, rank, tag) for each in arrays]
