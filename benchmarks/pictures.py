"""Pictures for the documents: of the JSON files in `results/`, and of the report of a real run.

    python -m benchmarks.pictures results --out docs/pictures    # needs matplotlib only
    python -m benchmarks.pictures report --out docs/pictures     # trains a model; `--engine emulated` without a GPU

What a picture shows is read by a function of its own (`lightning_steps`, `two_gpus`, `backend_ratios`), so that a test
can compare the tables of docs/benchmarks.md with the same data.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pygraph_train import StepReport

RESULTS = Path(__file__).parent / "results"

LIGHTNING = ("lightning_step_h200_1.json", "lightning_step_h200_2.json")
TWO_GPUS = ("distributed_step_h200_1.json", "distributed_step_h200_2.json")
BACKEND = ("backend_step_h200_16.json", "backend_step_h200_17.json", "backend_step_h200_18.json")

MODELS = {
    "mlp": "16-layer MLP",
    "bert": "BERT",
    "gpt2": "GPT-2",
    "xlnet": "XLNet",
    "vit_small": "ViT-S",
    "mobilenetv3": "MobileNetV3",
    "dlrm": "DLRM",
    "t5": "T5",
    "mobilebert": "MobileBERT",
    "densenet": "DenseNet",
    "autoencoder": "deep autoencoder",
    "eos": "equation of state",
    "speech": "speech transformer",
}
MODES = {
    "eager": "plain",
    "compile": "torch.compile",
    "reduce-overhead": "reduce-overhead",
    "pygraph-eager": "PyGraph, compile=False",
    "pygraph": "PyGraph, compile=True",
    "by-hand-compiled": "a graph by hand",
}
# told apart by lightness as well: grey is without graphs, orange is torch's, blue is PyGraph's
COLORS = {
    "eager": "#c4c4c4",
    "compile": "#8c8c8c",
    "reduce-overhead": "#e08a2e",
    "pygraph-eager": "#8db8e0",
    "pygraph": "#1f5f9f",
    "by-hand-compiled": "#f0cfa4",
}

Rows = dict[str, dict[str, dict[str, Any]]]  # model, then mode


def rows_of(names: Iterable[str]) -> Rows:
    """The rows of some files by model and mode. A later file wins where two have the same row."""
    found: Rows = {}
    for name in names:
        for row in json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]:
            found.setdefault(row["model"], {})[row["mode"]] = row
    return found


def lightning_steps() -> Rows:
    """One GPU, a stock Lightning Trainer; the model that gains most over `reduce-overhead` first."""
    rows = rows_of(LIGHTNING)
    return dict(sorted(rows.items(), key=lambda item: -_gain(item[1])))


def two_gpus() -> dict[str, list[dict[str, dict[str, Any]]]]:
    """DistributedDataParallel: for each model the rows of each host that measured it."""
    hosts = [rows_of([name]) for name in TWO_GPUS]
    models = {
        model: max(_gain(host[model]) for host in hosts if model in host) for host in hosts for model in host
    }
    return {
        model: [host[model] for host in hosts if model in host]
        for model in sorted(models, key=lambda m: -models[m])
    }


def backend_ratios() -> dict[str, dict[str, float]]:
    """How much faster the backend is than `reduce-overhead`: by workload, then by file. The best workload first."""
    found: dict[str, dict[str, float]] = {}
    for name in BACKEND:
        for model, modes in rows_of([name]).items():
            if modes["reduce-overhead"].get("ms"):
                found.setdefault(model, {})[name] = modes["reduce-overhead"]["ms"] / modes["pygraph"]["ms"]
    return dict(sorted(found.items(), key=lambda item: -min(item[1].values())))


def _gain(modes: dict[str, dict[str, Any]]) -> float:
    return float(modes["reduce-overhead"]["step_ms"] / modes["pygraph"]["step_ms"])


def draw_results(folder: Path) -> list[Path]:
    """All pictures of `results/`; returns where they are."""
    drawn = {
        "lightning_step": _steps_picture(),
        "memory": _memory_picture(),
        "two_gpus": _two_gpus_picture(),
        "backend": _backend_picture(),
    }
    return [_save(figure, folder / f"{name}.svg") for name, figure in drawn.items()]


def _save(figure: Figure, path: Path) -> Path:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # the same data give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _panels(models: Sequence[str], columns: int, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    lines = -(-len(models) // columns)
    figure = Figure(figsize=(10, height * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in axes[len(models) :]:
        axis.remove()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    return figure, axes[: len(models)]


def _bars(axis: Axes, modes: dict[str, dict[str, Any]], names: Sequence[str], key: str) -> None:
    values = [modes[mode][key] for mode in names]
    axis.barh([MODES[mode] for mode in names], values, color=[COLORS[mode] for mode in names])
    for place, value in enumerate(values):
        _label(axis, _short(value), value, place)
    axis.set_xlim(0, max(values) * 1.17)
    axis.invert_yaxis()


def _label(axis: Axes, text: str, value: float, place: float) -> None:
    """Write a text behind the bar that ends at a value."""
    axis.annotate(text, (value, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)


def _short(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _steps_picture() -> Figure:
    rows = lightning_steps()
    names = [mode for mode in MODES if mode != "by-hand-compiled"]
    figure, axes = _panels(list(rows), columns=2, height=2.0)
    for axis, (model, modes) in zip(axes, rows.items(), strict=True):
        _bars(axis, modes, names, "step_ms")
        axis.axvline(modes["compile"]["busy_ms"], color="black", linestyle=":", linewidth=1)
        axis.set_title(f"{MODELS[model]}: {_gain(modes):.2f}x over reduce-overhead", fontsize=10, loc="left")
    figure.suptitle(
        "Milliseconds a step in a Lightning Trainer, one H200, bf16 (less is better)\n"
        "dotted: time that the GPU is busy in a compiled step",
        fontsize=11,
    )
    return figure


def _memory_picture() -> Figure:
    rows = lightning_steps()
    names = [mode for mode in MODES if mode != "by-hand-compiled"]
    figure, axes = _panels(list(rows), columns=2, height=2.0)
    for axis, (model, modes) in zip(axes, rows.items(), strict=True):
        peaks = [modes[mode]["reserved_whole_fit_mib"] for mode in names]
        axis.barh(
            [MODES[m] for m in names],
            peaks,
            facecolor="none",
            edgecolor="#777777",
            hatch="////",
            linewidth=0.6,
        )
        steady = [modes[mode]["reserved_after_warmup_mib"] for mode in names]
        axis.barh([MODES[m] for m in names], steady, color=[COLORS[m] for m in names])
        for place, (peak, value) in enumerate(zip(peaks, steady, strict=True)):
            text = f"{value}" if peak == value else f"{value}, at most {peak}"
            _label(axis, text, peak, place)
        axis.set_xlim(0, max(peaks) * 1.45)
        axis.invert_yaxis()
        axis.set_title(MODELS[model], fontsize=10, loc="left")
    figure.suptitle(
        "MiB that PyTorch reserves at most, one H200 (less is better)\n"
        "filled: after the first 60 steps; hatched: the whole run with its warm-up",
        fontsize=11,
    )
    return figure


def _two_gpus_picture() -> Figure:
    models = two_gpus()
    names = ["eager", "reduce-overhead", "pygraph-eager", "pygraph", "by-hand-compiled"]
    figure, axes = _panels(list(models), columns=2, height=2.6)
    for axis, (model, hosts) in zip(axes, models.items(), strict=True):
        width = 0.8 / len(hosts)
        longest = 0.0
        for number, modes in enumerate(hosts):
            places = [place + (number - (len(hosts) - 1) / 2) * width for place in range(len(names))]
            values = [modes[mode]["step_ms"] for mode in names]
            longest = max(longest, *values)
            axis.barh(places, values, height=width * 0.92, color=[COLORS[mode] for mode in names])
            for place, value in zip(places, values, strict=True):
                _label(axis, _short(value), value, place)
        axis.set_yticks(range(len(names)), ["DDP" if mode == "eager" else MODES[mode] for mode in names])
        axis.set_xlim(0, longest * 1.17)
        axis.invert_yaxis()
        gains = " and ".join(f"{_gain(modes):.1f}x" for modes in hosts)
        axis.set_title(f"{MODELS[model]}: {gains} over reduce-overhead", fontsize=10, loc="left")
    figure.suptitle(
        "Milliseconds a step under DistributedDataParallel, two H200s (less is better)\n"
        "two bars of one colour: two hosts",
        fontsize=11,
    )
    return figure


def _backend_picture() -> Figure:
    from matplotlib.figure import Figure

    ratios = backend_ratios()
    figure = Figure(figsize=(10, 4.8), layout="constrained")
    axis = figure.subplots()
    for number, name in enumerate(BACKEND):
        points = [(each[name], place) for place, each in enumerate(ratios.values()) if name in each]
        axis.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=50,
            marker="os^"[number],
            color=("#8db8e0", "#e08a2e", "#1f5f9f")[number],
            label=name,
            zorder=3,
        )
    for place, each in enumerate(ratios.values()):
        axis.plot(
            [min(each.values()), max(each.values())], [place, place], color="#bbbbbb", linewidth=1.5, zorder=2
        )
    axis.axvline(1, color="black", linewidth=1)
    axis.set_yticks(range(len(ratios)), [MODELS[model] for model in ratios])
    axis.invert_yaxis()
    axis.set_xlim(0.9, None)
    axis.grid(axis="x", color="#e5e5e5")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("time of reduce-overhead / time of the backend (1: no gain)")
    axis.set_title("The compile backend over reduce-overhead, one point for each run", fontsize=11)
    axis.legend(frameon=False, fontsize=9)
    return figure


def draw_report(folder: Path, engine: str, steps: int) -> list[Path]:
    """Trains a small model, and draws its printed report and `report.plot(...)`; returns where they are."""
    from rich.console import Console

    report = _report_of_a_run(engine, steps)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    console.print(report.verbose())
    printed, plotted = folder / "report_printed.svg", folder / "report_plot.svg"
    console.save_svg(str(printed), title="print(step.report().verbose())", unique_id="report")
    report.plot(plotted)
    return [printed, plotted]


def _report_of_a_run(engine: str, steps: int) -> StepReport:
    import torch
    from torch import nn

    from pygraph_train import GraphedStep

    torch.manual_seed(0)
    device = "cuda" if engine == "cuda" else "cpu"
    width = 512 if device == "cuda" else 16
    blocks = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(12)]
    model = nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    step = GraphedStep(
        lambda batch: model(batch).square().mean(), model=model, optimizer=optimizer, engine=engine
    )
    for _ in range(steps):
        step(torch.randn(64, width, device=device))
    return step.report()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("results", "report"))
    parser.add_argument("--out", type=Path, required=True, help="the folder for the pictures")
    parser.add_argument("--engine", choices=("cuda", "emulated"), default="cuda", help="of `report`")
    parser.add_argument("--steps", type=int, default=2000, help="of `report`")
    options = parser.parse_args(arguments)
    if options.what == "results":
        drawn = draw_results(options.out)
    else:
        drawn = draw_report(options.out, options.engine, options.steps)
    for path in drawn:
        print(path)


if __name__ == "__main__":
    main()
