"""From a Dynamo graph to regions: Inductor's kernels on a GPU, or aten kernels, which the emulation always has."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph_train.graphs.devices import give_back_unused, make_engine, watch_for_unused_memory
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.regions.absent import Absent, has_several_gradients, memory_behind, noting, with_absent
from pygraph_train.regions.arena import Arena
from pygraph_train.regions.counters import Counting
from pygraph_train.regions.direct import Direct
from pygraph_train.regions.direct_inference import DirectInference
from pygraph_train.regions.exponents import fix_exponents
from pygraph_train.regions.histories import without_unused_histories
from pygraph_train.regions.idle import handing_through
from pygraph_train.regions.options import BackendOptions
from pygraph_train.regions.pair import Bounds, Pair, Tangent
from pygraph_train.regions.partial import refuse_mixtures
from pygraph_train.regions.passes.draft import copy_module, in_one_line
from pygraph_train.regions.region import Region, RegionSpec
from pygraph_train.regions.replaced import Replacing, without_replacements
from pygraph_train.regions.sharing import plain_where_shared
from pygraph_train.regions.staging import Staged
from pygraph_train.regions.transform import Transformed, batched, transform
from pygraph_train.regions.unfit import (
    Unfit,
    compile_truly,
    leave_recurrent_networks,
    looked_at,
    refuse_forward_mode,
)
from pygraph_train.regions.where import device_of, first_user_line
from pygraph_train.report.announcements import switched_off
from pygraph_train.report.backend_report import BackendReport, RegionRecord
from pygraph_train.selection.break_even import BreakEven
from pygraph_train.torch_private.aot import (
    CompileKernels,
    TracedGraph,
    compile_with_aten,
    donates,
    dynamic_results,
    forget_strides_of_last_outputs,
    grad_mode_changed,
    runs_graph_only,
    suggest_memory_format,
)
from pygraph_train.torch_private.autograd import compiled_autograd_wanted
from pygraph_train.torch_private.dispatch import has_symbols
from pygraph_train.torch_private.dynamo import dynamo_restart, start_untraced, without_second_wrapper
from pygraph_train.torch_private.inductor import compile_with_inductor, small_ends_together
from pygraph_train.torch_private.names import COMPILED, DYNAMO, lacking
from pygraph_train.tracing.counters import numbers_that_are_no_sizes, varying_counters
from pygraph_train.tracing.recompute import as_eager

__all__ = ["close_graphs", "compile_graph", "compile_whole", "report", "reset", "seconds_to_capture"]

_arenas: dict[tuple[str, torch.device], Arena] = {}
_records: dict[int, RegionRecord] = {}
_over: deque[RegionRecord] = deque()  # those that never ran as regions, and those whose regions are gone
_MOST_OVER = 256
_numbers = itertools.count()


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: BackendOptions,
    made: Callable[[RegionRecord], None] = lambda record: None,
    bounds: Bounds | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph into a callable whose forwards and backwards are regions.

    Args:
        gm, example_inputs: from Dynamo.
        options: of the backend.
        made: gets the record of each region when the region is made. Some are made when a backward runs first.
        bounds: of captures.
    """

    def note(record: RegionRecord) -> None:
        _records[id(record)] = record
        if record.decision == "plain":
            _over.append(record)
        while len(_over) > _MOST_OVER:
            _records.pop(id(_over.popleft()), None)
        made(record)

    number = next(_numbers)
    if (lack := lacking(DYNAMO) or lacking(COMPILED)) is not None:
        note(RegionRecord(f"function {number}", "function", first_user_line(gm), "plain", str(lack)))
        return gm.forward
    if options.engine == "off" or switched_off():
        if not options.compile:
            return as_eager(gm).forward
        return compile_with_inductor(gm, example_inputs, None, options.inductor)
    start_untraced()
    fix_exponents(gm)
    if (idle := handing_through(gm)) is not None:
        note(RegionRecord(f"function {number}", "function", None, "plain", "it computes nothing"))
        return idle
    try:

        def compiling(inputs: Sequence[Any]) -> Callable[..., Any]:
            return compile_truly(
                gm,
                inputs,
                lambda gm, look: _compile_regions(gm, inputs, options, number, look, note, bounds),
                exact=_has_eager_kernels(options),
            )

        truly = functools.partial(without_unused_histories, gm, example_inputs, compiling)
        return plain_where_shared(gm, example_inputs, truly)
    except Unfit as unfit:
        where, reason = first_user_line(gm), str(unfit)
        note(RegionRecord(f"function {number}", "function", where, "plain", reason))
        return as_eager(gm).forward


def _has_eager_kernels(options: BackendOptions) -> bool:
    return options.engine == "emulated" or not options.compile


