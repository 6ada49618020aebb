"""Names that ranks match operations and variables by, whatever their processes have counted."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError
from ringreduce.engine import Engine
from ringreduce.testing import caught, run_engines, run_ranks
from ringreduce.training.binding.host import HOST
from ringreduce.training.binding.identity import ScopedName, agree, agreed_names, counters, identity_of, name_in
from ringreduce.training.calls.parameters import require_same_arrays


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("dense/kernel", "dense/kernel"),
        ("dense_12/kernel", "dense/kernel"),
        ("sequential_3/dense_1/kernel", "dense/kernel"),
        ("functional/actor_2/conv2d_1/bias", "actor/conv2d/bias"),
        ("adam_1/sequential_1_dense_2_kernel_momentum", "adam/dense_kernel_momentum"),
        ("Variable_7:0", "Variable:0"),
        ("agent0", "agent0"),
        ("w2d/x", "w2d/x"),
        ("sequential", "sequential"),
    ],
)
def test_counters_and_containers_without_names_are_left_out(path: str, name: str) -> None:
    """Digits that belong to a word stay."""
    assert ScopedName(path) == name


@pytest.mark.parametrize(
    ("names", "same"),
    [
        (["dense/kernel", "actor/dense/kernel"], True),
        (["adam/dense_kernel_momentum", "adam/actor_dense_kernel_momentum", "adam/dense_kernel_momentum"], True),
        (["actor/dense/kernel", "critic/dense/kernel"], False),
        (["probe/kernel", "dense/kernel"], False),
        (["adam/dense_kernel_momentum", "sgd/actor_dense_kernel_momentum"], False),
        (["dense/w", "dense/my_w"], False),
        (["kernel", "mykernel"], False),
    ],
)
def test_names_agree_where_only_outer_scopes_are_left_out(names: list[str], same: bool) -> None:
    """As a model that was loaded from a file leaves out its own. Other names have no scopes."""
    assert agree(names, scoped=True) == same
    assert not agree(names, scoped=False)
    assert agree(names[:1] * 3, scoped=False)


def test_what_was_made_first_has_the_lower_counters() -> None:
    """Also beyond nine, and where an outer scope was made once."""
    paths = [
        "net/dense/kernel",
        "net/dense_2/kernel",
        "net/dense_10/kernel",
        "net_1/dense/kernel",
        "net_1/dense_3/kernel",
    ]
    assert sorted(paths, key=counters) == paths


def test_agreed_names_follow_the_counters() -> None:
    """A process that has counted to ten has the same names as one that has just begun."""
    one = agreed_names(["loss", "auc_10", "auc_9", "val_auc_9", "val_auc_10"])
    other = agreed_names(["loss", "auc_1", "auc", "val_auc", "val_auc_1"])
    assert list(one.values()) == list(other.values())
    assert (one["auc_9"], one["auc_10"], one["val_auc_10"]) == ("auc", "auc 2", "val_auc 2")


def test_identities_are_named_by_first_use_and_say_if_they_were_made_in_another_order() -> None:
    """Names depend on the order in which a rank made what it uses, not on how much else it has made."""

    def program(engine: Engine) -> list[str]:
        shift = 5 * engine.communicator.rank
        made = [identity_of("tape", [("w", (3,))], (shift + number,)) for number in (1, 2, 3)]
        other = identity_of("tape", [("w", (4,))], (shift,))
        return [name_in(engine, each) for each in (made[0], other, made[2], made[1], made[0])]

    first, second = run_engines(2, program, config=Config(timeout_s=30.0))
    assert first == second
    assert len(set(first)) == 4
    assert first[0] == first[4]
    assert first[3].endswith(", made before 1 of these")
    assert not any("before" in each for each in first[:3])


def test_arrays_are_compared_without_counters() -> None:
    """Names that differ in more, shapes and other options are errors that show what each rank has."""

    def compared(ranks: Communicator, *paths: str, shape: int = 2) -> str:
        named = [(ScopedName(path), np.zeros(shape)) for path in paths]
        return str(caught(require_same_arrays, HOST, ranks, "check", named))

    def program(ranks: Communicator) -> None:
        root = ranks.rank == 0
        same = compared(ranks, "dense_1/kernel" if root else "dense/kernel", "a/b/c" if root else "b/c")
        assert same == "None"
        assert "tensor 1 is probe/kernel" in compared(ranks, "dense/bias", "probe/kernel" if root else "head_2/kernel")
        assert "shape (3,)" in compared(ranks, "dense/bias", shape=2 + root)
        assert "missing" in compared(ranks, *["dense/bias"] * (1 + root))
        plain = [("dense_1/kernel" if root else "dense/kernel", np.zeros(2))]
        assert isinstance(caught(require_same_arrays, HOST, ranks, "check", plain), MismatchError)

    run_ranks(3, program)
