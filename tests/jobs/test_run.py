"""Jobs that `ringreduce run` and `horovodrun` start: output, failures, exit statuses."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import click
import launching
import pytest
from launching import RINGREDUCE, Job, needs

from ringreduce.cli import main
from ringreduce.common.errors import ConfigError

FAILS = """
import sys
import ringreduce
ringreduce.init()
print("begun", ringreduce.rank())
if ringreduce.rank() == 1:
    raise KeyError("the reason")
ringreduce.barrier()
"""
#: Without ringreduce, so that a job is quick.
SPEAKS = """
import os, sys
rank = os.environ["OMPI_COMM_WORLD_RANK"]
print("out", rank)
print("error", rank, file=sys.stderr)
print("more", rank, os.environ.get("SAID"))
"""


def run(*arguments: object, command: str = "ringreduce", cwd: Path | None = None) -> Job:
    """Run a command beside this Python."""
    return launching.run(RINGREDUCE.with_name(command), *arguments, cwd=cwd)


@pytest.mark.parametrize("option", ["", "--prefix", "--log-dir=logs", "--verbose"])
def test_the_traceback_of_the_rank_that_failed_is_shown_once(tmp_path: Path, option: str) -> None:
    """With one line that names the rank last, and nothing of mpirun's own, unless that is asked for."""
    done = run("run", "-np", 2, *filter(None, [option]), sys.executable, "-c", FAILS, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("KeyError: 'the reason'\n") == 1
    if option != "--prefix":  # then each line of a rank's MPI library has one, too
        assert ("MPI_ABORT was invoked" in done.stderr) == ("prterun" in done.stderr) == (option == "--verbose")
        assert ("\0" in done.stderr) == (option == "--verbose")
    said = done.stderr.splitlines()
    last = said.index("ringreduce: rank 1 failed, and the job has ended with status 1" + ":" * ("log" in option))
    assert (last == len(said) - 1) == ("log" not in option)


FAIL = """
import os, sys, traceback
import ringreduce as rr

rr.init()
rank = rr.rank()

def fail():
    try:
        raise ValueError(rank)
    except ValueError:
        traceback.print_exc()
    rr.barrier()  # the first that ends may end the other, too
    sys.exit(1)

"""


@pytest.mark.parametrize(
    ("death", "status", "last"),
    [
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 1 was ended by SIGKILL, and the job has ended with status 137; if nobody",
        ),
        ("fail()", 1, "failed, and the job has ended with status 1"),
        (r"os.write(2, b'-' * 80 + b'\nMPI_ABORT\n\0\n'); sys.exit(3)", 3, "rank 1 failed, and"),
    ],
    ids=["kill -9", "two errors", "like a notice"],
)
def test_the_end_of_a_job_is_told_in_one_line(death: str, status: int, last: str) -> None:
    """That names the signal of a rank that was killed; what ranks write passes as it is, errors of two ranks too."""
    who = "in (0, 1)" if death == "fail()" else "== 1"
    program = f"{FAIL}if rank {who}: {death}\nrr.barrier()"
    done = run("run", "-np", 2, sys.executable, "-c", program)
    assert done.returncode == status
    assert last in done.stderr.splitlines()[-1]
    assert "prterun" not in done.stderr
    assert death != "fail()" or {"ValueError: 0", "ValueError: 1"} <= set(done.stderr.splitlines())
    assert "write" not in death or "-" * 80 + "\nMPI_ABORT\n\0\n" in done.stderr


def test_a_traceback_of_all_ranks_is_shown_once_and_horovodrun_named() -> None:
    """Of a program that imports Horovod, which is not there; then comes what starts it here."""
    done = run("run", "-np", 3, sys.executable, "-c", "import horovod.torch")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count("<string>") == 1
    assert "ringreduce: the program imports horovod: start it by `horovodrun`" in done.stderr


def test_a_rank_that_ends_without_init_has_not_failed() -> None:
    """It has ended with status 0, and a line says what is missing: the launcher's, or that of the rank that waits.

    Whichever notices first ends the job; a rank that others keep waiting ends with 69 (EX_UNAVAILABLE of sysexits.h).
    """
    program = "import os, ringreduce as rr; os.environ['OMPI_COMM_WORLD_RANK'] == '1' or rr.init()"
    done = run("run", "-np", 2, sys.executable, "-c", program)
    assert "rank 1 failed" not in done.stderr
    said = {
        "rank 1 has ended, with status 0, without init() or by os._exit()": 1,
        "rank 0 of 2 ends: rank 1 ended before init()": 69,
    }
    assert done.returncode in [status for each, status in said.items() if each in done.stderr], done.stderr


