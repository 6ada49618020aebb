"""Which hosts a job uses: what follows from what was seen and the time."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.growth import Cooldown, reason_to_change
from ringreduce.launcher.hosts import Hosts, SizePolicy, parse_host_file, parse_hosts


def reason(hosts: Hosts, policy: SizePolicy, now: float) -> str:
    return reason_to_change(hosts.living, hosts.listed, sum(hosts.next_ranks(policy, now).values()))


FOREVER, AT_ONCE, A_MINUTE = None, Cooldown(0, 0), Cooldown(60, 60)


@pytest.mark.parametrize(
    ("listed", "least", "most", "ranks"),
    [
        ({"a": 4}, 1, 4, {"a": 4}),
        ({"a": 4}, 1, 3, {"a": 3}),
        ({"a": 2, "b": 2}, 1, 3, {"a": 2, "b": 1}),
        ({"a": 2, "b": 2}, 1, 2, {"a": 2}),
        ({"a": 2, "b": 2}, 4, 8, {"a": 2, "b": 2}),
        ({"a": 2, "b": 1}, 4, 8, {}),
        ({"a": 0, "b": 1}, 1, 8, {"b": 1}),
        ({}, 1, 8, {}),
    ],
)
def test_a_job_starts_with_what_there_is(listed: dict[str, int], least: int, most: int, ranks: dict[str, int]) -> None:
    """As many ranks as there are slots, on the first hosts, up to the most; none if that is less than the least."""
    assert Hosts(listed).next_ranks(SizePolicy(least, most), 0.0) == ranks


@pytest.mark.parametrize(
    ("cooldown", "deaths", "now", "failing"),
    [
        (FOREVER, (), 0.0, False),
        (FOREVER, (5.0,), 1e9, True),
        (AT_ONCE, (5.0,), 5.0, False),
        (A_MINUTE, (5.0,), 64.9, True),
        (A_MINUTE, (5.0,), 65.0, False),
        (A_MINUTE, (5.0, 30.0), 89.9, True),
        (A_MINUTE, (5.0, 30.0), 90.0, False),
        (Cooldown(10, 60), (0.0, 0.0), 19.9, True),
        (Cooldown(10, 60), (0.0, 0.0), 20.0, False),
        (Cooldown(10, 60), (0.0,) * 4, 59.9, True),
        (Cooldown(10, 60), (0.0,) * 10000, 60.0, False),
    ],
)
def test_a_host_fails_for_a_while(
    cooldown: Cooldown | None, deaths: tuple[float, ...], now: float, failing: bool
) -> None:
    """From its last death on, for twice as long with each, up to the most; without a number for ever."""
    hosts = Hosts({"a": 4}, {}, {"a": deaths})
    assert (hosts.fails_for("a", SizePolicy(1, 4, cooldown), now) > 0) is failing
    assert hosts.next_ranks(SizePolicy(1, 4, cooldown), now) == ({} if failing else {"a": 4})


@pytest.mark.parametrize(
    ("listed", "living", "deaths", "cooldown", "changes"),
    [
        ({"a": 2}, {"a": 2}, {}, FOREVER, False),
        ({"a": 3}, {"a": 2}, {}, FOREVER, True),
        ({"a": 9}, {"a": 4}, {}, FOREVER, False),  # there are the most already
        ({"a": 2, "b": 1}, {"a": 2}, {}, FOREVER, True),
        ({"a": 2}, {"a": 1}, {"a": (0.0,)}, FOREVER, False),
        ({"a": 2}, {"a": 1}, {"a": (0.0,)}, A_MINUTE, False),
        ({"a": 2}, {"a": 1}, {"a": (0.0,)}, AT_ONCE, True),
        ({"a": 2, "b": 1}, {"a": 1}, {"a": (0.0,)}, FOREVER, True),  # one rank of each
        ({"a": 2}, {"a": 2, "b": 1}, {}, FOREVER, True),
        ({"a": 1}, {"a": 2, "b": 1}, {}, FOREVER, False),  # too few for a job
        ({"a": 2}, {"a": 3}, {}, FOREVER, True),
        ({"a": 2}, {"a": 2, "b": 0}, {"b": (0.0,)}, FOREVER, False),
        ({}, {"a": 2}, {}, FOREVER, False),
        ({"a": 4}, {}, {}, FOREVER, False),
    ],
)
def test_when_the_ranks_begin_again(
    listed: dict[str, int],
    living: dict[str, int],
    deaths: dict[str, tuple[float, ...]],
    cooldown: Cooldown | None,
    changes: bool,
) -> None:
    """If there would be more, or some are where they should not be; never with fewer than the least."""
    policy = SizePolicy(2 if living.get("a", 0) > 1 else 1, 4, cooldown)
    assert bool(reason(Hosts(listed, living, deaths), policy, 30.0)) is changes


def test_why_the_ranks_begin_again() -> None:
    """Each host with its own reason, and more slots only where that is the reason."""
    policy = SizePolicy(1, 9)
    hosts = Hosts({"a": 1, "e": 9}).started({"a": 2, "b": 1, "c": 1})
    assert reason(hosts, policy, 0.0) == "b and c are no longer listed; a has fewer slots than ranks"
    hosts = Hosts({"a": 1, "b": 1}).started({"a": 2, "b": 2})
    assert reason(hosts, policy, 0.0) == "a and b have fewer slots than ranks"
    hosts = Hosts({"a": 3}).started({"a": 2})
    assert reason(hosts, policy, 0.0) == "there are slots for 3 ranks, and 2 live"


def test_which_hosts_are_not_used_anew_and_until_when() -> None:
    """In words for users; hosts that are no longer listed are no use to them."""
    hosts = Hosts({"a": 2, "b": 2, "": 1}, {}, {"a": (10.0,), "": (0.0,), "c": (10.0,)})
    assert hosts.unused_said(SizePolicy(1, 4, A_MINUTE), 30.0) == (
        "a counts as failing for another 40 s, this machine counts as failing for another 30 s"
    )
    assert hosts.unused_said(SizePolicy(1, 4, FOREVER), 30.0).startswith("a counts as failing for ever")
    assert hosts.unused_said(SizePolicy(1, 4, A_MINUTE), 70.0) == ""
    assert hosts.without("a").without("c").unused_said(SizePolicy(1, 4, A_MINUTE), 70.0) == "a is lost"


def test_ranks_that_live_on_a_host_that_fails_begin_again_there() -> None:
    """Its free slots do not count, theirs do."""
    hosts = Hosts({"a": 4, "b": 2}, {"a": 3}, {"a": (0.0,)})
    assert hosts.next_ranks(SizePolicy(1, 8), 1.0) == {"a": 3, "b": 2}


def test_what_happens_to_hosts() -> None:
    """Deaths are of a host; those that come of having too few ranks are nobody's fault."""
    policy = SizePolicy(3, 4)
    hosts = Hosts({"a": 2, "b": 2}).started({"a": 2, "b": 2})
    hosts = hosts.died("a", 1.0, policy).died("b", 2.0, policy)
    assert hosts.living == {"a": 1, "b": 1}
    assert hosts.deaths == {"a": (1.0,), "b": (2.0,)}
    hosts = hosts.died("a", 3.0, policy).died("b", 3.0, policy)
    assert hosts.living == {"a": 0, "b": 0}
    assert hosts.deaths == {"a": (1.0,), "b": (2.0,)}


