"""The hosts that a job may use, and the number of ranks there.

These are pure functions of the hosts that users list, of events, and of the time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ringreduce.common.errors import ConfigError

_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]{1,6}))?")
_SHOWN = 60  # of a text that is refused
#: What a file for mpirun says of a host, as that reads it.
_SLOTS = {"slots", "count"}
_MOST_SLOTS = {"max_slots", "max-slots", "slots_max", "slots-max"}
_MOST_LOSSES = 1  # of a host that is used again
#: The host of ranks where mpirun finds the hosts itself, or where there is this machine alone.
UNNAMED = ""
#: What this machine is called on each.
LOCAL = {"localhost", "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class SizePolicy:
    """The sizes of the job that users allow, and for how long hosts fail.

    Attributes:
        least, most: numbers of ranks of a job.
        cooldown: returns for how many seconds a host counts as failing after a number of deaths; None: for ever.
        forgives: whether hosts of which ranks have died are used again once the job has failed.
    """

    least: int
    most: int
    cooldown: Callable[[int], float] | None = None
    forgives: bool = False


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a job. Slots and ranks are counted by host, in the order of their use.

    Attributes:
        listed: number of slots.
        living: number of living ranks.
        deaths: times of deaths of ranks, in seconds of the clock.
        places: hosts of the ranks of the job, as mpirun fills them: in their order.
        lost: hosts that cannot be reached.
        losses: number of losses of a host.
    """

    listed: Mapping[str, int] = field(default_factory=dict)
    living: Mapping[str, int] = field(default_factory=dict)
    deaths: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()
    losses: Mapping[str, int] = field(default_factory=dict)

    # ---- what happens ----

    def started(self, ranks: Mapping[str, int]) -> Hosts:
        """A job has been started with these ranks."""
        places = tuple(host for host, count in ranks.items() for _ in range(count))
        return replace(self, living=dict(ranks), places=places)

    def died(self, host: str, now: float, policy: SizePolicy) -> Hosts:
        """A rank of a host has died; that host fails, unless the others are ending for want of ranks already."""
        enough = sum(self.living.values()) >= policy.least
        living = {**self.living, host: max(self.living.get(host, 0) - 1, 0)}
        deaths = {**self.deaths, host: (*self.deaths.get(host, ()), now)} if enough else self.deaths
        return replace(self, living=living, deaths=deaths)

    def failed(self, now: float, policy: SizePolicy) -> Hosts:
        """The job has failed. Where hosts fail for ever, and the others do not suffice, all of them are tried again."""
        ended = replace(self, living={})
        forgiven = policy.forgives or (policy.cooldown is None and not ended.next_ranks(policy, now))
        return replace(ended, deaths={}) if forgiven else ended

    def without(self, host: str) -> Hosts:
        """A host cannot be reached any more; its ranks count as ended."""
        losses = {**self.losses, host: self.losses.get(host, 0) + 1}
        return replace(self, living={**self.living, host: 0}, lost=self.lost | {host}, losses=losses)

    def returned(self, host: str) -> Hosts:
        """A host that was lost can be reached again."""
        return replace(self, lost=self.lost - {host})

    # ---- what follows ----

    def returning(self) -> list[str]:
        """Return the lost hosts that may be used again once they can be reached: those that were lost once."""
        return sorted(host for host in self.lost if self.losses[host] <= _MOST_LOSSES)

    def known_as(self, name: str) -> str | None:
        """Return the host of this name, or of the same one without or with a domain; None if there is none.

        A host of the ranks counts also where it is no longer listed. Addresses have no short form.
        """
        known = dict.fromkeys((*self.listed, *self.places))
        if name in known:
            return name
        short = name.partition(".")[0]
        return None if short.isdigit() else next((each for each in known if each.partition(".")[0] == short), None)

    def fails_for(self, host: str, policy: SizePolicy, now: float) -> float:
        """Return the seconds for which no rank starts on a host: 0 or less if one may; infinity if never."""
        deaths = self.deaths.get(host)
        if not deaths:
            return 0.0
        return math.inf if policy.cooldown is None else deaths[-1] + policy.cooldown(len(deaths)) - now

    def usable(self, policy: SizePolicy, now: float) -> dict[str, int]:
        """Return the usable slots by host: none of a lost host; of one that fails, those whose ranks live."""
        found = {}
        for host, slots in self.listed.items():
            if host in self.lost:
                continue
            lives = self.living.get(host, 0)
            found[host] = min(slots, lives) if self.fails_for(host, policy, now) > 0 else slots
        return {host: slots for host, slots in found.items() if slots}

    def next_ranks(self, policy: SizePolicy, now: float) -> dict[str, int]:
        """Return the ranks by host of a job that starts now; empty if there are too few slots for one."""
        ranks = fill(self.usable(policy, now), policy.most)
        return ranks if sum(ranks.values()) >= policy.least else {}

    def unused_said(self, policy: SizePolicy, now: float) -> str:
        """Return which listed hosts are lost, or fail and for how long, in words; empty: all can be used."""
        lost = [f"{host} is lost" for host in self.listed if host in self.lost]
        left_s = {host: self.fails_for(host, policy, now) for host in self.listed if host not in self.lost}
        failing = [
            f"{host or 'this machine'} counts as failing "
            + ("for ever, as there is no --cooldown" if math.isinf(seconds) else f"for another {seconds:.0f} s")
            for host, seconds in left_s.items()
            if seconds > 0
        ]
        return ", ".join(lost + failing)

    def host_of(self, rank: int, name: str) -> str:
        """Return the host of a rank: by its own name if that is listed, else by the number of the rank.

        Args:
            rank: number of the rank.
            name: name of its host, in the operating system there.
        """
        return name if name in self.listed or rank >= len(self.places) else self.places[rank]


