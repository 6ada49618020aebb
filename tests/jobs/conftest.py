"""The fixtures of the tests of whole jobs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import launching
import pytest

#: The files that take longest begin first, or a process would be at one of them when the others are done.
LONGEST = ["test_elastic.py", "test_stops.py", "test_training_loops.py", "test_slow_jobs.py", "test_stalled_jobs.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put those first; the order is else as it was."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(autouse=True, scope="session")
def _has_mpirun() -> None:
    """Some installations keep mpirun off the path (behind modules); these tests are about jobs that it starts."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on the path")


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The variables of a job that a test starts by itself: `launching.job_environment`."""
    with launching.job_environment() as variables:
        yield variables
