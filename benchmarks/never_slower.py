"""Whether the library is slower, or larger, than what one line gives: eager, `torch.compile`, `reduce-overhead`.

    python -m benchmarks.never_slower --json never_slower.json --seconds 500      # one CUDA GPU
    python -m benchmarks.never_slower --json never_slower.json --seconds 500 --resume
    python -m benchmarks.never_slower --scale tiny --names "PPO"                  # does the script work? (CPU)

Twelve cases at the size at which they were found to be slow, and entries of the zoo; bf16 autocast. The whole step and
the backend are compared with the best of the three, and Accelerate's stock loop with the best of the three in such a
loop. Each contender has a process of its own, so that none moves the addresses of another one's tensors, meets its
guards, or hides its peak of memory; benchmarks/README.md says how they take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks.command import NO_CLAIM, settle_defaults
from benchmarks.entries_run import add_options, run_entries, settle_options
from benchmarks.entry_child import be_child
from benchmarks.noise import (
    ALLOWED,
    KINDS,
    TWIN,
    is_below_noise,
    median_ratio,
    paired,
    spread_of_twins,
    times_of,
)
from benchmarks.record import DASH, print_table
from benchmarks.settling import Loop
from benchmarks.zoo_models import ENTRIES
from benchmarks.zoo_models.cases import CASES
from benchmarks.zoo_summary import mean_of

Row = dict[str, Any]

OTHERS = ("eager", "compile", "reduce-overhead")
OTHERS_IN_ACCELERATE = ("accelerate-eager", "accelerate-compile", "accelerate-reduce-overhead")
OURS = ("graphed-compiled", "graphed", "backend", "accelerate")
LOOPS = (Loop(OTHERS, OURS[:-1]), Loop(OTHERS_IN_ACCELERATE, OURS[-1:]))
"""What is compared: ours with the best of the others in the same loop."""
MODES = ("compile", "reduce-overhead", *OURS, *OTHERS_IN_ACCELERATE, "eager")
COMPILED = tuple(mode for mode in MODES if mode not in ("eager", "accelerate-eager"))
"""Modes with Inductor's kernels. The first one of an entry compiles, and the others find its kernels on disk."""

FROM_ZOO = (
    *("BERT", "DistilBERT", "XLNet", "GPT-2", "OPT", "BLOOM", "LLaMA", "Mixtral", "Gemma", "T5", "BART"),
    *("Longformer", "Mamba", "wav2vec2", "Whisper", "PatchTST", "ViT", "DINOv2", "ConvNeXt", "SegFormer"),
    *("CLIP", "LayoutLM", "resnet18", "mobilenetv3_small_100", "densenet121", "GraphSAGE", "GAT", "GRU"),
    *("seq2seq with attention", "nn.Transformer", "critic with a gradient penalty", "SAC, actor"),
    *("DQN, double", "RealNVP", "VAE", "DCGAN, discriminator", "SimCLR", "DLRM", "checkpointed layers"),
)
"""Entries of the zoo that are measured as well."""

LONG = (
    *(
        "case: Swin-T",
        "case: EfficientNet-B0",
        "case: Whisper",
        "case: DeBERTa-v2",
        "SegFormer",
        "Mamba",
        "T5",
    ),
    *("case: Llama-like, one tensor twice", "densenet121", "mobilenetv3_small_100", "Whisper", "BART"),
    *("Longformer", "wav2vec2", "GPT-2", "OPT", "DLRM", "CLIP", "case: U-Net", "resnet18"),
)
"""Entries that take long until they are ready; they are begun first, as the end of a run waits for the last one."""

ALL = {**CASES, **{name: ENTRIES[name] for name in FROM_ZOO}}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults of the device filled in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", help=f"of {', '.join(MODES)} (default: all)")
    add_options(
        parser,
        timeout_s=600,
        processes=min(16, os.cpu_count() or 1),
        of="contenders, without those that are ready,",
        windows=8,
        window_s=0.3,
    )
    parser.add_argument("--most-windows", type=int, help="where they do not tell (default: 24; CPU: 6)")
    parser.add_argument("--short-windows", type=int, help="of all modes, at first (default: 5; CPU: 2)")
    parser.add_argument("--short-s", type=float, help="seconds of such a window (default: 0.05; CPU: 0)")
    parser.add_argument(
        "--fork",
        action="store_true",
        help="import once, and fork the contenders, where a copy can use the device",
    )
    parser.set_defaults(mode_s=240)
    args = parser.parse_args(argv)
    settle_options(parser, args, ALL)
    settle_defaults(args, most_windows=(24, 6), short_windows=(5, 2), short_s=(0.05, 0.0))
    args.autocast = True
    args.names = list(ALL) if args.names is None else args.names
    chosen = MODES if args.modes is None else args.modes.split(",")
    if args.child and chosen[0].endswith(TWIN):
        args.modes = chosen
        return args
    if unknown := [mode for mode in chosen if mode not in MODES]:
        parser.error(f"--modes: unknown {', '.join(unknown)}")
    args.modes = [mode for mode in MODES if mode in chosen]  # eager last: it needs no warm-up
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON. Returns 1 if a mode of the library crashed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(argv)
    warnings.filterwarnings("ignore")
    if args.child:
        be_child(ALL[args.names[0]], args.modes, args)
        return 0
    record = run_entries(
        "never_slower",
        ALL,
        args.modes,
        args,
        argv,
        summarize,
        _line,
        apart=True,
        loops=LOOPS,
        compiled=COMPILED,
        first=LONG,
    )
    title = "Training step, ms" if record["timing_claim"] else NO_CLAIM
    print_table(title, ["entry", *MODES, "worst", "memory", "plan"], [_cells(row) for row in record["rows"]])
    for key, value in record["summary"].items():
        print(f"{key}: {value}")
    below, misses = (
        sum(len(record["summary"][m][key]) for m in OURS) for key in ("below_0.98", "below_noise")
    )
    print(f"below 0.98 of the best: {below}; by more than twins of the best differ: {misses}")
    return int(bool(record["summary"]["crashed"]))


