"""Small works of every kernel family, and the recorder of their graph nodes for the CPU tests.

    python -m tests.gpu.record_nodes --out tests/fixtures/graph_nodes

Each work is captured twice, with its inputs at different addresses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pygraph_train.graphs.cuda import CudaEngine, CudaGraph
from pygraph_train.graphs.indirection import discover
from pygraph_train.graphs.memory import address_range, copy_elsewhere
from pygraph_train.graphs.nodes import driver, read_nodes, to_json

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Work:
    """Something to capture.

    Attributes:
        name: of the kernel family.
        inputs: makes new inputs with random values.
        run: from the inputs to the tensors that it made; it may write to its inputs.
        host_only: whether only the host can patch it.
    """

    name: str
    inputs: Callable[[], Tensors]
    run: Callable[..., Tensors]
    host_only: bool = False


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


@torch.compile
def _pointwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * weight + bias).sum(-1)


def _attention(backend: SDPBackend) -> Callable[..., Tensors]:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        with sdpa_kernel(backend):
            return [F.scaled_dot_product_attention(q, k, v)]

    return run


PARAMETERS = 20


def _adamw_inputs() -> Tensors:
    return [
        *(random(33, 17, dtype=torch.float32) for _ in range(3 * PARAMETERS)),
        *(random(33, 17, dtype=torch.float32).square() for _ in range(PARAMETERS)),
        *(torch.full((), 3.0, device="cuda") for _ in range(PARAMETERS)),
    ]


def _adamw(*tensors: torch.Tensor) -> Tensors:
    groups = [list(tensors[i * PARAMETERS : (i + 1) * PARAMETERS]) for i in range(5)]
    parameters, gradients, averages, squares, steps = groups
    numbers: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    torch._fused_adamw_(
        parameters, gradients, averages, squares, [], steps, amsgrad=False, maximize=False, **numbers
    )
    return []


def _copies(source: torch.Tensor, filled: torch.Tensor) -> Tensors:
    d = driver()
    out = torch.empty_like(source)
    out.copy_(source)  # a memcpy node
    stream = d.CUstream(torch.cuda.current_stream().cuda_stream)
    status = d.cuMemsetD8Async(d.CUdeviceptr(filled.data_ptr()), 7, filled.nbytes, stream)[0]
    assert int(status) == 0
    return [out]


WORKS = [
    Work(
        "triton",
        lambda: [random(64, 256, dtype=torch.float32) for _ in range(2)] + [random(256, dtype=torch.float32)],
        lambda *inputs: [_pointwise(*inputs)],
    ),
    Work("linear", lambda: [random(256, 512), random(768, 512), random(768)], lambda *t: [F.linear(*t)]),
    Work("linear_rows", lambda: [random(256, 512)[:, :256], random(768, 256)], lambda x, w: [x @ w.t()]),
    Work(
        "attention_flash",
        lambda: [random(2, 4, 128, 64) for _ in range(3)],
        _attention(SDPBackend.FLASH_ATTENTION),
    ),
    Work(
        "attention_cudnn",
        lambda: [random(2, 4, 128, 64) for _ in range(3)],
        _attention(SDPBackend.CUDNN_ATTENTION),
    ),
    Work(
        "convolution",
        lambda: [random(4, 16, 16, 16), random(32, 16, 3, 3), random(32)],
        lambda x, weight, bias: [F.conv2d(x, weight, bias, padding=1)],
    ),
    Work("adamw", _adamw_inputs, _adamw),
    Work("copies", lambda: [random(64, 64), random(64, 64)], _copies, host_only=True),
]


def capture_twice(
    engine: CudaEngine, run: Callable[..., Tensors], inputs: Sequence[torch.Tensor]
) -> tuple[CudaGraph, CudaGraph, Tensors, Tensors]:
    """Two captures, what the second returned, and the second's inputs."""
    with torch.no_grad():
        with engine.warm_up():
            for _ in range(3):
                run(*map(copy_elsewhere, inputs))
        moved = [copy_elsewhere(tensor) for tensor in inputs]
        first, _ = engine.capture(lambda: run(*inputs), instantiate=False)
        second, outputs = engine.capture(lambda: run(*moved), instantiate=False)
    return first, second, outputs, moved


def record(work: Work) -> dict[str, Any]:
    """What the CPU test needs of one work."""
    engine = CudaEngine(torch.device("cuda"))
    inputs = work.inputs()
    first, second, _, moved = capture_twice(engine, work.run, inputs)
    nodes = [read_nodes(graph.raw) for graph in (first, second)]
    ranges = [[address_range(tensor) for tensor in tensors] for tensors in (inputs, moved)]
    found = discover(nodes[0], nodes[1], ranges[0], ranges[1])
    print(f"{work.name}: {len(nodes[0])} nodes\n{found}", flush=True)
    first.close()
    second.close()
    return {
        "work": work.name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "served": sorted(found.served),
        "slots": len(found.slots),
        "ranges_first": ranges[0],
        "ranges_second": ranges[1],
        "first": to_json(nodes[0]),
        "second": to_json(nodes[1]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Record the works that were asked for, one file each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON files")
    parser.add_argument("--works", default=",".join(work.name for work in WORKS))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for work in WORKS:
        if work.name in args.works.split(","):
            path = args.out / f"{work.name}.json"
            path.write_text(json.dumps(record(work), separators=(",", ":")) + "\n")
            print(f"{path.name}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
