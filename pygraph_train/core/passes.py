"""Changes of the graphs that Dynamo finds, so that they can be recorded."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import operator
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint, noop_context_fn

from pygraph_train.problems import Problem, first_line, frames_in, is_user_file, user_line_in
from pygraph_train.torch_private.dispatch import FakeTensor, TorchDispatchMode, schema_of
from pygraph_train.torch_private.phases import (
    HigherOrderOperator,
    end_transform,
    set_grad_mode,
    transforms,
)
from pygraph_train.torch_private.stock_dynamo import default_device
from pygraph_train.trees import map_leaves

_TRITON = "triton_kernel_wrapper_mutation"
_CHECKPOINT = "tag_activation_checkpoint"
_EAGER_OPERATORS = {"autograd_function_apply", _TRITON, _CHECKPOINT}
"""Higher-order operators that eager kernels compute as plain training does."""

_OBSTACLES = {"set_", "shallow_copy_data_", "resize_", "resize_as_", "swap_tensors"}
"""What gives a tensor other memory, which a graph would not find."""

_WAIT = {"bincount", "nonzero", "unique", "unique_consecutive", "masked_select", "argwhere"}
"""What makes the host wait for the size of a result."""

_UNORDERED = re.compile(
    r"(index_add|index_reduce|index_select|scatter_add|scatter_reduce|gather|take_along_dim|cumsum|embedding_bag|"
    r"interpolate|upsample\w*|grid_sampl\w*|scaled_dot_product_attention)_?"
)
"""Operations that add in no fixed order on a GPU, forward or backward (`torch.use_deterministic_algorithms`)."""

_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}

_COMMUNICATES = re.compile(r"torch\.(distributed|_ops\._?c10d)|_?c10d")

COMMUNICATES = "other processes take part in an operation of it"

_OF_PARTS = ("to_local", "from_local", "redistribute", "full_tensor")
"""Ends of names of what makes and divides DTensors, with collectives that a graph can hold."""

_CONSTANTS = {"tensor", "as_tensor", "new_tensor"}
"""What sends numbers of Python to a device."""

_TAKE_OF_HOST = {"getitem", "setitem", "copy_"}
_LIKE_ANOTHER = {"to", "type_as"}

_ALIASES = {"detach", "_get_data_attr"}
_GRAD_MODE = "_set_grad_enabled"
_MODES = {_GRAD_MODE, "_enter_autocast", "_sdpa_kernel", "_set_sdp_priority_order"}
_AUTOCAST = {"_enter_autocast": 1, "_exit_autocast": -1}

_WRITING_OPERATORS = {
    "setitem",
    *(f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")),
}


def _checkpointed(
    body: Any, *args: Any, contexts: Any = noop_context_fn, entering: Any = None, **kwargs: Any
) -> Any:
    """torch's own checkpoint: Dynamo's operator leaves random states to AOTAutograd.

    Buffers and parameters are no inputs of it, as in the module that it was: BatchNorm writes the former,
    Embedding(max_norm=...) the latter, and an input must stay.

    Args:
        entering: positions of the inputs of a reentrant one. torch trains nothing within where none needs gradients.
    """
    if entering is not None and not any(getattr(args[i], "requires_grad", False) for i in entering):
        with torch.no_grad():
            return body(*args)
    leads = [i for i, t in enumerate(args) if not isinstance(t, Tensor) or not t.is_leaf]

    def run(*given: Any) -> Any:
        inputs = list(args)
        for i, t in zip(leads, given, strict=True):
            inputs[i] = t
        return body(*inputs)

    given = [args[i] for i in leads]
    sets_back = contexts is noop_context_fn and kwargs.get("preserve_rng_state", True)
    return checkpoint(run, *given, use_reentrant=False, preserve_rng_state=sets_back, context_fn=contexts)


def _checkpointed_draws(body: Any, *args: Any, **kwargs: Any) -> Any:
    """The same of what draws random numbers. They are kept: no recording can set the state of a generator back."""
    return _checkpointed(body, *args, contexts=_drawn_once, **kwargs)


def _drawn_once() -> tuple[_Draws, _Draws]:
    kept: list[Any] = []
    return _Draws(kept, again=False), _Draws(kept, again=True)


class _Draws(TorchDispatchMode):
    """Keeps what operations draw, or has them give that `again`. Others may write it, so each gets a copy."""

    def __init__(self, kept: list[Any], *, again: bool) -> None:
        super().__init__()
        self._kept, self._again, self._position = kept, again, 0

    def __enter__(self) -> _Draws:
        self._position = 0
        super().__enter__()
        return self

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in operation.tags:
            return operation(*args, **given)
        if operation is torch.ops.aten.native_dropout.default and args[2]:
            return self._dropped_out(*args)
        schema = schema_of(operation)
        written = [
            args[i] if i < len(args) else given[a.name]
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if not self._again:
            made = operation(*args, **given)
            self._kept.append(_copied((written, made)))
            return made
        drawn, made = self._kept[self._position]
        self._position += 1
        for tensor, value in zip(written, drawn, strict=True):
            tensor.copy_(value)
        returns_it = any(r.alias_info is not None for r in schema.returns)
        return written[0] if returns_it else _copied(made)

    def _dropped_out(self, x: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
        """The dropout of a device: its mask alone is kept, and the backward's kernel computes the same of it."""
        if not self._again:
            made, mask = torch.ops.aten.native_dropout(x, p, train)
            self._kept.append(mask.clone())
            return made, mask
        mask = self._kept[self._position].clone()
        self._position += 1
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32  # the kernel rounds 1 - p
        scale = float(1 / torch.tensor(1 - p, dtype=dtype, device="cpu"))
        return torch.ops.aten.native_dropout_backward(x, mask, scale), mask


