"""``horovodrun``: Horovod's options of starting a job, as those of ``ringreduce run`` and as settings."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click

import ringreduce
from ringreduce.cli import main as ringreduce_main
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import read_file
from ringreduce.common.settings import PathOf, Setting, rows
from ringreduce.launcher.spec import LaunchSpec

#: Options besides those of rows of `LaunchSpec`: the names; what the value is called, if it takes one; what becomes of
#: it; what it does here.
_TABLE = """
--commits | FOLDER | set RINGREDUCE_COMMITS | commits of a job that grows, for all hosts; else here, while it runs
--blacklist-cooldown-range | MIN MAX | run --cooldown | seconds for which failing hosts are not used
--fusion-threshold-mb | MIB | set RINGREDUCE_FUSION | closes a group of fused tensors
--timeline-filename | FILE | set RINGREDUCE_TIMELINE | a trace of the job
--timeline-mark-cycles | | set HOROVOD_TIMELINE_MARK_CYCLES | marks where operations start
--no-stall-check | | set RINGREDUCE_STALL_WARNING | no warning of ranks that do not come
--stall-check-warning-time-seconds | SECONDS | set RINGREDUCE_STALL_WARNING | when to warn
--stall-check-shutdown-time-seconds | SECONDS | set RINGREDUCE_TIMEOUT | when to give up
--log-level | LEVEL | set HOROVOD_LOG_LEVEL | of ringreduce's logger
--config-file | FILE | file | these in a file, as Horovod's YAML has them
-cb --check-build | | show | what there is on this machine: `ringreduce doctor`
--gloo --use-gloo | | refuse | there is only MPI here, and no Gloo; leave it out
--jsrun | | refuse | jobs start under mpirun here, which runs on the hosts of an LSF allocation
"""
#: Options that mean nothing here, those that take a value with = behind their last name.
_UNNEEDED = """
--mpi --use-mpi, --tcp --tcp-flag, --binding-args=, --mpi-threads-disable, --no-mpi-threads-disable, --disable-cache,
-i --ssh-identity-file=, -prefix-timestamp --prefix-output-with-timestamp, --log-with-timestamp,
--log-without-timestamp --log-hide-timestamp --no-log-with-timestamp, --no-timeline-mark-cycles, --stall-check,
--cycle-time-ms=, --cache-capacity=, --hierarchical-allreduce, --hierarchical-allgather, --torus-allreduce,
--no-hierarchical-allreduce, --no-hierarchical-allgather, --no-torus-allreduce, --autotune, --no-autotune,
--autotune-log-file=, --autotune-warmup-samples=, --autotune-steps-per-sample=, --autotune-bayes-opt-max-samples=,
--autotune-gaussian-process-noise=, --num-nccl-streams=, --thread-affinity=, --ccl-bgt-affinity=,
--gloo-timeout-seconds=
"""


#: What makes the value of a variable from that of an option, where that is not the same.
_CONVERSIONS: dict[str, Callable[[str], str]] = {
    # 0, which is no fusion in Horovod, closes a group after its first byte.
    "--fusion-threshold-mb": lambda text: str(max(round(float(text) * (1 << 20)), 1)),
    "--no-stall-check": lambda text: "0",
    "--stall-check-warning-time-seconds": lambda text: f"{float(text):.15g}",
    # 0: wait for ever, which nothing does here
    "--stall-check-shutdown-time-seconds": lambda text: "" if float(text) == 0 else text,
}


class _Option(NamedTuple):
    """An option of Horovod's.

    Attributes:
        names: of the option.
        value: what its value is called; empty: it takes none.
        kind: what becomes of it: ``"run"``, an option of ``ringreduce run``; ``"set"``, a variable of the ranks;
            ``"file"``: it names a file of more; ``"show"``: this machine is shown, and no job started; ``"none"``: it
            means nothing here, and a warning says so; ``"refuse"``: it asks for what there is not.
        target: which option or variable.
        text: what it does here, or why there is nothing like it.
    """

    names: tuple[str, ...]
    value: str
    kind: str
    target: str
    text: str

    @property
    def keys(self) -> list[str]:
        """What it is called in a file of ``--config-file``."""
        return [name.strip("-").replace("-", "_") for name in self.names]


def _value(row: Setting, default: object) -> str:
    """Return what the value of an option of ``ringreduce run`` is called; empty: it takes none."""
    if row.metavar or isinstance(default, bool):
        return row.metavar
    if isinstance(row.parse, PathOf):
        return "FOLDER" if row.parse.is_folder else "FILE"
    return "N"


def _options() -> Iterator[_Option]:
    for _, default, row in rows(LaunchSpec):
        if row.horovodrun:
            names = tuple(row.horovodrun.split())
            yield _Option(names, _value(row, default), kind="run", target=row.option, text=row.help)
    for line in _TABLE.strip().splitlines():
        cells, value, here, text = (cell.strip() for cell in line.split("|"))
        kind, _, target = here.partition(" ")
        yield _Option(tuple(cells.split()), value, kind=kind, target=target, text=text)
    for option in _UNNEEDED.split(","):
        value = "VALUE" if "=" in option else ""
        yield _Option(tuple(option.replace("=", "").split()), value, kind="none", target="", text="")


_OPTIONS = tuple(_options())

#: Holds a package ``horovod`` that is ringreduce's; see `ringreduce.horovod.alias`.
_HOROVOD = Path(ringreduce.__file__).parent / "horovod" / "_path"
_NAMED = {name: option for option in _OPTIONS for name in option.names}
#: Of a file of ``--config-file``: what its sections add to the names of their options.
_SECTIONS = {
    **dict.fromkeys(("params", "library_options"), ""),
    **{"timeline": "timeline_", "stall_check": "stall_check_", "autotune": "autotune_", "logging": "log_"},
}
_RUN_ELASTIC = {row.option for _, _, row in rows(LaunchSpec) if row.needs and row.needs[0] == "--elastic"}


@dataclass
class CommandLine:
    """What a command line asks for.

    Attributes:
        options: for ``ringreduce run``: name -> value, empty where it takes none.
        settings: variables of the ranks.
        program: with its arguments.
        warnings: of options that mean nothing here.
        shows: whether this machine is to be shown, and no job started.
    """

    options: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)
    shows: bool = False

    def take(self, name: str, option: _Option, text: str) -> None:
        """Note an option that was given; of several for one thing, the last counts.

        Raises:
            ConfigError: its value is none, or it asks for what there is not.
        """
        if option.kind == "none":
            self.warnings.append(f"{name} is not needed: it means nothing here")
        elif option.kind == "refuse":
            raise ConfigError(f"{name}: {option.text}")
        elif option.kind == "run":
            self.options[option.target] = text
        elif option.kind == "show":
            self.shows = True
        else:
            try:
                self.settings[option.target] = _CONVERSIONS.get(option.names[0], str)(text or "1")
            except (ValueError, OverflowError):
                raise ConfigError(f"{name} {text}: expected a number") from None

    def arguments(self) -> list[str]:
        """Return the arguments of ``ringreduce`` that this is.

        Ranks find Horovod's modules by PYTHONPATH, whatever the program is that starts Python.
        """
        found = ["run", "--horovod-variables", "--env=all"]
        options = dict(self.options)
        if options.keys() & _RUN_ELASTIC:
            found.append("--elastic")
        for name, value in options.items():
            found += [name, value] if value else [name]
        paths = [str(_HOROVOD), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        variables = {**{name: text for name, text in self.settings.items() if text}, "PYTHONPATH": ":".join(paths)}
        found += [word for name, text in variables.items() for word in ("-x", f"{name}={text}")]
        return [*found, *self.program]


class _Parser(argparse.ArgumentParser):
    """Reads a command line as Horovod does, by argparse."""

    def error(self, message: str) -> NoReturn:
        _, _, word = message.partition("unrecognized arguments: ")
        close = difflib.get_close_matches(word.partition("=")[0], _NAMED, 1, 0.6)
        raise ConfigError(f"{message}; " + (f"did you mean {close[0]}?" if close else "see horovodrun --help"))


class _Take(argparse.Action):
    """Adds an option to ``options``, with its name and its value."""

    def __call__(self, parser: object, found: argparse.Namespace, values: Any, name: str | None = None) -> None:
        assert name is not None
        found.options.append((name, _NAMED[name], values if isinstance(values, str) else " ".join(values)))


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line; its help is what ``horovodrun --help`` prints."""
    unneeded, refused = (
        ", ".join(option.names[0] for option in _OPTIONS if option.kind == kind) for kind in ("none", "refuse")
    )
    made = _Parser(
        usage="horovodrun -np N [options] python train.py [arguments ...]",
        description="Horovod's command, for ringreduce: starts a job as `ringreduce run` does (see its --help), in "
        "which `import horovod.torch` gives ringreduce.torch.",
        epilog=f"Taken with a warning, as nothing here needs them: {unneeded}. Refused: {refused}.",
        add_help=False,
    )
    for option in _OPTIONS:
        words = option.value.split()
        made.add_argument(
            *option.names,
            action=_Take,
            nargs=len(words) if len(words) != 1 else None,
            metavar=tuple(words) if len(words) > 1 else option.value,
            help=argparse.SUPPRESS if option.kind in ("none", "refuse") else option.text,
        )
    made.add_argument("-h", "--help", action="help", help="this text")
    version = f"horovodrun of ringreduce {ringreduce.__version__}"
    made.add_argument("-v", "--version", action="version", version=version, help="this version")
    made.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return made


