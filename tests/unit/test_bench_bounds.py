"""What bounds a case: memory that is touched, ranks that meet, and bytes that cross links."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.bench.bounds import HostBounds, traffic
from ringreduce.bench.cases import COLLECTIVES, Case
from ringreduce.testing import run_ranks


def case(collective: str, nbytes: int, nranks: int = 2) -> Case:
    kind = COLLECTIVES[collective]
    return Case.of_nbytes(kind, "float", "sum" if kind.reduces else None, 0, nranks, nbytes)


@pytest.mark.parametrize("nbytes", [4, 8, 4096, (1 << 20) + 4])
def test_an_allreduce_changes_every_element_once(nbytes: int) -> None:
    for contender in traffic(case("allreduce", nbytes)):
        contender.source.fill(3.0)
        assert np.isin(contender.call(), [-3.0, 4.0]).all()
        assert contender.source.nbytes == nbytes


@pytest.mark.parametrize(
    ("collective", "nbytes"),
    [
        ("allgather", 900),
        ("alltoall", 900),
        ("broadcast", 1200),
        ("reduce", 1200),
        ("gather", 900),
        ("reduce_scatter", 300),
    ],
)
def test_others_copy_what_comes_from_other_ranks(collective: str, nbytes: int) -> None:
    """Of 1200 bytes with 4 ranks; of a reduce_scatter its part of the result."""
    (contender,) = traffic(case(collective, 1200, nranks=4))
    contender.source.fill(7)
    copied = contender.call()
    assert copied.nbytes == nbytes
    assert (copied == 7).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_meet_before_they_move_anything(size: int) -> None:
    """Nobody returns before the slowest has come."""
    came = [0] * size

    def body(world):
        (copy,) = HostBounds(world).contenders(case("allgather", 64, nranks=size))
        for turn in range(1, 6):
            came[world.rank] = turn
            copy.call()
            assert min(came) >= turn
            world.barrier()

    run_ranks(size, body)


def test_one_node_has_no_links() -> None:
    assert run_ranks(2, lambda world: HostBounds(world).between_nodes_us(case("allreduce", 1 << 20))) == [0.0, 0.0]


def test_bytes_between_nodes_follow_the_bus_factor_of_nodes() -> None:
    """3 nodes of 2 ranks: an allreduce takes 4/3 n across each link, an allgather 2/3 n, an alltoall 2/3 n per rank."""

    def body(world):
        bounds = HostBounds(world)
        latency, *found = (
            bounds.between_nodes_us(case(name, nbytes, nranks=6))
            for name, nbytes in (
                ("broadcast", 24),
                ("broadcast", 24 << 20),
                ("allreduce", 24 << 20),
                ("allgather", 24 << 20),
                ("alltoall", 24 << 20),
            )
        )
        return [each - latency for each in found]

    for broadcast, *others in run_ranks(6, body, node_size=2):
        assert [each / broadcast for each in others] == pytest.approx([4 / 3, 2 / 3, 4 / 3], rel=1e-3)
