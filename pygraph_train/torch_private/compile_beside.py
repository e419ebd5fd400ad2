"""Inductor's work in another process: what it is given, and what that process does with it.

Inductor keeps what it has compiled on disk, under a key that has all that its kernels depend on. So the other process
only has to fill these caches: where its key is another one, the training process compiles as if nothing had been made.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from pygraph_train.torch_private.dispatch import has_symbols

__all__ = [
    "Order",
    "cache_counts",
    "fill_caches",
    "has_device_context",
    "order_under_way",
    "why_not_beside",
]

_UNREADABLE = frozenset({"source_fn_stack", "nn_module_stack", "fwd_source_fn_stack", "fwd_nn_module_stack"})
"""Notes of nodes that name classes of the user. Kernels do not depend on them."""

_MEASURES = (
    "max_autotune",
    "max_autotune_gemm",
    "benchmark_kernel",
    "benchmark_fusion",
    "benchmark_combo_kernel",
    "cpp_wrapper",
    "freezing",
    "profile_bandwidth",
    "runtime_estimations_mms_benchmark",
    "partitioned_scatter_enabled",  # asks how much memory the device has, which makes a context
)
"""Settings of Inductor with which it uses the device while it compiles, or keeps nothing on disk."""

_PASSES = (
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
    "custom_partitioner_fn",
    "cudagraph_policy",
)
"""Settings of Inductor that are functions of this process."""


class _Thread(threading.local):
    """The orders that this thread shows the work for, the latest one last."""

    def __init__(self) -> None:
        self.under_way: list[Order] = []


_of_thread = _Thread()


def order_under_way() -> Order | None:
    """The order that takes graphs instead of their compilation, None where Inductor compiles."""
    under_way = _of_thread.under_way
    return under_way[-1] if under_way else None


class Order:
    """What Inductor would compile: graphs of AOTAutograd with all that their kernels depend on, as bytes.

    Attributes:
        graphs: forward first, then backward.
    """

    def __init__(self) -> None:
        self.graphs: list[bytes] = []
        self._settings: dict[str, Any] = {}

    @contextmanager
    def taking(self) -> Iterator[None]:
        """What would be compiled in this block becomes part of the order. (2.11, 2.13)"""
        self.graphs.clear()
        self._settings = _settings()
        _of_thread.under_way.append(self)
        try:
            with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                yield
        finally:
            _of_thread.under_way.pop()

    def add(
        self,
        gm: torch.fx.GraphModule,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        tag: str,
        *,
        together: bool,
    ) -> Callable[[list[Any]], Any]:
        """Take a graph, and return what stands for its kernels. Nobody may call that.

        Args:
            gm, inputs, kwargs: what `compile_fx_inner` would be called with.
            tag: part of the key in Inductor's cache.
            together: whether small kernels are put together.
        Raises:
            ValueError: another process cannot compile it.
        """
        self.graphs.append(_as_bytes(gm, inputs, kwargs, tag, together=together))

        def compiled_elsewhere(inputs: list[Any]) -> Any:
            raise AssertionError("this graph was given to another process, which compiles it")

        compiled_elsewhere._boxed_call = True  # type: ignore[attr-defined]
        return compiled_elsewhere

    def dump(self) -> bytes:
        """All of it, for `fill_caches`."""
        return pickle.dumps({"graphs": self.graphs, "settings": self._settings})


def why_not_beside() -> str | None:
    """Why another process would not make the kernels that this one would make, None where it would. (2.11, 2.13)"""
    import torch._inductor.config as config
    from torch._inductor.codegen.common import custom_backend_passes
    from torch._inductor.lowering import lowerings

    bundled = getattr(torch._functorch.config, "bundled_autograd_cache", False)
    if config.force_disable_caches or not config.fx_graph_cache or bundled:
        return "Inductor's cache is off"
    if any(found is not None for found in custom_backend_passes.values()):
        return "a pass of Inductor is a function of this process"
    for name in _MEASURES:
        if getattr(config, name, False):
            return f"Inductor's setting {name} is on"
    for name in _PASSES:
        if getattr(config, name, None) is not None:
            return f"Inductor's setting {name} is a function of this process"
    for lowering in lowerings.values():
        module = str(getattr(lowering, "__module__", "torch"))
        if module.partition(".")[0] not in ("torch", "functools", "_operator"):  # torch's own, too
            return "Inductor has rules for operators that do not come from torch"
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return "the training runs on another device than the first one"
    return None


def _switches() -> dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]:
    """Switches of a process that choose kernels: how each is read, and how it is set."""
    matmul, cudnn, fills = torch.backends.cuda.matmul, torch.backends.cudnn, torch.utils.deterministic

    def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)

    return {
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "fills": attribute(fills, "fill_uninitialized_memory"),
        "precision": (_precision, torch.set_float32_matmul_precision),
        "products": attribute(matmul, "fp32_precision"),
        "fp16": attribute(matmul, "allow_fp16_reduced_precision_reduction"),
        "bf16": attribute(matmul, "allow_bf16_reduced_precision_reduction"),
        "cudnn": attribute(cudnn, "enabled"),
        "benchmark": attribute(cudnn, "benchmark"),
        "cudnn_deterministic": attribute(cudnn, "deterministic"),
    }


def _precision() -> str | None:
    """None where the newer switch was set: `products` has it, and torch refuses to say it in the older words."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _switches().items()}


