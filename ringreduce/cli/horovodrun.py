"""``horovodrun``: Horovod's options of starting a job, as those of ``ringreduce run`` and as settings."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import click

import ringreduce
from ringreduce.cli import main as ringreduce_main
from ringreduce.cli.doctor import command as doctor
from ringreduce.errors import ConfigError

__all__ = ["Plan", "main", "read"]

#: Holds a package ``horovod`` that is ringreduce's; see `ringreduce.horovod.alias`.
_HOROVOD = Path(ringreduce.__file__).parent / "horovod" / "_path"
_MIB = 1 << 20


class _Option(NamedTuple):
    """An option of Horovod's.

    Attributes:
        names: of the option.
        value: what its value is called; empty: it takes none.
        help: what it does here, in words.
        run: the option of ``ringreduce run`` that it is; empty: none.
        variable: the setting that it is; empty: none.
        convert: makes the text of the setting from that of the option.
        unneeded: why it means nothing here; empty: it means something.
        section, key: where a file of ``--config-file`` has it.
    """

    names: tuple[str, ...]
    value: str = ""
    help: str = ""
    run: str = ""
    variable: str = ""
    convert: Callable[[str], str] = str
    unneeded: str = ""
    section: str = ""
    key: str = ""


def _mebibytes(text: str) -> str:
    """Return bytes; 0, which is no fusion in Horovod, closes a group after its first byte."""
    return str(max(round(float(text) * _MIB), 1))


def _seconds(text: str) -> str:
    float(text)
    return text


_CYCLES = "nothing waits for a cycle here: what all ranks have submitted runs at once"
_CACHE = "there is no cache of responses to size: ranks remember what they agreed on"
_TUNE = "`mpirun ... ringreduce tune` measures once, beforehand, and later runs choose by its table"
_SCHEDULE = "the algorithm is chosen for each size; see `ringreduce explain`, and RINGREDUCE_ALGORITHM"
_GLOO = "there is only MPI here, and no Gloo"
_NCCL = "see docs/gpu.md for what GPUs use"

_OPTIONS = (
    _Option(("-np", "--num-proc"), "N", "how many ranks", run="-np"),
    _Option(("-H", "--hosts"), "h1:2,h2:2", "hosts and their slots", run="-H"),
    _Option(("-hostfile", "--hostfile"), "FILE", "a file with lines: h1 slots=2", run="--hostfile"),
    _Option(("-p", "--ssh-port"), "PORT", "where ssh reaches the other hosts", run="--ssh-port"),
    _Option(("--network-interface", "--network-interfaces"), "NAMES", "for messages", run="--network-interface"),
    _Option(("--mpi-args",), "OPTIONS", "more options for mpirun", run="--mpi-args"),
    _Option(("--output-filename",), "FOLDER", "a file for each rank: rank-0.log", run="--log-dir"),
    _Option(("--start-timeout",), "SECONDS", "of elastic jobs: wait so long for --min-np slots", run="--start-timeout"),
    _Option(("--elastic-timeout",), "SECONDS", "the same", run="--start-timeout"),
    _Option(("--verbose",), "", "show the command line of mpirun", run="--verbose"),
    _Option(("--min-np", "--min-num-proc"), "N", "an elastic job ends with fewer ranks", run="--min-np"),
    _Option(("--max-np", "--max-num-proc"), "N", "an elastic job grows to so many", run="--max-np"),
    _Option(("--slots", "--slots-per-host"), "N", "of hosts listed without a number", run="--slots"),
    _Option(("--host-discovery-script",), "FILE", "prints host:slots lines", run="--host-discovery-script"),
    _Option(("--reset-limit",), "N", "how often the ranks may change", run="--reset-limit"),
    _Option(
        ("--blacklist-cooldown-range",), "MIN MAX", "seconds for which failing hosts are not used", run="--cooldown"
    ),
    _Option(
        ("--fusion-threshold-mb",),
        "MIB",
        "closes a group of fused tensors",
        variable="RINGREDUCE_FUSION",
        convert=_mebibytes,
        section="params",
        key="fusion_threshold_mb",
    ),
    _Option(
        ("--timeline-filename",),
        "FILE",
        "a trace of the job",
        variable="RINGREDUCE_TIMELINE",
        section="timeline",
        key="filename",
    ),
    _Option(
        ("--timeline-mark-cycles",),
        "",
        "marks where operations start",
        variable="RINGREDUCE_TIMELINE_MARK_BATCHES",
        section="timeline",
        key="mark_cycles",
    ),
    _Option(
        ("--no-stall-check",),
        "",
        "no warning of ranks that do not come",
        variable="RINGREDUCE_STALL_WARNING",
        convert=lambda text: "0",
    ),
    _Option(
        ("--stall-check-warning-time-seconds",),
        "SECONDS",
        "when to warn of them",
        variable="RINGREDUCE_STALL_WARNING",
        convert=_seconds,
        section="stall_check",
        key="warning_time_seconds",
    ),
    _Option(
        ("--stall-check-shutdown-time-seconds",),
        "SECONDS",
        "when that is an error",
        variable="RINGREDUCE_TIMEOUT",
        convert=lambda text: "" if float(text) == 0 else text,  # 0: wait for ever, which nothing does here
        section="stall_check",
        key="shutdown_time_seconds",
    ),
    _Option(
        ("--log-level",),
        "LEVEL",
        "of ringreduce's logger",
        variable="HOROVOD_LOG_LEVEL",  # whose names are Horovod's
        section="logging",
        key="level",
    ),
    _Option(("--mpi", "--use-mpi"), "", "", unneeded="MPI is what there is"),
    _Option(("--tcp", "--tcp-flag"), "", "", unneeded="messages of one machine take shared memory; see --mpi-args"),
    _Option(("--binding-args",), "OPTIONS", "", unneeded="say it with --mpi-args"),
    _Option(("--mpi-threads-disable",), "", "", unneeded="ringreduce asks MPI for the threads that it needs"),
    _Option(("--no-mpi-threads-disable",), "", "", unneeded="ringreduce asks MPI for the threads that it needs"),
    _Option(("--disable-cache",), "", "", unneeded="mpirun checks no hosts beforehand, so nothing is kept of that"),
    _Option(("-i", "--ssh-identity-file"), "FILE", "", unneeded="name it in ~/.ssh/config"),
    _Option(("-prefix-timestamp", "--prefix-output-with-timestamp"), "", "", unneeded="see --mpi-args"),
    _Option(("--log-with-timestamp",), "", "", unneeded="log lines carry the time if the program's logging does"),
    _Option(("--no-log-with-timestamp", "--log-hide-timestamp"), "", "", unneeded="the program's logging decides"),
    _Option(("--no-timeline-mark-cycles",), "", "", unneeded="that is so already"),
    _Option(("--stall-check",), "", "", unneeded="that is so already"),
    _Option(("--cycle-time-ms",), "MS", "", unneeded=_CYCLES, section="params", key="cycle_time_ms"),
    _Option(("--cache-capacity",), "N", "", unneeded=_CACHE, section="params", key="cache_capacity"),
    *(
        _Option((f"--{no}{name}",), "", "", unneeded=_SCHEDULE)
        for name in ("hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce")
        for no in ("", "no-")
    ),
    _Option(("--autotune",), "", "", unneeded=_TUNE, section="autotune", key="enabled"),
    _Option(("--no-autotune",), "", "", unneeded=_TUNE),
    *(
        _Option((f"--autotune-{name}",), "VALUE", "", unneeded=_TUNE)
        for name in (
            "log-file",
            "warmup-samples",
            "steps-per-sample",
            "bayes-opt-max-samples",
            "gaussian-process-noise",
        )
    ),
    _Option(("--num-nccl-streams",), "N", "", unneeded=_NCCL),
    _Option(("--thread-affinity",), "CORES", "", unneeded="no thread of ours is bound to a core"),
    _Option(("--gloo-timeout-seconds",), "SECONDS", "", unneeded=_GLOO),
)
_NAMED = {name: option for option in _OPTIONS for name in option.names}
#: What is handled on its own: whether it takes a value, and what it does.
_OTHERS = {
    "--config-file": "FILE",
    "--gloo": "",
    "--use-gloo": "",
    "--jsrun": "",
    "-cb": "",
    "--check-build": "",
    "-v": "",
    "--version": "",
    "-h": "",
    "--help": "",
}
_RUN_ELASTIC = {"--min-np", "--max-np", "--host-discovery-script", "--slots", "--reset-limit", "--cooldown"}


@dataclass
class Plan:
    """What a command line asks for.

    Attributes:
        options: for ``ringreduce run``: name -> value, empty where it takes none.
        settings: variables of the ranks.
        program: with its arguments.
        warnings: of options that mean nothing here.
        instead: ``"check"``, ``"version"`` or ``"help"``: what is to be shown, and no job started.
    """

    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    instead: str = ""

    def take(self, name: str, option: _Option, text: str) -> None:
        """Note an option that was given; of several for one thing, the last counts."""
        if option.unneeded:
            self.warnings.append(f"{name} is not needed: {option.unneeded}")
        elif option.run:
            self.options[option.run] = text
        elif option.variable:
            try:
                self.settings[option.variable] = option.convert(text or "1")
            except (ValueError, OverflowError):
                raise ConfigError(f"{name} {text}: expected a number") from None

    def arguments(self) -> list[str]:
        """Return the arguments of ``ringreduce`` that this is.

        Ranks find Horovod's modules by PYTHONPATH, whatever the program is that starts Python.
        """
        found = ["run"]
        options = dict(self.options)
        if options.keys() & _RUN_ELASTIC:
            found.append("--elastic")
        for name, value in options.items():
            found += [name, value] if value else [name]
        paths = [str(_HOROVOD), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        variables = {**{name: text for name, text in self.settings.items() if text}, "PYTHONPATH": ":".join(paths)}
        found += [word for name, text in variables.items() for word in ("-x", f"{name}={text}")]
        return [*found, *self.program]


def read(arguments: Sequence[str]) -> Plan:
    """Return what a command line asks for: options up to the first word that is none, and then the program.

    Args:
        arguments: without the name of this program.

    Raises:
        ConfigError: an option is not known, has no value, or asks for what there is not.
    """
    plan, given, left = Plan(), Plan(), list(arguments)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--":
            break
        name, has_value, text = word.partition("=")
        option = _NAMED.get(name)
        if option is None and name not in _OTHERS:
            raise ConfigError(_unknown(name))
        value = _OTHERS[name] if option is None else option.value
        if has_value and not value:
            raise ConfigError(f"{name} takes no value")
        if value and not has_value:
            if not left:
                raise ConfigError(f"{name} takes a value: {value}")
            text = left.pop(0)
            if value == "MIN MAX" and left and _is_number(left[0]):
                text = f"{text} {left.pop(0)}"
        if option is not None:
            given.take(name, option, text)
        elif name == "--config-file":
            _read_file(text, plan)
        elif name in ("--gloo", "--use-gloo"):
            raise ConfigError(f"{name}: {_GLOO}; leave it out")
        elif name == "--jsrun":
            raise ConfigError("--jsrun: jobs start under mpirun here, which runs on the hosts of an LSF allocation")
        else:
            plan.instead = {"c": "check", "v": "version", "h": "help"}[name.strip("-")[0]]
    plan.options |= given.options
    plan.settings |= given.settings  # what is said on the command line counts
    plan.warnings += given.warnings
    plan.program = tuple(left)
    if "--start-timeout" in plan.options and not plan.options.keys() & _RUN_ELASTIC:
        del plan.options["--start-timeout"]
        plan.warnings.append("--start-timeout is not needed: jobs that are not elastic wait for no hosts")
    if not left and not plan.instead:
        raise ConfigError("there is no program to start; horovodrun -np 2 python train.py")
    return plan


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, [*_NAMED, *_OTHERS], 1, 0.6)
    return f"there is no option {name}" + (f"; did you mean {close[0]}?" if close else "; see horovodrun --help")


def _read_file(path: str, plan: Plan) -> None:
    """Read a file of ``--config-file``: sections, and indented ``key: value`` lines in them, as Horovod's YAML has."""
    by_key = {(option.section, option.key): option for option in _OPTIONS if option.key}
    by_key |= {("", option.names[-1].strip("-").replace("-", "_")): option for option in _OPTIONS}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from None
    section = ""
    for number, line in enumerate(lines, 1):
        text = line.partition(" #")[0].rstrip()
        if not text.strip() or text.lstrip().startswith("#") or text == "---":
            continue
        key, colon, value = (part.strip() for part in text.strip().partition(":"))
        if not colon:
            raise ConfigError(f"--config-file {path}, line {number}: expected key: value, got {line.strip()[:60]!r}")
        value = value.strip("\"'")
        if not text[0].isspace():
            section = "" if value else key.replace("-", "_")
        key, place = key.replace("-", "_"), f"{path}: {key}"
        if not value or value.lower() in ("null", "~", "none"):
            continue
        if (section, key) == ("stall_check", "enabled"):
            option, value = _NAMED["--no-stall-check"], {"true": "false", "false": "true"}.get(value.lower(), value)
        else:
            found = by_key.get((section, key))
            if found is None:
                plan.warnings.append(f"{place} is not known, and not used")
                continue
            option = found
        if option.value:
            plan.take(place, option, value)
        elif value.lower() in ("true", "yes", "on", "1"):
            plan.take(place, option, "")


