"""Sentences for what Dynamo says: why a step is not one graph, where, and what to do."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from typing import Any

import torch

from pygraph_train.problems import Problem, first_line, is_user_file, user_line_in
from pygraph_train.torch_private.dynamo import dynamo_error_place, dynamo_failure
from pygraph_train.tracing.losses_on_host import of_ctc_loss, of_switches

__all__ = [
    "RAISES",
    "compiler_failed",
    "first_use",
    "forget_frames",
    "innermost",
    "is_of_tensor",
    "line_of",
    "of_step_by_hand",
    "problem_of_break",
    "problem_of_guard",
    "read_on_host",
    "readable",
    "shape_of_values",
    "text_of_tensor",
]


_OF_TENSORS = ("TensorVariable", "SymNodeVariable", "StringFormatVariable")
"""What Dynamo calls tensors, numbers that are read from them, and texts that are made of either."""

_AS_IT_IS = "Leave this call out of the step, or let the step run without one graph"
_LEAVE_OUT = "pygraph-train makes the backward and the update"
_LOSS_ONLY = (
    "Return the loss. GraphedStep calls backward, step and zero_grad, or leaves them to the function with "
    "manual_optimization=True. In an Accelerate loop, decorate the function with accelerator.graphed_step"
)

RAISES = "Dynamo says that it raises"

READ_LATER = "Return the tensor from the step"
"""How a fix begins for a value that is read where no graph can be."""

CHANGE_RARELY = (
    "Change modules, shapes, frozen layers, hooks and switches of torch rarely: the step is traced again "
    "after each change"
)
DYNAMO_OFF = "Unset TORCHDYNAMO_DISABLE, and remove torch.compiler.disable decorators from the step"


def of_step_by_hand(problem: Problem) -> Problem:
    """The same problem, where the function makes its backwards and updates itself."""
    if not problem.reason.endswith(_LEAVE_OUT):
        return problem
    return Problem(
        problem.reason.removesuffix(f". {_LEAVE_OUT}") + " that pygraph-train does not know",
        problem.where,
        "Call backward() of the loss itself, and give pygraph-train every optimizer that the step uses",
    )


def problem_of_break(error: BaseException) -> Problem:
    stack = getattr(error, "real_stack", None)
    message = str(error)
    if (switched := of_switches(message, innermost(stack))) is not None:
        return switched
    shaped = re.search(r"Operator `aten\.(\w+).*`'s output shape depends on input Tensor data", message)
    if shaped is not None:
        where = innermost(stack)
        return of_ctc_loss(where) if shaped[1] == "_ctc_loss" else shape_of_values(where)
    builtin = re.search(r"how to trace the builtin `(?:<unknown module>\.)?([^`]+?)\.?`", message)
    if (builtin is not None and builtin[1].startswith("Random.")) or "Python's random module" in message:
        return Problem(
            "the step draws random numbers in Python, and a replay would repeat the numbers of the capture",
            innermost(stack),
            "Draw the numbers with torch, or before the step",
        )
    if builtin is not None:
        return Problem(
            f"the step is not one graph: it calls {builtin[1]}, which Dynamo does not trace",
            innermost(stack),
            "Call it outside of the step",
        )
    told = re.search(r"debug context: builtin (print|str|repr|format) (\[.*\])", message)
    if told is not None and any(kind in told[2] for kind in _OF_TENSORS):
        return Problem(
            f"the step is not one graph: {told[1]}() reads the value of a tensor on the host",
            innermost(stack),
            f"{READ_LATER}, and call {told[1]}() after the step",
        )
    if told is not None:
        return Problem(
            f"the step is not one graph: it calls {told[1]}(), and a replay runs no Python",
            innermost(stack),
            "Call it outside of the step",
        )
    if _makes_text(error):
        return text_of_tensor(innermost(stack) or user_line_in(message))
    if "builtin mod [<class 'torch._dynamo.variables.constant.ConstantVariable'>" in message or (
        "unsupported operand type(s) for %: 'str' and 'tuple'" in message
    ):
        return Problem(
            "the step is not one graph: it formats a text with %, and Dynamo does not know the values in the text",
            innermost(stack),
            f"{READ_LATER}, and make the text after the step",
        )
    if "`pack_padded_sequence`" in message or "`pad_packed_sequence`" in message:
        return _packed(innermost(stack))
    if _computes_with_number(error):
        return _number_on_device(innermost(stack), stack)
    if "`Tensor.numpy()` was called" in message:
        return Problem(
            "the step is not one graph: Tensor.numpy() reads the values of a tensor on the host",
            innermost(stack),
            "Keep the values in a tensor, or call numpy() after the step",
        )
    if "Data-dependent branching" in message:
        return _number_on_device(innermost(stack), stack)
    if "tracing `tolist()`" in message:
        return read_on_host(innermost(stack))
    untraced = re.search(r"'a graph cannot hold ([^']+)'", message)  # of a stand-in
    if untraced is not None:
        return Problem(f"the step is not one graph: it calls {untraced[1]}", innermost(stack), _AS_IT_IS)
    if "Observed exception" in message:
        raised = re.search(r"raised exception (\w+)", message)
        return Problem(
            f"the step is not one graph: {RAISES} {raised[1] if raised else 'an exception'}",
            innermost(stack),
            "If the step raises nothing without pygraph_train, Dynamo does not know the function that this line "
            "calls: call the function outside of the step",
        )
    if "(Generator)" in message and "as_proxy" in message:
        return Problem(
            "the step is not one graph: it draws random numbers from its own torch.Generator, and Dynamo does "
            "not trace this",
            innermost(stack),
            "Draw the numbers before the step, or from the default generator",
        )
    files = [frame.filename for frame in stack or ()]
    last = files[-1] if files else ""
    of_autograd = last == torch.autograd.__file__ or "the function `backward` in file" in message
    if "tracing `Tensor.backward()`" in message or of_autograd:
        return Problem(
            f"the step is not one graph: it calls backward(). {_LEAVE_OUT}", innermost(stack), _LOSS_ONLY
        )
    if "Optimizer.zero_grad" in message or last == inspect.getfile(torch.optim.Optimizer):
        return Problem(
            f"the step is not one graph: it calls step() or zero_grad() of an optimizer. {_LEAVE_OUT}",
            innermost(stack),
            _LOSS_ONLY,
        )
    if "User-inserted graph break" in message:
        return Problem(
            "the step is not one graph: it calls torch._dynamo.graph_break(), directly or in another function",
            innermost(stack),
            "Remove the call of graph_break(), or move it out of the step",
        )
    if any(f"torch{os.sep}_functorch{os.sep}" in file for file in files):
        return Problem(
            "the step is not one graph: it calls a transform of torch.func (vmap, grad, ...), and Dynamo does "
            "not trace it here",
            innermost(stack),
            "Call the transform outside of the step, or compute the result without torch.func",
        )
    if "SymNodeVariable" in message:  # a number that was read from a tensor
        return Problem(
            "the value of a tensor is read on the host (.item(), float(), int()), and Python uses the number here",
            innermost(stack),
            f"{READ_LATER}, and use its value after the step",
        )
    explanation = _told("Explanation", message)
    if explanation in ("", "Currently not supported"):  # which says nothing
        explanation = first_line(error)
    where = innermost(stack) or user_line_in(message)
    return Problem(f"the step is not one graph: {explanation.rstrip('.')}", where, _told("Hint", message))


def _told(name: str, message: str) -> str:
    """What Dynamo says under a name; an empty text where it says nothing."""
    lines = [line.strip() for line in message.splitlines()]
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), "")


def read_on_host(where: str | None) -> Problem:
    """Python asks for the value of a tensor."""
    return Problem(
        "the value of a tensor is read on the host (.item(), .tolist(), float(), int() or bool()), and this "
        "waits for the device",
        where,
        "Keep the value in a tensor, or read it after the step",
    )


def text_of_tensor(where: str | None) -> Problem:
    """A tensor goes into a text: an f-string, `format`, `%`."""
    return Problem(
        "the step is not one graph: it puts a tensor into a text, and this reads the tensor's values on the "
        "host",
        where,
        f"{READ_LATER}, and make the text after the step",
    )


def shape_of_values(where: str | None) -> Problem:
    """An operation makes a tensor whose shape only its values tell."""
    return Problem(
        "the shape of a tensor depends on the values of another tensor (a boolean mask as index, nonzero(), "
        "unique()), and the shapes in a graph are fixed",
        where,
        "Keep the shape, and select values by multiplying with the mask or with torch.where(mask, x, 0). A mask that "
        "follows from the batch alone, by a few cheap operations, may stay",
    )


def _makes_text(error: BaseException) -> bool:
    """Whether a number that the step has computed, or a tensor, goes into a text. (2.11, 2.13)"""
    message, before = str(error), str(error.__context__)
    percent = re.search(r"unsupported operand type\(s\) for %: 'str' and '(float|int|bool)'", message)
    return (
        percent is not None
        or "StringFormatVariable" in message
        or "example_value type: str; op: call_function; target: <built-in function mod>" in message
        or re.search(r"call_function <built-in function mod>\(\*\(['\"]", before) is not None
    )


def _computes_with_number(error: BaseException) -> bool:
    """Whether Python asks for a number that the step has computed."""
    asks = (
        "Could not guard on data-dependent",
        "Could not extract specialized integer from data-dependent",
        "has a non-Tensor output whose value is dependent on the data",
    )
    return any(text in str(error) for text in asks)


def _packed(where: str | None) -> Problem:
    return Problem(
        "the step packs sequences, or a recurrent network gets packed sequences: their lengths are read on the host, "
        "and the shapes of a graph are fixed",
        where,
        "Pad the sequences to few lengths, and leave out what was padded by a mask: in the loss, or with torch.where",
    )


def _number_on_device(where: str | None, stack: Any) -> Problem:
    if _is_in(stack, "rnn.py"):
        return _packed(innermost(stack) or where)
    if not _is_in(stack, "batchnorm.py"):
        return Problem(
            "the value of a tensor is read on the host, because Python needs it for a decision or a count (if, "
            "while, range, an index)",
            where,
            "Compute the result with tensors (torch.where), or move the decision out of the step",
        )
    return Problem(
        "Python computes with a number that is on the device (BatchNorm with momentum=None does this), and a "
        "graph would keep the value of the capture",
        where,
        "Keep the number in a tensor, or give BatchNorm a momentum",
    )


def _is_in(stack: Any, file: str) -> bool:
    """Whether a frame is in this file of `torch/nn/modules`."""
    return any(os.path.join("nn", "modules", file) in frame.filename for frame in stack or ())


def compiler_failed(error: BaseException) -> Problem:
    """What Dynamo raised while it traced, in one line."""
    kind = "" if isinstance(error, dynamo_failure()) else f"{type(error).__name__}: "
    where = (
        dynamo_error_place(error) or innermost(getattr(error, "real_stack", None)) or user_line_in(str(error))
    )
    if _computes_with_number(error):
        return _number_on_device(where, getattr(error, "real_stack", None))
    if "TensorVariable() is not a constant" in str(error):
        return Problem(
            "the step is not one graph: a Python function, such as format(), reads the value of a tensor on the "
            "host",
            where,
            f"{READ_LATER}, and call the function after the step",
        )
    said = f"{kind}{first_line(error).rstrip('.')}".strip()
    if said.endswith(":"):  # an exception without a message
        said = f"{said[:-1]} while it traced the step"
    return Problem(f"the compiler failed: {said}", where)


def forget_frames(error: BaseException) -> None:
    """Let an error of Dynamo, and those before it, hold no frames.

    Frames of Dynamo hold the error, so all of them live until garbage is collected. They know their callers, and
    the callers have the results of the step with its autograd graph.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()  # some errors of torch are not hashable
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


