"""The command line of ``bench`` and ``explain`` in a world of one: options, complaints, exit status."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner, Result

import ringreduce
import ringreduce.testing
from ringreduce.cli import main

FAST = ["-n", "2", "-w", "0"]


@pytest.fixture(autouse=True)
def _no_world_left():
    """Every command leaves as it came: without a world."""
    yield
    ringreduce.shutdown()


class OffByOne:
    """A communicator whose allreduce of float32 is wrong in one element."""

    def __init__(self, communicator) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str):
        return getattr(self._communicator, name)

    def allreduce(self, array, *arguments, **options):
        result = self._communicator.allreduce(array, *arguments, **options)
        if array.dtype == "float32":
            result[-1] += 1
        return result


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), prog_name="python -m ringreduce")


def test_the_last_size_is_measured():
    """Also where the factor jumps over it; the help says so."""
    result = invoke("bench", "allreduce", "-b", "8", "-e", "100K", "-f", "32", *FAST)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [row[0] for row in rows] == ["8", "256", "8192", "102400"]
    assert "measured too where the steps jump over it" in " ".join(invoke("bench", "--help").stdout.split())


def test_one_rank_has_no_bus_bandwidth():
    """It is N/A, not 0, and a line says how several ranks are started."""
    shown = invoke("bench", "allreduce", "-b", "1K", "-e", "1K", *FAST).stdout
    assert "ringreduce run -np 2 python -m ringreduce bench allreduce" in shown.splitlines()[-1]
    row = next(line.split() for line in shown.splitlines() if not line.startswith("#"))
    assert (row[7], row[11]) == ("N/A", "N/A")
    assert "# Avg bus bandwidth    : N/A" in shown


@pytest.mark.parametrize("command", ["bench", "tune", "explain"])
@pytest.mark.parametrize("option", ["-np", "-npp", "--np", "--num-proc"])
def test_ranks_are_started_in_front_of_a_command(command: str, option: str):
    """It has no option for that, whatever click makes of -np; the error says what to write."""
    result = invoke(command, option, "2")
    assert result.exit_code == 2
    assert f"{command} has no option {option}: it measures the ranks that run it. Start them in front" in result.stderr
    assert "ringreduce run -np N" in result.stderr


def test_bench_writes_json(tmp_path):
    """-J writes the report beside the table."""
    path = tmp_path / "report.json"
    result = invoke("bench", "broadcast", "-b", "8", "-e", "8", *FAST, "-J", str(path), "--format", "csv")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("collective,size,")
    report = json.loads(path.read_text())
    assert report["config"]["nranks"] == 1
    assert report["results"][0]["collective"] == "broadcast"
    assert f"bench: wrote {path}\n" in result.stderr


def test_wrong_elements_make_the_exit_status_1(monkeypatch):
    """A job whose results are wrong fails, after it has shown the table."""
    ringreduce.init()
    world = OffByOne(ringreduce.world())
    monkeypatch.setattr(ringreduce, "world", lambda: world)
    result = invoke("bench", "allreduce", "-b", "1K", "-e", "1K", *FAST)
    assert result.exit_code == 1
    assert "# Out of bounds values : 4 FAILED" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["bench", "allreduce", "-b", "8Q"], "'8Q' is not a size"),
        (["bench", "allreduce", "-b", "0"], "'0' is not a size"),
        (["bench", "allreduce", "-b", "1M", "-e", "1K"], "--maxbytes 1024 is smaller than --minbytes 1048576"),
        (["bench", "allreduce", "-f", "1"], "stepfactor"),
        (["bench", "allreduce", "-d", "float,quad"], "'quad' is not one of int8, uint8"),
        (["bench", "allreduce", "-o", "xor"], "'xor' is not one of sum, prod, max, min, avg, all"),
        (["bench", "allreduce", "--vs", "nccl"], "'nccl' is not one of mpi, gloo"),
        (["bench", "allreduce", "--algorithm", "rnig", *FAST], "choose auto, all or one of"),
        (["bench", "broadcast", "-r", "7", *FAST], "there is no rank 7 to be the root; the last is rank 0"),
        (["bench", "allreduce", "-J", "/no/such/folder/x.json"], "cannot be written: No such file"),
        (["bench", "scan"], "'scan' is not one of"),
        (["bnech"], "No such command 'bnech'"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], complaint: str):
    """What cannot be understood is named in one line on standard error, with exit status 2."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ")
    assert complaint in result.stderr


def test_explain_says_what_would_run():
    """One line or more per size, each beginning with the size."""
    result = invoke("explain", "-b", "4K", "-e", "64M", "-f", "256")
    assert result.exit_code == 0, result.output
    assert [line.split("  ")[0].strip() or line.split()[0] for line in result.stdout.splitlines()]
    assert "4 KiB" in result.stdout
    assert "64 MiB" in result.stdout


def test_explain_is_a_table():
    """A row for each size, whole where no terminal is narrower; what could run is said once, and not in each row."""
    shown = invoke("explain", "-b", "4K", "-e", "1M", "-f", "16").stdout.splitlines()
    assert shown[0] == "allreduce of float in host memory, 1 rank on 1 node"
    assert shown[1].split() == ["size", "algorithm", "transport", "why"]
    rows = [line.split() for line in shown[2:-1]]
    assert [row[:2] for row in rows] == [["4", "KiB"], ["64", "KiB"], ["1", "MiB"]]
    names = ringreduce.testing.run_ranks(1, lambda world: world.algorithms("allreduce"))[0]
    assert all(row[2] in names for row in rows)
    assert shown[-1].startswith("all that can run here: ")
    assert sum("can run here" in line for line in shown) == 1


@pytest.mark.parametrize("command", [[], ["bench"], ["explain"]])
def test_help(command: list[str]):
    """Help exits with 0, fits 120 columns and starts no world."""
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: python -m ringreduce" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 120
    assert not ringreduce.is_initialized()


def test_without_a_command_there_is_help():
    """Nobody did anything wrong who only wants to see what there is."""
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout == invoke("--help").stdout
    assert result.stderr == ""


def test_no_option_is_without_help():
    """Every option of every command says what it does."""
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            assert not isinstance(parameter, click.Option) or parameter.help, parameter.name