@pytest.mark.parametrize(
    ("backend", "words"), [("ringredcue", "did you mean 'ringreduce'?"), ("gloo", "RANK, WORLD_SIZE")]
)
def test_a_backend_that_finds_no_ranks_here_is_named(backend: str, words: str) -> None:
    """One that there is not, or that asks for variables of another launcher: in one error, shown once."""
    program = f"import torch.distributed as d; d.init_process_group({backend!r})"
    done = run("run", "-np", 2, "--no-rank-variables", sys.executable, "-c", program)
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("ringreduce.ConfigError")]
    assert f"init_process_group({backend!r}): " in said
    assert words in said


#: As programs do that are written for torchrun; then without a word, and as Accelerate does where nobody names CPUs.
FOR_TORCHRUN = """
import os, sys, types, warnings
import torch, torch.distributed as dist
rank, size = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", -1))
assert (rank, size) == (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
dist.init_process_group(backend="gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
seen = [dist.get_backend(), rank == dist.get_rank(), model.module.weight.grad.item()]
dist.destroy_process_group()
state = types.SimpleNamespace(_shared_state={"backend": None, "distributed_type": None})
sys.modules["accelerate.state"] = types.SimpleNamespace(PartialState=state)
with warnings.catch_warnings(record=True) as told:
    dist.init_process_group(backend=None)
seen += [dist.get_backend(), dist.get_world_size(), *[each.message.args[0] for each in told]]
print("seen", *seen)
"""


def test_a_program_for_torchrun_finds_its_ranks() -> None:
    """By the variables of torch's launcher; a group without a name is ours, as under mpirun."""
    needs("torch")
    done = run("run", "-np", 2, sys.executable, "-c", FOR_TORCHRUN).well()
    alone = "with Accelerate each rank would train alone: torch sees no GPU: say Accelerator(cpu=True), or use_cpu=True"
    expected = f"seen gloo True 1.5 ringreduce 2 {alone}, or set ACCELERATE_USE_CPU=true"
    assert done.stdout.splitlines() == [expected] * 2
    assert "ran each alone" not in done.stderr


@pytest.mark.parametrize(
    ("options", "program", "is_told"),
    [
        ((), SPEAKS, True),
        (("--elastic",), SPEAKS, True),
        (("--log-dir", "logs"), SPEAKS, True),
        (("--quiet",), SPEAKS, False),
        ((), "import ringreduce as rr; rr.init()", False),
        (("-x", "RINGREDUCE_STANDALONE=1"), "import ringreduce as rr; rr.init()", False),
    ],
)
def test_copies_that_ran_each_alone_are_told(
    tmp_path: Path, options: tuple[str, ...], program: str, is_told: bool
) -> None:
    """Once, at the end, where no rank has called `init` or made a process group of torch."""
    done = run("run", "-np", 2, *options, sys.executable, "-c", program, cwd=tmp_path).well()
    assert done.stderr.count("2 copies of the program ran each alone") == is_told
    if is_told:
        assert "ran each alone" in done.stderr.splitlines()[-1]


def test_what_an_mpirun_of_a_rank_says_passes(tmp_path: Path) -> None:
    """Where it names itself, while the same notice of the job's own does not."""
    program = """
        import os, subprocess, sys, time
        rank, inner = os.environ["OMPI_COMM_WORLD_RANK"], "inner" in sys.argv
        if rank == "0":
            time.sleep(100)
        if inner:
            sys.exit(4)
        inherited = ("OMPI_COMM", "OMPI_ARGV", "PMIX_", "PRTE_LAUNCHED")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        subprocess.call(["mpirun", "-np", "2", sys.executable, sys.argv[0], "inner"], env=clean)
        sys.exit(3)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(program))
    done = run("run", "-np", 2, sys.executable, tmp_path / "train.py")
    assert done.returncode == 3
    assert re.findall("Exit code: +([0-9]+)", done.stderr) == ["4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "x = ("], "SyntaxError: '(' was never closed\n"),
        (["not_there.py"], "not_there.py': [Errno 2]"),
        (["-m", "not.there"], "No module named 'not'"),
    ],
)
def test_why_python_does_not_begin_is_shown(tmp_path: Path, arguments: list[str], words: str) -> None:
    """There is no traceback then."""
    done = run("run", "-n", 2, sys.executable, *arguments, cwd=tmp_path)
    assert done.returncode == 1 + (arguments == ["not_there.py"])
    assert words in done.stderr
    assert done.stderr.endswith(f"failed, and the job has ended with status {done.returncode}\n")
    assert "-----" not in done.stderr


@pytest.mark.parametrize("name", ["speaks.py", "./speaks.py"])
def test_a_script_runs_under_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What ends in .py, is here and names no interpreter needs none in front, whatever of that name is on the path."""
    (tmp_path / "speaks.py").write_text(SPEAKS)
    (tmp_path / "speaks.py").chmod(0o755)
    (tmp_path / "bin").mkdir()
    other = tmp_path / "bin" / "speaks.py"
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    assert run("run", "-n", 2, "--log-dir", "logs", name, cwd=tmp_path).well().stdout == "out 0\nerror 0\nmore 0 None\n"


