"""Inductor: compilation by it, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pygraph_train.patches import standing_in
from pygraph_train.torch_private import switches
from pygraph_train.torch_private.aot import BuildRegion, _note_what_is_donated, _traced
from pygraph_train.torch_private.changes import SharedChange

__all__ = [
    "compile_with_inductor",
    "inductor_settings",
    "kernels_for_all_sizes",
    "products_take_neighbours_in",
    "small_ends",
    "small_ends_together",
    "small_kernels_grouped",
]


def inductor_settings() -> list[str]:
    """Names of Inductor's settings, as its `options` have them. (2.11, 2.13)"""
    import torch._inductor.config as config

    return list(config.get_config_copy())


def products_take_neighbours_in() -> bool:
    """Whether Inductor may write matrix products itself, and element-wise neighbours into them. (2.11, 2.13)"""
    import torch._inductor.config as config

    return bool(config.max_autotune or config.max_autotune_gemm)


_SMALL = 1 << 20  # bytes that a kernel reads and writes: it is over before the next one can start


_TOGETHER = 16  # kernels made into one


# The caches of Inductor and AOTAutograd know a compilation by its graph and these settings; what else is done
# to the graph here they don't see. The number is nobody's default, so that nobody else's entries are taken.
_TOGETHER_KEY: dict[str, Any] = {"combo_kernel_max_num_args": 241}


_ONE_WAY = ("OUTER", "OUTER_TINY")  # names of `ReductionHint`


def small_ends_together() -> AbstractContextManager[None]:
    """Inductor makes one kernel of small ones that only write results of the graph. (2.11, 2.13)

    It has that for whatever can run side by side ("combo kernels"), which makes large kernels slower. Where
    that was asked for, it stays as it is.
    """
    old = torch.__version__ < "2.13"  # compares versions, not text: all threads have the same settings there
    return _shared_small_ends() if old else _small_ends_together()


@contextmanager
def _small_ends_together() -> Iterator[None]:
    import torch._inductor.config as config

    if config.combo_kernels:
        yield
        return
    with small_kernels_grouped(), config.patch(combo_kernels=True, **_TOGETHER_KEY):
        yield


_shared_small_ends = SharedChange(_small_ends_together)


def small_kernels_grouped() -> AbstractContextManager[None]:
    """Where Inductor puts kernels together, these are the groups of `small_ends`. (2.11, 2.13)"""
    return _grouped()


@contextmanager
def _grouping() -> Iterator[None]:
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Together

    before = Together.__dict__["group_algorithm_for_combo_kernels"]
    Together.set_group_algorithm_for_combo_kernels(small_ends)
    try:
        yield
    finally:
        Together.group_algorithm_for_combo_kernels = before


_grouped = SharedChange(_grouping)


def small_ends(scheduler: Any, device_type: str = "cuda") -> list[list[Any]]:
    """Groups of small kernels whose results no other kernel reads: nothing depends on when they run. (2.11, 2.13)

    Among sums only those that Inductor knows one way to compute, the last steps of large ones: where it tries
    several ways, it might choose another one for the group, and the sum would be rounded in another way.

    What a kernel reads waits for the last one of the group. So there are none of sizes that change: Inductor knows
    those of one batch, and what is small in that one keeps memory from the others where a later batch is longer.
    """
    from torch._inductor.scheduler import FusedMixOrderReductions

    special = set()  # what reads their results is written into them
    for node in scheduler.nodes:
        if isinstance(node, FusedMixOrderReductions):
            special |= set(node.get_buffer_names())
    alike: dict[Any, list[Any]] = {}
    for node in scheduler.nodes:
        device = node.get_device()
        if device is not None and device.type == device_type and _is_small_end(node, special):
            alike.setdefault((device, str(node.group)), []).append(node)
    return [nodes[i : i + _TOGETHER] for nodes in alike.values() for i in range(0, len(nodes), _TOGETHER)]


def _is_small_end(node: Any, special: set[str]) -> bool:
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.scheduler import FusedSchedulerNode, OutputNode, SchedulerNode

    if type(node) not in (SchedulerNode, FusedSchedulerNode) or special & set(node.used_buffer_names()):
        return False
    if any(map(_size_changes, node.used_buffer_names())):
        return False
    own = set(node.get_nodes())
    sums = [step for step in own if step.is_reduction()]
    if any(SIMDKernelFeatures.reduction_hint(step).name not in _ONE_WAY for step in sums):
        return False
    return node.get_read_write_buffers_sizes() <= _SMALL and all(
        not made.get_aliases()
        and not made.get_mutations()
        and all(isinstance(user.node, OutputNode) or user.node in own for user in made.users)
        for made in node.get_outputs()
    )


