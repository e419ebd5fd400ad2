"""Calls functions through `torch.compile`, and has Dynamo trace them with the settings that the library needs."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import operator
import re
import sys
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.boundary import STEP, executes, quietly, surely
from pygraph_train.patches import copied_function, held_weakly, not_collecting, nothing, standing_in
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.growing import Growing
from pygraph_train.torch_private.names import private

F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS: dict[str, Any] = {
    "suppress_errors": True,  # what Dynamo itself fails at runs as it is written
    "skip_nnmodule_hook_guards": False,  # hooks that are added later are noticed
    "specialize_float": False,
    "allow_unspec_int_on_nn_module": True,
    "allow_rnn": True,
    "optimize_ddp": False,  # gradients are exchanged by hooks of autograd, as in plain training
    "trace_numpy": False,  # NumPy computes in other types than its imitation in torch
    # requires_grad_(), `p.data = p.data[:n]`, and new methods and attributes of a class change no dict of a module
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_recursive_dict_tags_for_guards": False,
    "invalidate_compile_context_weakrefs": True,  # as for backends of torch: swap_tensors refuses these (not in 2.11)
    "record_runtime_overhead": False,  # 13 calls of Python in each step, for profilers
    "enable_dynamo_decompositions": False,  # `a.add_(b, alpha=c)` is rounded once, not twice
    "trace_autograd_ops": True,  # torch.autograd.grad is a part of the graph (not in 2.11 and 2.12)
}


def untraced(fn: F) -> F:
    """`fn`, which autograd or traced frames call: Dynamo traces neither it nor what it calls. (2.11 to 2.15)

    `torch.compiler.disable` does the same, and takes the host longer.
    """
    _left.append(fn.__code__)  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules:
        quietly(_tell_dynamo)
    return fn


def break_graph() -> None:
    """Have Dynamo, which traces the caller, end its graph here. (2.11 to 2.15)"""
    torch._dynamo.graph_break()


def make_dynamic(tensor: torch.Tensor, dimension: int) -> None:
    """Have Dynamo make a number of this size, if it can. (2.11 to 2.15)"""
    torch._dynamo.maybe_mark_dynamic(tensor, dimension)


_left: list[types.CodeType] = []


def _tell_dynamo() -> None:
    """Have Dynamo leave all of these to Python, before anything is compiled: its import takes a second."""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    for code in (*_left, *_of_metrics()):
        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    _left.clear()


def _of_metrics() -> Iterator[types.CodeType]:
    """What torchmetrics runs for a metric that no graph can hold.

    Dynamo would trace it function by function, and none of it is part of training. A metric that a graph can hold is
    traced within the step.
    """
    package = sys.modules.get("torchmetrics")
    of_one = "Metric.forward", "Metric._wrap_update", "Metric._wrap_compute"
    for name in (*of_one, "MetricCollection.forward", "MetricCollection.update"):
        with suppress(AttributeError):  # it is not there
            code = operator.attrgetter(f"{name}.__code__")(package)
            # with the functions that it makes
            yield from (c for c in (code, *code.co_consts) if isinstance(c, types.CodeType))


_APART: dict[str, Any] = dict.fromkeys(
    {"isolate_recompiles"} & set(inspect.signature(torch.compile).parameters), True
)
"""Options by which Dynamo's limit of traces counts for each training alone. Several trainings of a process share code,
such as a model's forward after a graph break. (2.13 to 2.15; 2.11 and 2.12 count all trainings together.)"""

_MOST_ANEW = 8
"""So often a function whose step raised while it was traced is traced as if it were another one."""


class _Here(threading.local):
    """Of this thread: the functions of ours that are called, what a trace in the present call has set, all traces,
    those of what the user compiled, and in a call with a trace when it began, and the kind of the default device."""

    def __init__(self) -> None:
        self.called: list[CompiledFunction] = []
        self.settings: ExitStack | None = None
        self.traces = self.others = 0
        self.began = 0.0
        self.device: str | None = None


_here = _Here()


