"""Functions that AOTAutograd makes other functions of, and what is done about them.

Some of a function's results may be inputs that it changes (spectral normalisation returns its buffers). AOTAutograd
may put these where other results belong. Then they are taken out of the graph, and Python returns them.

`.data = ...` may give an input another shape or other strides. Within its own memory AOTAutograd takes that for
nothing at all, and elsewhere it chooses kernels for the gradients by the strides of before, which round in another
way. Beside `.data = ...` it refuses changes in place. Such a function runs as Dynamo traced it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.regions.lazy_bits import is_lazy, resolved_before_views_as_real
from pygraph_train.regions.passes.draft import in_one_line, user_line
from pygraph_train.torch_private.aot import BuildRegion, CompileKernels, TracedGraph
from pygraph_train.torch_private.autocast import share_casts
from pygraph_train.torch_private.autograd import entries_into_forward_mode
from pygraph_train.torch_private.dynamo import dynamo_restart
from pygraph_train.torch_private.patched_functions import call_originals
from pygraph_train.torch_private.results import gets_other_memory, layout, offset, results_are_misplaced
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.recurrent import recurrent_networks

__all__ = [
    "Returning",
    "Unfit",
    "compile_truly",
    "leave_recurrent_networks",
    "looked_at",
    "of_other_class",
    "refuse_forward_mode",
]

Compile = Callable[[fx.GraphModule, Callable[[], None]], Callable[..., Any]]


class Unfit(Exception):
    """A function that cannot be compiled without becoming another one; the message says why, with the user's line."""

    __pygraph_theirs__ = True
    """See `pygraph_train.boundary.theirs`: it is no fault of the library."""


class _Misplaced(Exception):
    __pygraph_theirs__ = True


class Returning:
    """A compiled function, and the results that are inputs.

    Args:
        compiled: returns the other results.
        inputs: by place among all results, the argument that is the result.
    """

    def __init__(self, compiled: Callable[..., Any], inputs: dict[int, int]) -> None:
        self._compiled = compiled
        self._inputs = sorted(inputs.items())

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        results = list(self._compiled(*args))
        for place, argument in self._inputs:
            results.insert(place, args[argument])
        return tuple(results)


def of_other_class(inputs: Sequence[Any]) -> str | None:
    """The name of a class of tensors without operators of its own among inputs, if there is one.

    Its operations are its own in Python only (`x.as_subclass(...)`, tensors with metadata). AOTAutograd finds no
    operators for them.
    """
    kinds = {type(x) for x in inputs if isinstance(x, torch.Tensor)}
    for kind in kinds:
        plain = kind is torch.Tensor or issubclass(kind, torch.nn.Parameter)
        if not plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
            return kind.__name__
    return None


def leave_recurrent_networks(gm: fx.GraphModule) -> None:
    """Leave functions with recurrent networks to eager kernels: the graphs that Inductor makes of these are long.

    Args:
        gm: from Dynamo.
    Raises:
        NotLegal: there is one.
    """
    for node in recurrent_networks(gm):
        raise NotLegal(
            Problem(
                "it unrolls recurrent networks into operations for each element of a sequence", line_of(node)
            )
        )


def refuse_forward_mode(gm: fx.GraphModule) -> None:
    """Leave forward-mode differentiation to eager kernels.

    Tangents that are zero have no memory. Inductor's backwards hand them to kernels of CUDA that ask for some.

    Args:
        gm: from Dynamo.
    Raises:
        Unfit: there is some.
    """
    for node in entries_into_forward_mode(gm):
        line = line_of(node)
        raise Unfit(
            "it differentiates forward (torch.func.jvp, torch.autograd.forward_ad), and Inductor's kernels cannot "
            f"read zeros that have no memory{f' ({line})' if line else ''}"
        )


def compile_truly(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_function: Compile, *, exact: bool = False
) -> Callable[..., Any]:
    """`compile_function(gm, look)`, and nothing that computes something else.

    Args:
        gm: from Dynamo; results may be taken out of it.
        example_inputs: its inputs, as they are before it runs.
        compile_function: calls `look` when AOTAutograd has traced the graph.
        exact: its kernels are those of eager mode, and sums have the same last bits.
    Raises:
        Unfit: that is not possible.
    """
    if any(map(is_lazy, example_inputs)):
        raise Unfit("an input is conjugated or negated lazily (call its resolve_conj or resolve_neg)")
    call_originals(gm)
    apart = share_casts(gm)
    if exact and apart is not None:
        line = line_of(apart)
        raise Unfit(
            "under autocast a checkpoint uses a weight that is used several times, and eager kernels cast it once"
            f"{f' ({line})' if line else ''}"
        )
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    replacements = _replacements(gm, inputs)
    for new in replacements:
        if layout(new.value) != layout(example_inputs[new.place]):
            raise Unfit(
                f"`.data = ...` gives an input another shape, other strides or another type{new.line}"
            )

    offsets = [
        offset(example_inputs[new.place]) for new in replacements
    ]  # `look` lives on: it must keep no input

    def look() -> None:
        for new, before in zip(replacements, offsets, strict=True):
            moved = offset(new.value) != before
            if moved and not gets_other_memory(new.place, len(inputs)):
                raise Unfit(f"`.data = ...` gives an input another part of its memory{new.line}")
        if results_are_misplaced():
            raise _Misplaced

    try:
        return _with_all_results(gm, inputs, compile_function, look)
    except (Unfit, dynamo_restart()):
        raise
    except Exception as error:
        if not replacements:
            raise
        line = replacements[0].line
        raise Unfit(f"`.data = ...`{line} could not be compiled: {in_one_line(error)}") from error


def looked_at(build: BuildRegion, look: Callable[[], None]) -> BuildRegion:
    """`build` of what AOTAutograd has traced, after a look at it, and without bits that its kernels refuse."""

    def looking(
        compile_kernels: CompileKernels,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        traced: TracedGraph,
    ) -> Callable[[list[Any]], Any]:
        if traced.phase != "backward":
            look()
        resolved_before_views_as_real(gm)
        return build(compile_kernels, gm, example_inputs, traced)

    return looking


def _with_all_results(
    gm: fx.GraphModule, inputs: Sequence[fx.Node], compile_function: Compile, look: Callable[[], None]
) -> Callable[..., Any]:
    try:
        return compile_function(gm, look)
    except _Misplaced:
        taken = _take_inputs_out(gm, inputs)
    try:
        return Returning(compile_function(gm, look), taken)
    except _Misplaced:
        raise Unfit("it returns inputs that it changes, and the compiler mixes up what it returns") from None


def _take_inputs_out(gm: fx.GraphModule, inputs: Sequence[fx.Node]) -> dict[int, int]:
    """Let a graph return none of its inputs; by place among the results, which inputs they were."""
    places = {id(node.meta.get("example_value")): place for place, node in enumerate(inputs)}
    output = gm.graph.output_node()
    results: Any = output.args[0]
    taken = {}
    for i, node in enumerate(results):
        fake = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(fake, torch.Tensor) and id(fake) in places:
            taken[i] = places[id(fake)]
    output.args = (tuple(node for i, node in enumerate(results) if i not in taken),)
    gm.recompile()
    return taken


class _Replacement(NamedTuple):
    """`.data = value` of the input at a place; the user's line, in brackets where it is known."""

    place: int
    value: torch.Tensor
    line: str


def _replacements(gm: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[_Replacement]:
    found = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is torch.Tensor.set_ and node.args[0] in inputs:
            value, line = node.args[1].meta["example_value"], user_line(node)
            found.append(_Replacement(inputs.index(node.args[0]), value, f" ({line})" if line else ""))
    return found
