"""Step time and logged losses of transformers.Trainer: eager, torch_compile, the callback, PyGraphTrainer.

    python -m benchmarks.transformers_trainer --json transformers.json       # one CUDA GPU
    python -m benchmarks.transformers_trainer --scale tiny                    # does the script work? (CPU)

A small BERT learns random tokens under bf16 with a fused AdamW; the stock data loader and its defaults.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

from benchmarks.command import NO_CLAIM, measured_rows, new_record, settle_choices, settle_device, told_in
from benchmarks.record import DASH, print_table, write_json
from pygraph_train import PyGraphConfig, PyGraphTrainer, PyGraphTrainerCallback

Row = dict[str, Any]

MODES = ("eager", "torch-compile", "callback", "trainer-eager", "trainer")
WINDOWS = 5


class Times(transformers.TrainerCallback):
    """Milliseconds a step over windows, after a warm-up; the device is waited for at their borders only."""

    def __init__(self, warmup: int, steps: int, cuda: bool) -> None:
        self.warmup, self.steps, self.cuda = warmup, steps, cuda
        self.windows: list[float] = []
        self._began: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        done = state.global_step - self.warmup
        if done < 0 or done % self.steps:
            return
        if self.cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._began is not None:
            self.windows.append((now - self._began) / self.steps * 1e3)
        self._began = now


def measure(model: str, mode: str, args: argparse.Namespace) -> Row:
    """One row. A crash or a time-out is part of the row, never raised."""
    row: Row = {"model": model, "mode": mode, "error": None, "skipped": None, "step_ms": None}
    if args.device == "cpu" and mode == "torch-compile":
        return {**row, "skipped": "needs CUDA: on a CPU it would be compared with an emulation"}
    torch.compiler.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    with told_in(row, args.timeout_s), tempfile.TemporaryDirectory() as folder:
        row.update(_trained(mode, folder, args))
    return row


def _trained(mode: str, folder: str, args: argparse.Namespace) -> Row:
    cuda, full = args.device == "cuda", args.scale == "full"
    width, layers, length, vocabulary, batch = (256, 8, 128, 8192, 16) if full else (32, 2, 8, 64, 2)
    warmup, steps = (200, 100) if full else (12, 2)
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    rows = torch.randint(0, vocabulary, (64, length), generator=torch.Generator().manual_seed(1))
    times = Times(warmup, steps, cuda)
    engine = "cuda" if cuda else "emulated"
    ours = PyGraphTrainerCallback(engine=engine) if mode == "callback" else None
    options: dict[str, Any] = {"callbacks": [c for c in (ours, times) if c is not None]}
    kind = transformers.Trainer
    if mode.startswith("trainer"):
        kind = PyGraphTrainer
        options["pygraph"] = PyGraphConfig(compile=mode == "trainer" and cuda, engine=engine)
    trainer = kind(
        model=transformers.BertForMaskedLM(config),
        args=transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=batch,
            max_steps=warmup + WINDOWS * steps,
            logging_steps=10,
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=cuda,
            use_cpu=not cuda,
            torch_compile=mode == "torch-compile",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        **options,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row: Row = {"windows_ms": times.windows, "step_ms": statistics.median(times.windows), "losses": losses}
    if ours is not None:
        row["report"] = ours.report().to_dict()
    elif isinstance(trainer, PyGraphTrainer):
        row["report"] = trainer.report().to_dict()
    return row


def summarize(rows: Sequence[Row], device: str) -> dict[str, Any]:
    """Speed-ups over eager, and how far logged losses are from eager's and from torch_compile's."""
    of = {row["mode"]: row for row in rows}
    eager = of.get("eager", {})
    summary: dict[str, Any] = {}
    for mode, row in of.items():
        if not row["step_ms"] or mode == "eager":
            continue
        entry: dict[str, Any] = {}
        if device == "cuda" and eager.get("step_ms"):
            entry["speedup_over_eager"] = eager["step_ms"] / row["step_ms"]
        for other in ("eager", "torch-compile"):
            if of.get(other, {}).get("losses"):
                pairs = zip(row["losses"], of[other]["losses"], strict=True)
                entry[f"largest_loss_difference_from_{other}"] = max(abs(a - b) / b for a, b in pairs)
        summary[mode] = entry
    return summary


def main(argv: Sequence[str] | None = None) -> int:
    """Train in every mode, print the table, write the JSON. Returns 1 if a mode crashed or timed out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated (default: all)")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--timeout-s", type=int, default=300, help="limit of one mode; 0: none")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_choices(parser, args, modes=MODES)
    settle_device(parser, args)
    args.models = ["bert-small"]
    record = new_record("transformers_trainer", args)
    title = "transformers.Trainer, ms a step" if record["timing_claim"] else NO_CLAIM
    if not record["timing_claim"]:
        print(title)
    transformers.utils.logging.set_verbosity_error()
    rows: list[Row] = []
    for row in measured_rows(args, measure):
        rows.append(row)
        told = row["error"] or row["skipped"] or f"{row['step_ms']:.3f} ms a step"
        print(f"{row['mode']}: {told.splitlines()[0]}", flush=True)
        write_json(args.json, {**record, "rows": rows, "summary": summarize(rows, args.device)})
    summary = summarize(rows, args.device)
    names = ["speedup_over_eager", "largest_loss_difference_from_eager"]
    names.append("largest_loss_difference_from_torch-compile")
    cells = [
        [
            row["mode"],
            f"{row['step_ms']:.3f}" if row["step_ms"] else DASH,
            *(_cell(summary.get(row["mode"], {}).get(name)) for name in names),
        ]
        for row in rows
    ]
    print_table(title, ["mode", "ms", "over eager", "loss: from eager", "from torch_compile"], cells)
    return int(any(row["error"] for row in rows))


def _cell(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"


if __name__ == "__main__":
    raise SystemExit(main())