def innermost(stack: Any) -> str | None:
    frames = [f for f in stack or () if is_user_file(f.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def line_of(node: torch.fx.Node) -> str | None:
    return user_line_in(node.meta.get("stack_trace"))


def first_use(node: torch.fx.Node) -> str | None:
    return next((w for user in node.users if (w := line_of(user))), None)


def problem_of_guard(guard: str, where: str | None, fn: Any) -> Problem:
    """A value that the step depends on is another one now.

    Args:
        guard: Dynamo's text of what does not hold.
        where: the line that it is from.
        fn: the traced function.
    """
    for pattern, sentence in _GUARDS:
        found = re.fullmatch(pattern, guard)
        if found is not None:
            what = found.expand(sentence)
            break
    else:
        what = f"{guard} no longer holds"
    if _OF_SHAPES.search(guard):
        return Problem(f"{readable(what, fn)}: the step is traced for other sizes", where, _PAD)
    return Problem(
        f"{readable(what, fn)}: the step depends on Python state that changes",
        where,
        "Keep values that change in tensors, or outside of the step",
    )


_OF_SHAPES = re.compile(r"\.(size|stride|storage_offset)\(\)")
_PAD = "Pad batches to few shapes, or to multiples of 8"

_GUARDS = (
    (r"\(([^=]+)\) == ([^=]+)", r"\1 is no longer \2"),
    (r"len\((.+)\) != (\d+)", r"len(\1) is no longer \2"),
    (r"tensor '(.+?)' (.+)", r"\1 is another tensor than before (\2)"),
    (r"___check_type_id\((.+), \d+\), type=<class '(.+)'>", r"\1 is no longer of the class \2"),
    (r"([^=]+) == ([^=]+)", r"\1 is no longer \2"),
    (r"___check_obj_id\((.+), \d+\)(?:, type=.*)?", r"\1 is no longer the same object"),
)
"""Texts of Dynamo's that are no expressions, or name what a value is not, and sentences for them. (2.11, 2.13)"""


def is_of_tensor(guard: str) -> bool:
    """Whether Dynamo's text of what does not hold is about shape, type and the like of a tensor."""
    return guard.startswith("tensor '")


def readable(expression: str, fn: Any = None) -> str:
    """`L['fn'].__self__._modules['net'].scale` as the user would write it: `self.net.scale`.

    Args:
        expression: Dynamo's.
        fn: the traced function, for the names of its closure's variables.
    """
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for index, name in enumerate(names):
        expression = expression.replace(f"L['fn'].__closure__[{index}].cell_contents", name)
    expression = re.sub(r"dict\(type\((.+?)\)\.__dict__\)\['(\w+)'\]", r"type(\1).\2", expression)
    expression = expression.replace("G['__import___main__'].", "")
    expression = re.sub(r"G\['__import_(\w+)'\]", lambda found: found[1].replace("_dot_", "."), expression)
    expression = re.sub(r"G\['___unnamed_scope_\w+'\]\['(\w+)'\]", r"\1", expression)  # globals of no module
    text = expression.replace("L['fn'].__self__", "self").replace("L['fn']", "step")
    text = re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", text)
    text = re.sub(r"\.__dict__\['([^']+)'\]", r".\1", text)
    arguments = _argument_names(fn)
    text = re.sub(r"L\['args'\]\[(\d+)\]", lambda found: arguments.get(found[1], found[0]), text)
    text = re.sub(r"L\['kwargs'\]\['(\w+)'\]", r"\1", text)
    return text.replace("L['args']", "args").replace("L['kwargs']", "kwargs")


def _argument_names(fn: Any) -> dict[str, str]:
    """Names of the positional arguments of a function, by their place in a call."""
    code = getattr(fn, "__code__", None)
    if code is None:
        return {}
    bound = int(getattr(fn, "__self__", None) is not None)
    return {str(place): name for place, name in enumerate(code.co_varnames[bound : code.co_argcount])}
