"""Derivatives in a traced function: `torch.autograd.grad`, and tensors that are to require a gradient there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.changes import Around

__all__ = ["changes", "require_gradient", "required_gradients"]

_MAKERS = "empty empty_like eye full full_like linspace ones ones_like rand rand_like randn randn_like zeros zeros_like"
"""Functions of torch whose result is a tensor of its own, whatever they are given."""


def require_gradient(tensor: Tensor) -> None:
    """`tensor.requires_grad_()`, also while AOTAutograd traces. (2.11, 2.13)"""
    functorch: Any = torch._C._functorch
    before = functorch.get_inplace_requires_grad_allowed()
    functorch.set_inplace_requires_grad_allowed(True)
    try:
        tensor.requires_grad_()
    finally:
        functorch.set_inplace_requires_grad_allowed(before)


def required_gradients(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The calls of `require_gradient` in a graph of Dynamo's."""
    return [node for node in graph.graph.nodes if node.target is require_gradient]


@functools.cache
def changes() -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo: it follows `torch.autograd.grad`, and what asks for the gradient of a tensor of the step.

    `backward()` stays what it is: Dynamo would add gradients in another order. A tensor that the step was given is left
    to Python: it would require a gradient in later steps. (2.11, 2.13)

    Returns:
        (owner, attribute, value).
    """
    import torch._dynamo.config as config
    from torch._dynamo.variables import TensorVariable, builtin
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    setter = getattr(
        builtin, "SetAttrBuiltinVariable", builtin.BuiltinVariable
    )  # 2.11 has one for all builtins
    return (
        (config, "trace_autograd_ops", True),
        (TensorVariable, "method_backward", Around(_as_before)),
        (TensorVariable, "method_requires_grad_", Around(_requiring)),
        (TensorVariable, "method_attr_requires_grad", Around(_as_it_is_now)),
        (setter, "call_function", Around(_set)),
        (TorchInGraphFunctionVariable, "call_function", Around(_made)),
    )


def _as_before(stock: Callable[..., Any]) -> Callable[..., Any]:
    import torch._dynamo.config as config

    def method_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        config.trace_autograd_ops = False
        try:
            return stock(self, tx, *args, **kwargs)
        finally:
            config.trace_autograd_ops = True

    return method_backward


def _requiring(stock: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import unimplemented

    def method_requires_grad_(self: Any, tx: Any, requires_grad: Any = True) -> Any:
        node = self.as_proxy().node
        example = node.meta["example_value"]
        wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
        if example.requires_grad == wanted:
            return self
        if not wanted:  # Dynamo of 2.13 traces it as if True were asked for
            unimplemented(
                gb_type="requires_grad_(False) in a step",
                context="",
                explanation="A tensor is to require no gradient any more.",
                hints=["Call x.detach()"],
            )
        if not (example.is_floating_point() or example.is_complex()):
            return stock(self, tx, requires_grad)
        given = [n for n in node.graph.nodes if n.op in ("placeholder", "get_attr")]
        if self.source is not None or any(n.meta.get("example_value") is example for n in given):
            unimplemented(
                gb_type="requires_grad_() of a tensor that the step was given",
                context="",
                explanation="A tensor that the step was given is to require a gradient.",
                hints=["Call x.detach().requires_grad_() or x.clone().requires_grad_()"],
            )
        if tx.output.current_tracer.parent is not None:
            unimplemented(
                gb_type="requires_grad_() in a checkpoint",
                context="",
                explanation="A tensor in a checkpoint is to require a gradient.",
                hints=["Call requires_grad_() outside of the checkpoint"],
            )
        tx.output.create_proxy("call_function", require_gradient, (self.as_proxy(),), {})
        example.requires_grad_()
        self.requires_grad = True
        return self

    return method_requires_grad_


def _as_it_is_now(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Two of Dynamo's variables may be one tensor, as `x` and `x.contiguous()`."""

    def method_attr_requires_grad(self: Any, tx: Any) -> Any:
        example = self.as_proxy().node.meta.get("example_value")
        if isinstance(example, Tensor) and self.requires_grad is not None:
            self.requires_grad = example.requires_grad
        return stock(self, tx)

    return method_attr_requires_grad


def _set(stock: Callable[..., Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if (
            getattr(self, "fn", setattr) is setattr
            and len(args) == 3
            and _constant(args[1]) == "requires_grad"
        ):
            tensor, _, wanted = (arg.realize() for arg in args)
            if tensor.is_tensor() and _constant(wanted) is True:
                tensor.method_requires_grad_(tx, wanted)
                return wanted
        return stock(self, tx, args, kwargs)

    return call_function


def _constant(variable: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else None


def _made(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor that is made with `requires_grad=True` is made, and requires a gradient from then on."""
    makers = [getattr(torch, name) for name in _MAKERS.split()]

    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        wanted = kwargs.get("requires_grad")
        if wanted is None or "out" in kwargs or self.value not in makers or _constant(wanted) is not True:
            return stock(self, tx, args, kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "requires_grad"}
        made = stock(self, tx, args, rest)
        return made.method_requires_grad_(tx, wanted)

    return call_function