def _set(settings: Mapping[str, Any]) -> None:
    for name, (read, write) in _switches().items():
        if (
            settings[name] is not None and read() != settings[name]
        ):  # some are set to something else by being set to what they are
            write(settings[name])


def _as_bytes(
    gm: torch.fx.GraphModule, inputs: Sequence[Any], kwargs: Mapping[str, Any], tag: str, *, together: bool
) -> bytes:
    import torch._inductor.config as config
    from torch.fx._graph_pickler import GraphPickler, Options

    context = torch._guards.TracingContext.get()
    metadata, fake_mode = context.fw_metadata, context.fake_mode
    if metadata is None or fake_mode is None:
        raise ValueError("AOTAutograd does not say what it knows of the graph")
    values = [value for node in gm.graph.nodes for value in _values(node.meta.get("val"))]
    if has_symbols(values) or any(isinstance(value, torch.SymInt) for value in values):
        raise ValueError("its sizes change")
    if any(value.device.type != "cpu" or value.dim() > 0 for value in _constants(gm)):
        raise ValueError("it holds tensors")  # Inductor copies them to the device
    saved = None
    if kwargs.get("is_backward"):
        places = metadata.tensors_saved_for_backwards_slice
        saved = (places.start, places.stop, metadata.num_symints_saved_for_bw)
    described = [
        fake_mode.from_tensor(x, static_shapes=True)
        if isinstance(x, torch.Tensor) and not isinstance(x, torch._subclasses.FakeTensor)
        else x
        for x in inputs
    ]
    given = {
        "gm": gm,
        "inputs": described,
        "kwargs": {name: value for name, value in kwargs.items() if name != "compile_region_name"},
        "saved": saved,
        "donated": list(metadata.bw_donated_idxs or ()),
        "together": together,
        "config": config.save_config_portable(ignore_private_configs=False),
        "tag": tag,
    }
    options = Options(ops_filter=None, node_metadata_key_filter=lambda key: key not in _UNREADABLE)
    return GraphPickler.dumps(given, options)


def _values(found: Any) -> list[Any]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _constants(gm: torch.fx.GraphModule) -> Iterator[torch.Tensor]:
    """Real tensors that a graph holds."""
    for module in gm.modules():
        yield from module.parameters(recurse=False)
        yield from module.buffers(recurse=False)
        yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))


class _Metadata:
    """Of what AOTAutograd knows, what Inductor asks for."""

    def __init__(self, donated: list[int]) -> None:
        self.bw_donated_idxs = donated


