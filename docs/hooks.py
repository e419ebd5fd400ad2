"""What MkDocs calls while it makes the site."""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Make text of links that lead out of docs/: these files are in a clone, and not on the site."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)
