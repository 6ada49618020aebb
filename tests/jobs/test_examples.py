"""The examples do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from launching import LIMIT_S, needs, run_together

needs("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
TRANSFORMER = [str(EXAMPLES / "char_transformer.py"), "--batch-size=12", "--every=1", "--sample=20"]
#: Kinds of parallelism, with options, and on how many ranks.
KINDS = {"data": 4, "data --shard=node": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "mesh": 4}
MNIST = {
    "example": [str(EXAMPLES / "mnist.py")],
    "demo": [str(EXAMPLES.parent / "benchmarks" / "mnist.py"), "--epochs=1", "--batch-size=64"],
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """A function of a number of ranks: what the scripts say that take so many; they share a job."""

    @cache
    def of(ranks: int) -> dict[str, str]:
        kinds = [kind for kind, count in KINDS.items() if count == ranks]
        scripts = {kind: [*TRANSFORMER, *f"--parallel={kind}".split(), "--steps=8"] for kind in kinds}
        return run_together(ranks, tmp_path_factory.mktemp("said"), {**(MNIST if ranks == 2 else {}), **scripts})

    return of


def test_mnist_learns(said: Callable[[int], dict[str, str]]) -> None:
    """Four marked lines are all that the script needs, and its CNN recognises 95 % of digits that it has not seen."""
    source = (EXAMPLES / "mnist.py").read_text(encoding="utf-8")
    marked = [line for line in source.splitlines() if re.search(r"  # \([1-4]\) ", line)]
    calls = [line for line in source.splitlines() if "hvd." in line and "hvd.rank()" not in line]
    assert calls == marked
    assert len(marked) == 4
    shares = re.findall(r"epoch [0-9]: ([\d.]+)% of 1000", said(2)["example"])
    assert len(shares) == 3, "rank 0 alone speaks"
    assert float(shares[-1]) >= 95


def test_the_demo_compares_the_weights_of_its_ranks(said: Callable[[int], dict[str, str]]) -> None:
    """It trains, says what that took, and ends well where all ranks have the same weights."""
    demo = said(2)["demo"]
    assert re.search(r"throughput: [\d,]+ samples/s over all ranks\n", demo)
    assert "weights: bitwise identical on 2 ranks\n" in demo


def losses_of(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"training loss ([\d.]+)", output)]


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of the transformer in one process, without any parallelism: it learns more than frequencies."""
    command = [sys.executable, *TRANSFORMER, "--parallel=none", "--steps=40"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    learned = re.search(r"never trained on: ([\d.]+).*\n.*characters alone: ([\d.]+)", done.stdout)
    assert learned is not None, done.stdout
    assert float(learned[1]) < float(learned[2]) - 0.5
    return losses_of(done.stdout)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_parallelism_compute_the_same(
    alone: list[float], said: Callable[[int], dict[str, str]], kind: str
) -> None:
    """The transformer has the losses of one process, whatever is cut between the ranks, and all hold equal weights."""
    output = said(KINDS[kind])[kind]
    assert losses_of(output) == pytest.approx(alone[:8], abs=3e-4)
    assert "weights: bitwise identical" in output


def test_the_transformer_says_what_sharding_saves(said: Callable[[int], dict[str, str]]) -> None:
    """Adam keeps two numbers for each weight; one of two ranks need not have them."""
    found = re.search(
        r"the node has ([\d.]+) MB of weights and ([\d.]+) MB .* not 2 times: ([\d.]+) MB saved",
        said(2)["data --shard=node"],
    )
    assert found is not None
    weights, state, saved = map(float, found.groups())
    assert weights > 1
    assert state == pytest.approx(2 * weights, abs=0.02)
    assert saved == pytest.approx(weights + state, abs=0.02)