def _prepare_trace() -> None:
    """A trace begins in this thread: if a function of ours is called, it gets our settings until the call ends."""
    if _here.called and _here.settings is None:
        import torch._dynamo.config as config

        # these tell something in the first step only, which is not traced (transformers)
        told_once = {getattr(logging.Logger, name, None) for name in ("warning_once", "info_once")} - {None}
        settings = {**_SETTINGS, "ignore_logging_functions": config.ignore_logging_functions | told_once}
        known = {name: value for name, value in settings.items() if hasattr(config, name)}
        changes = ExitStack()
        changes.enter_context(config.patch(known))
        changes.enter_context(not_collecting())
        changes.enter_context(standing_in([(_here, "device", torch.get_default_device().type)]))
        _here.settings, _here.began = changes, time.perf_counter()
        function = _here.called[-1]
        sizes = functools.partial(function.around, *function.given)
        for around in (*_AROUND_A_TRACE, function.growing.left_to_python, sizes):
            quietly(lambda around=around: changes.enter_context(around()))  # type: ignore[misc]
    _here.traces += 1
    _here.others += not _here.called


def _trace_begins(*_: Any) -> None:
    surely(_prepare_trace, "a trace")
    if _here.called and time.perf_counter() - _here.began > _here.called[-1].patience:
        # Dynamo leaves the function to Python then, unless the user has compiled it with fullgraph=True
        leaves = torch._dynamo.convert_frame.ConvertFrame.__call__.__code__
        if leaves in (frame.f_code for frame, _ in traceback.walk_stack(None)):
            raise TimeoutError("traces of this call have taken as long as they may")


def _counting() -> Any:
    """Around a trace: the counter of a torchmetrics object is a number that changes, which takes no second trace to
    find out. (2.11 to 2.15)"""
    config: Any = torch.compiler.config
    sources = filter(None, (config.dynamic_sources, r".*\._update_count$"))
    return config.patch(dynamic_sources=",".join(sources))


def _without_logs() -> Any:
    """Around a trace: Dynamo does not split all source files that it meets into tokens, to name functions in a log: it
    takes a quarter of the time that the trace of a model of transformers does. Nor does it write `capturable` into
    groups that a step changes. (2.11 to 2.15)"""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables.optimizer import OptimizerVariable

    left_out = (symbolic_convert, "get_funcname", nothing), (OptimizerVariable, "_set_capturable", nothing)
    return standing_in(left_out)


def _one_step_tells() -> Any:
    """Around a trace: one step of time tells what a recurrent layer gives. Torch computes all of them with fake
    tensors, which takes seconds for an LSTM of two layers over 96 steps on CUDA. (2.11 to 2.15)"""
    from torch._decomp import decompositions as stock
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    def layer(whole: Callable[..., Any], given: Any, *others: Any, **named: Any) -> Any:
        tells = type(given) is FakeTensor and get_proxy_mode() is None  # else its operations are asked for
        out, last = whole(given.narrow(0, 0, 1) if tells else given, *others, **named)
        if type(last) is tuple:  # states of an LSTM, to which torch 2.11 adds a dimension
            last = tuple(state.flatten(0, -2) for state in last)
        return out.repeat(given.shape[0], 1, 1) if tells else out, last

    lstm, rnn = (functools.partial(layer, whole) for whole in (stock.one_layer_lstm, stock.one_layer_rnn))
    return standing_in([(stock, "one_layer_lstm", lstm), (stock, "one_layer_rnn", rnn)])


def _counts(node: Any) -> bool:
    """Whether the rows of a tensor count one by one from some number on, whatever the step is given."""
    value: Any = node.meta.get("example_value")
    if node.target is torch.arange:
        return len(node.args) == 1 and value.dtype is torch.int64
    tensors = [a for a in node.args if hasattr(getattr(a, "meta", {}).get("example_value"), "shape")]
    keeps = node.target in (operator.add, "unsqueeze", "expand") and len(tensors) == 1
    return keeps and _counts(tensors[0]) and value.shape[-1] == tensors[0].meta["example_value"].shape[-1]


