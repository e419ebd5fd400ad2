"""What a training step costs the host after the library has given up all graphs of it, beside the plain loop.

    python -m benchmarks.fallback_cost --json fallback.json            # one CUDA GPU
    python -m benchmarks.fallback_cost --scale tiny                    # does the script work? (CPU)

The step depends on a counter in Python, which no graph can hold, and its optimizer reads numbers on the host. Windows
of both loops take turns in one process; benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_device
from benchmarks.record import DASH, print_table, write_json
from pygraph_train import GraphedStep

LOOPS = ("graphed-step", "lightning", "accelerate-step", "accelerate-loop")
SIZES = {"full": (512, 8), "tiny": (32, 3)}
SETTLE = 60
"""Steps after which every loop has given up."""

Window = Callable[[int], float]
"""Makes so many steps and returns the seconds that the host took."""


class Counting(nn.Module):
    """Layers whose result depends on how often they were called."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.layers(x * (1.0 + 1e-6 * self.calls))
        return result


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _parts(args: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    width, depth = SIZES[args.scale]
    device = torch.device(args.device)
    model = Counting(width, depth).to(device)
    # Adafactor and LBFGS are the optimizers of torch that no graph can hold on CUDA
    optimizer = torch.optim.Adafactor if device.type == "cuda" else torch.optim.SGD
    return model, optimizer(model.parameters(), lr=1e-4), torch.randn(8, width, device=device)


def _timed(step: Callable[[], Any], device: str) -> Window:
    def window(steps: int) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - started

    return window


def graphed_step(args: argparse.Namespace, *, ours: bool) -> tuple[Window, Any]:
    """A loop in plain PyTorch."""
    model, optimizer, x = _parts(args)
    if ours:
        step = GraphedStep(lambda x: _loss(model, x), model=model, optimizer=optimizer, engine=args.engine)
        return _timed(lambda: step(x), args.device), step.report

    def plain() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return _timed(plain, args.device), None


def accelerate_loop(args: argparse.Namespace, *, ours: bool, whole: bool = False) -> tuple[Window, Any]:
    """The loop of Accelerate's documentation, as it is or as `accelerator.graphed_step`."""
    import accelerate

    from pygraph_train import Accelerator, PyGraph

    cpu = args.device == "cpu"
    plugin = PyGraph(engine=args.engine) if ours else None
    accelerator: Any = (
        accelerate.Accelerator(cpu=cpu) if plugin is None else Accelerator(cpu=cpu, plugins=[plugin])
    )
    model, optimizer, x = _parts(args)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = _loss(model, x)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    made = accelerator.graphed_step(step) if whole and ours else step
    return _timed(lambda: made(x), args.device), None if plugin is None else plugin.report


def accelerate_step(args: argparse.Namespace, *, ours: bool) -> tuple[Window, Any]:
    """`accelerator.graphed_step`."""
    return accelerate_loop(args, ours=ours, whole=True)


def lightning(args: argparse.Namespace, *, ours: bool) -> tuple[Window, Any]:
    """A Trainer with one callback. Each window is a run of its own, timed after it has given up."""
    import lightning.pytorch as pl

    from pygraph_train import PyGraphCallback

    model, _, x = _parts(args)
    made = type(_parts(args)[1])

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return _loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return made(self.parameters(), lr=1e-4)

    class Clock(pl.Callback):
        started = ended = 0.0

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == SETTLE:
                self.started = time.perf_counter()

        def on_train_batch_end(self, *given: Any) -> None:
            self.ended = time.perf_counter()

    class Idle(pl.Callback):
        def on_train_batch_end(self, *given: Any) -> None:
            """Nothing: PyGraphCallback has this hook as well, for loggers."""

    latest: list[Any] = []

    def window(steps: int) -> float:
        clock, callback = Clock(), PyGraphCallback(engine=args.engine) if ours else None
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="gpu" if args.device == "cuda" else "cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Idle() if callback is None else callback, clock],
        )
        trainer.fit(Module(), torch.utils.data.DataLoader([x.cpu()] * (SETTLE + steps), batch_size=None))
        latest[:] = [] if callback is None else [callback.report()]
        return clock.ended - clock.started

    return window, (lambda: latest[-1]) if ours else None


MAKERS: dict[str, Callable[..., tuple[Window, Any]]] = {
    "graphed-step": graphed_step,
    "lightning": lightning,
    "accelerate-step": accelerate_step,
    "accelerate-loop": accelerate_loop,
}


def measure(loop: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: host microseconds of one step in both loops. A crash is part of the row, never raised."""
    row: dict[str, Any] = {"loop": loop, "error": None}
    torch._dynamo.reset()
    gc.collect()
    try:
        row.update(_measure(loop, args))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def _measure(loop: str, args: argparse.Namespace) -> dict[str, Any]:
    (plain, _), (ours, report) = (MAKERS[loop](args, ours=ours) for ours in (False, True))
    if loop != "lightning":  # whose windows settle by themselves
        plain(SETTLE), ours(SETTLE)
    pairs = []
    for index in range(args.windows + 2):
        order = (plain, ours) if index % 2 else (ours, plain)
        times = {window: window(args.steps) / args.steps * 1e6 for window in order}
        pairs.append((times[plain], times[ours]))
    pairs = pairs[2:]  # both have warm caches now
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    told = report().to_dict()
    return {
        "plain_us": before,
        "ours_us": after,
        "ratio": statistics.median(b / a for a, b in pairs),
        "ratio_of_minima": min(b for _, b in pairs) / min(a for a, _ in pairs),
        "graphs_ran": bool(told.get("steps_replayed") or told.get("optimizer_steps_replayed")),
        "report": told,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loops", default=",".join(LOOPS), help=f"of {', '.join(LOOPS)} (default: all)")
    parser.add_argument("--windows", type=int, default=40, help="windows of each loop")
    parser.add_argument("--steps", type=int, default=100, help="steps of a window")
    parser.add_argument("--scale", choices=tuple(SIZES), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, loops=LOOPS)
    args.engine = "cuda" if args.device == "cuda" else "emulated"
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed."""
    args = parse(argv)
    warnings.filterwarnings("ignore")
    rows: list[dict[str, Any]] = []
    record = new_record("fallback_cost", args) | {"rows": rows}
    title = "Host time of one step without a graph, µs" if record["timing_claim"] else NO_CLAIM
    for loop in args.loops:
        rows.append(measure(loop, args))
        write_json(args.json, record)
        if rows[-1]["error"]:
            print(f"{loop}: {rows[-1]['error'].splitlines()[0]}", flush=True)
    print_table(
        title, ["loop", "plain", "given up", "ratio", "of minima", "no graph ran"], list(map(_cells, rows))
    )
    with suppress(ImportError):  # what Accelerate keeps in its classes
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    return int(any(row["error"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["loop"], "crash", DASH, DASH, DASH, DASH]
    times = [f"{row[key]:.1f}" for key in ("plain_us", "ours_us")]
    ratios = [f"{row[key]:.3f}" for key in ("ratio", "ratio_of_minima")]
    return [row["loop"], *times, *ratios, "NO" if row["graphs_ran"] else "yes"]


if __name__ == "__main__":
    raise SystemExit(main())
