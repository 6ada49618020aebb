"""Jobs that look for a tuning table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("folder", ["tables", 300 * "x"], ids=["empty", "a name too long for file systems"])
@pytest.mark.parametrize("deterministic", ["0", "1"])
def test_a_job_without_a_table_works(run_job: Callable[..., Any], folder: str, deterministic: str, tmp_path: Any):
    """Whether or not the folder can be looked into, and where the settings leave little to choose."""
    (tmp_path / "tables").mkdir()
    job = run_job(
        2,
        source="""
        import numpy as np
        import ringreduce as rr
        rr.init()
        assert rr.allreduce(np.ones(3)).tolist() == [2.0] * 3
        """,
        RINGREDUCE_DETERMINISTIC=deterministic,
        RINGREDUCE_TUNING=str(tmp_path / folder),
    )
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""
