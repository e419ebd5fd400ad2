"""What MkDocs calls while it makes the site."""

from __future__ import annotations

import re


def on_page_markdown(markdown: str, **_: object) -> str:
    """Make text of links that lead out of docs/: these files are in a clone, and not on the site."""
    return re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """Give cells the title of their column where a phone has no room for columns (site.css)."""
    html = html.replace("::test_", "::<wbr>test_")  # where the name of a test may be broken
    return re.sub(r"<table>.*?</table>", lambda table: _labelled(table[0]), html, flags=re.S)


def _labelled(table: str) -> str:
    titles = [re.sub(r"<[^>]+>", "", title) for title in re.findall(r"<th[^>]*>(.*?)</th>", table, re.S)]
    figures = "<td style" in table  # columns of figures are aligned, and narrow where their titles are
    long_names = re.search(r"<tr[^>]*>\s*<td>.*<code>[^\s<]{25,}", table)  # in a first cell
    if (len(titles) < 3 and not long_names) or (figures and sum(map(len, titles)) < 90):
        return table

    table = re.sub(r"(<td[^>]*>)\s+</td>", r"\1</td>", table)  # :empty for site.css

    def row(cells: re.Match[str]) -> str:
        parts = cells[0].split("<td")
        for column in range(2, len(parts)):
            parts[column] = f' data-label="{titles[column - 1]}"' + parts[column]
        return "<td".join(parts)

    return re.sub(r"<tr[^>]*>.*?</tr>", row, table, flags=re.S)
