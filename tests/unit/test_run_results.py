"""What a call of a function on ranks makes of the files that these leave."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringreduce.common.errors import CollectiveError
from ringreduce.launcher.function import results


def test_an_elastic_job_has_failed_by_the_failures_of_its_last_ranks(tmp_path: Path) -> None:
    """Of these, by the first one. Those of ranks that an earlier job went on without do not count."""
    for seconds, name in enumerate(["0-1", "10-2", "10-0", "9-0"]):
        path = tmp_path / f"{name}.failure"
        path.write_text(f"error of {name}")
        os.utime(path, (seconds, seconds))
    with pytest.raises(CollectiveError, match="rank 2 of the job failed:\nerror of 10-2"):
        results(tmp_path, None, 1)
