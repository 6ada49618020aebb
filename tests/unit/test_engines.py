"""What starts ranks on other systems, where these are not installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.engines import engine, run_on
from ringreduce.engines.slots import slots
from ringreduce.ray import RayExecutor


def test_a_missing_library_is_named_with_the_remedy() -> None:
    """As those of the bindings are."""
    said = r"^ringreduce\.ray needs no_such_library, which is not installed: pip install no_such_library$"
    with pytest.raises(ModuleNotFoundError, match=said):
        engine("no_such_library", "ray")


@pytest.mark.parametrize("how", ["environment", "option", "option of a file", "variable"])
def test_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Before anything is started: the engine's own messages are open, and the key would promise what does not hold."""
    if how == "environment":
        monkeypatch.setenv("RINGREDUCE_KEY_FILE", "/no/such/key")
    options = {"option": ["--encrypt"], "option of a file": ["--encrypt=/no/such/key"]}.get(how, [])
    variables = {"RINGREDUCE_KEY_FILE": "/no/such/key"} if how == "variable" else {}
    with slots("127.0.0.1") as held, pytest.raises(ConfigError, match="not for ranks on Ray, Spark and Dask"):
        run_on(held, {"h": 1}, print, options=options, env=variables)
    with pytest.raises(ConfigError, match="not for ranks on Ray, Spark and Dask"):
        RayExecutor(num_workers=1, options=options).start(extra_env_vars=variables)


def test_the_library_is_imported_when_it_is_used() -> None:
    """Not with `ringreduce.ray` and the like, nor with Horovod's names for them."""
    source = (
        "import sys, ringreduce.dask, ringreduce.horovod, ringreduce.ray, ringreduce.spark\n"
        "import horovod.spark\n"
        "assert horovod.spark.run is ringreduce.spark.run\n"
        "assert horovod.spark.run_elastic is ringreduce.spark.run_elastic\n"
        "from horovod.ray import RayExecutor\n"
        "assert RayExecutor is ringreduce.ray.RayExecutor\n"
        "RayExecutor(RayExecutor.create_settings(timeout_s=30), 4, cpus_per_worker=2)\n"
        "print(bool({'dask', 'distributed', 'pyspark', 'ray'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({}, "takes num_workers, or num_hosts"),
        ({"num_workers": 0}, "at least one rank"),
        ({"num_workers": 2, "num_hosts": 1}, "takes num_workers, or num_hosts"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "takes use_gpu=True"),
    ],
)
def test_wrong_arguments_of_an_executor_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    """At once, before anything starts."""
    with pytest.raises(ConfigError, match=complaint):
        RayExecutor(**arguments)


def test_an_executor_that_is_not_started_calls_nothing() -> None:
    """And says so; to end it does nothing."""
    executor = RayExecutor(num_workers=2)
    with pytest.raises(ConfigError, match="is not started"):
        executor.run(print)
    executor.shutdown()
