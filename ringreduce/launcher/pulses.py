"""Which hosts of a job have gone silent: the shell over one rank of each says every few seconds that it lives.

A host that loses its power, its network or its kernel sends nothing, so that nothing else says so: TCP notices when it
has sent something, and gives up after a quarter of an hour.
"""

from __future__ import annotations

__all__ = ["Pulses"]


class Pulses:
    """Notes which hosts have been heard, and says which have not been for long.

    Silence is counted in looks, not in time: a launcher that was stopped, and could not hear, blames nobody.

    Args:
        looks: so many looks without a word from a host are silence.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._silent: dict[str, int] = {}
        self._ranks: dict[int, str] = {}

    def hear(self, rank: int, host: str) -> None:
        """A rank of a host has said that it lives."""
        self._ranks[rank] = host
        self._silent[host] = 0

    def forget(self, rank: int) -> None:
        """A rank has ended; if it spoke for its host, nothing more is expected from that."""
        host = self._ranks.pop(rank, None)
        if host is not None:
            self._silent.pop(host, None)

    def look(self) -> list[str]:
        """Return the hosts that are silent, once each; to be called at equal distances of time."""
        for host in self._silent:
            self._silent[host] += 1
        found = [host for host, looks in self._silent.items() if looks > self._looks]
        for host in found:
            del self._silent[host]
        return found
