"""How Dynamo traces: its settings, and what it does in another way while the library traces."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from pygraph_train.boundary import arranged
from pygraph_train.problems import NotLegal, Problem, first_line
from pygraph_train.torch_private import (
    autocast,
    checkpoints,
    copies,
    host_numbers,
    ordered_dicts,
    quiet,
    second_derivatives,
    switches,
    texts,
)
from pygraph_train.torch_private.changes import changed, no_bounded_deques
from pygraph_train.torch_private.compiling import as_in_plain_python
from pygraph_train.torch_private.guards import with_place
from pygraph_train.torch_private.names import DYNAMO, FORWARD_AND_BACKWARD, lacking, lacks
from pygraph_train.torch_private.traces_of_threads import Trace, TracedBy, no_other_trace

__all__ = [
    "dynamo_region_config",
    "dynamo_step_config",
    "forget_notes",
    "weights_are_flat",
    "why_no_traces",
]


def forget_notes(notes: list[tuple[Any, str]]) -> None:
    """Once all is compiled: empty these. `swap_tensors` refuses tensors with weak references, and what is compiled
    keeps its fake tensors, which keep the notes. (2.11, 2.13)"""
    for owner, attribute in notes:
        setattr(owner, attribute, type(getattr(owner, attribute))())
    notes.clear()


def _tracing(*further: tuple[Any, str, Any], regions: bool, **settings: Any) -> AbstractContextManager[None]:
    """Dynamo with these settings, and with what it lacks.

    Numbers of the host are as eager has them, and it has no ideas of its own of optimizers.

    Args:
        *further: changes on top of these.
        regions: whether what is traced may be a part of a step.
        **settings: of Dynamo.
    """
    import torch._dynamo.config as config

    settings["trace_numpy"] = False  # `host_numbers` has the reasons
    settings["enable_dynamo_decompositions"] = False  # `a.add_(b, alpha=c)` is rounded once, not twice
    settings["invalidate_compile_context_weakrefs"] = True  # `torch.utils.swap_tensors` refuses what has any
    changes = [(config, name, value) for name, value in settings.items()]
    mends = [
        *(mend for part in (host_numbers, copies) for mend in part.mends()),
        *checkpoints.mends(regions=regions),
        *texts.mends(),
        *_mends(),
        ordered_dicts.moving_nothing(),
        *quiet.mends(),
        _forgetful(),
        _with_places(),
    ]
    return changed([*changes, *mends, no_bounded_deques(), _optimizers_as_they_are(), *further])


@functools.cache
def why_no_traces() -> Problem | None:
    """Why Dynamo of this torch cannot trace as the library needs it, None where it can.

    Found out once, without a trace: all changes of it are put in place and taken away.
    """
    found = arranged(lambda: (_why_no_traces(),))
    return _UNKNOWN if found is None else found[0]


_UNKNOWN = Problem("pygraph-train failed while it looked at Dynamo, and traces nothing")


def _why_no_traces() -> Problem | None:
    if (problem := lacking(DYNAMO) or lacking(FORWARD_AND_BACKWARD)) is not None:
        return problem
    try:
        with no_other_trace():
            for context in (_of_steps, functools.partial(_of_regions, {}, plain=True)):
                with context():
                    pass
    except Exception as error:
        said = first_line(error).partition(" (/")[0]  # without the file
        problem = lacks(f"what a change of Dynamo replaces ({said})", FORWARD_AND_BACKWARD)
        logging.getLogger("pygraph_train").warning("pygraph: %s", problem)
        return problem
    return None


@functools.cache
def _forgetful() -> tuple[Any, str, Any]:
    """Let traces that Dynamo gives up hold no weak references to real tensors. (2.11, 2.13)

    `swap_tensors` refuses tensors with weak references, and traces are reference cycles. The guards hold some.
    So do tables that Dynamo of 2.13 empties itself, and that of 2.11 only for traces that it takes. A trace that fails
    after its backend was called has two of one kind.
    """
    from torch._dynamo.output_graph import DynamoTracerOutput

    made = DynamoTracerOutput.__init__

    def make(self: Any, tracer: Any, error: Any = None) -> None:
        made(self, tracer, error)
        if error:
            context = tracer.output.tracing_context
            modes = {context.fake_mode, getattr(tracer.output, "_old_fake_mode", context.fake_mode)}
            describers = [mode.fake_tensor_converter.meta_converter.describer for mode in modes]
            tables = [(describer, "lookup_tensor") for describer in describers]
            guards = (context.guards_context, "dynamo_guards")
            forget_notes([guards, (context, "tensor_to_context"), *tables])

    return DynamoTracerOutput, "__init__", make


def _with_places() -> tuple[Any, str, Any]:
    """Guards that know which line of the user's they are from. (2.11, 2.13)"""
    import torch._dynamo.guards as guards

    return guards, "get_verbose_code_part", with_place