def _help() -> str:
    lines = [
        "usage: horovodrun -np N [options] python train.py [arguments ...]",
        "",
        "Horovod's command, for ringreduce: starts a job as `ringreduce run` does (see its --help), in which",
        "`import horovod.torch` gives ringreduce.torch. Options:",
        "",
    ]
    for option in _OPTIONS:
        if not option.unneeded:
            lines.append(f"  {', '.join(option.names)} {option.value}".rstrip())
            lines.append(f"      {option.help}")
    lines += ["  --config-file FILE", "      these in a file, as Horovod's YAML has them"]
    lines += ["  -cb, --check-build", "      what there is on this machine: `ringreduce doctor`"]
    lines += ["  -v, --version", "  -h, --help", ""]
    names = ", ".join(option.names[0] for option in _OPTIONS if option.unneeded)
    lines += [f"Taken with a warning, as nothing here needs them: {names}.", "Refused: --gloo, --jsrun."]
    return "\n".join(lines)


def main() -> NoReturn:
    """Start a job; the program ``horovodrun``."""
    try:
        plan = read(sys.argv[1:])
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    if plan.instead == "help":
        click.echo(_help())
        sys.exit(0)
    if plan.instead == "version":
        click.echo(f"horovodrun of ringreduce {ringreduce.__version__}")
        sys.exit(0)
    for warning in plan.warnings:
        click.echo(f"horovodrun: {warning}", err=True)
    ringreduce_main([str(doctor.name)] if plan.instead == "check" else plan.arguments(), prog_name="ringreduce")
    sys.exit(0)