@contextmanager
def _as_plain() -> Iterator[None]:
    """Around a trace: transformers gives attention no mask where a model gets none and counts its positions itself. It
    would read them, and give it a mask, and other kernels, where it is traced. Nothing is exported, as Dynamo has it in
    2.11 and 2.12. (2.11 to 2.15)"""
    from torch._dynamo.variables import ConstantVariable, UserFunctionVariable
    from torch._dynamo.variables.torch import tracing_state_functions

    stock = UserFunctionVariable.call_function
    masks = sys.modules.get("transformers.masking_utils")
    reads, asks = (getattr(masks, name, None) for name in ("find_packed_sequence_indices", "is_tracing"))

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn is reads and len(args) == 1 and _counts(args[0].as_proxy().node):
            return ConstantVariable.create(None)
        if self.fn is asks and len(args) == 1 and args[0].is_constant_none():  # no mask
            return ConstantVariable.create(False)
        return stock(self, tx, args, kwargs)

    no_export = mock.patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})
    with no_export, mock.patch.object(UserFunctionVariable, "call_function", call):
        yield


@contextmanager
def _at_breaks() -> Iterator[None]:
    """Around the traces of one call: a call that was found to break a graph ends the graph of each function on the way
    to it at once. Dynamo would trace all that the function calls once more to find that out. Nor does a guard depend on
    what is handed to such a call, as the boxes of an image to a loss that is left to Python. (2.11 to 2.15)"""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.output_graph import GraphCompileReason, OutputGraph
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase
    from torch._dynamo.variables.lazy import LazySymNodeFormatString, LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    stock, realize_all = InliningInstructionTranslator.inline_call, LazyVariableTracker.realize_all
    speculate, found = InstructionTranslatorBase.speculate, dict[Any, Unsupported]()
    write, create = InstructionTranslatorBase._format_value, LazyVariableTracker.create
    takes_tracer = "tx" in inspect.signature(create).parameters  # not in 2.11 and 2.15

    def inline(parent: Any, *given: Any, **named: Any) -> Any:
        call = parent.f_code, parent.instruction_pointer
        if parent.parent is None and call in found:  # where `begin` has left it alone, as in a loop
            raise found[call]
        try:
            return stock(parent, *given, **named)
        except Unsupported as error:
            calls = getattr(error, "calls", getattr(error.__context__, "calls", ()))  # the innermost first
            vars(error)["calls"] = (*calls, call)
            found.update(dict.fromkeys(() if parent.parent else calls, error))
            raise

    def begin(tracer: Any) -> Any:
        made, why = speculate(tracer), found.get((tracer.f_code, tracer.instruction_pointer))
        if why is None or tracer.parent or tracer.active_generic_context_managers:
            return made
        if tracer.should_compile_partial_graph() and not tracer.maybe_has_backedge():
            made._failed, made.error_on_graph_break = True, tracer.error_on_graph_break
            made.reason = GraphCompileReason(why.msg, why.real_stack)
        return made

    def look(value: Any, *given: Any, **named: Any) -> Any:
        breaks = sys._getframe(1).f_code is OutputGraph._get_stack_values_to_restore.__code__
        return value if breaks else realize_all(value, *given, **named)

    def text(tracer: Any, spec: Any, flags: int) -> None:
        if not isinstance(tracer.stack[-1], SymNodeVariable):
            return write(tracer, spec, flags)
        # with the source of its number it would be the number behind a break, and no text
        given = {"source": None, "tx": tracer} if takes_tracer else {"source": None}
        tracer.push(create(LazySymNodeFormatString(tracer.pop(), spec), **given))

    changes: list[tuple[Any, str, Any]] = [
        (InliningInstructionTranslator, "inline_call", staticmethod(inline)),
        (LazyVariableTracker, "realize_all", staticmethod(look)),
        (InstructionTranslatorBase, "speculate", begin),
        (InstructionTranslatorBase, "_format_value", text),
    ]
    try:
        with standing_in(changes):
            yield
    finally:
        found.clear()