@functools.cache
def _mends() -> tuple[tuple[Any, str, Any], ...]:
    """Methods of Dynamo's that set too few guards in torch 2.11, or fail for some; 2.13 needs none."""
    if torch.__version__ >= "2.13":  # compares versions, not text
        return ()
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable
    from torch._guards import Guard

    return (
        (UserDefinedClassVariable, "var_getattr", _guarding(UserDefinedClassVariable.var_getattr)),
        (Guard, "set_export_info", _for_new_objects(Guard.set_export_info)),
    )


def _guarding(var_getattr: Callable[..., Any]) -> Callable[..., Any]:
    """Let guards stand for numbers, strings, enums and lists of them that are read from a class.

    As in `type(self).scale`. (2.11: pytorch #176851)
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, EnumVariable  # type: ignore[attr-defined]
    from torch._dynamo.variables.base import VariableTracker

    def guarded(self: Any, tx: Any, name: str) -> Any:
        found = var_getattr(self, tx, name)
        if self.source is None or found.source is not None or name.startswith("__"):
            return found
        source = AttrSource(self.source, name)
        if isinstance(found, ConstantVariable):
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        elif isinstance(found, EnumVariable):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        elif ConstantVariable.is_literal(value := getattr(self.value, name, None)):  # a list, tuple or set
            return VariableTracker.build(tx, value, source)
        return found

    return guarded


def _for_new_objects(set_export_info: Callable[..., None]) -> Callable[..., None]:
    """Let guards be for a property that returns a new object each time, as some of transformers' configs have.

    With a filter guards are made twice, and torch wants the same object then. (2.11)
    """

    def set_anew(self: Any, *args: Any) -> None:
        self.obj_weakref = None
        set_export_info(self, *args)

    return set_anew


def dynamo_step_config(*further: tuple[Any, str, Any]) -> AbstractContextManager[None]:
    """Trace with every Python number specialised, so that a guard stands for it (torch 2.11, 2.13).

    Args:
        *further: changes of Dynamo, as (owner, attribute, value).

    Raises:
        NotLegal: this torch cannot trace as the library needs it.
    """
    if (lack := why_no_traces()) is not None:
        raise NotLegal(lack)

    def traced(trace: Trace, *args: Any) -> Any:
        with _of_steps(*further):
            return trace(*args)

    return TracedBy(traced)


def _of_steps(*further: tuple[Any, str, Any]) -> AbstractContextManager[None]:
    """Context: Dynamo traces a whole step."""
    import torch._dynamo.config as config

    return _tracing(
        *further,
        *second_derivatives.changes(),  # last: they go on with what is there
        regions=False,
        specialize_int=True,
        specialize_float=True,
        allow_unspec_int_on_nn_module=False,
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        capture_scalar_outputs=True,
        capture_dynamic_output_shape_ops=False,
        skip_nnmodule_hook_guards=True,  # `ModuleWatch` notices hooks registered in mid-run
        skip_tensor_guards_with_matching_dict_tags=False,  # and requires_grad_()
        use_recursive_dict_tags_for_guards=False,  # misses new `__defaults__` and `__code__` of functions
        allow_rnn=True,  # a recurrent network is one operation of the graph
        side_effect_replay_policy="info",  # keeps the user's stack of every mutation
        recompile_limit=32,
        suppress_errors=False,
        # `warning_once` and its like (transformers puts them on Logger) say nothing the second time
        ignore_logging_functions=_Functions.of(
            *config.ignore_logging_functions,
            *[getattr(logging.Logger, name) for name in dir(logging.Logger) if name.endswith("_once")],
        ),
    )


def weights_are_flat() -> tuple[tuple[Any, str, Any], ...]:
    """Changes of torch: `flatten_parameters` of recurrent networks does nothing.

    It gives cuDNN the weights in one piece of memory, and changes no number. Dynamo cannot trace it on a GPU. Only for
    traces whose graph runs in captures: Python in a capture would move the weights there. (2.11, 2.13)
    """
    return ((torch.nn.RNNBase, "flatten_parameters", _nothing),)


def _nothing(self: torch.nn.RNNBase) -> None:
    """In the place of `flatten_parameters`."""


@functools.cache
def _optimizers_as_they_are() -> tuple[Any, str, Any]:
    """Let an optimizer be traced as any other object. (2.11, 2.13)

    Otherwise Dynamo runs `_init_group` for real and sets few guards for what it does, takes `capturable` for
    True, moves step counts to the GPU, and loses what is written to the optimizer's attributes.
    """
    import torch._dynamo.variables.builder as builder
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def any_object(value: Any, *, source: Any, **kwargs: Any) -> Any:
        made = UserDefinedObjectVariable(value, source=source)
        return InstructionTranslator.current_tx().output.side_effects.track_object_existing(value, made)

    return builder, "OptimizerVariable", any_object


class _Functions(str):
    """Functions to iterate over, in a value that `json.dumps` takes: torch 2.11 logs Dynamo's options."""

    functions: tuple[Any, ...]

    @classmethod
    def of(cls, *functions: Any) -> _Functions:
        made = cls(", ".join(str(f) for f in functions))
        made.functions = functions
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