def _compile_regions(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: BackendOptions,
    number: int,
    look: Callable[[], None],
    note: Callable[[RegionRecord], None],
    bounds: Bounds | None,
) -> Callable[..., Any]:
    measure = options.selection and options.engine != "emulated"  # which is slower by nature
    pair = Pair(options.indirection, measure, bounds)
    if pair.way is None:
        pair.worth = BreakEven(options.warmup_runs)
    region = functools.partial(_region, pair=pair, number=number, options=options, note=note)
    exact = not options.compile
    build = looked_at(with_absent(region, pair.absent, pair if exact else None), look)
    pair.direct = options.direct and not compiled_autograd_wanted()
    if _has_eager_kernels(options):
        look_at_both = (lambda joint: refuse_mixtures(joint.graph)) if exact else None
        compiled = compile_with_aten(gm, example_inputs, build, look_at_both)
    else:
        refuse_forward_mode(gm)
        compiled = compile_with_inductor(gm, example_inputs, build, options.inductor)
    for arena in list(_arenas.values()):
        arena.give_back_leftovers()
    compiled = noting(without_second_wrapper(compiled), pair.absent)
    if not pair.direct or pair.forward is None:
        return compiled
    return Direct(compiled, pair) if pair.forward.spec.phase == "forward" else DirectInference(compiled, pair)


def _region(
    compile_kernels: CompileKernels,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    traced: TracedGraph,
    *,
    pair: Pair,
    number: int,
    options: BackendOptions,
    note: Callable[[RegionRecord], None],
) -> Callable[[list[Any]], Any]:
    """Compile one forward or backward graph and make a region of it."""
    record = RegionRecord(f"{traced.phase} {number}", traced.phase, first_user_line(gm))
    note(record)
    device, reason = device_of(gm)
    arena = _arena(options, device) if device is not None else None
    if device is None or arena is None:
        why = "no CUDA device: engine='emulated' shows the mechanism"
        record.decision, record.reason = "plain", reason if device is None else why
        _over.append(record)
        return compile_kernels(gm, example_inputs)
    replaced = without_replacements(gm, traced.saved_from)
    gm, targets = replaced.gm, frozenset(replaced.targets)
    traced = traced._replace(static=traced.static - targets, mutated=traced.mutated - targets)
    counted, numbers = varying_counters(gm), numbers_that_are_no_sizes(gm)  # before Inductor rewrites it
    static = traced.static if options.phases != "backward" else _lasting(gm, traced, pair)
    if options.transform and options.compile:
        changed = _transform(gm, example_inputs, device, traced.phase, pair, record)
        compiled = _with_small_ends_together(compile_kernels, changed.gm, changed.example_inputs, record.left)
    else:
        changed = Transformed(gm, example_inputs)
        compiled = compile_kernels(gm, example_inputs)
    forget_strides_of_last_outputs(len(targets))
    record.numbers = bool(numbers)
    spec = RegionSpec(
        record.name,
        traced.phase,
        static | frozenset(changed.staged),
        traced.mutated,
        traced.mutations,
        traced.saved_from,
        record.where,
        len(targets),
        numbers,
    )
    region = Region(compiled, spec, arena, options, pair, record)
    weakref.finalize(region, _over.append, record).atexit = False
    if replaced.refused is not None:
        region.give_up(replaced.refused)
    if changed.staged or changed.late or changed.passthrough or targets or counted:
        pair.direct = False
        run = Staged(region, changed, device)
        wrapped = Replacing(run, replaced.targets) if targets else run
        return Counting(wrapped, counted) if counted else wrapped
    _name_ends(gm, traced.phase, traced.saved_from, pair)
    return region


def compile_whole(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], left: list[str]
) -> Callable[..., Any]:
    """Compile one Dynamo graph as Inductor does, small kernels put together: somebody else captures it.

    Args:
        left: what could not be done is added to it.
    Raises:
        NotLegal: it has a recurrent network, or compiled, it would compute something else.
    """
    leave_recurrent_networks(gm)

    def build(
        compile_kernels: CompileKernels,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        traced: TracedGraph,
    ) -> Callable[[list[Any]], Any]:
        device, _ = device_of(gm)
        if device is None:
            return compile_kernels(gm, example_inputs)
        gm, failures = batched(gm, device)
        left.extend(str(Problem(f"{failure.op}: {failure.why}", failure.where)) for failure in failures)
        return _with_small_ends_together(compile_kernels, gm, example_inputs, left)

    def compile_function(gm: torch.fx.GraphModule, look: Callable[[], None]) -> Callable[..., Any]:
        looking = looked_at(build, look)
        if not has_several_gradients(gm):
            return compile_with_inductor(gm, example_inputs, looking, {}, cached=True)
        absent = Absent()
        looking = with_absent(looking, absent)
        return noting(compile_with_inductor(gm, example_inputs, looking, {}), absent)

    try:
        refuse_forward_mode(gm)
        return compile_truly(gm, example_inputs, compile_function)
    except Unfit as unfit:
        raise NotLegal(Problem(str(unfit))) from unfit