def fill_caches(order: bytes) -> None:
    """Compile what an `Order` has, and leave it on disk. Loads no kernel. (2.11, 2.13)

    Raises:
        RuntimeError: Inductor does not keep a graph on disk, so that all was in vain.
        Exception: whatever Inductor raises.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    content = pickle.loads(order)
    _set(content["settings"])
    strides: Sequence[Any] = ()
    with _without_device(), torch.no_grad():
        for graph in content["graphs"]:
            fake_mode = FakeTensorMode(shape_env=ShapeEnv())
            given: Any = GraphPickler.loads(graph, fake_mode)
            context = TracingContext(fake_mode)
            context.fw_metadata = _Metadata(given["donated"])  # type: ignore[assignment]
            with _configured(given), tracing(context), TracingContext.report_output_strides() as found:
                inputs = given["inputs"]
                if given["saved"] is not None:
                    inputs = _as_saved(inputs, strides, given["saved"], fake_mode)
                kept = sum(cache_counts())
                compile_fx_inner(given["gm"], inputs, **given["kwargs"])
                if _has_calls(given["gm"]) and sum(cache_counts()) == kept:
                    raise RuntimeError("Inductor does not keep these kernels on disk")
                strides = found or ()


def cache_counts() -> tuple[int, int]:
    """How many graphs Inductor has found in its cache in this process, and how many it has put there. (2.11, 2.13)"""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def _has_calls(gm: torch.fx.GraphModule) -> bool:
    from torch._dynamo.utils import count_calls

    return bool(count_calls(gm.graph))


def has_device_context() -> bool:
    """Whether this process has a context on a CUDA device, which takes some hundred MiB there. (2.11, 2.13)"""
    if not torch.cuda.is_initialized():
        return False
    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return any(has_context(index) for index in range(torch.cuda.device_count()))


@contextmanager
def _configured(given: Mapping[str, Any]) -> Iterator[None]:
    """Inductor's settings as they were in the training process."""
    import torch._inductor.config as config

    from pygraph_train.torch_private.inductor import small_kernels_grouped

    with ExitStack() as stack:
        stack.enter_context(config.patch(given["config"]))
        keys: Any = torch.compiler.config
        stack.enter_context(keys.patch(cache_key_tag=given["tag"]))
        if given["together"]:
            stack.enter_context(small_kernels_grouped())
        yield


def _as_saved(
    inputs: Sequence[Any], strides: Sequence[Any], saved: tuple[int, int, int], fake_mode: Any
) -> list[Any]:
    """Inputs of a backward with the strides that the kernels of its forward give them, as AOTAutograd has them."""
    start, stop, before = saved
    result = list(inputs)
    for place, stride in enumerate(strides[start:stop], before):
        value = result[place]
        if stride is None or not isinstance(value, torch.Tensor):
            continue
        stride = tuple(map(int, stride))
        if tuple(value.stride()) != stride:
            with fake_mode:
                result[place] = value.as_strided(value.size(), stride)
    return result


@contextmanager
def _without_device() -> Iterator[None]:
    """Inductor loads no kernel, so that it needs no context of the device: what it compiles goes to disk.

    Loading a kernel (`_make_launchers`) makes a context, and so does the first tensor on a device, also a part of one
    that is only described (a seed of a dropout, CUDA 13). Reading properties of a device makes none.
    """
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.inductor_prims
    import torch._subclasses.fake_tensor as fake_tensor
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    autotuner: Any = CachingAutotuner

    def no_context(argument: Any) -> Any:
        return nullcontext()

    def seed(seeds: torch.Tensor, index: int) -> torch.Tensor:
        return torch.empty([], dtype=seeds.dtype, device=seeds.device)

    lookup: Any = torch.ops.prims.inductor_lookup_seed.default
    with ExitStack() as stack:
        for owner, name, value in (
            (autotuner, "_make_launchers", lambda self: None),
            (autotuner, "_dynamic_scale_rblock", lambda self: None),  # reads registers of loaded kernels
            (compile_fx, "get_cuda_device_context", no_context),
            (fake_tensor, "init_gpu_context", no_context),
            (lookup, "prim_meta_impl", seed),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