def read(arguments: Sequence[str]) -> CommandLine:
    """Return what a command line asks for: options up to the first word that is none, and then the program.

    Args:
        arguments: without the name of this program.

    Raises:
        ConfigError: an option is not known, has no value, or asks for what there is not.
    """
    found = parser().parse_args(arguments, argparse.Namespace(options=[]))
    words = found.program
    plan = CommandLine(program=tuple(words[1:] if words[:1] == ["--"] else words))
    for name, option, text in sorted(found.options, key=lambda taken: taken[1].kind != "file"):
        if option.kind == "file":  # What is said on the command line comes later, and counts.
            _read_file(text, plan)
        else:
            plan.take(name, option, text)
    if not plan.program and not plan.shows:
        raise ConfigError("there is no program to start; horovodrun -np 2 python train.py")
    return plan


def _read_file(path: str, plan: CommandLine) -> None:
    """Read a file of ``--config-file``: sections, and indented ``key: value`` lines in them, as Horovod's YAML has."""
    options = {key: option for option in _OPTIONS if option.kind not in ("file", "show") for key in option.keys}
    try:
        lines = read_file(path, most_nbytes=1 << 20, ours=True).decode().splitlines()
    except ForeignFileError as error:
        raise ForeignFileError(f"--config-file {path}: {error}") from None
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config-file {path}: {error}") from None
    section = ""
    for number, line in enumerate(lines, 1):
        text = line.partition(" #")[0].rstrip()
        if not text.strip() or text.lstrip().startswith("#") or text == "---":
            continue
        key, colon, value = (part.strip() for part in text.strip().partition(":"))
        if not colon:
            raise ConfigError(f"--config-file {path}, line {number}: expected key: value, got {line.strip()[:60]!r}")
        key = key.replace("-", "_")
        value = value.strip("\"'")
        if not text[0].isspace():
            section = "" if value else _SECTIONS.get(key, f"{key}.")
        if value and value.lower() not in ("null", "~", "none"):
            _take_line(plan, f"{path}: {key}", options=options, key=section + key, value=value)


