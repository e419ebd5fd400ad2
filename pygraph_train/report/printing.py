"""How a report prints: as wide as the terminal, with short paths."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

_NARROWEST, _WIDEST = 60, 120

_TITLE = "pygraph-train: "

Rows = Sequence[tuple[str, str]]
"""The lines of a table: name and text."""


def as_text(headline: str, rows: Rows) -> str:
    """The first line, wrapped, and a table of two columns below it."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, _NARROWEST), _WIDEST)
    names = max((len(name) for name, _ in rows), default=0) + 2
    lines = [*_wrapped(shortened(_TITLE + headline), width), ""]
    for name, text in rows:
        first, *others = [
            line for part in shortened(text).splitlines() for line in _wrapped(part, width - names)
        ]
        lines.append(f"{name:<{names}}{first}")
        lines += [" " * names + line for line in others]
    return "\n".join(lines)


def shortened(text: str) -> str:
    """Paths in a text as people want them: below the working directory, or with the name of an installed package."""
    text = re.sub(r"[^\s'\"(]*[/\\](?:site|dist)-packages[/\\]", "", text)
    return text.replace(os.getcwd().rstrip(os.sep) + os.sep, "")


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [line]


class Printed:
    """A first line and a table: `print`, `rich.print` and notebooks show them."""

    def __str__(self: Any) -> str:
        return as_text(self.headline(), self.rows())

    def _repr_html_(self: Any) -> str:
        cell = "style='text-align: left; white-space: pre-wrap'>"
        rows = [
            f"<th {cell}{escape(name)}</th><td {cell}{escape(shortened(text))}</td>"
            for name, text in self.rows()
        ]
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{escape(shortened(_TITLE + self.headline()))}</p><table>{table}</table>"

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(str(self))
