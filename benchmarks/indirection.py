"""What it costs to point a replayed graph at other inputs: patched by the device, by the host, or copied.

    python -m benchmarks.indirection --json indirection.json   # one CUDA GPU
    python -m benchmarks.indirection --scale tiny               # does the script work? (CPU, emulated)

The work is the compiled forward of a stack of transformer blocks; every replay moves all of its inputs,
activations and weights alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from benchmarks.command import NO_CLAIM, new_record, settle_choices, settle_device
from benchmarks.record import DASH, print_table, write_json
from pygraph_train.graphs import Engine, make_engine
from pygraph_train.graphs.memory import copy_elsewhere

WAYS = ("none", "device", "host", "copy")
Tensors = list[torch.Tensor]


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, time, width)."""
        batch, steps, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, steps, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, steps, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


def build(args: argparse.Namespace) -> tuple[Callable[..., torch.Tensor], list[Tensors]]:
    """The work and two sets of inputs for it: activations first, then all weights."""
    width, heads, layers, shape = (
        (512, 8, args.layers, (4, 128)) if args.scale == "full" else (16, 2, 2, (1, 4))
    )
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        model = nn.Sequential(*[Block(width, heads) for _ in range(layers)]).to(dtype)
        x = torch.randn(*shape, width, dtype=dtype)
    names = [name for name, _ in model.named_parameters()]

    def work(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return functional_call(model, {name: weights[i] for i, name in enumerate(names)}, (x,))

    inputs = [x, *(parameter.detach() for parameter in model.parameters())]
    return (torch.compile(work) if args.scale == "full" else work), [
        inputs,
        [torch.randn_like(tensor) * 0.02 for tensor in inputs],
    ]


def measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: a way to serve changed inputs. A crash is part of the row, never raised."""
    row: dict[str, Any] = {"way": way, "error": None}
    torch._dynamo.reset()
    try:
        torch.manual_seed(0)
        with torch.no_grad():
            row.update(_measure(way, args))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:2000]
    return row


def _measure(way: str, args: argparse.Namespace) -> dict[str, Any]:
    engine = make_engine("cuda" if args.device == "cuda" else "emulated", torch.device(args.device))
    assert engine is not None
    work, sets = build(args)
    expected = []
    with engine.warm_up():
        for _ in range(3):
            expected = [work(*inputs).clone() for inputs in sets]
    static = [copy_elsewhere(tensor) for tensor in sets[0]]
    row: dict[str, Any] = {"inputs": len(static), "input_bytes": sum(tensor.nbytes for tensor in static)}
    if way in ("none", "copy"):
        graph, out = engine.capture(lambda: work(*static))
        row |= {"graph_nodes": graph.nodes, "bytes_moved": row["input_bytes"] if way == "copy" else 0}

        def turn(index: int) -> None:
            if way == "copy":
                torch._foreach_copy_(static, sets[index])
            graph.replay()

        row["wrong"] = _wrong(turn, out, expected if way == "copy" else expected[:1])
        row |= _timed(turn, engine, args)
        graph.close()
        engine.close()
        return row

    first, _ = engine.capture(lambda: work(*sets[0]), instantiate=False)
    second, out = engine.capture(lambda: work(*static), instantiate=False)
    start = time.perf_counter()
    moving: Any = engine.indirect(first, second, sets[0], static, prefer=way)
    row["prepared_s"] = time.perf_counter() - start
    changes = [{i: tensors[i] for i in sorted(moving.served)} for tensors in sets]
    slots = moving.discovery.slots
    row |= {
        "graph_nodes": moving.nodes,
        "path": moving.path,
        "note": moving.note,
        "served": len(moving.served),
        "unserved": {str(index): reason for index, reason in moving.unserved.items()},
        "pointers": len(slots),
        "patched_nodes": len({slot.node for slot in slots}),
        "bytes_moved": 8 * len(moving.served),
    }

    def patch_and_replay(index: int) -> None:
        moving.retarget(changes[index])
        moving.replay()

    row["wrong"] = _wrong(patch_and_replay, out, expected) if not moving.unserved else None
    row |= _timed(patch_and_replay, engine, args)
    alone = _timed(lambda index: moving.replay(), engine, args)
    row["replay_of_this_graph_us"] = alone["device_us"]
    patch_only = _timed(lambda index: moving.retarget(changes[index]), engine, args)
    row["patch_host_us"] = patch_only["host_us"]
    row["patch_host_us_per_node"] = patch_only["host_us"] / row["patched_nodes"]
    moving.check()
    moving.close()
    engine.close()
    return row


def _wrong(turn: Callable[[int], None], out: torch.Tensor, expected: Sequence[torch.Tensor]) -> int:
    wrong = 0
    for i in range(50):
        turn(i % len(expected))
        wrong += not torch.equal(out, expected[i % len(expected)])
    return wrong


def _timed(turn: Callable[[int], None], engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds of many turns each: per turn, until the device is done and until the host is."""
    device, host = [], []
    for _ in range(args.rounds + 1):  # the first warms up
        engine.synchronize()
        start = time.perf_counter()
        for i in range(args.turns):
            turn(i % 2)
        host.append((time.perf_counter() - start) / args.turns * 1e6)
        engine.synchronize()
        device.append((time.perf_counter() - start) / args.turns * 1e6)
    return {"device_us": statistics.median(device[1:]), "host_us": statistics.median(host[1:])}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)")
    parser.add_argument("--layers", type=int, default=24, help="transformer blocks")
    parser.add_argument("--turns", type=int, default=200, help="replays a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scale", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=Path, help="write rows and environment there, after each row")
    args = parser.parse_args(argv)
    settle_device(parser, args)
    settle_choices(parser, args, ways=WAYS)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any row crashed or computed something wrong."""
    args = parse(argv)
    rows: list[dict[str, Any]] = []
    record = new_record("indirection", args) | {"rows": rows}
    title = "Moving every input of a replayed graph, µs a replay" if record["timing_claim"] else NO_CLAIM
    for way in args.ways:
        rows.append(measure(way, args))
        alone = rows[0].get("device_us") if rows[0]["way"] == "none" else None
        if alone is not None and rows[-1].get("device_us") is not None:
            rows[-1]["over_replay_us"] = rows[-1]["device_us"] - alone
        write_json(args.json, record)
        if rows[-1]["error"]:
            print(f"{way}: {rows[-1]['error'].splitlines()[0]}", flush=True)
        for index, reason in rows[-1].get("unserved", {}).items():
            print(f"{way}: input {index} is not served: {reason}", flush=True)
    columns = ["inputs", "replay", "over replay", "host", "patch a node", "pointers", "bytes moved", "wrong"]
    print_table(title, columns, [_cells(row) for row in rows])
    return int(any(row["error"] or row["wrong"] for row in rows))


def _cells(row: dict[str, Any]) -> list[str]:
    if row["error"]:
        return [row["way"], "crash", *[DASH] * 6]
    per_node = row.get("patch_host_us_per_node")
    return [
        {"none": "stay", "copy": "copied"}.get(row["way"], f"by the {row.get('path')}"),
        f"{row['device_us']:.1f}",
        f"{row['over_replay_us']:.1f}" if "over_replay_us" in row else DASH,
        f"{row['host_us']:.1f}",
        f"{per_node:.2f}" if per_node is not None else DASH,
        f"{row['pointers']} in {row['patched_nodes']}" if "pointers" in row else DASH,
        str(row["bytes_moved"]),
        DASH if row["wrong"] is None else str(row["wrong"]),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
