"""Which hosts a job may use, how many ranks it starts there, and when it is time to begin again on others.

Nothing in here does anything: all follows from what was seen, and from the time.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ringreduce.errors import ConfigError

__all__ = ["Cooldown", "Hosts", "Rules", "is_here", "parse_host_file", "parse_hosts"]

_HOST = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?::([0-9]+))?")
_MOST_DOUBLINGS = 64
_LOCAL = {"localhost", "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How long a host counts as failing after a death, in seconds: doubled by each further death of it.

    Attributes:
        least_s: after the first.
        most_s: at most.
    """

    least_s: float
    most_s: float

    @classmethod
    def parse(cls, text: str) -> Cooldown:
        """Read ``60``, or ``60 600``.

        Raises:
            ValueError: it is neither.
        """
        try:
            numbers = [float(each) for each in text.split()]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not 0 <= numbers[0] <= numbers[-1] < float("inf"):
            raise ValueError('expected seconds, or the least and the most, as in "60 600"')
        return cls(numbers[0], numbers[-1])

    def after(self, deaths: int) -> float:
        """Return how long it is after so many deaths, at least one."""
        return float(min(self.least_s * 2 ** min(deaths - 1, _MOST_DOUBLINGS), self.most_s))


@dataclass(frozen=True, slots=True)
class Rules:
    """What was asked for.

    Attributes:
        least, most: how many ranks a job has.
        cooldown: how long a host counts as failing; None: for ever.
    """

    least: int
    most: int
    cooldown: Cooldown | None = None


@dataclass(frozen=True, slots=True)
class Hosts:
    """What is known of the hosts of a job. Slots and ranks are counted by host, in the order in which they are used.

    Attributes:
        listed: how many slots there are.
        living: how many ranks live.
        deaths: when ranks have died.
    """

    listed: Mapping[str, int] = field(default_factory=dict)
    living: Mapping[str, int] = field(default_factory=dict)
    deaths: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    # ---- what happens ----

    def started(self, ranks: Mapping[str, int]) -> Hosts:
        """A job has been started with these ranks."""
        return replace(self, living=dict(ranks))

    def died(self, host: str, now: float, rules: Rules) -> Hosts:
        """A rank of a host has died; that host fails, unless the others are ending for want of ranks already."""
        enough = sum(self.living.values()) >= rules.least
        living = {**self.living, host: max(self.living.get(host, 0) - 1, 0)}
        deaths = {**self.deaths, host: (*self.deaths.get(host, ()), now)} if enough else self.deaths
        return replace(self, living=living, deaths=deaths)

    def failed(self, now: float, rules: Rules) -> Hosts:
        """The job has failed. Where hosts fail for ever, and the others do not suffice, all of them are tried again."""
        ended = replace(self, living={})
        return replace(ended, deaths={}) if rules.cooldown is None and not ended.next_ranks(rules, now) else ended

    # ---- what follows ----

    def is_failing(self, host: str, rules: Rules, now: float) -> bool:
        """Return whether no rank is to be started on a host."""
        deaths = self.deaths.get(host)
        if not deaths:
            return False
        return rules.cooldown is None or now < deaths[-1] + rules.cooldown.after(len(deaths))

    def usable(self, rules: Rules, now: float) -> dict[str, int]:
        """Return how many slots can be used; of a host that fails, those whose ranks live."""
        found = {}
        for host, slots in self.listed.items():
            lives = self.living.get(host, 0)
            found[host] = min(slots, lives) if self.is_failing(host, rules, now) else slots
        return {host: slots for host, slots in found.items() if slots}

    def next_ranks(self, rules: Rules, now: float) -> dict[str, int]:
        """Return how many ranks a job would have that starts now; none, if there are too few slots for one."""
        left, ranks = rules.most, {}
        for host, slots in self.usable(rules, now).items():
            ranks[host] = min(slots, left)
            left -= ranks[host]
        return {host: count for host, count in ranks.items() if count} if rules.most - left >= rules.least else {}

    def reason_to_change(self, rules: Rules, now: float) -> str:
        """Return why the ranks that live should begin again on other hosts; empty: they should not."""
        then, lives = sum(self.next_ranks(rules, now).values()), sum(self.living.values())
        if not then or not lives:
            return ""
        gone = [host for host, count in self.living.items() if count > self.listed.get(host, 0)]
        if gone:
            return f"{', '.join(gone)} has fewer slots than ranks, or is no longer listed"
        return f"there are slots for {then} ranks, and {lives} live" if then > lives else ""

    def find(self, name: str, here: Collection[str]) -> str:
        """Return which host a rank means that calls its own one by a name; that name, if no host is known by it.

        Args:
            name: as the operating system there has it.
            here: the names of this machine.
        """
        known = [*self.living, *self.listed]
        if name in known:
            return name
        if is_here(name, here):
            return next((host for host in known if is_here(host, here)), name)
        return next((host for host in known if host.partition(".")[0] == name.partition(".")[0]), name)


def is_here(host: str, here: Collection[str]) -> bool:
    """Return whether a host is this machine, given the names of this one."""
    return host in _LOCAL or host in here


def parse_hosts(text: str, slots: int) -> dict[str, int]:
    """Return the slots by host of ``host`` or ``host:slots``, separated by commas or line ends.

    Args:
        text: of a person or a script.
        slots: of hosts that come without a number.

    Raises:
        ConfigError: that is something else.
    """
    found: dict[str, int] = {}
    for each in filter(None, map(str.strip, re.split("[,\n]", text))):
        parts = _HOST.fullmatch(each)
        if parts is None:
            raise ConfigError(f"{each!r} is no host; expected a name or an address, or one with slots as in host:4")
        found[parts[1]] = found.get(parts[1], 0) + (slots if parts[2] is None else int(parts[2]))
    return found


def parse_host_file(text: str, slots: int) -> dict[str, int]:
    """Return the slots by host of a file for mpirun: lines of ``host slots=4``.

    Args:
        text: of the file.
        slots: of hosts that come without a number.

    Raises:
        ConfigError: a line is something else.
    """
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    hosts = [":".join(re.sub("^(slots|max_slots)=", "", word) for word in words[:2]) for words in lines if words]
    return parse_hosts("\n".join(hosts), slots)