def _require_grad(tensor: torch.Tensor) -> None:
    with torch._functorch.eager_transforms.enable_inplace_requires_grad(True):  # for AOTAutograd as well
        tensor.requires_grad_()


@contextmanager
def _inner_leaves() -> Iterator[None]:
    """Around a trace: `requires_grad_()` of what the step has computed is an operation. Dynamo breaks the graph there,
    and in each function around it: adapters with checkpoints take it 32 traces. `backward()` breaks the graph in all
    versions: what listens for gradients would hear of none. (2.11 to 2.15)"""
    from torch._dynamo.variables import TensorVariable

    stock, accumulates = TensorVariable.method_requires_grad_, TensorVariable.method_backward

    def backward(self: Any, *given: Any, **named: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=False):
            return accumulates(self, *given, **named)

    def method(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        example = self.as_proxy().node.meta["example_value"]
        wanted = requires_grad is True or requires_grad.as_python_constant()
        if self.source or not wanted or example.requires_grad:
            return stock(self, tx, requires_grad)
        tx.output.create_proxy("call_function", _require_grad, (self.as_proxy(),), {})
        self.requires_grad = example.requires_grad_().requires_grad
        return self

    made = {"requires_grad_": method}
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # not in 2.11 and 2.12
        made["backward"] = backward
    table = getattr(TensorVariable, "tp_methods", {})  # 2.15
    known = {name: type(table[name])(made[name]) for name in made if name in table}
    changes = ((TensorVariable, f"method_{name}", change) for name, change in made.items())
    with standing_in(changes), mock.patch.dict(table, known):
        yield


_ADVICE = "Dynamo does not know how to trace|Dynamo detected a call to a `functools.lru_cache`"
_LOGGERS = (
    "torch._dynamo.convert_frame",
    "torch._dynamo.metrics_context",  # it cannot write down a setting that holds functions
    "torch._dynamo.variables.tensor",
    "torch._subclasses.fake_tensor",
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Around a trace: Dynamo tells neither of graph breaks nor of operations that fail, unless its logs are on."""
    loggers = [log for name in _LOGGERS if not (log := logging.getLogger(name)).isEnabledFor(logging.DEBUG)]
    with warnings.catch_warnings(), standing_in((log, "disabled", True) for log in loggers):
        warnings.filterwarnings("ignore", message=_ADVICE)
        yield


_AROUND_A_TRACE = _counting, _quiet, _without_logs, _one_step_tells, _as_plain, _inner_leaves, _at_breaks


def traced_again() -> tuple[str, str | None] | None:
    """The condition that failed when Dynamo traced anew last, and its `file:line`; None if unknown. (2.11 to 2.15)"""
    for traced in reversed(torch._dynamo.utils.get_compilation_metrics()):
        if traced.recompile_reason:
            condition, *of = re.split(r"\s+# ", traced.recompile_reason.splitlines()[0].partition(": ")[2])
            place = re.match(r"(\S+):(\d+) in ", of[-1]) if of else None
            if place is None or not str(traced.co_filename).endswith(place.group(1)):
                return condition, None
            return condition, f"{traced.co_filename}:{place.group(2)}"
    return None


@contextmanager
def looking() -> Iterator[None]:
    """Context: Dynamo gives no advice, and what it compiles of new functions is forgotten in the end: no garbage
    collection sees compiled code, which may hold what holds it. (2.11 to 2.15)"""
    from torch._dynamo import convert_frame

    known = convert_frame.input_codes
    found = type(known)()
    try:
        with _quiet(), standing_in([(convert_frame, "input_codes", found)]):
            yield
    finally:
        for code in (held() for held in found.seen):
            if code is not None and code not in known:
                torch._C._dynamo.eval_frame.reset_code(code)


def _listen() -> None:
    """Have Dynamo tell us of traces. `torch.compiler.reset` makes it forget. Hot path."""
    from torch._dynamo.callback import callback_handler

    if _trace_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_trace_begins)


def traces() -> int:
    """How often Dynamo has traced in this thread, as far as it was listened to. Hot path."""
    return _here.traces


def default_device() -> str:
    """The kind of the default device, also in a backend, where torch names the CPU. (2.11 to 2.15)"""
    device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return _here.device or ("cpu" if device is None else str(device.device.type))


def left_untraced() -> None:
    """Something has changed without a trace: who looks for changes in each trace is to look again."""
    _here.traces += 1


def traces_of_others() -> int:
    """How often Dynamo has traced in this thread what the user compiled, as far as it was listened to."""
    _listen()
    return _here.others


class CompiledFunction:
    """A function that `torch.compile` has prepared.

    Args:
        fn: the user's.
        backend: gets each graph. It is not kept alive, though Dynamo keeps all backends.

    Attributes:
        patience: seconds after which a call with a trace begins no further one; 0 where it may begin none.
        given: its arguments in the present call.
        around: gives a context for its traces, called with its arguments.
    """

    def __init__(self, fn: Callable[..., Any], backend: Callable[..., Any]) -> None:
        self.fn, self.patience, self.growing = fn, math.inf, Growing()
        self.given: tuple[Any, ...] = ()
        self.around: Callable[..., Any] = lambda *given: nullcontext()
        self._backend, self._anew = held_weakly(backend), 0
        self._compiled: Callable[..., Any] | None = None  # until the first call: it imports Inductor

    def _compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        code = None if fn is self.fn else getattr(fn, "__code__", None)
        if code is not None:  # of a copy: Dynamo keeps it and its graphs for ever
            weakref.finalize(self, torch._C._dynamo.eval_frame.reset_code, code).atexit = False
        self._compiled = torch.compile(fn, backend=self._backend, **_APART)
        return self._compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Hot path."""
        _listen()
        here, compiled = _here, self._compiled
        if compiled is None:
            quietly(_tell_dynamo)
            compiled = self._compile(copied_function(self.fn))
        here.called.append(self)
        self.given = args, kwargs
        graded = torch.is_grad_enabled()
        try:
            executes(STEP)
            if self.patience:
                return compiled(*args, **kwargs)
            with torch.compiler.set_stance("eager_on_recompile"):
                return compiled(*args, **kwargs)
        except BaseException:
            torch.set_grad_enabled(graded)  # a graph that switches it and raises leaves it switched
            if here.settings is not None and self._anew < _MOST_ANEW:
                self._anew += 1
                self._compile(copied_function(self.fn))
            raise
        finally:
            here.called.pop()
            self.given = ()
            if here.settings is not None and not here.called:
                settings, here.settings = here.settings, None
                settings.close()


class CompiledModule(CompiledFunction):
    """Hooks and forward of modules, with a code object of its own: Dynamo counts traces for each code object.

    It is called with the module, its arguments and its keyword arguments. Inside of DistributedDataParallel its graph
    is not split by buckets, which Dynamo refuses for small ones. (2.11 to 2.15)

    Args:
        backend: see `CompiledFunction`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Hot path."""
        if DistributedDataParallel._active_ddp_module is None:
            return super().__call__(*args, **kwargs)
        with standing_in([(DistributedDataParallel, "_active_ddp_module", None)]):
            return super().__call__(*args, **kwargs)

    def __init__(self, backend: Callable[..., Any]) -> None:
        super().__init__(_traced_call, backend)


call_impl: Callable[..., Any] = private("torch.nn.Module._call_impl")
"""Runs hooks and forward of a module, which is the first argument. (2.11 to 2.15)"""


def _traced_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As `call_impl`: Dynamo begins no trace in files of torch."""
    return module._call_impl(*args, **kwargs)


def call_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What a call of `module` runs instead of its hooks and forward, as `Module.compile` sets it. (2.11 to 2.15)"""
    return module.__dict__.get("_compiled_call_impl")


def set_call_of(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have calls of `module` run `call`; None undoes it. See `call_of`. (2.11 to 2.15)"""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)  # the class has another
    else:
        module.__dict__["_compiled_call_impl"] = call


def compiled_by_user(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made it of another module, or prepared its calls. (2.11 to 2.15)"""
    return isinstance(module, torch._dynamo.OptimizedModule) or call_of(module) is not None