def _rnn_by_layers(
    kind: str, x: Tensor, states: Any, weights: Any, biased: bool, count: int, *options: Any
) -> Any:
    """A recurrent network layer by layer, with torch's own dropout between layers, as on a CPU.

    cuDNN's dropout has a random state of its own, which lies elsewhere after somebody has set a seed: graphs would
    read freed memory. Nor can it be set back, so that two runs could be compared.

    Args:
        kind: the name of torch's function. The others are its arguments.
    """
    p, train, both, batch_first = options
    made, each, wide = [], len(weights) // count, 1 + both
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "RNN module weights")  # those of a layer are copied to one place
        for i in range(count):
            first = map_leaves(operator.itemgetter(slice(i * wide, (i + 1) * wide)), states)
            mine = weights[i * each : (i + 1) * each]
            x, *last = getattr(torch, kind)(x, first, mine, biased, 1, 0.0, train, both, batch_first)
            x = nn.functional.dropout(x, p, train) if i < count - 1 else x
            made.append(last)
    return x, *map(torch.cat, zip(*made, strict=True))


def _draws_masks(given: Sequence[Any]) -> bool:
    """Whether a recurrent network that is called with these drops out. For packed rows, the weights come fourth."""
    return len(given) == 9 and not isinstance(given[3], (list, tuple)) and all(given[5:7])


_copied = functools.partial(map_leaves, lambda value: value.clone() if isinstance(value, Tensor) else value)


