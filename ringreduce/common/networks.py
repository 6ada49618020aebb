"""The networks of a host, as its kernel lists them, and those among them that join no hosts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path

#: Where the kernel lists networks and addresses: their texts, one after the other, are what `read_interfaces` reads.
FILES = ("/proc/net/route", "/proc/net/fib_trie")
_ROUTE = re.compile(r"^(\S+)\s+([0-9A-F]{8})\s+00000000\s+(?:\S+\s+){4}([0-9A-F]{8})\s", re.MULTILINE)
_ADDRESS = re.compile(r"\|-- ([0-9.]+)\s+/32 host LOCAL")


def read_interfaces(text: str) -> dict[str, str]:
    """Return the IPv4 address of each interface by its name, without the loopback's.

    Args:
        text: of `FILES`.
    """
    routes = [(name, _number(network), _number(mask)) for name, network, mask in _ROUTE.findall(text)]
    routes.sort(key=lambda route: route[2])  # The narrowest network counts.
    addresses: dict[str, str] = {}
    for address in dict.fromkeys(_ADDRESS.findall(text)):
        number = int(IPv4Address(address))
        names = [name for name, network, mask in routes if mask and number & mask == network]
        if names and not address.startswith("127."):
            addresses.setdefault(names[-1], address)
    return addresses


def own_text() -> str:
    """Return the text of `FILES` on this host; empty where the kernel has none."""
    with suppress(OSError):
        return "".join(Path(file).read_text(encoding="ascii") for file in FILES)
    return ""


def _number(written: str) -> int:
    """Return an address or a mask that the kernel writes in hexadecimal, in the byte order of the machine."""
    return int.from_bytes(int(written, 16).to_bytes(4, "little"), "big")


def own_to_each(hosts: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the interfaces by which hosts reach themselves alone: of two hosts at least, one has the same address.

    That of Docker's bridge is an example. A name that belongs to a network of any host is not among them; and none is,
    if a host would have no other, as a machine that is listed by two names.

    Args:
        hosts: the interfaces of each.
    """
    addresses = [address for host in hosts for address in host.values()]
    shared = {address for address in addresses if addresses.count(address) > 1}
    names = {name for host in hosts for name, address in host.items() if address in shared}
    own = sorted(name for name in names if all(host[name] in shared for host in hosts if name in host))
    return own if all(host.keys() - set(own) for host in hosts if host) else []


def in_use(chosen: str, left_out: str) -> str:
    """Return what messages between hosts go over, in words; empty if that is not known.

    Args:
        chosen, left_out: networks that MPI is told to use, or not to use, by commas.
    """
    if chosen:
        return chosen
    addresses = read_interfaces(own_text())
    return " and ".join(f"{name} ({address})" for name, address in addresses.items() if name not in left_out.split(","))
