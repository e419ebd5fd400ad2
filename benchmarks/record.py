"""What every benchmark writes down: the machine it ran on, its rows as JSON, a table on the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

DASH = "–"
_PATH = re.compile(r"(?<![\w.])(?<!:/)/(?:[^\s/:'\",()]+/)+(?=[^\s/:'\",()]+)")


def environment() -> dict[str, Any]:
    """Hardware, versions, date, command and commit; None where something cannot be found out."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "lightning", "transformers", "timm", "triton")},
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "argv": sys.argv[1:],
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": _uncommitted_changes(),
    }


def scrub(value: Any) -> Any:
    """`value` as JSON data, with directories cut from absolute paths and without the host's name.

    Numbers that JSON lacks become strings: "nan", "inf".
    """
    if isinstance(value, dict):
        return {str(k): scrub(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub(v) for v in value]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    text = _PATH.sub("", str(value))
    host = socket.gethostname()
    if host in ("", "localhost"):  # nobody's secret, and frequent in messages
        return text
    return re.sub(rf"\b{re.escape(host)}\b", "<host>", text)


def write_json(path: Path | None, data: dict[str, Any]) -> None:
    """Write `data`, scrubbed, replacing the file in one move: a killed run leaves the last whole one."""
    if path is None:
        return
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(scrub(data), indent=1) + "\n")
    temporary.replace(path)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print with rich where it is installed, else in plain columns."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
        print(title)
        for line in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # a log file has no width: rich would assume 80 and cut the columns
    Console(width=None if sys.stdout.isatty() else 160, markup=False).print(table)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.splitlines() or [None])[0]


def _git(*arguments: str) -> str | None:
    return _output("git", "-C", str(Path(__file__).parent), *arguments)


def _uncommitted_changes() -> bool | None:
    return None if _git("rev-parse", "HEAD") is None else _git("status", "--porcelain") is not None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None