def _name(node: Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.rpartition(".")[2] if node.op.startswith("call") else ""


_ATTENTION = "flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp"


def runner(gm: GraphModule) -> Callable[..., Any]:
    """What runs a graph, so that an operation that fails leaves no mode behind.

    Nodes of the graph begin and end `no_grad`, autocast, transforms and the choice of attention's kernels.
    """
    if not any(_name(n) in _MODES or _name(n).endswith("_increment_nesting") for n in gm.graph.nodes):
        return gm.forward
    run, sdp = gm.forward, torch.backends.cuda

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return int(torch.autocast_decrement_nesting())

    def running(*given: Any) -> Any:
        gradients, depth = torch.is_grad_enabled(), nesting()
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        attention = [getattr(sdp, f"{kind}_enabled")() for kind in _ATTENTION]
        layers = transforms()
        try:
            return run(*given)
        except BaseException:
            while transforms() > layers:
                end_transform()
            torch.set_grad_enabled(gradients)
            while nesting() > depth:
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
            for device, enabled, dtype in casts:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            for kind, enabled in zip(_ATTENTION, attention, strict=True):
                getattr(sdp, f"enable_{kind}")(enabled)
            raise

    return running


_OF_PYTHON = {
    "ImportError",
    "ModuleNotFoundError",
    "AttributeError",
    "KeyError",
    "NameError",
    "StopIteration",
}
"""Exceptions that are raised while Dynamo traces, and not by operations."""


def caught(gm: GraphModule) -> str | None:
    """`file:line` of an operation in a `try` of the user's, None without one: what a graph raises passes it by."""
    stacks = {n.meta.get("stack_trace") for n in gm.graph.nodes if n.op.startswith("call")}
    places = {place for stack in stacks for place in frames_in(stack) if is_user_file(place[0])}
    return next((f"{f}:{n}" for f, n in sorted(places) if _may_catch(f, n) and n in _lines_in_try(f)), None)


def _may_catch(file: str, line: int) -> bool:
    """Whether a block of the function that a line is in may catch exceptions, as indentation tells.

    To parse a file of transformers takes a quarter of a second.
    """
    indentation = None
    for text in reversed(linecache.getlines(file)[:line]):
        code = text.lstrip()
        here = len(text) - len(code)
        if code and indentation is None:
            indentation = here
        elif code and indentation is not None and here < indentation:
            if code.startswith(("def ", "async def ", "class ")):
                return False
            if code.startswith("try") or "suppress(" in code or code.rstrip() == "with (":
                return True
            indentation = here
    return True


def _nodes_of(part: nn.Module) -> list[Node]:
    """Those of all graphs in it."""
    return [n for m in part.modules() if isinstance(m, GraphModule) for n in m.graph.nodes]


_BREAK = "Move the line behind the last computation of the loss, or write it with operations of tensors"
_IN_WORDS = {
    "step_unsupported": "the graph breaks: Dynamo leaves the rest of the function to Python, and looks at none of it",
    "generic_jump": "the graph breaks: a branch depends on the value of a tensor",
}


def end_of(gm: GraphModule) -> Problem | None:
    """Why a graph ends before its function does, and the line of the user's code.

    To be asked inside a backend, with the graph that it is given. None where the function ends.
    """
    end = getattr(gm, "compile_subgraph_reason", None)
    if end is None or not end.graph_break:
        return None
    explanation = re.search(r"Explanation: (.*)", end.reason)
    why = (explanation.group(1) if explanation else first_line(Exception(end.reason))).strip().rstrip(".")
    why = _IN_WORDS.get(why.partition(" ")[0], f"the graph breaks: {why}")
    frames = [(frame.filename, frame.lineno) for frame in end.user_stack]
    inner = [frame for frame in frames if is_user_file(frame[0])] or frames
    return Problem(why, "{}:{}".format(*inner[-1]) if inner else None, _BREAK)


def communication(gm: GraphModule) -> str | None:
    """`file:line` of an operation in which other processes take part, "" if no line of the user's, None without one.

    Where they replay nothing, they would wait for each comparison and each capture. And Dynamo changes the gradient: of
    a sum over all processes that is made in place, the summand gets none.
    """
    names = ((n, str(getattr(n.target, "__module__", n.target))) for n in _nodes_of(gm))
    talking = (n for n, name in names if _COMMUNICATES.match(name) and not _name(n).endswith(_OF_PARTS))
    node = next(talking, None)
    return None if node is None else user_line_in(node.meta.get("stack_trace")) or ""


def beyond_eager_kernels(gm: GraphModule) -> tuple[str, str | None]:
    """A higher-order operator that eager kernels do not compute as plain training does, "" without one, and its line.

    A model may ask for it in compiled code alone, and compute something else in plain training.
    """
    for n in _nodes_of(gm):
        if isinstance(n.target, HigherOrderOperator) and (name := n.target.name()) not in _EAGER_OPERATORS:
            return name, user_line_in(n.meta.get("stack_trace")) or ""
    return "", None


def adds_in_any_order(gm: GraphModule) -> bool:
    """Whether runs of a graph on a GPU may differ in their last bits."""
    return any(_UNORDERED.fullmatch(_name(n)) for n in _nodes_of(gm))


def differentiates(gm: GraphModule) -> bool:
    """Whether a graph calls `torch.autograd.grad`."""
    return any(n.target is torch.autograd.grad for n in _nodes_of(gm))


def parts_in(gm: GraphModule) -> list[Any]:
    """The DTensors in a graph."""
    return [value for n in gm.graph.nodes if hasattr(value := value_of(n), "placements")]


def signature(gm: GraphModule) -> int:
    """A number that is the same in all processes that trace the same operations."""
    return zlib.crc32(" ".join(filter(None, map(_name, gm.graph.nodes))).encode())


class Collectives(TorchDispatchMode):
    """Counts operations in which other processes take part, as `sent` of a region."""

    def __init__(self, region: Any) -> None:
        super().__init__()
        self._region = region

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wraps = any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in types)
        if wraps and FakeTensor not in types:
            return NotImplemented  # its operations on plain tensors come back here
        self._region.sent += "c10d" in operation.namespace
        return operation(*args, **(kwargs or {}))


