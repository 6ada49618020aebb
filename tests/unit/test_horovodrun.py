"""`horovodrun`: what each of Horovod's options becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringreduce.cli.horovodrun import read
from ringreduce.common.config import ignored_variables
from ringreduce.common.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (["-np", "4"], {"-np": "4"}),
        (["--num-proc=4", "-H", "a:2,b:2"], {"-np": "4", "-H": "a:2,b:2"}),
        (["-np=2", "-p2222", "-Ha:2"], {"-np": "2", "--ssh-port": "2222", "-H": "a:2"}),
        (["-np=2", "--verb", "--host-d", "s"], {"-np": "2", "--verbose": "", "--host-discovery-script": "s"}),
        (["--num", "2"], {"-np": "2"}),
        (["-hostfile", "f"], {"--hostfile": "f"}),
        (["--hostfile", "f", "-p", "2222"], {"--hostfile": "f", "--ssh-port": "2222"}),
        (["--network-interface", "e0,e1"], {"--network-interface": "e0,e1"}),
        (["--mpi-args", "--map-by core"], {"--mpi-args": "--map-by core"}),
        (["--output-filename", "d", "--verbose"], {"--log-dir": "d", "--verbose": ""}),
        (["--min-np", "2", "--max-np", "8"], {"--min-np": "2", "--max-np": "8"}),
        (["--slots", "3", "--host-discovery-script", "s"], {"--slots": "3", "--host-discovery-script": "s"}),
        (["--reset-limit", "3"], {"--reset-limit": "3"}),
        (["--blacklist-cooldown-range", "1", "10"], {"--cooldown": "1 10"}),
    ],
)
def test_options_are_those_of_ringreduce_run(given: list[str], options: dict[str, str]) -> None:
    """In Horovod's spellings; the program keeps its own."""
    plan = read([*given, "python", "train.py", "-np", "9"])
    assert plan.options == options
    assert plan.program == ("python", "train.py", "-np", "9")
    assert not plan.warnings


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (["--fusion-threshold-mb", "32"], {"RINGREDUCE_FUSION": str(32 << 20)}),
        (["--fusion-threshold-mb", "0"], {"RINGREDUCE_FUSION": "1"}),
        (["--timeline-filename", "t.json"], {"RINGREDUCE_TIMELINE": "t.json"}),
        (["--timeline-mark-cycles"], {"HOROVOD_TIMELINE_MARK_CYCLES": "1"}),
        (["--no-stall-check"], {"RINGREDUCE_STALL_WARNING": "0"}),
        (["--stall-check-warning-time-seconds", "7"], {"RINGREDUCE_STALL_WARNING": "7"}),
        (["--stall-check-shutdown-time-seconds=40"], {"RINGREDUCE_TIMEOUT": "40"}),
        (["--log-level", "TRACE"], {"HOROVOD_LOG_LEVEL": "TRACE"}),
    ],
)
def test_settings_reach_the_ranks(given: list[str], settings: dict[str, str]) -> None:
    """As variables, of ours but for the log level, whose names are Horovod's; -x sends them to all hosts."""
    plan = read([*given, "true"])
    assert plan.settings == settings
    arguments = plan.arguments()
    assert all(f"{name}={value}" in arguments for name, value in settings.items())


@pytest.mark.parametrize(
    "given",
    [
        ["--cycle-time-ms", "1"],
        ["--cache-capacity", "9"],
        ["--autotune"],
        ["--autotune-log-file", "f"],
        ["--hierarchical-allreduce"],
        ["--no-torus-allreduce"],
        ["--mpi"],
        ["--num-nccl-streams", "2"],
        ["--disable-cache"],
        ["--log-without-timestamp"],
        ["--log-hide-timestamp"],
        ["--log-with-timestamp"],
    ],
)
def test_what_means_nothing_here_is_said(given: list[str]) -> None:
    """One warning, and the job starts."""
    plan = read([*given, "true"])
    (warning,) = plan.warnings
    assert warning.startswith(f"{given[0]} is not needed: ")
    assert plan.options == plan.settings == {}
    assert plan.program == ("true",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gloo", "true"], "there is only MPI here"),
        (["--jsrun", "true"], "under mpirun"),
        (["--fusion-treshold-mb", "1", "true"], "did you mean --fusion-threshold-mb"),
        (["--fusion-threshold-mb", "x", "true"], "expected a number"),
        (["--zzz", "true"], "unrecognized arguments: --zzz"),
        (["--ver", "true"], "--ver could match --verbose, --version"),
        (["-np"], "-np/--num/--num-proc: expected one argument"),
        (["--verbose=1", "true"], "--verbose: ignored explicit argument"),
        (["-np", "2"], "there is no program"),
        (["--config-file", "/there/is/none", "true"], "No such file"),
    ],
)
def test_wrong_options_are_refused(given: list[str], said: str) -> None:
    """With the nearest known name, or what to do."""
    with pytest.raises(ConfigError, match=said):
        read(given)


