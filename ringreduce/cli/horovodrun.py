"""``horovodrun``: Horovod's options of starting a job, as those of ``ringreduce run`` and as settings."""

from __future__ import annotations

import difflib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import click

import ringreduce
from ringreduce.cli import main as ringreduce_main
from ringreduce.cli.horovod_options import OPTIONS, Option
from ringreduce.cli.reports import doctor
from ringreduce.common.errors import ConfigError

__all__ = ["Plan", "help_text", "main", "read"]

#: Holds a package ``horovod`` that is ringreduce's; see `ringreduce.horovod.alias`.
_HOROVOD = Path(ringreduce.__file__).parent / "horovod" / "_path"
_NAMED = {name: option for option in OPTIONS for name in option.names}
#: Of a file of ``--config-file``: what its sections add to the names of their options.
_SECTIONS = {
    **dict.fromkeys(("params", "library_options"), ""),
    **{"timeline": "timeline_", "stall_check": "stall_check_", "autotune": "autotune_", "logging": "log_"},
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

    def take(self, name: str, option: Option, text: str) -> None:
        """Note an option that was given; of several for one thing, the last counts.

        Raises:
            ConfigError: its value is none, or it asks for what there is not.
        """
        if option.kind == "none":
            self.warnings.append(f"{name} is not needed: {option.text}")
        elif option.kind == "refuse":
            raise ConfigError(f"{name}: {option.text}")
        elif option.kind == "run":
            self.options[option.target] = text
        elif option.kind == "show":
            self.instead = option.target
        else:
            try:
                self.settings[option.target] = option.convert(text or "1")
            except (ValueError, OverflowError):
                raise ConfigError(f"{name} {text}: expected a number") from None

    def arguments(self) -> list[str]:
        """Return the arguments of ``ringreduce`` that this is.

        Ranks find Horovod's modules by PYTHONPATH, whatever the program is that starts Python.
        """
        found = ["run", "--horovod-variables"]
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
        name, has_value, text = _named(word)
        option = _NAMED[name]
        value = option.value
        if has_value and not value:
            raise ConfigError(f"{name} takes no value")
        if value and not has_value:
            if not left:
                raise ConfigError(f"{name} takes a value: {value}")
            text = left.pop(0)
            if value == "MIN MAX" and left and _is_number(left[0]):
                text = f"{text} {left.pop(0)}"
        if option.kind == "file":
            _read_file(text, plan)
        else:
            given.take(name, option, text)
    plan.options |= given.options
    plan.settings |= given.settings  # what is said on the command line counts
    plan.warnings += given.warnings
    plan.instead = given.instead
    plan.program = tuple(left)
    if not left and not plan.instead:
        raise ConfigError("there is no program to start; horovodrun -np 2 python train.py")
    return plan


def _named(word: str) -> tuple[str, bool, str]:
    """Return which option a word is, whether it holds a value, and that; as argparse, which Horovod uses, reads it.

    A name may be cut where that leaves no doubt, and the value of a short one may follow at once: ``-np2``.

    Raises:
        ConfigError: there is no such option, or several begin like this.
    """
    name, equals, text = word.partition("=")
    if name in _NAMED:
        return name, bool(equals), text
    longer = [each for each in _NAMED if each.startswith(name) and (name.startswith("--") or not each.startswith("--"))]
    if len(longer) == 1:
        return longer[0], bool(equals), text
    if longer:
        raise ConfigError(f"{name} could be {' or '.join(sorted(longer))}")
    short = [each for each in _NAMED if not each.startswith("--") and word.startswith(each)]
    if not short:
        close = difflib.get_close_matches(name, _NAMED, 1, 0.6)
        hint = f"did you mean {close[0]}?" if close else "see horovodrun --help"
        raise ConfigError(f"there is no option {name}; {hint}")
    found = max(short, key=len)
    return found, True, word.removeprefix(found).removeprefix("=")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _read_file(path: str, plan: Plan) -> None:
    """Read a file of ``--config-file``: sections, and indented ``key: value`` lines in them, as Horovod's YAML has."""
    options = {key: option for option in OPTIONS if option.kind not in ("file", "show") for key in option.keys}
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
        key, value = key.replace("-", "_"), value.strip("\"'")
        if not text[0].isspace():
            section = "" if value else _SECTIONS.get(key, f"{key}.")
        if value and value.lower() not in ("null", "~", "none"):
            _take_line(plan, f"{path}: {key}", options, section + key, value)


def _take_line(plan: Plan, place: str, options: Mapping[str, Option], key: str, value: str) -> None:
    if key == "controller":
        if value.lower() != "gloo":  # MPI is what there is
            return
        key, value = "use_gloo", "true"
    if key == "stall_check_enabled":
        key, value = "no_stall_check", {"true": "false", "false": "true"}.get(value.lower(), value)
    option = options.get(key.removesuffix("_enabled"))
    if option is None:
        plan.warnings.append(f"{place} is not known, and not used")
    elif option.value:
        plan.take(place, option, value)
    elif value.lower() in ("true", "yes", "on", "1"):
        plan.take(place, option, "")


def help_text() -> str:
    """Return what ``horovodrun --help`` prints."""
    lines = [
        "usage: horovodrun -np N [options] python train.py [arguments ...]",
        "",
        "Horovod's command, for ringreduce: starts a job as `ringreduce run` does (see its --help), in which",
        "`import horovod.torch` gives ringreduce.torch. Options:",
        "",
    ]
    for option in OPTIONS:
        if option.kind not in ("none", "refuse"):
            lines.append(f"  {', '.join(option.names)} {option.value}".rstrip())
            lines.append(f"      {option.text}")
    unneeded, refused = (
        ", ".join(option.names[0] for option in OPTIONS if option.kind == kind) for kind in ("none", "refuse")
    )
    lines += ["", f"Taken with a warning, as nothing here needs them: {unneeded}.", f"Refused: {refused}."]
    return "\n".join(lines)


def main() -> NoReturn:
    """Start a job; the program ``horovodrun``."""
    try:
        plan = read(sys.argv[1:])
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    if plan.instead == "help":
        click.echo(help_text())
        sys.exit(0)
    if plan.instead == "version":
        click.echo(f"horovodrun of ringreduce {ringreduce.__version__}")
        sys.exit(0)
    for warning in plan.warnings:
        click.echo(f"horovodrun: {warning}", err=True)
    if plan.instead == "check":
        ringreduce_main([str(doctor.name)], prog_name="ringreduce")
    with tempfile.TemporaryDirectory(prefix="ringreduce-commits-", ignore_cleanup_errors=True) as folder:
        if "--host-discovery-script" in plan.options:
            plan.settings.setdefault("RINGREDUCE_COMMITS", folder)
        ringreduce_main(plan.arguments(), prog_name="ringreduce")
    sys.exit(0)