@functools.cache
def _lines_in_try(file: str) -> set[int]:
    """Lines where what operations raise is caught by the function that they are in."""
    found: set[int] = set()

    def look(node: ast.AST, within: bool) -> None:
        function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))
        within = within and not function
        if within and isinstance(node, ast.stmt):
            found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for child in ast.iter_child_nodes(node):
            look(child, within or (_catches(node) and child in node.body))  # type: ignore[attr-defined]

    with contextlib.suppress(SyntaxError):
        look(ast.parse("".join(linecache.getlines(file))), False)
    return found


def _catches(node: ast.AST) -> bool:
    if isinstance(node, ast.With):
        return any("suppress(" in ast.unparse(item) for item in node.items)
    handlers = node.handlers if isinstance(node, ast.Try) else []
    handlers = [h for h in handlers if not _only_raises(h)]
    kinds = [{"all"} if h.type is None else set(re.findall(r"\w+", ast.unparse(h.type))) for h in handlers]
    return any(not kind <= _OF_PYTHON for kind in kinds)


def _only_raises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler does nothing but choose which exception comes out."""
    statements = [n for n in ast.walk(handler) if isinstance(n, ast.stmt)]
    return isinstance(handler.body[-1], ast.Raise) and all(
        isinstance(n, (ast.If, ast.Raise)) for n in statements
    )


def halves(gm: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """The graph without what no recording can hold, and the rest, which takes all inputs and what the first half makes.

    The rest begins with an operation for which the host waits. What is fetched from a device, and what is computed of
    that, is part of it as well. None where nothing is in the way, or where autocast begins or ends in only one of the
    halves.
    """
    fetched = _fetched(gm)
    nodes = list(gm.graph.nodes)
    place = next((i for i, n in enumerate(nodes) if _name(n) in _OBSTACLES | _WAIT), len(nodes) - 1)
    first = [n for n in nodes[:place] if n not in fetched]
    rest = [n for n in nodes[:place] if n in fetched] + nodes[place:]
    if len(rest) == 1 or sum(_AUTOCAST.get(_name(n), 0) for n in first) != 0:
        return None
    sunk = {n for n in first if _name(n) in _ALIASES and all(u in rest for u in n.users)}
    rest = [n for n in first if n in sunk] + rest
    first = [n for n in first if n not in sunk]
    inputs = gm.graph.find_nodes(op="placeholder")
    handed = [n for n in first if n.op.startswith("call") and any(u in rest for u in n.users)]
    modes = [n.args[0] for n in first if _name(n) == _GRAD_MODE]
    off = bool(modes) and modes[-1] is False
    head = _graph_of(gm, inputs, first, handed)
    tail = _graph_of(gm, inputs + handed, rest[:-1], rest[-1].args[0])
    if off:
        begins = next(n for n in tail.graph.nodes if n.op != "placeholder")
        for part, place_of, on in ((head, head.graph.output_node(), True), (tail, begins, False)):
            with part.graph.inserting_before(place_of):
                part.graph.call_function(set_grad_mode, (on,))
            part.recompile()
    return head, tail


def _fetched(gm: GraphModule) -> set[Node]:
    """What is copied from a device to the host, and what is computed of it: none where some of it needs gradients.

    It runs last, and what it is copied from may be written until then: it is copied from a clone without gradients.
    """
    found: dict[Node, None] = {}
    written: list[Any] = []

    def sources(n: Node) -> list[Node]:
        return [x for x in n.all_input_nodes if _tensors(x)]

    while True:  # what is written in the end is made there as well
        before = len(found)
        for n in gm.graph.nodes:
            given = sources(n)
            fetches = is_on_host(n) and not all(map(is_on_host, given))
            follows = any(x in found for x in given) or _lie_in([n, *given], written)
            if n.op.startswith("call") and n not in found and (follows or fetches):
                found[n] = None
                written += _written_storages(n)
        if len(found) == before:
            break
    drawing = {n for n in gm.graph.nodes if _draws_on_host(n)}
    in_order = drawing <= found.keys() or drawing.isdisjoint(found)
    if not in_order or any(t.requires_grad for n in found for t in _tensors(n)):
        return set()
    for n in found:
        for x in [x for x in sources(n) if x not in found and not is_on_host(x)]:
            kept = x
            for operation in ("detach", "clone"):
                with gm.graph.inserting_before(n):
                    kept = gm.graph.call_method(operation, (kept,))
                kept.meta["example_value"] = value_of(x).detach()
            n.replace_input_with(x, kept)
    return set(found)


class HostPart:
    """What the host computes of a graph on a device: random numbers that it draws, and batches that it sends there.

    No graph of the device would do it again, so it runs in front of the rest, which takes what it makes.

    Args:
        gm: the graph.

    Attributes:
        rest: the graph without that part.
        any: whether there is such a part.
    """

    def __init__(self, gm: GraphModule) -> None:
        _send_constants(gm)
        nodes, front = list(gm.graph.nodes), dict[Node, None]()
        alone, written = _computed_alone(nodes[:-1])
        for n in nodes[:-1]:
            given = n.all_input_nodes
            if not n.op.startswith("call") or not alone.issuperset(given):
                continue
            sent = n not in alone and (any(map(is_on_host, given)) or _name(n) in _CONSTANTS)
            follows = any(
                x in front or (x.op == "placeholder" and is_on_host(x) and value_of(x).dim()) for x in given
            )
            acts = _draws_on_host(n) or _lie_in([n, *given], written)
            own = n in alone and bool(_tensors(n)) and (follows or acts or n in nodes[-1].all_input_nodes)
            if sent or own or (n in alone and _written_storages(n)):
                front[n] = None
        in_order = all(n in alone for n in nodes if _draws_on_host(n))
        self.any = bool(front) and in_order
        if not self.any:
            return
        results, needed = list(nodes[-1].args[0]), set(front)
        for n in reversed(nodes):
            needed |= set(n.all_input_nodes) if n in needed else set()
        live = {nodes[-1]}
        for n in reversed(nodes[:-1]):  # a number that nobody uses would be a constant of a recording
            pure = n in alone and n.op.startswith("call") and value_of(n) is not None
            if n not in front and (not pure or not live.isdisjoint(n.users)):
                live.add(n)
        inputs, body = gm.graph.find_nodes(op="placeholder"), [n for n in nodes[:-1] if n in live]
        handed = [n for n in front if any(u not in front for u in n.users)]
        crossing = [n for n in handed if any(u in live and u is not nodes[-1] for u in n.users)]
        kept = [n for n in inputs if n not in alone or not live.isdisjoint(n.users)]
        self._front = runner(_graph_of(gm, inputs, [n for n in nodes if n in needed], handed))
        self._kept = [inputs.index(n) for n in kept]
        self._crossing = [handed.index(n) for n in crossing]
        self._results = [handed.index(n) if n in front else None for n in results]
        self._examples = [value_of(n) for n in crossing]
        varies = any(n.op == "placeholder" or _draws_on_host(n) for n in needed) or handed != crossing
        self._stays = not (varies or _may_change(crossing, body, results))
        self._made: Sequence[Any] | None = None
        self.rest = _graph_of(gm, kept + crossing, body, [n for n in results if n not in front])

    def examples(self, given: Sequence[Any]) -> list[Any]:
        """What the rest is traced with, where the graph is traced with these."""
        return [*(given[i] for i in self._kept), *self._examples]

    def around(self, rest: Callable[..., Any]) -> Callable[..., Any]:
        """The whole graph, of which this computes the rest."""

        def whole(*given: Any) -> Any:
            handed = self._front(*given) if self._made is None else self._made
            if self._stays and not torch.is_inference_mode_enabled():
                self._made = handed  # to send it makes the host wait for the device
            made = iter(rest(*(given[i] for i in self._kept), *(handed[i] for i in self._crossing)))
            return tuple(next(made) if i is None else handed[i] for i in self._results)

        return whole


def _may_change(made: Sequence[Node], body: Sequence[Node], results: Sequence[Any]) -> bool:
    """Whether operations may write what was made before, or a result hands it on."""
    inner = [x for n in body if isinstance(n.target, HigherOrderOperator) for x in n.all_input_nodes]
    touched = [s for n in body for s in _written_storages(n)] + _storages([*results, *inner])
    return _lie_in(made, touched)


def _send_constants(gm: GraphModule) -> None:
    """Let operations of their own send to the device what others would send: indices, and what is copied there."""
    for n in gm.graph.nodes:
        name, (first, second) = _name(n), (*n.args, None, None)[:2]
        if name in _CONSTANTS and _is_on_device(n):
            _make_there(n)
        elif name in _LIKE_ANOTHER and _is_on_device(second):
            like = value_of(second)
            n.op, n.target, n.args = "call_method", "to", (first, like.device, like.dtype, *n.args[2:])
        elif name in _TAKE_OF_HOST and _is_on_device(first):
            n.args = (first, *(_sent(gm, x, n, value_of(first)) for x in n.args[1:]))
            indices = [t for x in n.all_input_nodes if x is not first for t in _tensors(x)]
            if (
                name == "setitem"
                and not (isinstance(n.args[2], Node) and _tensors(n.args[2]))
                and any(t.dtype != torch.bool for t in indices)
            ):
                with gm.graph.inserting_before(n):  # torch would make it on the host
                    number = gm.graph.call_function(torch.tensor, (n.args[2],))
                number.meta["example_value"] = value_of(first).new_empty((), requires_grad=False)
                _make_there(number)
                n.args = (*n.args[:2], number)
    gm.recompile()


def _is_on_device(node: Any) -> bool:
    """Whether it computes a tensor on the device, which is not a part of one."""
    value = value_of(node) if isinstance(node, Node) else None
    return isinstance(value, Tensor) and not hasattr(value, "placements") and not is_on_host(node)


def _make_there(node: Node) -> None:
    """Let what makes a tensor of numbers ask for no other tensor. A number that stays is filled in on the device."""
    of_tensor = _name(node) == "new_tensor"
    if any(_tensors(x) for x in node.all_input_nodes if not of_tensor or x is not node.args[0]):
        return  # it may be a view of another tensor
    data = node.kwargs["data"] if "data" in node.kwargs else node.args[of_tensor]
    one, value = isinstance(data, (int, float, complex)), value_of(node)
    device = None if value.is_cpu else value.device
    node.op, node.target = "call_function", torch.full if one else torch.tensor
    node.args = ((), data) if one else (data,)
    node.kwargs = {"dtype": value.dtype, "device": device, "requires_grad": value.requires_grad}


def _sent(gm: GraphModule, given: Any, to: Node, into: Tensor) -> Any:
    """An index or a value that an operation on a tensor takes, on the device of that tensor."""
    call: tuple[Any, ...]
    if isinstance(given, tuple):
        return tuple(_sent(gm, x, to, into) for x in given)
    if isinstance(given, list) and given and all(type(i) is int for i in given):
        call = "call_function", torch.tensor, (given,), {"device": into.device}
        example = into.new_empty(len(given), dtype=torch.int64, requires_grad=False)
    elif isinstance(given, Node) and is_on_host(given) and _tensors(given)[0].dim():
        call = "call_method", "to", (given, into.device), {}
        example = value_of(given).to(into.device)
    else:
        return given
    with gm.graph.inserting_before(to):
        made = gm.graph.create_node(*call)
    made.meta["example_value"] = example
    return made


def _computed_alone(nodes: Sequence[Node]) -> tuple[set[Node], list[Any]]:
    """What the host computes alone, and the storages that it writes there.

    No tensor of a device leads to it, and nothing but the host alone writes what it reads, or reads what it writes.
    """
    shared: list[Any] = []
    while True:
        alone, written, others = set[Node](), list[Any](), list[Any]()
        for n in nodes:
            tensors = _tensors(n)
            here = not any(t.requires_grad for t in tensors) and not _lie_in([n], shared)
            here = here and (not tensors or is_on_host(n))
            if here and alone.issuperset(n.all_input_nodes):
                alone.add(n)
            if n.op.startswith("call") and (storages := _written_storages(n)):
                (written if n in alone else others).extend(storages)
        readers = [n for n in nodes if not alone.issuperset(n.all_input_nodes)]
        others += [
            s for n in readers for x in n.all_input_nodes if _lie_in([x], written) for s in _storages([x])
        ]
        if all(any(s is x for x in shared) for s in others):
            return alone, written
        shared += others


def _tensors(node: Node) -> list[Tensor]:
    value = value_of(node)
    return [t for t in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(t, Tensor)]


def _storages(nodes: Sequence[Any]) -> list[Any]:
    """Where the tensors that nodes compute lie."""
    made = [t for n in nodes if isinstance(n, Node) for t in _tensors(n)]
    return [t.untyped_storage() for t in made if t.layout is torch.strided]


def _lie_in(nodes: Sequence[Node], storages: Sequence[Any]) -> bool:
    return bool(storages) and any(s is x for s in _storages(nodes) for x in storages)


def value_of(node: Node) -> Any:
    """The fake tensor, or the number, that stands for what a node computes."""
    return node.meta.get("example_value")


def is_on_host(node: Node) -> bool:
    """Whether it computes tensors in memory of the host.

    Dynamo of torch 2.11 does not ask for the default device: what is made without a device is on another one.
    """
    tensors = _tensors(node)
    if not tensors or not all(t.is_cpu for t in tensors):
        return False
    if not node.op.startswith("call") or default_device() == "cpu":
        return True
    if "pygraph_on_host" not in node.meta:
        given = [n for n in node.all_input_nodes if _tensors(n)]
        there = [n for n in given if all(t.is_cpu for t in _tensors(n))]
        node.meta["pygraph_on_host"] = all(map(is_on_host, there)) if given else "device" in node.kwargs
    return bool(node.meta["pygraph_on_host"])


def _graph_of(
    gm: GraphModule, inputs: Sequence[Node], body: Sequence[Node], outputs: Sequence[Any]
) -> GraphModule:
    """A graph of some nodes of another one."""
    made, copy = Graph(), dict[Node, Node]()
    for n in inputs:
        copy[n] = made.placeholder(n.name)
        # "grapharg" refers to the tensor, and swap_tensors refuses a tensor that somebody refers to
        copy[n].meta = {key: value for key, value in n.meta.items() if key != "grapharg"}
    for n in body:
        if n.op != "placeholder":
            copy[n] = made.node_copy(n, copy.__getitem__)
    made.output(tuple(copy[n] if isinstance(n, Node) else n for n in outputs))
    return GraphModule(gm, made)


def prepared(gm: GraphModule, device: str, *, eager: bool) -> tuple[GraphModule, str | None]:
    """The graph with its higher-order operators made fit for eager kernels, and the reason why it stays plain.

    The operators of a graph that stays plain are made fit as well: that of a checkpoint draws other random numbers in
    the backward than in the forward. AOTAutograd (not `eager`) knows the operators as they are.
    """
    why = None if communication(gm) is None else COMMUNICATES
    nodes = _nodes_of(gm)
    if device != "cpu" and any(map(_draws_on_host, nodes)):
        why = why or "it draws random numbers on the host"  # a replay would not
    changed = {gm} if _read_random_numbers(gm) else set[GraphModule]()
    parts = [m for m in gm.modules() if isinstance(m, GraphModule)]  # checkpoints may lie in others
    for part, node in [(m, node) for m in parts for node in m.graph.nodes]:
        target = node.target
        if (name := _name(node)) in _OBSTACLES:
            why = why or f"it gives a tensor other memory ({name})"
        elif eager and name == "_saved_tensors_hooks_disable":  # a recording has hooks
            why = why or "eager kernels cannot compute derivatives of torch.func in a graph"
        if not eager or node.op != "call_function":
            continue
        if name in _RECURRENT and _draws_masks(node.args):
            node.target, node.args = _rnn_by_layers, (name, *node.args)
            changed.add(part)
        if isinstance(target, HigherOrderOperator) and target.name() == _CHECKPOINT:
            keeps = node.kwargs.get("preserve_rng_state", True)
            draws = keeps and _draws(part.get_submodule(node.args[0].target))
            node.target = _checkpointed_draws if draws else _checkpointed
            if node.kwargs.get("use_reentrant"):
                inputs = [value_of(a) if isinstance(a, Node) else a for a in node.args[1:]]
                own = [i for i, t in enumerate(inputs) if not isinstance(t, nn.Parameter)]
                node.kwargs = {**node.kwargs, "entering": own}
            changed.add(part)
    for part in changed:
        part.recompile()
    return gm, why


def written_inputs(gm: GraphModule) -> set[str]:
    """Names of inputs that a graph writes in place. Of writes through `.data` no version tells."""
    written = [s for n in gm.graph.nodes for s in _written_storages(n)]
    return {n.name for n in gm.graph.find_nodes(op="placeholder") if _lie_in([n], written)}


def _written_storages(node: Node) -> list[Any]:
    """Where an operation writes in place."""
    if not _writes(node):
        return []
    named: dict[str, Any] = node.kwargs
    if _name(node) == _TRITON:  # it may write each of them
        return _storages(list(named["kwargs"].values()))
    target = named["out"] if "out" in named else node.args[0]
    return _storages(target if isinstance(target, (list, tuple)) else [target])


def _writes(node: Node) -> bool:
    name = _name(node)
    in_place = name.endswith("_") and not name.endswith("__")
    writes = "out" in node.kwargs or name == _TRITON
    return writes or (bool(node.args) and (in_place or name in _WRITING_OPERATORS))


def _read_random_numbers(gm: GraphModule) -> bool:
    """Let floats that Python's `random` draws be numbers: Dynamo hands them over as tensors of float64."""
    drawn = gm.graph.find_nodes(op="placeholder")
    drawn = [n for n in drawn if str(n.target).startswith("random_value_") and n.users]
    for node in drawn:
        if node.meta["example_value"].is_floating_point():
            with gm.graph.inserting_after(node):
                number = gm.graph.call_method("item", (node,))
            node.replace_all_uses_with(number, lambda user, number=number: user is not number)
    return bool(drawn)


_DRAWING = re.compile(
    "drop|rand|bernoulli|normal|uniform|nomial|poisson|exponential|cauchy|geometric|rnn|lstm|gru"
)


def _draws_on_host(node: Node) -> bool:
    return bool(_name(node)) and is_on_host(node) and bool(_DRAWING.search(str(node.target)))


def _draws(body: nn.Module) -> bool:
    """Whether a part of a step may draw random numbers."""
    called = [n for n in _nodes_of(body) if _name(n)]
    attention = [n for n in called if "attention" in str(n.target)]
    return (
        any(isinstance(m, nn.Dropout) and m.p for m in body.modules())
        or any(_DRAWING.search(str(n.target)) for n in called)
        or any(n.kwargs.get("dropout_p") or any(n.args[4:5]) for n in attention)
    )
