"""Whole runs on batches of changing shapes, beside eager PyTorch, `torch.compile` and `mode="reduce-overhead"`.

    python -m benchmarks.changing_shapes --json shapes.json                                    # one CUDA GPU
    python -m benchmarks.changing_shapes --cases 49 --arms eager,graphed-eager --steps 400 --timeout-s 120
    python -m benchmarks.changing_shapes --scale tiny                                          # does the script work?

Each row is a process of its own with cold caches. Its clock begins before the first step: tracing, compilation and
captures are in it. What the first process of a machine reads from the disk is not: each case begins with a short eager
run that no row is made of. benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.children import row_of_process
from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_defaults, settle_device
from benchmarks.record import DASH, print_table, write_json
from benchmarks.workloads import Batch

try:
    import fcntl
except ImportError:  # no Unix: rows run one after another
    fcntl = None  # type: ignore[assignment]

CASES = ("49", "5", "new")
ARMS = (
    *("eager", "compile", "reduce-overhead", "accelerate-eager"),
    *("backend", "accelerate", "accelerate-compiled", "graphed-eager", "graphed-compiled", "graphed"),
)
OURS = ARMS[4:]
WINDOW = 20
"""Steps between two looks at the clock, which wait for the device."""

Step = Callable[[Batch], Tensor]


def lengths_of(case: str, scale: str, steps: int) -> list[int]:
    """The length of each batch; of the case "new" the number of rows, no two alike."""
    drawn = random.Random(0)
    if case == "new":
        return drawn.sample(range(64, 64 + steps), steps)
    short, long = (80, 128) if scale == "full" else (4, 16)
    lengths = list(range(short, long + 1)) if case == "49" else [long - k * (long // 8) for k in range(5)]
    return drawn.choices(lengths, k=steps)


def model_of(case: str, scale: str) -> nn.Module:
    """BERT with 6 layers; for shapes that never return layers that take any number of rows."""
    torch.manual_seed(0)
    if case == "new":
        width, depth = (512, 16) if scale == "full" else (16, 2)
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))
    from transformers import BertConfig, BertForMaskedLM

    if scale == "full":
        return BertForMaskedLM(BertConfig(num_hidden_layers=6)).train()
    config = BertConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertForMaskedLM(config).train()


def batches_of(case: str, scale: str, steps: int) -> Iterator[Batch]:
    """Padded texts with masks; made on the CPU while training runs, as a loader would."""
    generator = torch.Generator().manual_seed(1)
    width, count, words = (512, 8, 1000) if scale == "full" else (16, 2, 64)
    for length in lengths_of(case, scale, steps):
        if case == "new":
            x = torch.randn(1, width, generator=generator).expand(length, width).contiguous()
            yield {"x": x, "y": torch.zeros(length, dtype=torch.long)}
            continue
        tokens = torch.randint(0, words, (count, length), generator=generator)
        used = torch.randint(length // 2, length + 1, (count, 1), generator=generator)
        used[0] = length
        mask = (torch.arange(length)[None] < used).long()
        batch = {"input_ids": tokens, "labels": tokens.masked_fill(mask == 0, -100)}
        if (
            scale == "full"
        ):  # without Dynamo, transformers look at masks on the host: the emulation holds no such step
            batch["attention_mask"] = mask
        yield batch


def loss_of(call: Callable[..., Any], batch: Batch) -> Tensor:
    """The loss of one batch."""
    if "x" in batch:
        return nn.functional.cross_entropy(call(batch["x"]), batch["y"])
    loss: Tensor = call(**batch).loss
    return loss


def _loss(call: Callable[..., Any], batch: Batch, device: str) -> Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return loss_of(call, batch)


def step_of(arm: str, model: nn.Module, device: str) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """One training step, and what is to be told of it at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine: Any = "cuda" if device == "cuda" else "emulated"
    if arm.startswith("graphed"):
        from pygraph_train import GraphedStep

        options: dict[str, Any] = {
            "graphed-eager": {"compile": False},
            "graphed-compiled": {"compile": True},
        }.get(arm, {})
        graphed = GraphedStep(
            lambda batch: _loss(model, batch, device),
            model=model,
            optimizer=optimizer,
            engine=engine,
            **options,
        )
        return graphed, lambda: graphed.report().to_dict()
    if arm.startswith("accelerate"):
        return _in_accelerate(arm, model, optimizer, device)
    call: Any = model
    if arm == "backend":
        import pygraph_train  # noqa: F401

        options = {"engine": engine} if engine == "emulated" else {}
        call = torch.compile(model, backend="pygraph", options=options)
    elif arm != "eager":
        call = torch.compile(model, mode="reduce-overhead" if arm == "reduce-overhead" else None)

    def step(batch: Batch) -> Tensor:
        if arm == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss = _loss(call, batch, device)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, dict


