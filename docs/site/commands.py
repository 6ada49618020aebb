"""The page of commands, made of what each says when it is asked for help."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ringreduce.cli import main
from ringreduce.cli.horovodrun import parser

_WIDTH = 90  # characters that a block of code shows without scrolling


def commands() -> str:
    """Return the page, as Markdown."""
    helps = [*_helps(main, None, "ringreduce"), ("horovodrun", parser().format_help())]
    sections = [f"## {name}\n\n```text\n{text}\n```\n" for name, text in helps]
    return "\n".join(["# Commands\n\n`python -m ringreduce` is the same as `ringreduce`.\n", *sections])


def _helps(command: click.Command, parent: click.Context | None, name: str) -> Iterator[tuple[str, str]]:
    """Yield the full name of a command and its help, and those of the commands within it."""
    context = click.Context(command, parent, name, terminal_width=_WIDTH, **command.context_settings)
    yield context.command_path, context.get_help()
    for inner, each in sorted(getattr(command, "commands", {}).items()):
        yield from _helps(each, context, inner)
