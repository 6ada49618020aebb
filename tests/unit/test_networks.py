"""Networks that each of several hosts has for itself."""

from __future__ import annotations

import socket

import pytest

from ringreduce.common.networks import in_use, own_text, own_to_each, read_interfaces

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100710A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000710A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
wide\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
ADDRESS = """           |-- {0}
              /32 host LOCAL
"""


def text(*addresses: str) -> str:
    """What the files of a host say that has these addresses."""
    return ROUTES + "Local:\n" + "".join(map(ADDRESS.format, ("127.0.0.1", *addresses)))


def test_an_address_belongs_to_the_narrowest_network() -> None:
    """Addresses behind a gateway alone, and the loopback's, are no network of a host."""
    found = read_interfaces(text("10.113.0.1", "10.7.7.7", "172.17.0.1", "192.0.2.1"))
    assert found == {"eth0": "10.113.0.1", "wide": "10.7.7.7", "docker0": "172.17.0.1"}
    assert read_interfaces("") == {}


def test_this_host_is_read_as_its_kernel_says() -> None:
    """Each address can be bound, and each interface is one."""
    found = read_interfaces(own_text())
    assert found.keys() <= {name for _, name in socket.if_nameindex()}
    for address in found.values():
        with socket.socket() as probe:
            probe.bind((address, 0))


@pytest.mark.parametrize(
    ("hosts", "own"),
    [
        ([("10.113.0.1", "172.17.0.1"), ("10.113.0.2", "172.17.0.1")], ["docker0"]),
        ([("10.113.0.1",), ("10.113.0.2", "172.17.0.1"), ("10.113.0.3", "172.17.0.1")], ["docker0"]),
        ([("10.113.0.1", "172.17.0.1"), ("10.113.0.2", "172.17.0.2")], []),
        ([("10.113.0.1", "172.17.0.1"), ("10.113.0.2", "172.17.0.1"), ("10.113.0.3", "172.17.0.3")], []),
        ([("10.113.0.1",), ("10.113.0.2",)], []),
        ([("10.113.0.1", "172.17.0.1"), ("10.113.0.1", "172.17.0.1")], []),
    ],
    ids=["both", "not the first", "a network", "a network of some", "none", "one host by two names"],
)
def test_an_address_of_two_hosts_joins_none(hosts: list[tuple[str, ...]], own: list[str]) -> None:
    """Unless the interface of that name belongs to a network elsewhere."""
    assert own_to_each([read_interfaces(text(*each)) for each in hosts]) == own


def test_the_networks_in_use_are_named() -> None:
    """What users have chosen, else all but those that are left out."""
    assert in_use("ib0", "") == "ib0"
    found = read_interfaces(own_text())
    assert in_use("", "lo") == " and ".join(f"{name} ({address})" for name, address in found.items())
    assert in_use("", ",".join(found)) == ""
