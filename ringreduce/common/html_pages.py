"""Pages that need no other file: their look, their tables, and colours for what is drawn on them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

#: Colours that people who are colour-blind can tell apart, too, on white and on black (those of Okabe and Ito).
COLOURS = {
    **{"blue": "#0072b2", "orange": "#d55e00", "green": "#009e73", "purple": "#cc79a7", "yellow": "#f0e442"},
    **{"amber": "#e69f00", "sky": "#56b4e9", "grey": "#999999", "pale": "#d0d0d0"},
}


def html_page(title: str, body: str) -> str:
    """Return a page that needs nothing else; dark where the reader's screen is."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{html.escape(title)}</title><style>
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #1b1d21; --line: #c8c8c8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #1b1d21; --ink: #e4e4e4; --line: #55585f; }} }}
body {{ font: 14px system-ui, sans-serif; margin: 2em auto; padding: 0 1em; max-width: 76em; background: var(--paper);
color: var(--ink); overflow-wrap: anywhere; }}
.table {{ overflow-x: auto; overflow-wrap: normal; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ text-align: right; padding: 2px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }}
.words td:last-child, .words th:last-child {{ text-align: left; white-space: normal; min-width: 14em; }}
svg {{ max-width: 100%; height: auto; }}
section {{ display: flex; flex-wrap: wrap; gap: 1em; align-items: flex-start; }}
section > svg {{ flex: 0 1 34em; min-width: 0; }}
section > .table {{ flex: 0 1 auto; max-width: 100%; }}
i {{ display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: middle;
border: 1px solid var(--ink); }}
.key span {{ display: inline-block; margin-right: 1.2em; }}
.state, .squares, .charts {{ display: flex; flex-wrap: wrap; gap: .8em 2em; }}
.state b {{ font-size: 1.4em; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18em, 100%), 1fr)); }}
.charts figure {{ margin: 0; }}
.charts svg {{ width: 100%; height: 5em; border-bottom: 1px solid var(--line); }}
.squares i {{ margin: 2px; }}
.bars {{ width: 100%; max-width: 60em; height: auto; overflow: visible; }}
.bars text {{ fill: var(--ink); font-size: 13px; }}
.bars rect {{ stroke: var(--paper); stroke-width: 1; }}
.bars rect + text {{ fill: #000000; text-anchor: middle; pointer-events: none; }}
.bars .on-dark + text {{ fill: #ffffff; }}
.bars line {{ stroke: var(--line); }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{body}
</body></html>
"""


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Return a table of a page; ``words``: whether its last column holds these, not numbers."""
    lines = [("th", headings), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) for tag, row in lines)
    kind = ' class="words"' if words else ""
    return f'<div class="table"><table{kind}>{"".join(f"<tr>{each}</tr>" for each in cells)}</table></div>'
