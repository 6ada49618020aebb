"""Settings: every variable, its default, and what is wrong with a bad value."""

from __future__ import annotations

import dataclasses

import pytest

from ringreduce.common.config import HOROVOD, Config, gpu_switches, ignored_variables
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import Launch
from ringreduce.common.settings import rows

VARIABLES = {row.variable: name for name, _, row in reversed([*rows(Config)])}


def test_an_empty_environment_gives_the_defaults() -> None:
    """Without variables, and with empty ones, Horovod's too, the settings are those of Config()."""
    assert Config.from_environ({}) == Config()
    assert Config.from_environ(dict.fromkeys([*VARIABLES, *HOROVOD], "")) == Config()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("RINGREDUCE_TIMEOUT", "2.5", 2.5),
        ("RINGREDUCE_TIMEOUT", "1e3", 1000.0),
        ("RINGREDUCE_NODE_SIZE", "2", 2),
        ("RINGREDUCE_SHARED_MEMORY", "0", False),
        ("RINGREDUCE_SHARED_MEMORY", "Off", False),
        ("RINGREDUCE_PRIVATE_MEMORY", "0", False),
        ("RINGREDUCE_STATUS", "0", False),
        ("RINGREDUCE_STATUS_TOKEN_FILE", "/keys/token", "/keys/token"),
        ("RINGREDUCE_RESULTS_BYTES", "2G", 2 << 30),
        ("RINGREDUCE_RESULTS_BYTES", "0", 0),
        ("RINGREDUCE_SHARED_MEMORY", "yes", True),
        ("RINGREDUCE_ALGORITHM", "ring", "ring"),
        ("RINGREDUCE_BUCKET", "1m", 1 << 20),
        ("RINGREDUCE_BUCKET", "2G", 2 << 30),
        ("RINGREDUCE_BUCKET", "4MiB", 4 << 20),
        ("RINGREDUCE_BUCKET", "512kb", 512 << 10),
        ("RINGREDUCE_BUCKET", "1gib", 1 << 30),
        ("RINGREDUCE_BUCKET", "4096B", 4096),
        ("RINGREDUCE_FUSION", "64K", 64 << 10),
        ("RINGREDUCE_OBJECT_LIMIT", "8G", 8 << 30),
        ("RINGREDUCE_STALL_WARNING", "2.5", 2.5),
        ("RINGREDUCE_STALL_WARNING", "0", None),
        ("RINGREDUCE_LOG_LEVEL", "debug", "DEBUG"),
        ("RINGREDUCE_LOG_LEVEL", "Fatal", "CRITICAL"),
        ("RINGREDUCE_DETERMINISTIC", "1", True),
        ("RINGREDUCE_TIMELINE", "trace.json", "trace.json"),
        ("RINGREDUCE_TIMELINE", "a,b:c.json", "a,b:c.json"),
        ("RINGREDUCE_TIMELINE_MARKS", "1", True),
        ("RINGREDUCE_CHECK", "100", 100),
        ("RINGREDUCE_CHECK_FINITE", "7", 7),
        ("RINGREDUCE_CHECK_DATA", "off", False),
        ("RINGREDUCE_TUNING", "tables", "tables"),
        ("RINGREDUCE_GPU", "NCCL", "nccl"),
        ("RINGREDUCE_GPU", "mpi", "mpi"),
        ("RINGREDUCE_CONVENTIONS", "horovod", Conventions.HOROVOD),
        ("RINGREDUCE_CONVENTIONS", "chain_rule", Conventions.CHAIN_RULE),
    ],
)
def test_a_variable_sets_its_field_alone(name: str, text: str, value: object) -> None:
    """A variable is understood as documented and changes no other setting."""
    assert Config.from_environ({name: text}) == dataclasses.replace(Config(), **{VARIABLES[name]: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("RINGREDUCE_TIMEOUT", text) for text in ("soon", "0", "-1", "nan", "inf", "5s")),
        *(("RINGREDUCE_NODE_SIZE", text) for text in ("0", "-2", "two", "1.5", " ", "²")),
        *(("RINGREDUCE_SHARED_MEMORY", text) for text in ("2", "maybe")),
        *(("RINGREDUCE_FUSION", text) for text in ("0", "K", "-4K", "1T", "1.5M", "0K", "4 K", "4iB", "4KI", "MB")),
        *(("RINGREDUCE_BUCKET", text) for text in ("many", "M", "-1")),
        *(("RINGREDUCE_STALL_WARNING", text) for text in ("-1", "never")),
        *(("RINGREDUCE_LOG_LEVEL", text) for text in ("loud", "10")),
        *(("RINGREDUCE_MIN_NP", text) for text in ("0", "two", "-1")),
        *(("RINGREDUCE_RESET_LIMIT", text) for text in ("never", "-1")),
        ("RINGREDUCE_GPU", "maybe"),
        ("RINGREDUCE_CHECK_FINITE", "0"),
        ("RINGREDUCE_WATCHDOG_ACTION", "stop"),
        ("RINGREDUCE_CONVENTIONS", "mine"),
        ("HOROVOD_FUSION_THRESHOLD", "64.5"),
        ("HOROVOD_LOG_LEVEL", "loud"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "a minute"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-5"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, text: str) -> None:
    """What cannot be understood is a ConfigError that names the variable and quotes its value."""
    with pytest.raises(ConfigError) as caught:
        Config.from_environ({name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("RINGREDUCE_TIMELINE", "trace.json,marks:1", "RINGREDUCE_TIMELINE_MARKS=1"),
        ("RINGREDUCE_CHECK", "100,finite:1", "RINGREDUCE_CHECK_FINITE=1"),
        ("RINGREDUCE_CHECK", "data:0", "RINGREDUCE_CHECK_DATA=0"),
        ("RINGREDUCE_SHARED_MEMORY", "private:0,results:2G", "RINGREDUCE_PRIVATE_MEMORY=0 RINGREDUCE_RESULTS_BYTES=2G"),
        ("RINGREDUCE_STATUS", "9400,token:/t", "RINGREDUCE_STATUS_TOKEN_FILE=/t"),
        ("RINGREDUCE_WATCHDOG", "60,action:end", "RINGREDUCE_WATCHDOG_ACTION=end"),
    ],
)
def test_what_stood_behind_commas_has_a_variable_of_its_own(name: str, text: str, remedy: str) -> None:
    """The error names it, with the value."""
    with pytest.raises(ConfigError, match=f"{name}='{text}' in the environment: .*: {remedy}$"):
        Config.from_environ({name: text})


def test_a_bad_size_is_told_what_is_understood() -> None:
    """The error shows how sizes are written, and that units are of 1024."""
    with pytest.raises(ConfigError, match="64K, 64KiB or 4MB, in units of 1024"):
        Config.from_environ({"RINGREDUCE_BUCKET": "4 megabytes"})


def test_a_variable_overrides_the_conventions_of_the_process() -> None:
    """What the program has chosen is the default; the environment has the last word."""
    assert Config.from_environ({}, Conventions.HOROVOD).conventions is Conventions.HOROVOD
    environ = {"RINGREDUCE_CONVENTIONS": "chain_rule"}
    assert Config.from_environ(environ, Conventions.HOROVOD).conventions is Conventions.CHAIN_RULE


@pytest.mark.parametrize(
    "name",
    [
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "MV2_COMM_WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
        "PALS_NRANKS",
        "FLUX_JOB_SIZE",
        "JSM_NAMESPACE_SIZE",
    ],
)
def test_launchers_are_recognised(name: str) -> None:
    """The number of ranks is read where each launcher leaves it; what is no number says nothing."""
    assert Config.from_environ({name: "4"}).launched_size == 4
    assert Config.from_environ({name: "four"}).launched_size is None


def test_the_launcher_says_which_rank_this_is() -> None:
    """The rank is read where launchers leave it; a process without a launcher is rank 0."""
    environs = ({}, {"PMI_RANK": "3"}, {"SLURM_PROCID": "3", "PMI_RANK": ""})
    assert [Launch.from_environ(each).rank for each in environs] == [0, 3, 3]


def test_settings_cannot_be_changed() -> None:
    """A Config is a value."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().timeout_s = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("environ", "field", "value"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "67108864"}, "fusion_nbytes", 64 << 20),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, "fusion_nbytes", 1),
        ({"HOROVOD_FUSION_THRESHOLD": "8", "RINGREDUCE_FUSION": "1M"}, "fusion_nbytes", 1 << 20),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, "stall_warning_s", 5.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "RINGREDUCE_STALL_WARNING": "7"}, "stall_warning_s", 7.0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, "stall_warning_s", None),
        ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, "stall_warning_s", 60.0),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"}, "stall_warning_s", None),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_DISABLE": "0"}, "stall_warning_s", 5.0),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1", "RINGREDUCE_STALL_WARNING": "7"}, "stall_warning_s", 7.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "120"}, "timeout_s", 120.0),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, "timeout_s", 300.0),
        ({"HOROVOD_LOG_LEVEL": "trace"}, "log_level", "DEBUG"),
        ({"HOROVOD_LOG_LEVEL": "warning"}, "log_level", "WARNING"),
        ({"HOROVOD_TIMELINE": "trace.json"}, "timeline", "trace.json"),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, "timeline", None),
        ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, "timeline_marks_batches", True),
    ],
)
def test_variables_of_horovod(environ: dict[str, str], field: str, value: object) -> None:
    """They mean what they mean in Horovod, unless ours of the same meaning is set."""
    assert getattr(Config.from_environ(environ), field) == value


def test_variables_of_horovod_without_meaning() -> None:
    """Those that steer what is not here are named, each once and in order; those that are honoured are not."""
    environ = dict.fromkeys(HOROVOD, "1") | {
        "HOROVOD_TORUS_ALLREDUCE": "1",
        "HOROVOD_CYCLE_TIME": "5",
        "HOROVOD_AUTOTUNE": "",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOME": "/",
    }
    assert ignored_variables(environ) == ["HOROVOD_CYCLE_TIME", "HOROVOD_TORUS_ALLREDUCE"]
    ours = {"RINGREDUCE_TIMEOT": "5", "RINGREDUCE_TIMEOUT": "5", "RINGREDUCE_XYZ": "1", "RINGREDUCE_HOST": "a"}
    assert ignored_variables(ours) == ["RINGREDUCE_TIMEOT (did you mean RINGREDUCE_TIMEOUT?)", "RINGREDUCE_XYZ"]
    assert ignored_variables({}) == []


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/ringreduce"),
        ({"HOME": "/home/u", "XDG_CACHE_HOME": "/caches"}, "/caches/ringreduce"),
        ({"HOME": "/home/u", "RINGREDUCE_TUNING": "tables"}, "tables"),
        ({"HOME": "/home/u", "RINGREDUCE_TUNING": "0"}, None),
        ({}, None),
    ],
)
def test_tables_lie_with_the_users_caches(environ: dict[str, str], folder: str | None) -> None:
    """Unless a variable names another folder, or 0 for none."""
    assert Config.from_environ(environ).tuning == folder


def test_switches_of_other_libraries_are_passed_on() -> None:
    """What MPI libraries and NCCL are told about GPUs is handed on as it is; what is unset or empty is not there."""
    environ = {"MV2_USE_CUDA": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "", "NCCL_DEBUG": "INFO"}
    assert gpu_switches(environ) == {"MV2_USE_CUDA": "1"}


@pytest.mark.parametrize(
    ("environ", "name", "proof"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, "Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=4"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "mpiexec of MPICH or Intel MPI", "PMI_SIZE=2"),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}, "srun", "SLURM_STEP_NUM_TASKS=3"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "torchrun (or what sets its variables)", "WORLD_SIZE=2"),
        ({"PMIX_RANK": "1"}, "Open MPI's mpirun", "PMIX_RANK=1"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            *("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE=2"),
        ),
        (
            {
                **dict.fromkeys(("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"), "2"),
                "RANK": "1",
                "OMPI_COMM_WORLD_RANK": "0",
                "TORCHELASTIC_RUN_ID": "none",
            },
            *("torchrun (or what sets its variables)", "WORLD_SIZE=2"),
        ),
    ],
)
def test_several_processes_are_proved(environ: dict[str, str], name: str, proof: str) -> None:
    """By a size above one together with a rank, or by a rank that is not the first."""
    found = Launch.from_environ(environ)
    assert (found.launcher.name, found.proof) == (name, proof)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "4"},
        {"WORLD_SIZE": "4", "RANK": "1", "RINGREDUCE_MASTER_ADDR": "h1"},
        {"SLURM_STEP_NUM_TASKS": "4"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        {"PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"},
    ],
)
def test_what_proves_nothing(environ: dict[str, str]) -> None:
    """An allocation, half of what a launcher sets, and a launcher that has started this process alone."""
    assert Launch.from_environ(environ).launcher is None


def test_the_launcher_says_when_elastic_training_ends() -> None:
    """`ringreduce run --min-np --reset-limit`; where it says nothing, one rank will do, and ranks go on for ever."""
    said = Launch.from_environ({"RINGREDUCE_MIN_NP": "2", "RINGREDUCE_RESET_LIMIT": "0"})
    assert (said.least_size, said.reset_limit) == (2, 0)
    assert (Launch().least_size, Launch().reset_limit) == (1, None)
    assert Launch.from_environ({}) == Launch()
    assert ignored_variables({"RINGREDUCE_MIN_NP": "2", "RINGREDUCE_RESET_LIMIT": "0"}) == []


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9400", ("127.0.0.1", 9400)),
        (":9400", ("127.0.0.1", 9400)),
        ("node7:9400", ("node7", 9400)),
        ("[::1]:9400", ("::1", 9400)),
        ("1", None),
        ("off", None),
    ],
)
def test_where_the_status_is_served(text: str, address: tuple[str, int] | None) -> None:
    """On this machine alone, unless a host is named; nowhere by a switch."""
    assert Config.from_environ({"RINGREDUCE_STATUS": text}).status_address == address


@pytest.mark.parametrize("text", ["2000000", "node7", "::1:9400", "node7:", ":-5", "perhaps"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """With what an address looks like."""
    with pytest.raises(ConfigError, match=r"RINGREDUCE_STATUS=.*expected .*; or 1 or 0"):
        Config.from_environ({"RINGREDUCE_STATUS": text})