def _in_accelerate(
    arm: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: str
) -> tuple[Step, Callable[[], dict[str, Any]]]:
    """Accelerate's stock loop, with the plugin but for `accelerate-eager`."""
    from pygraph_train import Accelerator, PyGraph

    compile: Any = True if arm == "accelerate-compiled" else "auto"
    plain = arm == "accelerate-eager"
    plugins = [] if plain else [PyGraph(engine="cuda" if device == "cuda" else "emulated", compile=compile)]
    accelerator: Any = Accelerator(cpu=device == "cpu", plugins=plugins)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Batch) -> Tensor:
        loss = _loss(prepared, batch, device)
        accelerator.backward(loss)
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        return loss.detach()

    return step, dict if plain else (lambda: plugins[0].report().to_dict())


@contextlib.contextmanager
def _turn(lock: Path | None, *, timed: bool) -> Iterator[None]:
    """Steps of rows side by side: of those that are timed in the end, one row's run at a time.

    Steps that are not timed wait for nobody, and nobody for them: compilations would starve the others.
    """
    if lock is None or fcntl is None or not timed:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_row(case: str, arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process: the whole run, window by window."""
    device, steps = args.device, args.steps
    model = model_of(case, args.scale).to(device)
    step, told = step_of(arm, model, device)
    cuda = device == "cuda"
    windows: list[float] = []
    imported: list[int] = []
    losses: list[float] = []
    first: list[float] = []
    batches = batches_of(case, args.scale, steps)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    total, made = 0.0, 0
    while made < steps:
        count = min(WINDOW, steps - made)
        with _turn(args.lock, timed=made >= steps * 3 // 4):
            known, started = len(sys.modules), time.perf_counter()
            for _ in range(count):
                began = time.perf_counter()
                batch = {name: value.to(device, non_blocking=True) for name, value in next(batches).items()}
                loss = step(batch)
                if len(losses) < 20:
                    losses.append(float(loss))
                    first.append((time.perf_counter() - began) * 1e3)
            if cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        total += seconds
        windows.append(seconds / count * 1e3)
        imported.append(len(sys.modules) - known)
        made += count
    last = windows[len(windows) * 3 // 4 :]
    report = told()
    return {
        "whole_s": total,
        "steady_ms": statistics.median(last),
        "windows_ms": windows,
        "windows_imported": imported,
        "first_steps_ms": first,
        "reserved_mib": torch.cuda.max_memory_reserved() >> 20 if cuda else None,
        "allocated_mib": torch.cuda.max_memory_allocated() >> 20 if cuda else None,
        "first_losses": losses,
        "last_loss": float(loss),
        "plan": report.get("plan"),
        "replays": report.get("steps_replayed"),
        "captures": len(report["captures"]) if report else None,
        "fallbacks": [f["reason"] for f in report.get("fallbacks", ())],
    }


def measure(case: str, arm: str, args: argparse.Namespace, steps: int | None = None) -> dict[str, Any]:
    """One row, in a process of its own with cold caches. A crash or a time-out is part of the row."""
    steps = args.steps if steps is None else steps
    options = ["--scale", args.scale, "--device", args.device, "--steps", str(steps)]
    options += ["--lock", str(args.lock)] if args.lock is not None else []
    found = row_of_process("benchmarks.changing_shapes", (case, arm), options, args.timeout_s)
    return {"case": case, "arm": arm, "steps": steps, **found}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--steps", type=int, help="of each row (default: 400; on a CPU 60)")
    parser.add_argument("--timeout-s", type=int, default=580, help="for each row; 0: none")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side: then `whole_s` says little")
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, cases=CASES, arms=ARMS)
    settle_defaults(args, steps=(400, 60))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    if args.row is not None:
        case, arm, out = args.row
        Path(out).write_text(json.dumps(run_row(case, arm, args)))
        return 0
    rows: list[dict[str, Any]] = []
    record = new_record("changing_shapes", args) | {"side_by_side": args.jobs, "rows": rows}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        args.lock = None
        before = [measure(case, "eager", args, steps=WINDOW) for case in args.cases]
        record["before"] = [{key: row.get(key) for key in ("case", "whole_s", "error")} for row in before]
        args.lock = Path(folder) / "lock" if args.jobs > 1 else None
        made = pool.map(
            lambda pair: measure(*pair, args), [(case, arm) for case in args.cases for arm in args.arms]
        )
        for row in made:
            rows.append(row)
            write_json(args.json, record)
            print(" ".join(_cells(row)), row["error"] or "", flush=True)
    title = "Whole runs on batches of changing shapes" if record["timing_claim"] else NO_CLAIM
    columns = ["case", "arm", "whole s", "steady ms", "reserved MiB", "plan", "replays", "captures"]
    print_table(title, columns, list(map(_cells, rows)))
    return int(any(row["error"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["case"], row["arm"], "crash", *[DASH] * 5]
    told = [
        DASH if row[key] is None else str(row[key]) for key in ("reserved_mib", "plan", "replays", "captures")
    ]
    return [row["case"], row["arm"], f"{row['whole_s']:.1f}", f"{row['steady_ms']:.2f}", *told]


if __name__ == "__main__":
    raise SystemExit(main())