@pytest.mark.parametrize(
    ("deaths", "cooldown", "ranks"),
    [
        ({"a": (1.0,)}, FOREVER, {"b": 2}),
        ({"a": (1.0,), "b": (1.0,)}, FOREVER, {"a": 2, "b": 2}),
        ({"a": (1.0,), "b": (1.0,)}, A_MINUTE, {}),
        ({"a": (1.0,)}, A_MINUTE, {"b": 2}),
        ({"a": (1.0,)}, AT_ONCE, {"a": 2, "b": 2}),
    ],
)
def test_after_a_job_has_failed(
    deaths: dict[str, tuple[float, ...]], cooldown: Cooldown | None, ranks: dict[str, int]
) -> None:
    """Hosts that have not failed are used; all, if these do not suffice and the others would fail for ever."""
    hosts = Hosts({"a": 2, "b": 2}, {"a": 1, "b": 1}, deaths)
    assert hosts.failed(2.0, SizePolicy(2, 4, cooldown)).next_ranks(SizePolicy(2, 4, cooldown), 2.0) == ranks


def test_a_host_is_known_by_its_name_or_its_ranks() -> None:
    """By the name that a rank has for it; where that is not listed, in the order in which mpirun fills hosts."""
    hosts = Hosts({"10.0.0.1": 3, "n2": 3}).started({"10.0.0.1": 2, "n2": 3})
    assert [hosts.host_of(rank, "n1") for rank in range(5)] == ["10.0.0.1"] * 2 + ["n2"] * 3
    assert hosts.host_of(0, "n2") == "n2"  # mpirun was set up otherwise
    assert hosts.host_of(9, "n9") == "n9"


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a:2\nb\n", {"a": 2, "b": 3}),
        ("a:2,b:1", {"a": 2, "b": 1}),
        ("a,a", {"a": 6}),
        ("\n 10.0.0.1:0 \n\n", {"10.0.0.1": 0}),
        ("", {}),
    ],
)
def test_hosts_and_slots(text: str, slots: dict[str, int]) -> None:
    """One a line, or between commas; those without a number have as many as hosts have."""
    assert parse_hosts(text, 3) == slots


