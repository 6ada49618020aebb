"""What docs/clusters.md says for machines that reach each other by ssh; here they have the names that it gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import WHO, Cluster, Done, cluster_of

cluster = cluster_of("ssh", 2)
DOCS = Path(__file__).parents[2] / "docs"


def lines_of(*beginnings: str) -> list[str]:
    """Return the lines of the page that begin so, one each."""
    lines = (DOCS / "clusters.md").read_text(encoding="utf-8").splitlines()
    found = [[line for line in lines if line.startswith(each)] for each in beginnings]
    assert [len(each) for each in found] == [1] * len(beginnings), found
    return [line for (line,) in found]


@pytest.fixture
def named(cluster: Cluster) -> Cluster:
    """The cluster, whose hosts are also called h1 and h2."""
    first, second = cluster.host(0), cluster.host(1)
    names = ("-e", f"s/ {first}$/& h1/", "-e", f"s/ {second}$/& h2/", "/etc/hosts")
    known = ("-e", f"s/^{first},/h1,&/", "-e", f"s/^{second},/h2,&/", "/root/.ssh/known_hosts")
    for words in (names, known):
        for number in (0, 1):
            assert cluster.run(number, "sed", "-i", *words).status == 0
    cluster.write("train.py", WHO)
    return cluster


@pytest.fixture
def two_networks(named: Cluster) -> Iterator[Cluster]:
    """The same, with one network more on each host, which seems to be that of the other, and leads nowhere."""
    add = "ip link add wrong0 type veth peer name wrong1 && ip link set wrong0 up && ip link set wrong1 up"
    for number in (0, 1):
        done = named.run(number, "sh", "-c", f"{add} && ip addr add 10.99.0.{number + 1}/24 dev wrong0")
        assert done.status == 0, done.text
    yield named
    for number in (0, 1):
        named.run(number, "ip", "link", "delete", "wrong0")


def require_ranks(cluster: Cluster, done: Done) -> None:
    """Require that a job ended well, with two ranks on each host."""
    expected = [f"rank {rank} of 4 on {cluster.host(rank // 2)}" for rank in range(4)]
    assert (done.status, done.ranks()) == (0, expected), done.text


def test_two_machines(named: Cluster) -> None:
    """The file for them, and the same line on the page."""
    file = DOCS / "clusters" / "two-machines.sh"
    assert lines_of("ringreduce run -H h1:2,h2:2 python train.py")[0] in file.read_text().splitlines()
    require_ranks(named, named.run(0, "bash", str(file)))


@pytest.mark.thorough
def test_doctor_looks_at_both(named: Cluster) -> None:
    """With one rank on each, in place of two."""
    (line,) = lines_of("ringreduce run -H h1:2,h2:2 python -m ringreduce doctor")
    done = named.run(0, *line.replace(":2", ":1").split())
    assert done.status == 0, done.text
    assert f"{named.host(0)}: rank 0; {named.host(1)}: rank 1" in done.text


@pytest.mark.thorough
def test_a_module_of_the_users_folder(named: Cluster) -> None:
    """Is found by its name on each."""
    require_ranks(named, named.run(0, "ringreduce", "run", "-H", "h1:2,h2:2", "python", "-m", "train"))


def test_the_network_that_is_named_is_used(two_networks: Cluster) -> None:
    """Without a name ranks try the other, too, and do not find each other."""
    asked = ("-H", "h1:2,h2:2", "python", "train.py")
    done = two_networks.run(0, "ringreduce", "run", *asked)
    assert done.status != 0, done.text
    require_ranks(two_networks, two_networks.run(0, "ringreduce", "run", "--network-interface", "eth0", *asked))


def test_mpirun_with_the_network_that_is_named(two_networks: Cluster) -> None:
    """By hand, with the hosts' own network and four ranks in place of sixteen."""
    two_networks.write("hosts", "h1 slots=2\nh2 slots=2\n")
    lines = lines_of("export OMPI_MCA_btl_tcp_if_include", "export PRTE_MCA_prte_if_include", "mpirun -x")
    text = "\n".join(lines).replace("10.0.0.0/24", "10.113.0.0/24").replace("-np 16", "-np 4")
    require_ranks(two_networks, two_networks.run(0, "bash", "-c", text))