def test_elastic_options_make_an_elastic_job() -> None:
    """Horovod has no switch for that."""
    arguments = read(["-np", "2", "--min-np", "1", "--start-timeout", "9", "true"]).arguments()
    assert "--elastic" in arguments
    assert arguments[arguments.index("--start-timeout") + 1] == "9"
    assert "--elastic" not in read(["-np", "2", "--start-timeout", "9", "true"]).arguments()


def test_a_file_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    """In Horovod's sections; unknown keys are named, and what the command line says counts."""
    file = tmp_path / "c.yaml"
    file.write_text(
        "# ours\nverbose: true\nparams:\n  fusion_threshold_mb: 16  # MiB\n  cycle_time_ms: 5\n"
        "timeline:\n  filename: 't.json'\n  mark_cycles: no\n"
        "stall_check:\n  enabled: false\n  shutdown_time_seconds: 0\nother:\n  key: 1\nlogging:\n  level: null\n"
    )
    plan = read(["--fusion-threshold-mb", "2", "--config-file", str(file), "true"])
    assert plan.options == {"--verbose": ""}
    assert plan.settings == {
        "RINGREDUCE_FUSION": str(2 << 20),
        "RINGREDUCE_TIMELINE": "t.json",
        "RINGREDUCE_STALL_WARNING": "0",
        "RINGREDUCE_TIMEOUT": "",
    }
    cycle, other = plan.warnings
    assert "cycle_time_ms is not needed" in cycle
    assert "key is not known" in other
    file.write_text("controller: gloo\n")
    with pytest.raises(ConfigError, match="controller: there is only MPI here"):
        read(["--config-file", str(file), "true"])
    file.write_text("params\n")
    with pytest.raises(ConfigError, match="line 1: expected key: value"):
        read(["--config-file", str(file), "true"])


def test_all_keys_of_horovods_file_are_known(tmp_path: Path) -> None:
    """Each that is set and means nothing here has a warning."""
    unneeded = {
        "params": {"cycle_time_ms": 2, "cache_capacity": 9, "hierarchical_allreduce": True,
                   "hierarchical_allgather": True, "torus_allreduce": True},
        "autotune": {"enabled": True, "log_file": "f", "warmup_samples": 1, "steps_per_sample": 2,
                     "bayes_opt_max_samples": 3, "gaussian_process_noise": 0.5},
        "library_options": {"mpi_threads_disable": True, "num_nccl_streams": 2, "ccl_bgt_affinity": 1,
                            "gloo_timeout_seconds": 3, "thread_affinity": 0},
        "logging": {"with_timestamp": True},
    }  # fmt: skip
    file = tmp_path / "c.yaml"
    lines = [
        line
        for section, keys in unneeded.items()
        for line in (f"{section}:", *(f"  {k}: {v}" for k, v in keys.items()))
    ]
    file.write_text("\n".join(["controller: mpi", *lines, "stall_check:", "  warning_time_seconds: 7"]))
    plan = read(["--config-file", str(file), "true"])
    expected = [key for keys in unneeded.values() for key in keys]
    assert [warning.split(": ")[1].removesuffix(" is not needed") for warning in plan.warnings] == expected
    assert plan.settings == {"RINGREDUCE_STALL_WARNING": "7"}


def test_what_it_sets_for_programs_is_not_set_in_vain() -> None:
    """No log line names these variables."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    assert ignored_variables({f"HOROVOD_{name}": "1" for name in names}) == []


def test_some_options_start_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    """They need no program."""
    assert read(["-cb"]).shows
    assert read(["--check-build"]).shows
    for option, said in (("-v", "horovodrun of ringreduce "), ("--help", "usage: horovodrun -np N")):
        with pytest.raises(SystemExit) as ends:
            read([option])
        assert not ends.value.code
        assert capsys.readouterr().out.startswith(said)