@contextmanager
def dynamo_region_config(
    backward: autocast.State | None = None, *, plain: bool = False, **settings: Any
) -> Iterator[list[BaseException]]:
    """Compile so that it is noticed when hooks of modules or methods of classes change later (torch 2.11, 2.13).

    A function for which Dynamo itself fails runs as it is, because half of the step may
    have been made by then. It stays so, but where the step raises: then the batch may be at fault.

    All of it is switched on when Dynamo traces, which few steps do.

    Args:
        backward: the autocast that its backward is called under; None for the present one.
        plain: code that asks whether it is compiled takes the branches of plain Python.
        **settings: further ones of Dynamo.

    Yields:
        These failures, for which torch would log pages.
    """
    failures: list[BaseException] = []
    failed: list[types.CodeType] = []

    def traced(trace: Trace, stock: Any, frame: Any, *args: Any) -> Any:
        before = len(failures)
        with _tracing_regions(failures, settings, plain=plain):
            found = trace(stock, frame, *args)
        if len(failures) > before and found.guarded_code is None:
            found.apply_to_code = False  # this call alone
            failed.append(frame.f_code)
        return found

    with autocast.backward_comes_here(backward), TracedBy(traced):
        yield failures
    for code in failed:
        torch._dynamo.eval_frame.skip_code(code)


@contextmanager
def _tracing_regions(
    failures: list[BaseException], settings: dict[str, Any], *, plain: bool
) -> Iterator[None]:
    def take(record: logging.LogRecord) -> bool:
        if "recompile_limit" in str(record.msg) or "recompile_limit" in map(str, record.args or ()):
            return False
        if record.levelno != logging.WARNING or not record.exc_info or record.exc_info[1] is None:
            return True
        failures.append(record.exc_info[1])
        return False

    log = logging.getLogger("torch._dynamo.convert_frame")
    log.addFilter(take)
    try:
        with autocast.as_around_backward(), _of_regions(settings, plain=plain):
            yield
    finally:
        log.removeFilter(take)


@contextmanager
def _of_regions(settings: dict[str, Any], *, plain: bool) -> Iterator[None]:
    """Context: Dynamo traces parts of a step."""
    settings = {
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,  # `p.data = p.data[:n]` changes no dict
        "skip_no_tensor_aliasing_guards_on_parameters": False,  # two weights may become one
        "allow_unspec_int_on_nn_module": True,  # a counter in a module need not be traced anew on every step
        "suppress_errors": True,
        **settings,
    }
    mends = changed([*_guarded_methods(), *switches.guarded()])
    further = as_in_plain_python() if plain else ()  # on top of those that set the same methods
    with mends, _tracing(*further, regions=True, **settings):
        yield


@functools.cache
def _guarded_methods() -> tuple[tuple[Any, str, Any], ...]:
    """Dynamo guards that no object has a method of its own, and not which one its class has. (2.11, 2.13)

    Nor which one an object has of its own, as modules have a `forward` in Accelerate's mixed precision. (2.11)
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, TypeSource
    from torch._dynamo.variables import nn_module
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    called = "guard_to_detect_forward_monkeypatching"
    guard_forward: Callable[..., None] = getattr(nn_module, called)
    read: Callable[..., Any] = UserDefinedObjectVariable.var_getattr

    def guard(source: Any, value: object, name: str) -> None:
        if source is not None and isinstance(getattr(type(value), name, None), types.FunctionType):
            install_guard(AttrSource(TypeSource(source), name).make_guard(GuardBuilder.ID_MATCH))
            if type(getattr(value, "__dict__", {}).get(name)) is types.MethodType:
                for part in ("__func__", "__self__"):
                    own = AttrSource(AttrSource(source, name), part)
                    install_guard(own.make_guard(GuardBuilder.ID_MATCH))

    def forward(source: Any, module: torch.nn.Module) -> None:
        guard_forward(source, module)
        guard(source, module, "forward")

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if not name.startswith("_"):
            guard(self.source, self.value, name)
        return found

    return (nn_module, called, forward), (UserDefinedObjectVariable, "var_getattr", var_getattr)
