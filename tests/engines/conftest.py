"""Programs that start ranks on other systems; `scripts/install engines` makes the environment that has these."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(autouse=True, scope="session")
def _has_mpirun(tmp_path_factory: pytest.TempPathFactory) -> None:
    tmp_path_factory.getbasetemp()  # is made before a module sets TMPDIR to a folder that it removes
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not on the path")
