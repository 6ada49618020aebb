"""Reduce operations: their names, and the table that says what they mean."""

from __future__ import annotations

import pytest

import ringreduce as rr
from ringreduce.common import reduce_ops
from ringreduce.common.reduce_ops import ReduceOp


@pytest.mark.parametrize("op", ReduceOp, ids=lambda op: op.value)
def test_an_operation_is_found_by_itself_and_by_name(op: ReduceOp) -> None:
    """The member and its name, in any case, mean the same operation."""
    assert ReduceOp.parse(op) is op
    assert ReduceOp.parse(op.value) is op
    assert ReduceOp.parse(op.value.upper()) is op


@pytest.mark.parametrize(("name", "op"), [("avg", rr.AVERAGE), ("prod", rr.PRODUCT), ("Avg", rr.AVERAGE)])
def test_short_names_are_understood(name: str, op: ReduceOp) -> None:
    """The usual abbreviations work."""
    assert ReduceOp.parse(name) is op


@pytest.mark.parametrize("name", ["mean", "", "SUM!", None, 3])
def test_an_unknown_operation_is_refused(name: object) -> None:
    """What is no operation is a ConfigError that quotes it and lists the choices."""
    with pytest.raises(rr.ConfigError, match="sum, average, min, max, product") as caught:
        ReduceOp.parse(name)
    assert repr(name) in str(caught.value)


def test_the_constants_are_the_members() -> None:
    """`ringreduce.SUM` and its siblings are all the operations there are."""
    assert [getattr(rr, op.name) for op in ReduceOp] == list(ReduceOp)


@pytest.mark.parametrize("op", ReduceOp, ids=lambda op: op.value)
def test_the_table_defines_every_operation(op: ReduceOp) -> None:
    """The module's docstring says for each operation what it does to floats, integers and bools."""
    rows = [line.split("|")[1:-1] for line in reduce_ops.__doc__.splitlines() if line.startswith(f"| {op.value} ")]
    assert len(rows) == 1
    assert all(cell.strip() for cell in rows[0])