def test_mpirun_may_look_for_the_program_elsewhere(tmp_path: Path) -> None:
    """Where options of mpirun, or PATH, say where it is, only mpirun knows."""
    program = tmp_path / "bin" / "program"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho here\n")
    program.chmod(0o755)
    for options in (
        ["--mpi-args", f"--wdir {program.parent}", "./program"],
        ["-x", f"PATH={program.parent}:/bin", "program"],
    ):
        assert run("run", "-n", 2, *options, cwd=tmp_path).well().stdout == "here\nhere\n"


def test_each_rank_has_a_file(tmp_path: Path) -> None:
    """With both streams in the order of the program; rank 0 alone is shown. A variable reaches all of them."""
    done = run(
        "run", "-np", 2, "--log-dir", "a/logs", "-x", "SAID=a b", sys.executable, "-c", SPEAKS, cwd=tmp_path
    ).well()
    for rank in range(2):
        text = (tmp_path / "a" / "logs" / f"rank-{rank}.log").read_text()
        assert text == f"out {rank}\nerror {rank}\nmore {rank} a b\n"
    assert done.stdout == "out 0\nerror 0\nmore 0 a b\n"
    again = run("run", "-np", 1, "--log-dir", "a/logs", sys.executable, "-c", "print('new')", cwd=tmp_path)
    assert again.stdout == (tmp_path / "a" / "logs" / "rank-0.log").read_text() == "new\n"


def test_values_of_variables_are_shown_nowhere(tmp_path: Path) -> None:
    """Neither by the launcher, whatever happens, nor in what a rank writes about itself: they may be secret."""
    program = f"""if True:
        import os, ringreduce as rr
        rr.init()
        assert len(os.environ["TOKEN"]) == 4
        rr.allreduce(1.0)
        rr.dump({str(tmp_path)!r})
        raise ValueError("the reason")
    """
    files = [f"RINGREDUCE_{name.upper()}={tmp_path / name}" for name in ("audit", "timeline")]
    variables = [part for each in ("TOKEN=hush", *files) for part in ("-x", each)]
    for options in (["--dry-run"], ["--verbose"], ["--verbose", "--elastic"]):
        done = run("run", "-np", 2, *options, *variables, sys.executable, "-c", program)
        assert (done.returncode == 0) == (options == ["--dry-run"])
        assert "hush" not in done.stdout + done.stderr
    written = [each.read_text() for each in tmp_path.rglob("*") if each.is_file()]
    assert len(written) >= 4
    assert not any("hush" in each for each in written)


