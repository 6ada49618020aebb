"""Tables of reports in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDE = 1000  # columns, which no table takes


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], red: Sequence[bool] = (), text: int = 0) -> Table:
    """Return a table of numbers, which are whole or they are misread, and of text.

    Args:
        headings: of the columns.
        rows: the cells.
        red: whether a row is red; the first ones.
        text: how many columns, the last ones, are text.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings, 1):
        if number > len(headings) - text:
            made.add_column(heading)
        else:
            made.add_column(heading, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        made.add_row(*map(Text, row), style="red" if number < len(red) and red[number] else None)
    return made


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], text: int = 0) -> None:
    """Print a table: as wide as its cells, or in a terminal as wide as that, with text in several lines.

    Args:
        headings: of the columns.
        rows: the cells.
        text: how many columns, the last ones, are text.
    """
    made = table(headings, rows, text=text)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(Console(width=_WIDE).measure(made).maximum, 1))
    console.print(made)
