"""Graphs of AOTAutograd for an accelerator that this machine need not have.

Fake tensors carry a device that does not exist, so Dynamo, AOTAutograd and Inductor's decompositions make
the very graphs that a real device would get; only kernels cannot be compiled or run.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import backend_registration

_in_use = False


class _Module(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        return _in_use  # the rest of this process must not take it for an accelerator

    def device_count(self) -> int:
        return int(_in_use)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        # AOTAutograd turns autocast off for every device that is registered
        return [torch.bfloat16, torch.float16]


class _Hook(backend_registration._DummyPrivateUse1Hook):
    def is_available(self) -> bool:
        return _in_use


@functools.cache
def device() -> torch.device:
    """CUDA where it exists; else a device known by name only, as autograd asks for a registered one."""
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    backend_registration._setup_privateuseone_for_python_backend("pretended", _Module(), _Hook())
    return torch.device("pretended:0")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside are fake, also on `device()`."""
    global _in_use
    device()
    _in_use = True
    torch._dynamo.reset()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()):
            yield
    finally:
        _in_use = False
        torch._dynamo.reset()


def on_fake_device(module: torch.nn.Module) -> torch.nn.Module:
    """Give a module fake parameters and buffers on `device()`; call it inside `fake_tensors`."""
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device())
                    table[name] = torch.nn.Parameter(moved) if table is part._parameters else moved
    return module


def graphs_of(call: Callable[..., Any], *args: Any, **dynamo: Any) -> list[fx.GraphModule]:
    """The graphs that `inner_compile` gets for a call and, where a result requires grad, its backward."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any, **_: Any) -> Callable[[list[Any]], list[Any]]:
        graphs.append(gm)

        def run(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [_fresh(output) for output in gm.graph.output_node().args[0]]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=keep)

    with (
        torch._dynamo.config.patch(**dynamo),
        # autograd's engine knows no device that came after its first backward in this process
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        # these two would run kernels on the device
        torch._inductor.config.patch(joint_graph_constant_folding=False),
        mock.patch.object(torch._inductor.fx_passes.joint_graph, "lazy_init"),
    ):
        torch.compile(call, backend=backend, fullgraph=True)(*args)
    return graphs


def _fresh(output: Any) -> Any:
    value = output.meta["val"] if isinstance(output, fx.Node) else output
    if not isinstance(value, torch.Tensor):
        return 1 if isinstance(value, torch.SymInt) else value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def example_inputs(gm: fx.GraphModule) -> list[Any]:
    """What `inner_compile` gets beside the graph."""
    return [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]


def random_inputs(gm: fx.GraphModule, seed: int = 0) -> list[Any]:
    """Real CPU tensors for a graph's inputs; integers are small enough to index with."""
    random.seed(seed)
    generator = torch.Generator().manual_seed(seed)
    inputs: list[Any] = []
    for value in example_inputs(gm):
        if not isinstance(value, torch.Tensor):
            inputs.append(int(value))
        elif value.dtype.is_floating_point:
            drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
            inputs.append(drawn.to(value.dtype))
        else:
            inputs.append(torch.randint(0, 2, value.shape, generator=generator).to(value.dtype))
    return inputs


def run_on_cpu(gm: fx.GraphModule, inputs: list[Any]) -> list[Any]:
    """Run a graph with every device in it replaced by the CPU, one aten kernel after the other."""

    class OnCpu(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a for a in args)
            kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in kwargs.items()}
            result = super().call_function(target, args, kwargs)
            # between devices it was a copy
            return result.clone() if target is torch.ops.prims.device_put.default else result

    return list(OnCpu(gm).run(*(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs)))
