"""What Dynamo made: cache entries, guards, side effects, compiled calls."""

from __future__ import annotations

import functools
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pygraph_train.torch_private.names import DYNAMO, FakeTensor, lacking, private

__all__ = [
    "CHECKPOINT",
    "CUSTOM_FUNCTION",
    "assign_data",
    "compiled_apart",
    "compiled_call",
    "compiled_calls",
    "dynamo_asked_whether_compiling",
    "dynamo_cache_entries",
    "dynamo_error_place",
    "dynamo_failure",
    "dynamo_refusal",
    "dynamo_restart",
    "end_trace_here",
    "example_of",
    "forget_compiled",
    "forgetting_values",
    "have_code",
    "hold_constant",
    "is_optimized_module",
    "leave_to_python",
    "module_of_copy",
    "placeholder_source",
    "placeholder_value",
    "raised_while_tracing",
    "raising_node",
    "set_compiled_call",
    "start_untraced",
    "through_dynamo",
    "tracing_notes",
    "uncompiled_call",
    "untraced",
    "without_grad_mode",
    "without_second_wrapper",
    "writes_to_inputs",
]


def dynamo_cache_entries(code: types.CodeType) -> list[Any]:
    """Compiled variants of a frame, each with `.guard_manager` (tried on torch 2.11, 2.13)."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def through_dynamo(
    function: Callable[..., Any], backend: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """`torch.compile` with these options."""
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **options)
    return compiled


def compiled_apart(function: Any, backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A copy of a function through Dynamo, with a code object of its own: Dynamo's caches belong to these.

    What is compiled is freed with the copy. (2.11, 2.13)

    Args:
        function: of Python, without a closure and without defaults.
        backend, options: of `torch.compile`.
    """
    fresh = types.FunctionType(function.__code__.replace(), function.__globals__)
    compiled = through_dynamo(fresh, backend, **options)
    weakref.finalize(compiled, forget_compiled, fresh.__code__).atexit = False
    return compiled


def forget_compiled(code: types.CodeType) -> None:
    """Free the compiled variants of a code object. Its garbage collection does not see them: where they hold what
    holds it, nothing is ever freed. (2.11, 2.13)"""
    torch._C._dynamo.eval_frame.reset_code(code)


def tracing_notes(graph: torch.fx.GraphModule) -> list[tuple[Any, str]]:
    """Where the compilation of a frame keeps weak references to real tensors: (owner, attribute).

    To be called inside a backend with the graph it is given. (2.11, 2.13)
    """
    context = torch._guards.TracingContext.try_get()
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    modes: list[Any] = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    found: list[tuple[Any, str]] = []
    if context is not None:
        found.append((context, "tensor_to_context"))
        modes.append(context.fake_mode)
    for mode in {id(m): m for m in modes if m is not None}.values():
        found.append((mode.fake_tensor_converter.meta_converter.describer, "lookup_tensor"))
    return found


def dynamo_error_place(error: BaseException) -> str | None:
    """`file:line` of the user's code that Dynamo was tracing when it raised this, if it says so (torch 2.11, 2.13)."""
    frame = getattr(error, "innermost_user_frame_summary", None)
    return None if frame is None else f"{frame.filename}:{frame.lineno}"


def dynamo_asked_whether_compiling() -> bool:
    """Whether the frame being compiled has asked `torch.compiler.is_compiling()` or the like, which is False
    without Dynamo; call inside a backend (torch 2.11, 2.13)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().inconsistent_side_effects)


def placeholder_source(node: torch.fx.Node) -> str | None:
    """Python expression over the frame's locals `L` that a graph input was read from (torch 2.11, 2.13)."""
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def placeholder_value(node: torch.fx.Node) -> object:
    """The real tensor, or the number, that a graph input has in the call that is traced (torch 2.11, 2.13)."""
    return getattr(node.meta.get("grapharg"), "example", None)


def example_of(value: Any) -> Any:
    """What a node of a graph is like, where Dynamo has computed that; another value itself. (torch 2.11, 2.13)"""
    return value.meta.get("example_value") if isinstance(value, torch.fx.Node) else value


@contextmanager
def forgetting_values(graphs: Iterable[torch.fx.GraphModule]) -> Iterator[None]:
    """Context after which copies of a graph of Dynamo's do not know any more what `placeholder_value` returns.

    They hold weak references, and `swap_tensors` refuses tensors with such. Dynamo lets its own graph forget them.
    (torch 2.11, 2.13)
    """
    try:
        yield
    finally:
        for graph in graphs:
            for node in graph.graph.find_nodes(op="placeholder"):
                node.meta.pop("grapharg", None)