@pytest.mark.parametrize("options", [[], ["--elastic"]])
def test_what_is_set_for_mpirun_is_shown_on_demand_alone(options: list[str]) -> None:
    """A job in which nothing goes wrong says nothing of its own."""
    for verbose in ([], ["--verbose"]):
        done = run(
            "run", "-np", 2, *options, *verbose, sys.executable, "-c", "import ringreduce; ringreduce.init()"
        ).well()
        assert ("set for mpirun: " in done.stderr) == ("starting " in done.stderr) == bool(verbose)
        assert verbose or (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("options", [[], ["--elastic"], ["--log-dir=logs"]])
def test_arguments_come_as_they_are(tmp_path: Path, options: list[str]) -> None:
    """No shell reads them, the one above a rank neither; nor those of a program's path."""
    program = tmp_path / "$(touch run) program"
    program.symlink_to(sys.executable)
    odd = ["$(touch made)", "`touch made`", "; touch made", "a  b", "*", "'", '"', "\\", "-x", ""]
    save = "import json, os, sys; json.dump(sys.argv[1:], open(os.environ['OMPI_COMM_WORLD_RANK'] + '.json', 'w'))"
    run("run", "-np", 2, *options, program, "-c", save, *odd, cwd=tmp_path).well()
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [odd] * 2
    assert not {"made", "run"} & {each.name for each in tmp_path.iterdir()}


def test_lines_carry_the_rank() -> None:
    """All lines of all ranks, where that is asked for."""
    done = run("run", "-np", 2, "--prefix", sys.executable, "-c", SPEAKS).well()
    assert sorted(line[:3] for line in done.stdout.splitlines()) == ["[0]", "[0]", "[1]", "[1]"]
    assert {line[:3] for line in done.stderr.splitlines() if "error" in line} == {"[0]", "[1]"}


# ---- what starts nothing ----


def dry_run(*arguments: object, **environ: str | None) -> str:
    """Return the command line that ``ringreduce run`` would start; None: without that variable."""
    words = ["run", "--dry-run", *map(str, arguments)]
    with redirect_stdout(StringIO()) as shown, pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        assert main(words, standalone_mode=False) in (0, None)
    return shown.getvalue()


def test_a_dry_run_prints_what_would_be_started(tmp_path: Path) -> None:
    """Hosts and variables go to mpirun as they are, quoted, and the program with its own options; nothing starts."""
    hosts = tmp_path / "hosts"
    hosts.write_text("h1 slots=2\n")
    shown = dry_run("-np", 3, "--hostfile", hosts, "python", "train.py", "--lr", "0.1", "-np", "a b")
    assert f"-np 3 --hostfile {hosts}" in shown
    assert shown.endswith("python train.py --lr 0.1 -np 'a b'\n")
    assert "--with-ft" not in shown
    elastic = dry_run("--elastic", "--min-np", 2, "-np", 4, "python", "train.py")
    assert "RINGREDUCE_MIN_NP=2" in elastic
    assert "mpirun --with-ft ulfm -np 4 sh -c" in elastic


def test_wrong_arguments_end_with_status_2() -> None:
    """In one line, and nothing is started."""
    done = run("run", "-np", 2, "--prefix", "--log-dir", "d", "echo", "started")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "--prefix does not go with --log-dir" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-np", "0", "python"), "0 is not in the range"),
        (("-np", "2"), "Missing argument"),
        (("--min-np", "2", "-np", "4", "python"), "add --elastic"),
        (("--elastic", "--min-pn", "2", "-np", "4", "python"), "there is no option --min-pn; did you mean --min-np?"),
        (("--elastic", "--min-np", "5", "-np", "4", "python"), "more than the 4 ranks"),
        (("--hostfile", "/there/is/none", "python"), "does not exist"),
        (("--start-timeout", "0", "python"), "'--start-timeout': '0': expected a positive number of seconds"),
        (("--start-timeout", "nan", "python"), "'--start-timeout': 'nan': expected a positive number of seconds"),
        (("--start-timeout", "inf", "python"), "'--start-timeout': 'inf': expected a positive number of seconds"),
        (("--max-np", "4", "-np", "2", "python"), "--max-np is for elastic jobs; add --elastic"),
        (("--reset-limit", "4", "python"), "--reset-limit is for elastic jobs; add --elastic"),
        (("--elastic", "--max-np", "2", "-np", "4", "python"), "--max-np 2 is less than the 4 ranks of -np"),
        (("--elastic", "--max-np", "4", "-np", "2", "python"), "name hosts with more: -H localhost:4"),
        (("--elastic", "--cooldown", "soon", "python"), "'soon': expected seconds, or the least and the most"),
        (("--elastic", "--cooldown", "0", "-H", "a b", "python"), "'a b' is no host"),
        (
            ("--elastic", "--max-np", "4", "--min-np", "3", "-H", "a,b", "python"),
            "the hosts have 2 slots, and --min-np is 3",
        ),
        (("--elastic", "--host-discovery-script", "/bin/true", "-H", "a", "python"), "leave out -H and --hostfile"),
        (("--elastic", "--host-discovery-script", __file__, "python"), "is not executable"),
        (("-np", "2", "--prefix", "--log-dir", "d", "true"), "--prefix does not go with --log-dir"),
        (("-np", "2", "--elastic", "--prefix", "true"), "--prefix does not go with --elastic"),
        (
            ("-np", "2", "--elastic", "--cooldown", "1", "--log-dir", "d", "true"),
            "--log-dir does not go with --cooldown",
        ),
        (("-np", "2", "-x", "=1", "true"), "names no variable"),
        (("-np", "2", "-x", "NOT_SET_ANYWHERE", "true"), "it is not set here"),
        (("-np", "2", "-H", "a", "--hostfile", "/dev/null", "true"), "give one of them"),
        (("-np", "2", "--mpi-args", "'", "true"), "No closing quotation"),
        (("-np", "2", "--log-dir", "/proc/logs", "true"), "--log-dir /proc/logs: cannot write there"),
        (("-np", "2", "-n", "1000000000", "true"), "processes that this machine allows"),
        (("-np", "2", "not-a-program", "true"), "there is no program not-a-program"),
        (("-np", "2", "/etc/passwd", "true"), "/etc/passwd can be read, but not run"),
        (("-np", "2", "-H", "localhost:2", "not-a-program", "true"), "there is no program not-a-program"),
        (("-np", "2", "/", "true"), "/ is a folder, and no program"),
        (("-npp", "2", "true"), "No such option '-npp'"),
        (("true", "-np", "2"), "-np 2 comes after the name of the program"),
        (("python", "train.py", "--num-proc=2"), "write --num-proc=2 in front of python, or -- if it is the program's"),
        (("python", "train.py", "--elastic"), "--elastic comes after the name of the program"),
        (("-np", "2", "train.py", "-H", "h1:2,h2:2"), "-H h1:2,h2:2 comes after the name of the program"),
        (("--hostfile", "/dev/null", "-np", "2", "true"), "--hostfile /dev/null: it is no regular file"),
        (("-H", ",", "-np", "2", "true"), "-H ',' has no host with slots; give it as in -H localhost:2"),
        (("-H", "localhost:0", "-np", "2", "true"), "-H 'localhost:0' has no host with slots"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], said: str) -> None:
    """In one line; an error of use, or of the settings."""
    with pytest.raises((click.UsageError, ConfigError)) as refused:
        main(["run", *arguments], standalone_mode=False)
    error = refused.value
    message = error.format_message() if isinstance(error, click.UsageError) else str(error)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("hosts", "more"), [("localhost:2", "-H localhost:8"), ("localhost:2,h2:3", "-H localhost:5,...")]
)
def test_more_ranks_than_slots_are_refused(monkeypatch: pytest.MonkeyPatch, hosts: str, more: str) -> None:
    """In our words, before Open MPI says that in its own; unless that is set to start more."""
    monkeypatch.delenv("PRTE_MCA_rmaps_default_mapping_policy", raising=False)
    slots = sum(int(each.partition(":")[2]) for each in hosts.split(","))
    with pytest.raises(ConfigError) as refused:
        main(["run", "-H", hosts, "-np", "8", "true"], standalone_mode=False)
    said = f"-np 8 is more than the {slots} slots of -H {hosts}; give more, as in {more}, start fewer ranks, or "
    said += "add --oversubscribe"
    assert str(refused.value) == said
    asked = ["--mpi-args", "--map-by :oversubscribe", "--dry-run"]
    assert main(["run", "-H", hosts, "-np", "8", *asked, "true"], standalone_mode=False) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["-np", "1", "python", "train.py", "-np", "2"],
        ["--", "python", "train.py", "-np", "2", "--elastic"],
        ["python", "train.py", "-np", "many", "-H", "0.1", "--hosts", "all", "--elastic=1", "-n", "2"],
        ["mpirun", "-np", "2", "true"],
    ],
)
def test_a_program_may_have_options_of_these_names(arguments: list[str]) -> None:
    """Where ours are given before, or values differ; behind --; and where it is a launcher itself."""
    assert main(["run", "--dry-run", *arguments], standalone_mode=False) == 0


