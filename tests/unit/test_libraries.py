"""Libraries that a part of ringreduce is for: one that is missing or too old is one error that says what to install."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringreduce.common.libraries import require_library


@pytest.mark.parametrize(
    ("version", "fits"), [("2.16.0", True), ("2.16", True), ("3.0rc1", True), ("2.9.1", False), ("1.99", False)]
)
def test_versions_are_compared_as_numbers(monkeypatch: pytest.MonkeyPatch, version: str, fits: bool) -> None:
    """The error names both versions, and what to do."""
    library = ModuleType("some_library")
    library.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_library", library)
    if fits:
        require_library("some_library", "Some Library", "ringreduce.some", "pip install it", lowest=(2, 16))
        return
    text = f"^ringreduce.some needs Some Library 2.16 or newer, and this is {version}: pip install it$"
    with pytest.raises(ImportError, match=text):
        require_library("some_library", "Some Library", "ringreduce.some", "pip install it", lowest=(2, 16))


def test_a_missing_library_is_told_from_one_that_lacks_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The former is an error with a remedy; what the library itself lacks is its own error."""
    with pytest.raises(ModuleNotFoundError, match=r"^ringreduce\.some needs X, which is not installed: Y$") as error:
        require_library("no_such_library", "X", "ringreduce.some", "Y")
    assert error.value.name == "no_such_library"
    (tmp_path / "half_a_library.py").write_text("import the_other_half")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="the_other_half") as error:
        require_library("half_a_library", "X", "ringreduce.some", "Y")
    assert error.value.name == "the_other_half"