def hold_constant(graph: torch.fx.GraphModule, name: str, value: torch.Tensor) -> None:
    """Give a graph of Dynamo's a buffer. AOTAutograd asks for the origin of each (torch 2.11, 2.13)."""
    from torch._dynamo.source import ConstantSource

    graph.register_buffer(name, value)
    origins = getattr(graph, "_param_name_to_source", None)
    if origins is not None:
        origins[name] = ConstantSource(name)


def module_of_copy(
    graph: torch.fx.GraphModule, copied: torch.fx.Graph, nodes: dict[torch.fx.Node, torch.fx.Node]
) -> torch.fx.GraphModule:
    """A module of a copy of a graph of Dynamo's. AOTAutograd learns from it where parameters and inputs are from.

    (torch 2.11, 2.13)

    Args:
        nodes: the copy of each node.
    """
    made = torch.fx.GraphModule(graph, copied)
    made.meta.update(graph.meta)
    for node, copy in nodes.items():
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    origins = getattr(graph, "_param_name_to_source", None)
    if origins is not None:
        made._param_name_to_source = origins  # type: ignore[assignment]
    return made


def raising_node(error: BaseException) -> torch.fx.Node | None:
    """The operation of a traced graph in which an exception was raised; None where no traced graph ran. (2.11, 2.13)

    The code of a graph is generated, and the graph knows which of its lines belongs to which operation.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.fx.GraphModule) and frame.f_code.co_filename.startswith(
            "<eval_with_key>"
        ):
            index = (getattr(module, "_lineno_map", None) or {}).get(line - frame.f_code.co_firstlineno)
            nodes = list(module.graph.nodes)
            return nodes[index] if index is not None and index < len(nodes) else None
    return None


def have_code(graph: torch.fx.GraphModule) -> None:
    """Let `graph.forward` be the code of a graph of Dynamo's, and not what makes this code in the first call.

    That goes through `Module.__call__` in each call, and where the code raises it prints a part of it and takes the
    frames off the exception. (2.11, 2.13)
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    _LazyGraphModule.force_recompile(graph)


def writes_to_inputs(graph: torch.fx.GraphModule) -> list[tuple[torch.fx.Node, torch.fx.Node, bool]]:
    """What a graph of Dynamo does to its inputs: (operation, input, whether it gets other memory). (2.11, 2.13)

    `x.data = y` is `torch.Tensor.set_` there. `x.data` is an operation whose result shares the memory of `x`, and
    counts the changes in place on its own. For these the operation is the first one that may be meant.
    """
    found = []
    for node in graph.graph.nodes:
        if node.target is torch.Tensor.set_:
            found.append((node, node.args[0], True))
            continue
        value = node.meta.get("example_value")
        is_data = node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor) and (node.op == "placeholder" or is_data) and value._version > 0:
            users = [u for u in node.users if str(getattr(u.target, "__name__", u.target)).endswith("_")]
            found.append((next(iter(users or node.users), node), node.args[0] if is_data else node, False))
    return [(node, source, rebinds) for node, source, rebinds in found if source.op == "placeholder"]


def assign_data(graph: torch.fx.Graph) -> bool:
    """Let `x.data = y` in a graph of Dynamo be just that, and return whether there are any. (2.11, 2.13)

    Dynamo makes `set_` of it, and corrects the count of changes. `set_` also gives a leaf another node that adds to its
    gradient, and hooks on the node before it are lost.
    """
    found = [node for node in graph.nodes if node.target is torch.Tensor.set_ and len(node.args) == 2]
    for node in found:
        node.target = _assign_data
        for user in list(node.users):
            if getattr(user.target, "__name__", "") == "_lower_version_count_by_1":
                graph.erase_node(user)
    return bool(found)


def _assign_data(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    tensor.data = value
    return tensor


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What a call of `module` runs instead of its hooks and forward, as `Module.compile` sets it. (2.11, 2.13)"""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have calls of `module` run `call`; None undoes it. (2.11, 2.13)"""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)  # the class has None
    else:
        module.__dict__["_compiled_call_impl"] = call


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's hooks and forward, as they run without a `compiled_call`. (2.11, 2.13)"""
    return module._call_impl