def _take_line(plan: CommandLine, place: str, options: Mapping[str, _Option], key: str, value: str) -> None:
    if key == "controller":
        if value.lower() != "gloo":  # MPI is what there is
            return
        key = "use_gloo"
        value = "true"
    if key == "stall_check_enabled":
        key = "no_stall_check"
        value = {"true": "false", "false": "true"}.get(value.lower(), value)
    option = options.get(key.removesuffix("_enabled"))
    if option is None:
        plan.warnings.append(f"{place} is not known, and not used")
    elif option.value:
        plan.take(place, option, value)
    elif value.lower() in ("true", "yes", "on", "1"):
        plan.take(place, option, "")


def main() -> NoReturn:
    """Start a job; the program ``horovodrun``."""
    try:
        plan = read(sys.argv[1:])
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    for warning in plan.warnings:
        click.echo(f"horovodrun: {warning}", err=True)
    if plan.shows:
        ringreduce_main(["doctor"], prog_name="ringreduce")
    with tempfile.TemporaryDirectory(prefix="ringreduce-commits-", ignore_cleanup_errors=True) as folder:
        if "--host-discovery-script" in plan.options:
            plan.settings.setdefault("RINGREDUCE_COMMITS", folder)
        ringreduce_main(plan.arguments(), prog_name="ringreduce")
    sys.exit(0)
