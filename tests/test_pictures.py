"""The tables of docs/benchmarks.md say what the JSON files say, and the pictures are drawn from these."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures, zoo_summary

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")

pytestmark = pytest.mark.passes_without_graphs("what pages and pictures say")

_MODELS = {
    "16-layer MLP": "mlp",
    "MLP": "mlp",
    "BERT": "bert",
    "GPT-2": "gpt2",
    "XLNet": "xlnet",
    "ViT-S": "vit_small",
    "MobileNetV3": "mobilenetv3",
    "speech transformer": "speech",
    "DLRM": "dlrm",
    "T5": "t5",
    "MobileBERT": "mobilebert",
    "DenseNet": "densenet",
    "deep autoencoder": "autoencoder",
    "equation of state": "eos",
}


def table(heading: str, number: int = 0) -> list[list[str]]:
    """The cells of a table of a section, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\|\n)+", section, re.M)[number]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()[2:]]


def model_of(cell: str) -> str:
    """The longest name that begins the cell."""
    return _MODELS[max((name for name in _MODELS if cell.startswith(name)), key=len)]


def says(cell: str, value: float) -> bool:
    """Whether the number in the cell is the value, rounded to as many digits as the cell has."""
    digits = re.search(r"\d+(?:\.(\d+))?", cell)
    assert digits, cell
    return abs(float(digits[0]) - value) <= 0.5 * 10 ** -len(digits[1] or "") * 1.001


def check(cells: list[str], values: list[float | None]) -> None:
    wrong = [
        (cell, value)
        for cell, value in zip(cells, values, strict=True)
        if value is not None and not says(cell, value)
    ]
    assert not wrong


def test_steps_of_one_gpu() -> None:
    rows = pictures.lightning_steps()
    cells_of = table("Lightning, one GPU")
    assert len(cells_of) == len(rows)
    for name, *cells in cells_of:
        modes = rows[model_of(name)]
        ms = {mode: row["step_ms"] for mode, row in modes.items()}
        busy = modes["compile"]["busy_ms"]
        check(
            cells,
            [
                *(ms[m] for m in ("eager", "compile", "reduce-overhead", "pygraph-eager", "pygraph")),
                busy,
                ms["pygraph"] / busy,
                ms["reduce-overhead"] / ms["pygraph"],
            ],
        )


def test_memory_of_one_gpu() -> None:
    whole, after = "reserved_whole_fit_mib", "reserved_after_warmup_mib"
    for name, *cells in table("Lightning, one GPU", 1):
        modes = pictures.lightning_steps()[model_of(name)]
        eager, compiled, overhead = (modes[m][whole] for m in ("eager", "compile", "reduce-overhead"))
        ours, plain = modes["pygraph"], modes["pygraph-eager"]
        over = ours[after] / modes["compile"][after]
        check(cells, [eager, compiled, overhead, ours[whole], ours[after], over, plain[whole], plain[after]])


def test_the_backend() -> None:
    rows = pictures.rows_of(["backend_step_h200_18.json"])
    cells_of = table("The backend alone")
    assert len(cells_of) == len(rows)
    for name, *cells in cells_of:
        default, overhead, ours = (rows[model_of(name)][m] for m in ("default", "reduce-overhead", "pygraph"))
        settled = None if "†" in cells[5] else ours["settle_s"] / default["settle_s"]
        values: list[float | None] = [
            default["ms"],
            overhead.get("ms"),
            ours["ms"],
            ours["kernel_ms"],
            (overhead.get("ms") or default["ms"]) / ours["ms"],
            settled,
            ours["reserved_mib"] / default["reserved_mib"],
            ours["reserved_warmup_mib"] / default["reserved_warmup_mib"],
        ]
        assert (cells[1] == "crashes") == (overhead.get("ms") is None)
        check(cells, values)


def test_every_run_of_a_case_is_quoted() -> None:
    """Not just the better one of two."""
    modes = ("eager", "reduce-overhead", "pygraph")
    measured = [
        tuple(found.get(mode, {}).get("step_ms") for mode in modes)
        for file in sorted(pictures.RESULTS.glob("phase_switching*.json"))
        for case, found in _by_case(file).items()
        if case in ("compute", "hooks", "metric", "hostread")
    ]
    quoted = [cells[2:5] for cells in table("Plans chosen while training")]
    assert len(quoted) == len(measured)
    for values in measured:
        assert any(
            all(bool(cell) == (value is not None) for cell, value in zip(cells, values, strict=True))
            and all(says(cell, value) for cell, value in zip(cells, values, strict=True) if value is not None)
            for cells in quoted
        ), values


def _by_case(file: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        found.setdefault(row["case"], {})[row["mode"]] = row
    return found


def test_steps_of_two_gpus() -> None:
    model, quoted = "", []
    for name, run, *cells in table("Two GPUs"):
        model = model_of(name) if name else model
        (file,) = (f for f in pictures.TWO_GPUS if f.endswith(run.strip("`")))
        modes = pictures.rows_of([file])[model]
        ms = {mode: row["step_ms"] for mode, row in modes.items()}
        peaks = [modes[mode]["reserved_warmup_mib"] for mode in ("eager", "pygraph")]
        check(
            cells,
            [
                *(
                    ms[m]
                    for m in ("eager", "reduce-overhead", "pygraph-eager", "pygraph", "by-hand-compiled")
                ),
                ms["reduce-overhead"] / ms["pygraph"],
                *peaks,
                modes["pygraph"]["reserved_after_warmup_mib"],
            ],
        )
        quoted.append((file, model))
    measured = [(file, model) for file in pictures.TWO_GPUS for model in pictures.rows_of([file])]
    assert sorted(quoted) == sorted(measured), "every model on every host, not just the better one"


def test_many_architectures() -> None:
    files = sorted(pictures.RESULTS.glob("zoo_h*.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]
    assert ("\n## Many architectures\n" in PAGE) == bool(rows)
    assert not rows or zoo_summary.table_of(rows) in PAGE


def test_all_pictures_are_drawn_and_shown(tmp_path: Path) -> None:
    shown = set(re.findall(r"\]\(pictures/(\w+\.svg)\)", PAGE))
    assert shown <= {path.name for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    pytest.importorskip("matplotlib")
    drawn = pictures.draw_results(tmp_path)
    assert {path.name for path in drawn} == shown
    assert all(path.stat().st_size > 10_000 for path in drawn)


def test_a_report_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    printed, plotted = pictures.draw_report(tmp_path, "emulated", 30)
    assert "training" in printed.read_text(encoding="utf-8")
    assert plotted.stat().st_size > 1000


def test_reading_the_files_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert list(pictures.backend_ratios())
