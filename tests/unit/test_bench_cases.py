"""What sizes, names and counts mean to ``bench``: the same as to nccl-tests."""

from __future__ import annotations

import pytest

from ringreduce.bench.cases import COLLECTIVES, TYPES, Case, sizes
from ringreduce.common.quantities import format_nbytes, plural


def case(collective: str, type_name: str = "float", nranks: int = 4, nbytes: int = 4096) -> Case:
    return Case.of_nbytes(COLLECTIVES[collective], type_name, "sum", 0, nranks, nbytes)


def test_sizes_grow_by_factor():
    """Without a step in bytes, each size is the one before times the factor; the last one is measured in any case."""
    assert list(sizes(8, 4096, None, 8)) == [8, 64, 512, 4096]
    assert list(sizes(8, 5000, None, 8)) == [8, 64, 512, 4096, 5000]
    assert list(sizes(8, 64 << 20, None, 8))[-2:] == [16 << 20, 64 << 20]
    assert list(sizes(8, 9, None, 8)) == [8, 9]
    assert list(sizes(8, 8, None, 8)) == [8]


def test_sizes_grow_by_steps():
    """A step in bytes is added instead."""
    assert list(sizes(8, 40, 16, 8)) == [8, 24, 40]
    assert list(sizes(8, 41, 16, 8)) == [8, 24, 40, 41]


def test_one_is_not_many():
    """A number stands before the word in its form."""
    assert [plural(number, "core") for number in (0, 1, 1.0, 2, 2.5)] == [
        *("0 cores", "1 core", "1 core", "2 cores", "2.5 cores"),
    ]


@pytest.mark.parametrize(
    ("collective", "count", "given", "got"),
    [
        ("allreduce", 1024, 1024, 1024),
        ("broadcast", 1024, 1024, 1024),
        ("reduce_scatter", 256, 1024, 256),
        ("allgather", 256, 256, 1024),
        ("alltoall", 256, 1024, 1024),
        ("reduce", 1024, 1024, 1024),
        ("gather", 256, 256, 1024),
        ("scatter", 256, 1024, 256),
        ("sendrecv", 1024, 1024, 1024),
        ("latency", 1024, 1024, 1024),
        ("bandwidth", 1024, 1024, 1024),
    ],
)
def test_size_is_that_of_the_larger_side(collective: str, count: int, given: int, got: int):
    """4 KiB of float over 4 ranks: counts are per part where the buffer is divided, as in nccl-tests."""
    made = case(collective)
    assert (made.count, made.input_count, made.output_count, made.nbytes) == (count, given, got, 4096)


def test_sizes_are_rounded_down_to_equal_parts():
    """What cannot be divided equally is left off."""
    assert case("alltoall", nranks=3, nbytes=100).nbytes == 96


def test_no_case_is_empty():
    """A size below one element per rank becomes one element per rank."""
    assert case("allgather", "double", nranks=4, nbytes=8).nbytes == 32


def test_collectives_that_do_not_reduce_have_no_operation():
    """The operation of an allgather is none, whatever was asked for."""
    assert case("allgather").op_name is None
    assert case("allreduce").op_name == "sum"


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        *(("allreduce", 1.5), ("reduce_scatter", 0.75), ("allgather", 0.75), ("alltoall", 0.75), ("broadcast", 1.0)),
        *(("reduce", 1.0), ("gather", 0.75), ("scatter", 0.75)),
        *(("sendrecv", 1.0), ("latency", 1.0), ("bandwidth", 1.0)),
    ],
)
def test_bus_factor(collective: str, factor: float):
    """Bus bandwidth has the correction factors of nccl-tests; here for 4 ranks."""
    assert COLLECTIVES[collective].bus_factor(4) == factor


def test_types_have_the_names_of_nccl_tests_first():
    """``-d all`` means the first ten types; our own names of others follow."""
    nccl = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double", "bfloat16"]
    assert list(TYPES)[:10] == nccl
    assert TYPES["half"].name == "float16"
    assert {"int16", "uint16", "bool", "complex64", "complex128"} == set(TYPES) - set(nccl)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(8, "8 B"), (65536, "64 KiB"), (3 << 19, "1.5 MiB"), (2 << 30, "2 GiB"), (1000, "1000 B")]
)
def test_format_nbytes(nbytes: int, text: str):
    """Sizes are written in the largest 1024-based unit that fits."""
    assert format_nbytes(nbytes) == text