def is_here(host: str, here: Collection[str]) -> bool:
    """Return whether a host is this machine, by the names of this machine."""
    return host in LOCAL or host in here


def fill(slots: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the ranks by host, if hosts are filled in their order."""
    filled = {}
    left = ranks
    for host, count in slots.items():
        filled[host] = min(count, left)
        left -= filled[host]
    return {host: count for host, count in filled.items() if count}


def parse_hosts(text: str, slots: int) -> dict[str, int]:
    """Return the slots by host of ``host`` or ``host:slots``, separated by commas or line ends.

    Args:
        text: option, or output of a script.
        slots: slots of hosts without a number.

    Raises:
        ConfigError: the text is something else.
    """
    found: dict[str, int] = {}
    for each in filter(None, map(str.strip, re.split("[,\n]", text))):
        parts = _HOST.fullmatch(each)
        if parts is None:
            raise ConfigError(
                f"{each[:_SHOWN]!r} is no host; expected a name or an address, or one with slots as in host:4"
            )
        found[parts[1]] = found.get(parts[1], 0) + (slots if parts[2] is None else int(parts[2]))
    return found


def parse_host_file(text: str, slots: int) -> dict[str, int]:
    """Return the slots by host of a file for mpirun: lines of ``host slots=4``; ``max_slots=8`` does not matter here.

    Args:
        text: content of the file.
        slots: slots of hosts without a number.

    Raises:
        ConfigError: a line is something else.
    """
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        pairs = dict(word.partition("=")[::2] for word in words[1:])
        host = _HOST.fullmatch(words[0])
        counts = [value for key, value in pairs.items() if key in _SLOTS]
        known = pairs.keys() <= _SLOTS | _MOST_SLOTS and len(pairs) == len(words) - 1
        if host is None or not known or not all(map(re.compile("[0-9]{1,6}").fullmatch, pairs.values())):
            raise ConfigError(
                f"line {number} of the file of hosts is {line.strip()[:_SHOWN]!r}; expected a host, and "
                "then at most slots=4 and max_slots=8"
            )
        count = counts[-1] if counts else host[2]
        found[host[1]] = found.get(host[1], 0) + (slots if count is None else int(count))
    return found