def _size_changes(name: str) -> bool:
    from torch._inductor.virtualized import V

    return bool(getattr(V.graph.get_numel(name), "free_symbols", ()))


def kernels_for_all_sizes() -> AbstractContextManager[None]:
    """Sizes that change decide nothing that Inductor could do in another way. (2.11, 2.13)

    Otherwise its code is for some of the sizes only. It asks whether it pays to pad a matrix product (2.11), where the
    sizes of this batch are as good an answer, and whether sizes are multiples of 8, as the kernels of attention want
    masks: it pads those that are not known to be, and padding what is aligned changes nothing.

    Several threads may compile at a time, a backward in one of autograd's.
    """
    return _for_all_sizes()


def _answers_for_all_sizes() -> AbstractContextManager[None]:
    import torch._inductor.fx_passes.pad_mm as pad_mm
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.utils._sympy.functions import Mod

    bound, asked = pad_mm.is_mm_compute_bound, SizeVarAllocator.guard_or_false

    def is_mm_compute_bound(*sizes: Any) -> bool:
        return bool(bound(*map(_size_of_this_batch, sizes)))

    def guard_or_false(self: Any, question: Any) -> bool:
        if getattr(question, "has", lambda kind: False)(Mod):
            return bool(self.statically_known_true(question))
        return bool(asked(self, question))

    pays = (pad_mm, "is_mm_compute_bound", is_mm_compute_bound)
    return standing_in((pays, (SizeVarAllocator, "guard_or_false", guard_or_false)))


_for_all_sizes = SharedChange(_answers_for_all_sizes)


def _size_of_this_batch(size: Any) -> Any:
    known = isinstance(size, torch.SymInt) and size.node.has_hint()
    return size.node.hint if known else size


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    build: BuildRegion | None,
    settings: Mapping[str, Any],
    *,
    cached: bool = False,
) -> Callable[..., Any]:
    """`compile_fx` under `settings`, with `build(compile_kernels, gm, inputs, traced)` as its inner compiler.

    AOTAutograd's own cache hands back callables that never went through `build`. It is off, unless `build`
    only rewrites graphs (`cached`): then it is not shared with those who do not. Inductor's cache of
    compiled graphs, where the time goes, is on. (2.11, 2.13)
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if build is None:
        return compile_fx(gm, list(example_inputs), config_patches=dict(settings))  # type: ignore[arg-type,return-value]

    keys: Any = torch.compiler.config
    users_tag = keys.cache_key_tag

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        static = frozenset(kwargs.get("static_input_idxs") or ())
        kwargs["cudagraphs"] = None

        def compile_kernels(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            with kernels_for_all_sizes():  # a backward may be compiled later
                return compile_fx_inner(gm, inputs, **kwargs)  # type: ignore[arg-type, return-value]

        backward, inference = kwargs.get("is_backward", False), kwargs.get("is_inference", False)
        phase: Any = "backward" if backward else "inference" if inference else "forward"
        _note_what_is_donated()
        _multiply_before_adding(gm)
        return build(compile_kernels, gm, inputs, _traced(gm, phase, static))

    cached = cached and torch._functorch.config.enable_autograd_cache
    if cached:
        settings = {**settings, **_TOGETHER_KEY}
    tag = users_tag
    if cached:  # what AOTAutograd makes of attention depends on the switches, and its key does not
        tag = f"{tag}{switches.settled_switches()}"
    caches = torch._functorch.config.patch(enable_autograd_cache=cached), keys.patch(cache_key_tag=tag)
    with caches[0], caches[1], kernels_for_all_sizes():
        return compile_fx(  # type: ignore[return-value]
            gm,
            list(example_inputs),  # type: ignore[arg-type]
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=dict(settings),
        )


def _multiply_before_adding(gm: torch.fx.GraphModule) -> None:
    """Let `x.add(y, alpha=k)` be `x.add(y * k)`, which has the same kernels. (2.11, 2.13)

    Inductor makes `addmm` of a sum with a matrix product, and forgets `alpha`.
    """
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or node.kwargs.get("alpha", 1) == 1:
            continue
        first, second = node.args
        if not any(isinstance(n, torch.fx.Node) and n.target is torch.ops.aten.mm.default for n in node.args):
            continue
        value = second.meta["val"]
        with gm.graph.inserting_before(node):
            product = gm.graph.call_function(torch.ops.aten.mul.Tensor, (second, node.kwargs["alpha"]))
        product.meta = {k: v for k, v in node.meta.items() if k != "val"}
        with value.fake_mode:
            product.meta["val"] = value * node.kwargs["alpha"]
        node.args = (first, product)
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "alpha"}
        gm.recompile()
