"""Loops that users reported to fail under mode="reduce-overhead": what they do there, and with pygraph.

    python -m benchmarks.known_issues --json known_issues.json      # one CUDA GPU
    python -m benchmarks.known_issues --device cpu                  # pygraph only, emulated

Each loop runs in eager mode and compiled; all of its results must agree to bf16's accuracy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.record import environment, print_table, write_json

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
Loop = Callable[[Compile, torch.device], list[Tensor]]

TOLERANCE = 2e-2
SIZES = 24  # input sizes that never return


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)


def _batches(device: torch.device, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(32, 64, generator=generator).to(device),
            torch.randint(0, 10, (32,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


def accumulation(compile: Compile, device: torch.device) -> list[Tensor]:
    """Four micro-batches a step; losses are read after the step."""
    model = _model(device)
    call, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for number, (x, y) in enumerate(_batches(device, 24)):
        loss = F.cross_entropy(call(x), y) / 4
        loss.backward()
        losses.append(loss.detach())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *model.parameters()]


def converted_outputs(compile: Compile, device: torch.device) -> list[Tensor]:
    """Outputs become float32 outside of the compiled model, and are gathered over steps."""
    model = _model(device)
    call, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []
    for x, y in _batches(device, 12):
        with torch.autocast(device.type, torch.bfloat16):
            raw = call(x)
        kept.append(raw.detach())
        F.cross_entropy(raw.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [out.float() for out in kept]


def chained(compile: Compile, device: torch.device) -> list[Tensor]:
    """One compiled function reads what another returned, after it ran twice."""
    first, second = compile(torch.cos), compile(torch.sin)
    results = []
    x = torch.zeros(5, device=device)
    for number in range(8):
        for repeat in range(2):
            x = first(torch.full((5,), float(number + repeat), device=device))
        results.append(second(x))
    return results


def validation(compile: Compile, device: torch.device) -> list[Tensor]:
    """Training, validation, training again; validation keeps its outputs."""
    model = _model(device)
    call, optimizer = compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Tensor] = []
    for _ in range(3):
        model.train()
        for x, y in _batches(device, 6):
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        model.eval()
        with torch.no_grad():
            results += [call(x) for x, _ in _batches(device, 4)]
    return results


def many_sizes(compile: Compile, device: torch.device) -> list[Tensor]:
    """Every size comes once."""
    model = _model(device).eval()
    call = compile(model)
    with torch.no_grad():
        return [call(torch.ones(size, 64, device=device)).clone() for size in range(2, 2 + SIZES)]


LOOPS: dict[str, Loop] = {
    "pytorch #169545": accumulation,
    "accelerate #2645": converted_outputs,
    "pytorch #122192": chained,
    "pytorch #128218": validation,
    "pytorch #196385": many_sizes,
}


def _compilers(device: torch.device) -> dict[str, dict[str, Any]]:
    ours: dict[str, Any] = {"backend": "pygraph"}
    if device.type == "cpu":
        return {"pygraph": {**ours, "options": {"engine": "emulated"}}}
    return {"reduce-overhead": {"mode": "reduce-overhead"}, "pygraph": ours}


def run(loop: Loop, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What a loop did under `torch.compile(**options)`: an outcome, and how many graphs it recorded."""
    from pygraph_train import backend

    torch.compiler.reset()
    backend.reset()
    dynamic = True if loop is many_sizes else None
    expected = loop(lambda fn: fn, device)
    try:
        found = loop(lambda fn: torch.compile(fn, dynamic=dynamic, **options), device)
        gap = max(
            float((a.detach().float() - b.detach().float()).abs().max())
            for a, b in zip(expected, found, strict=True)
        )
    except Exception as error:
        return {"outcome": f"{type(error).__name__}: {str(error).splitlines()[0]}", "graphs": None}
    if options.get("backend") == "pygraph":
        graphs = sum(region.captures for region in backend.report().regions)
    else:
        graphs = _recordings(device)
    outcome = "as in eager mode" if gap <= TOLERANCE else f"results differ by {gap:.3g}"
    return {"outcome": outcome, "graphs": graphs, "largest_difference": gap}


def _recordings(device: torch.device) -> int:
    """Graphs that torch has recorded since the last reset."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(device.index or 0, create_if_none_exists=False)
    return 0 if manager is None else next(manager.graph_counter)


def main(argv: Sequence[str] | None = None) -> int:
    """Run every loop, print the table, write the JSON. Returns 1 if pygraph fails in one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there")
    args = parser.parse_args(argv)
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    rows = [
        {"issue": issue, "loop": (loop.__doc__ or "").strip(), "mode": mode, **run(loop, options, device)}
        for issue, loop in LOOPS.items()
        for mode, options in _compilers(device).items()
    ]
    columns = ["issue", "mode", "outcome", "graphs"]
    cells = [[str(row[name])[:90] for name in columns] for row in rows]
    print_table("Loops that were reported to fail", columns, cells)
    write_json(
        args.json, {"benchmark": "known_issues", "device": kind, "environment": environment(), "rows": rows}
    )
    return int(any(row["mode"] == "pygraph" and row["outcome"] != "as in eager mode" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
