"""What commands say of wrong options: those that do not exist, and those that are in the wrong place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

import click

_RANKS = re.compile("--?np+|--num-proc")
#: Options of `ringreduce run` that programs have none of, with their values.
_OURS = re.compile(
    r"(-np|--num-proc|--min-np|--max-np|--max-restarts)[ =]\d+"
    r"|(-H|--hosts)[ =][\w.-]+:\d+(,[\w.-]+(:\d+)?)*"
    r"|(--hostfile|--host-discovery-script)[ =].+|--elastic"
)
#: What takes such options itself, and may be what is started.
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "srun", "ringreduce", "horovodrun", "ssh"}


def guess(word: str, known: Iterable[str]) -> str:
    """Return the question which of the known words was meant; empty if none is like it."""
    close = difflib.get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def options_of(*commands: click.Command) -> list[str]:
    """Return the names of all options of commands."""
    return [name for command in commands for param in command.params for name in param.opts if name.startswith("-")]


def require_program(program: Sequence[str], commands: Iterable[click.Command], otherwise: str) -> None:
    """Raise a UsageError where a program is an option, which no command has; ``otherwise`` says what may be meant."""
    if program[0].startswith("-"):
        asked = guess(program[0], options_of(*commands))
        raise click.UsageError(f"there is no option {program[0]}{asked or f'; {otherwise}'}")


class Command(click.Command):
    """A command whose errors name the option that was written, where click takes it for a value of a short one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadParameter) as error:
            short = getattr(error, "param", None)
            names = [error.option_name] if isinstance(error, click.NoSuchOption) else getattr(short, "opts", [])
            known = options_of(self)
            apart = [word for word in words if word[:2] in names and word[2:].isalpha() and word not in known]
            if not apart and not isinstance(error, click.NoSuchOption):
                raise
            raise self.no_such_option((apart or names)[0], ctx) from None

    def no_such_option(self, name: str, ctx: click.Context) -> click.UsageError:
        """Return what to say of an option that there is not."""
        return click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, options_of(self), 2), ctx=ctx)


class RankCommand(Command):
    """A command that ranks run, which something else has started."""

    def no_such_option(self, name: str, ctx: click.Context) -> click.UsageError:
        if not _RANKS.fullmatch(name):
            return super().no_such_option(name, ctx)
        return click.UsageError(
            f"{self.name} has no option {name}: it measures the ranks that run it. Start them in front: "
            f"ringreduce run -np N python -m ringreduce {self.name} ...",
            ctx=ctx,
        )


class ProgramCommand(Command):
    """A command that starts a program, whose options come after its name, and its own before."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [*args]
        rest = super().parse_args(ctx, args)
        program: Sequence[str] = ctx.params.get("program") or ()
        before = words[: len(words) - len(program)]
        is_named = program and not program[0].startswith("-")  # else that is an option, which there is not
        if is_named and before[-1:] != ["--"] and (word := _misplaced(program, before)):
            raise click.UsageError(
                f"{word} comes after the name of the program, and so would be its own; write {word} in front of "
                f"{program[0]}, or -- if it is the program's",
                ctx=ctx,
            )
        return rest


def _misplaced(program: Sequence[str], before: Sequence[str]) -> str:
    """Return the option of ``ringreduce run``, with its value, that comes after the program; empty if none does.

    Args:
        program: with its arguments.
        before: the words before it: what is there, the program may have as well.
    """
    if any(word.rpartition("/")[2] in _LAUNCHERS for word in program):
        return ""
    there = {word.partition("=")[0] for word in before}
    texts = (text for pair in zip(program[1:], (*program[2:], ""), strict=False) for text in (pair[0], " ".join(pair)))
    return next((text for text in texts if _OURS.fullmatch(text) and re.split("[ =]", text)[0] not in there), "")
