"""The silent hosts of a job: the shell over one rank of each host sends a mark every few seconds.

A host that loses its power, its network or its kernel sends nothing, and nothing else reports it: TCP notices when it
has sent something, and gives up after a quarter of an hour.
"""

from __future__ import annotations

__all__ = ["Pulses"]


class Pulses:
    """Counts how long no mark of a host has come.

    Silence is counted in looks, not in time: a launcher that was stopped, and could not hear, blames nobody.

    Args:
        looks: number of looks without a mark after which a host is silent.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._silent: dict[str, int] = {}
        self._ranks: dict[int, str] = {}

    def hear(self, rank: int, host: str) -> None:
        """Note a mark of a rank, for its host."""
        self._ranks[rank] = host
        self._silent[host] = 0

    def forget(self, rank: int) -> None:
        """Note that a rank has ended; if it sent the marks of its host, no more are expected."""
        host = self._ranks.pop(rank, None)
        if host is not None:
            self._silent.pop(host, None)

    def look(self) -> list[str]:
        """Return the hosts that have become silent; call it at equal distances of time."""
        for host in self._silent:
            self._silent[host] += 1
        found = [host for host, looks in self._silent.items() if looks > self._looks]
        for host in found:
            del self._silent[host]
        return found