def _with_small_ends_together(
    compile_kernels: CompileKernels,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    left: list[str],
) -> Callable[[list[Any]], Any]:
    """Compile with `small_ends_together`, and without it where that fails: few use that part of Inductor."""
    spare = copy_module(gm)
    try:
        with small_ends_together():
            return compile_kernels(gm, example_inputs)
    except dynamo_restart():  # not a failure: Dynamo traces once more
        raise
    except Exception as error:
        failure = in_one_line(error)
    compiled = compile_kernels(spare, example_inputs)
    left.append(f"small kernels were not put together, which failed: {failure}")
    return compiled


def _name_ends(gm: torch.fx.GraphModule, phase: str, saved_from: int, pair: Pair) -> None:
    """Note what goes into a graph and what comes out of it."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (outputs,) = next(node for node in gm.graph.nodes if node.op == "output").args
    names = tuple(node.name for node in placeholders)
    pair.direct &= all(
        isinstance(node.meta.get("val"), (torch.Tensor, torch.SymInt)) for node in placeholders
    )
    if phase == "backward":
        pair.arriving, pair.gradients = names, len(outputs)
        pair.donates = donates()
        tangents = [node for node in placeholders if node.name.startswith("tangents")]
        pair.tangents = tuple(_tangent(node) for node in tangents)
    else:
        pair.outputs = tuple(map(str, outputs))
        pair.dynamic = dynamic_results()
        pair.direct &= not grad_mode_changed() if phase == "forward" else runs_graph_only()
        seen = {memory_behind(node) for node in outputs[:saved_from]} - {None}
        saved = [memory_behind(node) for node in outputs[saved_from:]]
        pair.shared = tuple(i for i, memory in enumerate(saved) if memory in seen)
        kept = set(saved) - {None}
        pair.kept = frozenset(i for i, node in enumerate(placeholders) if memory_behind(node) in kept)


def _tangent(node: torch.fx.Node) -> Tangent:
    value = node.meta["val"]
    if has_symbols([value]):
        return Tangent(node.name, (), (), value.dtype, suggest_memory_format(value))
    return Tangent(node.name, tuple(value.size()), value.stride(), value.dtype)


def _transform(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    device: torch.device,
    phase: str,
    pair: Pair,
    record: RegionRecord,
) -> Transformed:
    """Rewrite what blocks a capture; what a forward saves on the device, its backward finds there."""
    changed = transform(gm, example_inputs, device, arriving=pair.handed_over, hand_over=phase == "forward")
    if phase == "forward":
        pair.handed_over = changed.handed_over
    record.changes = [str(Problem(change.what, change.where)) for change in changed.changes]
    record.left = [str(Problem(f"{left.op}: {left.why}", left.where)) for left in changed.left]
    return changed


def _lasting(gm: torch.fx.GraphModule, traced: TracedGraph, pair: Pair) -> frozenset[int]:
    """Inputs at the same addresses, of a backward whose forward runs without a graph.

    What that saves is elsewhere each time, but for parameters and views of them.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    if traced.phase == "backward":  # its inputs have the names of the forward's outputs
        return frozenset(i for i in traced.static if placeholders[i].name in pair.lasting)
    stays = {memory_behind(placeholders[i]) for i in traced.static}
    (outputs,) = next(node for node in gm.graph.nodes if node.op == "output").args
    saved = [node for node in outputs[traced.saved_from :] if isinstance(node, torch.fx.Node)]
    pair.lasting = frozenset(node.name for node in saved if memory_behind(node) in stays - {None})
    return traced.static


def _arena(options: BackendOptions, device: torch.device) -> Arena | None:
    """All regions of one device share one arena: they share memory."""
    name = "off" if options.engine == "auto" and device.type != "cuda" else options.engine
    give_back_unused()
    if (name, device) not in _arenas:
        engine = make_engine(name, device)
        if engine is None:
            return None
        _arenas[name, device] = arena = Arena(engine)
        watch_for_unused_memory(arena)
    return _arenas[name, device]


def close_graphs(records: Sequence[RegionRecord], why: str | None = None) -> None:
    """Close the graphs of these regions, and give back memory that no other graph uses.

    Args:
        records: of the regions.
        why: they get no graphs again; None: they are captured again when they run.
    """
    for arena in _arenas.values():
        with arena.lock:
            for region in _open_regions(arena, records):
                region.capture_again() if why is None else region.give_up(why)
            arena.give_back_unused()
            arena.engine.trim()


def seconds_to_capture(records: Sequence[RegionRecord]) -> list[float]:
    """What capturing took, for each graph that these regions have open just now."""
    return [s for a in _arenas.values() for r in _open_regions(a, records) for s in r.seconds_to_capture]


def _open_regions(arena: Arena, records: Sequence[RegionRecord]) -> list[Region]:
    mine = set(map(id, records))
    return [r for r in arena.owners() if isinstance(r, Region) and id(r.record) in mine]


def report() -> BackendReport:
    """What became of the regions of this process: of those that exist, and of the last ones that did."""
    return BackendReport(list(_records.values()))


def reset() -> None:
    """Forget the records of the report. Regions go on; call `torch.compiler.reset()` to drop them."""
    _records.clear()
    _over.clear()