@pytest.mark.parametrize("setting", ["pml=ucx", "pml=cm", "pml=^ob1", "mtl=ofi"])
def test_messages_that_survive_nothing_are_refused(setting: str) -> None:
    """Before anything starts, with what to set."""
    name, value = f"OMPI_MCA_{setting}".split("=")
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value} in the environment")):
        dry_run("--elastic", "-np", 2, "true", **{name: value})


@pytest.mark.parametrize("setting", ["pml=ob1", "pml=^ucx,cm", "mtl=^ofi"])
def test_messages_that_survive_are_not(setting: str) -> None:
    name, value = f"OMPI_MCA_{setting}".split("=")
    assert "--with-ft ulfm" in dry_run("--elastic", "-np", 2, "true", **{name: value})


@pytest.mark.parametrize(
    ("arguments", "environ", "set_here"),
    [
        ((), {}, True),
        (("-H", "localhost:2"), {}, True),
        (("--elastic", "--cooldown", "0", "-H", "localhost:2"), {}, True),
        (("-H", "other:2"), {}, False),
        ((), {"OMPI_MCA_btl_tcp_if_include": "eth0"}, False),
        ((), {"OMPI_MCA_btl_tcp_if_exclude": "eth0"}, False),
    ],
)
def test_a_job_of_one_machine_stays_on_it(arguments: tuple[str, ...], environ: dict[str, str], set_here: bool) -> None:
    """Its messages take shared memory, and no other interface than lo, unless the user has chosen one."""
    shown = dry_run("-np", 2, *arguments, "true", **{"OMPI_MCA_btl": None, **environ})
    assert ("OMPI_MCA_btl_tcp_if_include=lo" in shown) is set_here
    assert ("OMPI_MCA_btl=self,sm" in shown) is ("other:2" not in arguments)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_JOB_NODELIST": "n1,n2", "SLURM_TASKS_PER_NODE": "3(x2)"}, "-np 6 "),
        ({"LSB_MCPU_HOSTS": "a 2 b 1"}, "-np 3 --host a:2,b:1 "),
    ],
)
def test_an_allocation_says_how_many_ranks(environ: dict[str, str], expected: str) -> None:
    """Its slots; hosts are named to mpirun where it was not built for the scheduler. Nothing stays on lo then."""
    shown = dry_run("true", **environ)
    assert expected in shown
    assert "tcp_if_include" not in shown