@pytest.mark.parametrize("text", ["a:b", "-x", "a b", "a:-1", "$(reboot)", "a:2:3", "a:" + "9" * 5000, "\ufffda:2"])
def test_what_is_no_host_is_refused(text: str) -> None:
    """Nothing else gets on to a command line."""
    with pytest.raises(ConfigError, match="is no host") as caught:
        parse_hosts(text, 1)
    assert len(str(caught.value)) < 200


def test_files_of_hosts_are_read_as_mpirun_reads_them() -> None:
    """Comments, empty lines and spaces do not count, nor does the most that a host could take."""
    assert parse_host_file("# all\na slots=2\n\nb # one\nc slots=4 max_slots=8\n", 1) == {"a": 2, "b": 1, "c": 4}
    assert parse_host_file("a max-slots=8 slots = 4\nb max_slots=8\nc count =2\nd:3\na", 1) == {
        **{"a": 5, "b": 1},
        **{"c": 2, "d": 3},
    }


@pytest.mark.parametrize(
    "line", ["h slots", "h 4", "h slots=many", "h slots=", "h slots=2 slots=4", "h sockets=2", "h slots=" + "9" * 5000]
)
def test_another_line_of_a_file_of_hosts_is_refused(line: str) -> None:
    """By its number, and as it stands there."""
    with pytest.raises(ConfigError, match=r"line 2 of the file of hosts is '.*'; expected a host") as caught:
        parse_host_file(f"# all\n{line}\n", 1)
    assert repr(line[:60]) in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "expected"), [("0", Cooldown(0, 0)), ("1.5", Cooldown(1.5, 1.5)), ("60 600", Cooldown(60, 600))]
)
def test_cooldowns_are_read(text: str, expected: Cooldown) -> None:
    """One number of seconds, or two."""
    assert Cooldown.parse(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "-1", "2 1", "1 2 3", "nan", "inf"])
def test_other_cooldowns_are_refused(text: str) -> None:
    """With the form that is expected."""
    with pytest.raises(ValueError, match="expected seconds"):
        Cooldown.parse(text)


def test_a_lost_host_is_known_by_what_it_calls_itself() -> None:
    """With or without a domain, also once it is no longer listed; no address is another one's short form."""
    hosts = Hosts(listed={"a.lab": 1, "10.0.0.1": 1, "10.0.0.2": 1}, places=("b",))
    assert hosts.known_as("a") == "a.lab"
    assert hosts.known_as("b.lab") == "b"
    assert hosts.known_as("10.0.0.2") == "10.0.0.2"
    assert hosts.known_as("10.0.0.3") is None
    assert hosts.known_as("c") is None