def over_the_best(row: Row, mode: str) -> float | None:
    """How many times faster a mode is than the best of the three in the same loop; None where that was not measured."""
    if row["stage"] == "timed in part":  # the best may not have been ready
        return None
    ratios = [ratio for other in _others(mode) if (ratio := median_ratio(row, mode, other)) is not None]
    return min(ratios, default=None)


def below_noise(row: Row, mode: str, spread: float) -> bool | None:
    """Whether a mode is below 0.98 of the best by more than twins differ; None where no twin was measured.

    Args:
        spread: of the twins of the run.
    """
    ratio = over_the_best(row, mode)
    if ratio is None or ratio >= ALLOWED:
        return False
    times = times_of(row, "again_ms")
    told = [
        is_below_noise(times, mode, other, spread) for other in _others(mode) if paired(times, mode, other)
    ]
    return any(told) if told and None not in told else None


def _others(mode: str) -> Sequence[str]:
    return next(loop.others for loop in LOOPS if mode in loop.ours)


def memory_over(row: Row, mode: str, other: str = "compile") -> float | None:
    """Peak reserved memory of the whole run over that of another mode."""
    ours, theirs = (row["modes"].get(m, {}).get("reserved_mib") for m in (mode, other))
    return ours / theirs if ours and theirs else None


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """For each mode of the library: the geometric mean over the best of the three, and what is below 0.98."""
    spread = spread_of_twins(rows)
    noise = {f"{row['name']}, {mode}": ratio for row in rows for mode, ratio in row.get("noise", {}).items()}
    found: dict[str, Any] = {"entries": len(rows), "twins": noise, "nine_of_ten_twins_are_within": spread}
    for mode in OURS:
        ratios = {row["name"]: ratio for row in rows if (ratio := over_the_best(row, mode)) is not None}
        sizes = {row["name"]: size for row in rows if (size := memory_over(row, mode)) is not None}
        found[mode] = {
            "measured": len(ratios),
            "geometric_mean_over_the_best": mean_of(list(ratios.values())),
            "below_0.98": {name: round(ratio, 3) for name, ratio in ratios.items() if ratio < ALLOWED},
            "below_noise": [row["name"] for row in rows if below_noise(row, mode, spread)],
            "below_0.98_without_a_twin": [
                row["name"] for row in rows if below_noise(row, mode, spread) is None
            ],
            "geometric_mean_of_memory_over_compile": mean_of(list(sizes.values())),
            "memory_above_1.10": {name: round(size, 3) for name, size in sizes.items() if size > 1.10},
        }
    found["crashed"] = {
        f"{row['name']}, {mode}": row["modes"][mode]["error"].splitlines()[0]
        for row in rows
        for mode in OURS
        if row["modes"].get(mode, {}).get("error")
    }
    found["not_measured"] = {
        row["name"]: row["error"] or row.get("not_installed") for row in rows if row["stage"] != "done"
    }
    return found


def _cells(row: Row) -> list[str]:
    kinds = [times_of(row, kind) for kind in reversed(KINDS)]
    times = [next((found[mode] for found in kinds if mode in found), None) for mode in MODES]
    worst = min((r for mode in OURS if (r := over_the_best(row, mode)) is not None), default=None)
    size = max((s for mode in OURS if (s := memory_over(row, mode)) is not None), default=None)
    cells = [DASH if not t else f"{statistics.median(t):.2f}" for t in times]
    cells += [DASH if value is None else f"{value:.2f}" for value in (worst, size)]
    return [row["name"], *cells, row["modes"].get("graphed-compiled", {}).get("running_plan", DASH)]


def _line(row: Row) -> str:
    return "  ".join(_cells(row))


if __name__ == "__main__":
    raise SystemExit(main())
