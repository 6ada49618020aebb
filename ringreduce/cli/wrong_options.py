"""What commands say of wrong options: those that do not exist, and those that are in the wrong place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

import click

_RANKS = re.compile("--?np+|--num-proc")
_HOSTS = re.compile(r"[\w.-]+:\d+(,[\w.-]+(:\d+)?)*")
#: Of `ringreduce run`, the options that programs have none of: a name, and what its value is like; None: there is none.
_OURS: dict[str, re.Pattern[str] | None] = {
    **dict.fromkeys(("-np", "--num-proc", "--min-np", "--max-np", "--max-restarts"), re.compile(r"\d+")),
    **dict.fromkeys(("-H", "--hosts"), _HOSTS),
    **dict.fromkeys(("--hostfile", "--host-discovery-script"), re.compile(r".+")),
    "--elastic": None,
}
#: What takes such options itself, and may be what is started.
_LAUNCHERS = {"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "srun", "ringreduce", "horovodrun", "ssh"}


def guess(word: str, known: Iterable[str]) -> str:
    """Return the question which of the known words was meant; empty if none is like it."""
    close = difflib.get_close_matches(word.partition("=")[0], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def options_of(*commands: click.Command) -> list[str]:
    """Return the names of all options of commands."""
    return [name for command in commands for param in command.params for name in param.opts if name.startswith("-")]


class Command(click.Command):
    """A command whose errors name the option that was written, where click takes it for a value of a short one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            names = {error.option_name}
        except click.BadParameter as error:
            names = {*getattr(error.param, "opts", ())}
            if not (word := self._taken_apart(given, names)):
                raise
            raise self.no_such_option(word, ctx) from None
        raise self.no_such_option(self._taken_apart(given, names) or names.pop(), ctx)

    def _taken_apart(self, given: Sequence[str], names: Collection[str]) -> str:
        """Return the word that was read as one of these options, of one letter, with a value; empty if none was."""
        known = {each for param in self.params for each in param.opts}
        words = (word for word in given if word[:2] in names and word[2:].isalpha())
        return next((word for word in words if word not in known), "")

    def no_such_option(self, name: str, ctx: click.Context) -> click.UsageError:
        """Return what to say of an option that there is not."""
        known = [each for param in self.params for each in param.opts]
        return click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known, 2) or None, ctx=ctx)


class RankCommand(Command):
    """A command that ranks run, which something else has started."""

    def no_such_option(self, name: str, ctx: click.Context) -> click.UsageError:
        if _RANKS.fullmatch(name):
            return click.UsageError(
                f"{self.name} has no option {name}: it measures the ranks that run it. Start them in front: "
                f"ringreduce run -np N python -m ringreduce {self.name} ...",
                ctx=ctx,
            )
        return super().no_such_option(name, ctx)


class ProgramCommand(Command):
    """A command that starts a program, whose options come after its name, and its own before."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = [*args]
        rest = super().parse_args(ctx, args)
        program: Sequence[str] = ctx.params.get("program") or ()
        before = given[: len(given) - len(program)]
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
    words = list(program)
    if any(word.rpartition("/")[2] in _LAUNCHERS for word in words):
        return ""
    for place, word in enumerate(words[1:], 1):
        name, equals, value = word.partition("=")
        if name not in _OURS or any(each.partition("=")[0] == name for each in before):
            continue
        form = _OURS[name]
        following = "".join(words[place + 1 : place + 2])
        if form is None:
            if not equals:
                return word
        elif form.fullmatch(value if equals else following):
            return word if equals else f"{word} {following}"
    return ""