CHECKPOINT: Any = private("torch.ops.higher_order.tag_activation_checkpoint")
"""What Dynamo makes of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` and the like. (2.11, 2.13)"""


CUSTOM_FUNCTION: Any = private("torch.ops.higher_order.autograd_function_apply")
"""What Dynamo makes of `autograd.Function.apply`. Its second argument is the graph of the backward. (2.11, 2.13)"""


def without_grad_mode(backward: torch.fx.GraphModule) -> bool:
    """Let the backward of a custom function be differentiated itself, and return whether that changed anything.

    Dynamo switches gradients off at the start of its graph and on at the end. Autograd has them on where somebody
    differentiates the backward (create_graph=True), and off otherwise. (2.11, 2.13)
    """
    operations = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")]
    switches = [node for node in operations if node.target is torch._C._set_grad_enabled]
    if [node.args for node in switches] != [(False,), (True,)] or switches != [operations[0], operations[-1]]:
        return False
    for node in switches:
        backward.graph.erase_node(node)
    backward.recompile()
    return True


def raised_while_tracing(error: BaseException) -> bool:
    """Whether Dynamo raised this before anything of what it traced was executed. (2.11, 2.13)"""
    import torch._dynamo.convert_frame as convert_frame

    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # the frames of Dynamo are cut out of it
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == convert_frame.__file__ for frame, _ in frames)


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(fn: _F) -> _F:
    """`fn`, so that Dynamo traces neither it nor what it calls: autograd calls it from traced frames.

    `torch.compiler.disable` does the same, and takes the host longer. (2.11, 2.13)
    """

    @functools.wraps(fn)
    def outside(*args: Any) -> Any:
        before = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return fn(*args)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    if "torch._dynamo" in sys.modules and lacking(DYNAMO) is None:
        torch._dynamo.eval_frame.skip_code(_code(outside))
    return outside  # type: ignore[return-value]


def without_second_wrapper(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What a compiler returned, for somebody who is called where Dynamo is off already. (2.11, 2.13)"""
    from torch._dynamo.eval_frame import innermost_fn

    return innermost_fn(compiled)  # type: ignore[no-any-return]


def _code(fn: Any) -> types.CodeType:
    return fn.__code__  # type: ignore[no-any-return]


@functools.cache
def start_untraced() -> None:
    """Before anything is compiled: what was made by `untraced` without Dynamo, whose import takes a second."""
    import torch._dynamo.eval_frame as eval_frame

    eval_frame.skip_code(_code(untraced(_code)))  # they have their code in common


def leave_to_python(method: Callable[..., Any]) -> None:
    """Dynamo traces neither a function, where Python calls it, nor what it calls. (2.11, 2.13)"""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    set_code_exec_strategy(_code(method), FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def end_trace_here() -> None:
    """Where Dynamo traces the caller: end its graph before the call."""
    torch._dynamo.graph_break(msg="a graphed step is called inside of another one")


def dynamo_refusal() -> type[BaseException]:
    """What Dynamo raises where it cannot trace a function as one graph (torch 2.11, 2.13)."""
    return torch._dynamo.exc.Unsupported


def dynamo_failure() -> type[BaseException]:
    """What all errors of Dynamo's own are (torch 2.11, 2.13)."""
    return torch._dynamo.exc.TorchDynamoException


def is_optimized_module(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` made it of another module (torch 2.11, 2.13)."""
    return isinstance(module, torch._dynamo.OptimizedModule)


@contextmanager
def compiled_calls(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` where this thread calls what `torch.compile` has made inside. (2.11, 2.13)"""
    module, thread = sys.modules.get("torch._dynamo.eval_frame"), threading.get_ident()
    stock = getattr(module, "_callback_from_stance", None)
    if module is None or stock is None:
        yield
        return

    def looked_at(callback: Any) -> Any:
        if callable(callback) and threading.get_ident() == thread:  # it is None where Dynamo is disabled
            look()
        return stock(callback)

    module.__dict__["_callback_from_stance"] = looked_at
    try:
        yield
    finally:
        module.__dict__["_callback_from_stance"] = stock


def dynamo_restart() -> type[BaseException]:
    """What a compile backend lets pass so that Dynamo traces again with what was learned (torch 2.11, 2.13)."""
    return torch._dynamo.exc.RestartAnalysis
