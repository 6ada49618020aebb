"""What the random trainings of all frameworks share: draws, the comparison with one process, and how a job ends."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import subprocess
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from trainings import OF_JOBS

PRIVATE = MPI.COMM_WORLD.Dup()
RANK, SIZE = PRIVATE.rank, PRIVATE.size
EPISODE_LIMIT_S = 120  # ends what hangs, not what is slow


class WrongError(Exception):
    """Weights that must not be."""


class Draw(random.Random):
    """Draws that are the same on all ranks."""

    def chance(self, probability: float) -> bool:
        """Return True so often."""
        return self.random() < probability

    def some(self, choices: list[Any]) -> list[Any]:
        """Return a part of a list, not empty, in its order."""
        chosen = [each for each in choices if self.chance(0.6)]
        return chosen or [self.choice(choices)]


class Episode:
    """One training: its draws, what happened in it so far, and the numbers of each rank.

    Args:
        seed, number: of the job, and of the episode in the job.

    Attributes:
        draw: draws of the episode, the same on all ranks.
        said: what was drawn, for the report of an error.
        drawn: how often each of `SOUGHT` was drawn.
        step: the number of the step.
    """

    def __init__(self, seed: int, number: int) -> None:
        self._key = seed, number
        self.draw = Draw(repr(self._key))
        self.said: list[str] = []
        self.drawn: Counter[str] = Counter()
        self.step = 0
        self._drawn = 0

    def say(self, *words: object) -> None:
        """Note what happens."""
        self.said.append(" ".join(map(str, words)))

    def draws(self, name: str, probability: float, *, can: bool = True) -> bool:
        """Return whether one of `SOUGHT` was drawn, and count it; False where it cannot be."""
        drawn = self.draw.chance(probability) and can
        self.drawn[name] += drawn
        return drawn

    def numbers(self) -> list[np.random.Generator]:
        """Return generators of random numbers, one for each rank; all ranks have those of all."""
        self._drawn += 1
        return [np.random.default_rng([*self._key, self._drawn, rank]) for rank in range(SIZE)]

    def hold(self) -> None:
        """Hold a rank back, now and then: what waits for it and what is withdrawn then differs from run to run."""
        rank, milliseconds, holds = self.draw.randrange(SIZE), self.draw.randrange(30), self.draw.chance(0.15)
        if self.draws("freeze", 0.02) and rank == RANK:
            me = os.getpid()
            # One process sends both signals, or the second might come before the first, and the rank stop for good.
            subprocess.run(["sh", "-c", f"kill -STOP {me}; sleep {milliseconds / 100}; kill -CONT {me}"], check=True)
        elif holds and rank == RANK:
            time.sleep(milliseconds / 1000)

    def compare(
        self, found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, replica: object = None
    ) -> None:
        """Compare this rank's arrays with those of one process, and with the bits of other ranks.

        Args:
            found, expected: arrays by name.
            tolerance: relative and absolute.
            replica: equal on ranks that have the same bits; None: all have.

        Raises:
            WrongError: they differ, on any rank.
        """
        wrong = ""
        if found.keys() != expected.keys():
            wrong = f"has {sorted(found)}, not {sorted(expected)}"
        bits = []
        for name in sorted(found):
            mine, right = np.asarray(found[name]), np.asarray(expected[name], np.float64)
            bits.append((name, mine.tobytes()))
            close = np.allclose(mine.astype(np.float64), right, rtol=tolerance, atol=tolerance, equal_nan=True)
            if not wrong and (mine.shape != right.shape or not close):
                wrong = f"{name} is {mine.ravel()[:6].tolist()}, not {right.ravel()[:6].tolist()}"
        everyone = PRIVATE.allgather((wrong, repr(replica), hash_of(bits)))
        wrongs = {rank: each for rank, (each, _, _) in enumerate(everyone) if each}
        if wrongs:
            raise WrongError(f"step {self.step}: {wrongs}")
        if len({each[1:] for each in everyone}) > len({each[1] for each in everyone}):
            raise WrongError(f"step {self.step}: the ranks have different bits: {everyone}")


class Training(Protocol):
    """One model over the ranks, and the same in one process."""

    def train(self) -> None:
        """Make one step, and compare."""

    def leave(self) -> None:
        """Do what a program does before it ends its world."""

    def restarted(self) -> None:
        """Forget what a new world forgets."""

    def finish(self) -> None:
        """Do what a program does at the end, and compare."""


def train_in_turn(
    episode: Episode,
    trainings: Sequence[Training],
    shutdown: Callable[[], object] | None,
    init: Callable[[], object] | None,
) -> int:
    """Make steps of several trainings, now and then in a new world, until the job is to stop; return how many."""
    draw, steps = episode.draw, 0
    for episode.step in range(draw.choice([6, 12, 40])):
        if rr.stopping():
            break
        if draw.chance(0.03) and shutdown is not None and init is not None:
            episode.say("shutdown and init")
            for each in trainings:
                each.leave()
            shutdown()
            init()
            for each in trainings:
                each.restarted()
        for each in draw.sample(trainings, len(trainings)):
            each.train()
            steps += 1
    for each in trainings:
        each.finish()
    return steps


def hash_of(bits: list[tuple[str, bytes]]) -> int:
    """Return a number that tells arrays apart; NaNs and zeros of both signs are not expected."""
    total = 0
    for name, data in bits:
        total = zlib.crc32(data, zlib.crc32(name.encode(), total))
    return total


def run(train: Callable[[Episode], int], seed: int, steps: int, only: int | None) -> Counter[str]:
    """Train episodes until so many steps are made. The first that is wrong ends the job.

    Returns:
        How often each of `SOUGHT` was drawn.

    Args:
        train: trains one episode; returns how many steps it made.
        seed: of the job.
        steps: how many to make.
        only: the number of the one episode to train; None: all.
    """
    counts: Counter[str] = Counter()
    drawn: Counter[str] = Counter()
    number = 0 if only is None else only
    while counts["steps"] < steps:
        episode = Episode(seed, number)
        faulthandler.dump_traceback_later(EPISODE_LIMIT_S, exit=True)
        try:
            counts["steps"] += train(episode)
            counts["episodes"] += 1
            drawn += episode.drawn
            drawn.update(name for name, variable in OF_JOBS.items() if os.environ.get(variable))
        except BaseException as error:
            where = f"rank {RANK} of {SIZE}, nodes of {os.environ.get('RINGREDUCE_NODE_SIZE', 'all')}"
            print(f"WRONG on {where}: --seed {seed} --only {number}: {type(error).__name__}: {error}", file=sys.stderr)
            said = episode.said if only is not None else [*episode.said[:3], "...", *episode.said[-12:]]
            print("\n".join(said), file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            time.sleep(1)  # the abort ends the other ranks: first they say what they have, too
            MPI.COMM_WORLD.Abort(1)
        finally:
            faulthandler.cancel_dump_traceback_later()
        number += 1
        if only is not None:
            break
    if RANK == 0:
        print(f"{counts['steps']} steps of {counts['episodes']} trainings were right")
    return drawn


def stop(train: Callable[[Episode], int], seed: int) -> None:
    """Train until all ranks stop, in the same step, as the last one was asked to; then end the job with status 75."""
    if RANK == SIZE - 1:
        rr.request_stop()
    number = 1_000_000
    while not rr.stopping():
        train(Episode(seed, number))
        number += 1


def say_drawn(drawn: Counter[str]) -> None:
    """Print what was drawn, for random_trainings.py."""
    if RANK == 0:
        print(f"drawn: {json.dumps(drawn)}")
