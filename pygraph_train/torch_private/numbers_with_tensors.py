"""Operations of tensors with numbers that are held in tensors, under Dynamo. (2.11, 2.13)

The results are the same bits as those of the operation with the number:

- A kernel takes a number in the type that it computes in: a float32 number for float32 and smaller types, a float64
  number for float64. A product, sum or difference of float32 numbers has one rounding, whoever holds them. Products and
  quotients of bfloat16 and float16 are made with float32 numbers, and rounded: the kernel does nothing else. Their
  sums are rounded in another way on the CPU.
- On CUDA a tensor is divided by a number by a multiplication with its reciprocal
  (`tracing/live_numbers.py` has its rounding). On the CPU the tensor is divided.
- A number is divided by a tensor as torch does it in Python: the reciprocal of the tensor, times the number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["MOST", "WITH_TENSORS", "is_tensor", "with_tensor"]


class HeldNumbers(Protocol):
    """Who keeps such numbers."""

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""

    def value(self, number: Any) -> Any:
        """What a number is in this trace."""

    def tensor(self, number: Any, dtype: torch.dtype, *, inverse: bool) -> Tensor:
        """The number, or its reciprocal, as a tensor that is filled before each run."""


WITH_TENSORS = {
    **{getattr(operator, name): name for name in ("add", "sub", "mul", "truediv")},
    **{getattr(operator, f"i{name}"): f"i{name}" for name in ("add", "sub", "mul", "truediv")},
    **{torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "truediv"},
    **{torch.subtract: "sub", torch.multiply: "mul", torch.divide: "truediv", torch.true_divide: "truediv"},
}
"""Names of the operators that functions of torch and of Python are."""

MOST = 2**53
"""Greater whole numbers are rounded when they become floats."""

_COMPUTED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


def with_tensor(
    tx: Any,
    name: str,
    tensor: Any,
    number: Any,
    numbers: HeldNumbers,
    built: Callable[[Tensor], Any],
    *,
    first: bool,
) -> Any:
    """An operation of a tensor and a number; None where there is none with the same bits.

    Args:
        name: of the operator.
        tensor: a variable of Dynamo's.
        number: as `numbers` knows it.
        built: makes a tensor an input of the graph.
        first: whether the number is on the left.
    """
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable

    example = tensor.as_proxy().node.meta.get("example_value") if is_tensor(tensor) else None
    if (
        not isinstance(example, Tensor)
        or example.device.type != numbers.device.type
        or example.dtype not in _COMPUTED_IN
        or _is_rounded(numbers.value(number))
    ):
        return None
    name, in_place = (name[1:], True) if name.startswith("i") else (name, False)
    dtype = _COMPUTED_IN[example.dtype]
    rounded = dtype is not example.dtype
    if (in_place and first) or (rounded and (in_place or not _rounds_once(name, first=first))):
        return None
    inverse = name == "truediv" and not first and numbers.device.type == "cuda"
    value = built(numbers.tensor(number, dtype, inverse=inverse))
    if inverse or (name == "truediv" and first):
        name = "mul"
        tensor = tensor if inverse else tensor.call_method(tx, "reciprocal", [], {})
    if rounded:
        tensor = tensor.call_method(tx, "to", [ConstantVariable.create(dtype)], {})
    op = BuiltinVariable(getattr(operator, f"i{name}" if in_place else name))
    made = op.call_function(tx, [value, tensor] if first else [tensor, value], {})
    return made.call_method(tx, "to", [ConstantVariable.create(example.dtype)], {}) if rounded else made


def is_tensor(variable: Any) -> bool:
    """Whether a variable of Dynamo's is a plain tensor."""
    from torch._dynamo.variables.tensor import TensorVariable

    return type(variable) is TensorVariable


def _is_rounded(number: Any) -> bool:
    """Whether a float cannot hold a number exactly."""
    return type(number) is int and abs(number) > MOST


def _rounds_once(name: str, *, first: bool) -> bool:
    """Whether a kernel of bfloat16 and float16 computes with the number in float32, and rounds the result."""
    return name == "mul" or (name == "truediv" and not first)