def test_a_library_that_survives_nothing_is_refused(tmp_path: Path) -> None:
    """--elastic says which MPI it takes."""
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho HYDRA build details:\n")
    fake.chmod(0o755)
    program = "import sys; sys.executable = sys.argv.pop(1); from ringreduce.cli import main; main()"
    done = launching.run(sys.executable, "-c", program, tmp_path / "python", "run", "--elastic", "-np", 2, "true")
    assert done.returncode == 2
    assert "--elastic needs Open MPI 5" in done.stderr


# ---- horovodrun ----

SCRIPT = """
import os, socket
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
found = [int(os.environ["HOROVOD_" + name]) for name in names]  # before anything is imported
assert os.environ["HOROVOD_HOSTNAME"] == socket.gethostname()
import torch
import horovod.torch as hvd
hvd.init()
assert found == [getattr(hvd, name.lower())() for name in names]
config = __import__("ringreduce").config()
total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
if hvd.rank() == 0:
    print(hvd.size(), total.tolist(), config.fusion_nbytes, config.stall_warning_s)
    print(config.conventions.value, config.log_level)
"""


def test_a_script_of_horovod_runs_as_it_stands(tmp_path: Path) -> None:
    """With Horovod's command, module names, options, variables and numbers."""
    needs("torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["-np", 2, "--fusion-threshold-mb", 2, "--no-stall-check", "--log-level", "FATAL", "--cycle-time-ms", 1]
    done = run(*options, sys.executable, "train.py", command="horovodrun", cwd=tmp_path).well()
    assert done.stdout == f"2 [1.0, 1.0, 1.0] {2 << 20} None\nhorovod CRITICAL\n"
    assert done.stderr.count("--cycle-time-ms is not needed: ") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--version"], 0, "horovodrun of ringreduce"),
        (["--help"], 0, "usage: horovodrun"),
        (["--gloo", "true"], 2, "only MPI"),
        (["-np", "0", "true"], 2, "0 is not in the range"),
        (["--check-buid"], 2, "did you mean --check-build"),
    ],
)
def test_the_command_of_horovod_speaks_for_itself(arguments: list[str], status: int, said: str) -> None:
    """Wrong use is one line and status 2."""
    done = run(*arguments, command="horovodrun")
    assert done.returncode == status
    assert said in done.stdout + done.stderr
    assert status == 0 or len(done.stderr.splitlines()) == 1
