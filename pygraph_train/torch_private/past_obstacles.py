"""Dynamo that goes on behind what it cannot trace, to see all that it cannot trace. (2.11, 2.13)

Dynamo follows a function instruction by instruction and ends at the first one that it cannot trace. Here such an
instruction of the user's code is noted, and something stands in for its result. Nothing of it is executed. What
only follows from the stand-in (a comparison of it, an operation on it) is not noted.
"""

from __future__ import annotations

import copy
import dis
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import is_user_file
from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.stand_ins import (
    is_stand_in,
    is_text_of_tensor,
    one_round,
    stand_in_for,
    unknown,
)

__all__ = ["Condition", "PastObstacles", "user_place"]

Met = Callable[[BaseException, str, bool], None]
"""Called with what Dynamo raised, `file:line` of the instruction, and whether it only follows from a stand-in."""

Condition = tuple[Any, int]
"""The code of a function and the place of an instruction in it."""

_NO_RESULT = ("STORE_", "DELETE_", "LIST_", "SET_", "DICT_", "MAP_ADD", "POP_TOP", "YIELD")
_MORE_THAN_ONE_RESULT = (
    "BEFORE_",
    "SETUP_",
    "LOAD_METHOD",
    "UNPACK_EX",
    "FOR_ITER",
    "RETURN",
    "RAISE",
    "RERAISE",
)
"""Beginnings of names of instructions: these leave nothing on the stack, and these leave what cannot be made up."""

_MOST_VISITS = 20


class PastObstacles:
    """Changes of Dynamo for one trace.

    Args:
        met: told of each instruction that fails.
        reads: called with `file:line` where the host reads the value of a tensor.
        shapes: called with `file:line` where the shape of a tensor depends on values of another one.
        texts: called with `file:line` where a tensor goes into a text.
        leaves_out: of conditions that are not known, whether the code that follows them is left out. It is not where
            nothing is said.

    Attributes:
        decided: `file:line` of each condition that is not known, where one way was taken.
        ended: `file:line` of the instruction behind which nothing was looked at, None where all was.
        ways: these conditions in the order in which they were met, and whether that code was left out.
        returned: what the frame stores as `result`: "loss" (a tensor with one number that requires a gradient, or a
            dict with one as "loss"), "unknown", or words for something else.
    """

    def __init__(
        self,
        met: Met,
        *,
        reads: Callable[[str], None],
        shapes: Callable[[str], None],
        texts: Callable[[str], None],
        leaves_out: Mapping[Condition, bool],
    ) -> None:
        self._met = met
        self._reads = reads
        self._shapes = shapes
        self._texts = texts
        self._leaves_out = leaves_out
        self._made: dict[int, Any] = {}  # tensors and texts that were looked at
        self._visits: Counter[Condition] = Counter()
        self.decided: list[str] = []
        self.ended: str | None = None
        self.ways: list[tuple[Condition, bool]] = []
        self.returned: str | None = None

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """(owner, attribute, value), on top of those of `host_numbers`."""
        import torch._dynamo.config as config
        from torch._dynamo.output_graph import OutputGraph
        from torch._dynamo.symbolic_convert import InstructionTranslatorBase
        from torch._dynamo.variables import misc, user_defined
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        draw = self._drawing()
        return (
            (config, "capture_scalar_outputs", True),
            (config, "capture_dynamic_output_shape_ops", True),
            (OutputGraph, "create_proxy", self._reading(OutputGraph.create_proxy)),
            (InstructionTranslatorBase, "step", self._stepping(InstructionTranslatorBase.step)),
            (user_defined, "call_random_fn", draw),
            (misc, "call_random_fn", draw),
            (
                TorchInGraphFunctionVariable,
                "call_function",
                Around(self._without_generators),
            ),
        )

    def _stepping(self, step: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """One instruction; where it fails in the user's code, the next one follows."""
        from torch._dynamo.exc import ObservedException, RestartAnalysis, SkipFrame

        def stepped(tx: Any) -> bool:
            stack, at, gradients = list(tx.stack), tx.instruction_pointer, torch.is_grad_enabled()
            if _caller(tx) is None and at is not None and tx.instructions[at].opname == "STORE_FAST":
                self.returned = _described(stack[-1])
            try:
                going_on = step(tx)
            except (RestartAnalysis, SkipFrame):
                raise
            except Exception as error:
                if at is None or hasattr(error, "no_stand_in"):
                    raise
                inst = tx.instructions[at]
                if not hasattr(error, "follows"):  # the innermost frame knows
                    error.follows = any(map(is_stand_in, _operands(stack, inst)))  # type: ignore[attr-defined]
                follows = bool(error.follows)  # type: ignore[attr-defined]
                if not _is_followed(tx.f_code.co_filename):
                    raise
                if isinstance(error, ObservedException) and not follows:
                    raise  # of the step itself
                torch._C._set_grad_enabled(gradients)  # functions of torch that failed may have changed it
                self._go_on(tx, inst, stack, error, follows=follows)
                return True
            if at is not None and tx.stack and _is_followed(tx.f_code.co_filename):
                self._look_at(tx.stack[-1], tx, tx.instructions[at], stack)
            return going_on

        return stepped

    def _look_at(self, made: Any, tx: Any, inst: Any, stack: list[Any]) -> None:
        """Notice a tensor whose shape depends on values, and a text of a tensor, where it is made."""
        from torch._dynamo.variables.lists import BaseListVariable
        from torch._dynamo.variables.tensor import TensorVariable

        if is_text_of_tensor(made):
            if id(made) not in self._made:
                self._made[id(made)] = made
                self._texts(user_place(tx))
            return
        for variable in [made, *getattr(made, "items", ())] if isinstance(made, BaseListVariable) else [made]:
            if type(variable) is not TensorVariable or not is_stand_in(variable):
                continue
            node = variable.proxy.node
            if node.op != "placeholder" and id(node) not in self._made:
                self._made[id(node)] = node
                if not any(map(is_stand_in, _operands(stack, inst))):
                    self._shapes(user_place(tx))

    def _go_on(self, tx: Any, inst: Any, stack: list[Any], error: Exception, *, follows: bool) -> None:
        """Put something in the place of the result of an instruction that failed."""
        where = user_place(tx)
        self._met(error, where, follows)
        self._visits[tx.f_code, inst.offset] += 1
        if (
            inst.opname.startswith(_MORE_THAN_ONE_RESULT)
            or self._visits[tx.f_code, inst.offset] > _MOST_VISITS
        ):
            self.ended = where
            error.no_stand_in = True  # type: ignore[attr-defined]
            raise error
        if getattr(tx, "kw_names", None) is not None:
            tx.kw_names = None
        tx.stack[:] = stack
        tx.instruction_pointer = tx.indexof[inst] + 1
        if _is_condition(inst):
            return self._jump(tx, inst, where)
        operands = _operands(stack, inst)
        del tx.stack[len(stack) - len(operands) :]
        if inst.opname == "UNPACK_SEQUENCE":
            tx.stack += [unknown() for _ in range(inst.argval)]
        elif inst.opname == "GET_ITER":
            tx.stack.append(one_round())
        elif not inst.opname.startswith(_NO_RESULT):
            tx.stack.append(stand_in_for(operands))

    def _jump(self, tx: Any, inst: Any, where: str) -> None:
        """Go one of the two ways of a condition that is not known."""
        self.decided.append(where)
        forward = inst.target.offset is None or inst.offset is None or inst.target.offset > inst.offset
        condition = (tx.f_code, inst.offset)
        jumps = self._leaves_out.get(condition, False)
        if self._visits[condition] == 1:
            self.ways.append((condition, jumps))
        else:  # a loop has an end
            jumps = not jumps
        jumps = jumps and forward
        keeps = jumps and "OR_POP" in inst.opname
        if not keeps:
            tx.stack.pop()
        if jumps:
            tx.jump(inst)

    def _reading(self, create_proxy: Callable[..., Any]) -> Callable[..., Any]:
        def created(output: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
            if kind == "call_method" and target in ("item", "tolist"):
                self._reads(user_place(output.current_tx))
            return create_proxy(output, kind, target, *args, **kwargs)

        return created

    def _drawing(self) -> Callable[..., Any]:
        """A random number of Python: one that nobody else misses."""
        from torch._dynamo.exc import unimplemented
        from torch._dynamo.variables.constant import ConstantVariable

        def draw(tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self._note(tx, lambda: unimplemented(**_RANDOM))
            generator = copy.deepcopy(getattr(fn, "__self__", None))
            drawn = getattr(generator, fn.__name__, None)
            if drawn is None:
                return unknown()
            values = [x.as_python_constant() for x in args]
            value = drawn(*values, **{name: x.as_python_constant() for name, x in kwargs.items()})
            return ConstantVariable.create(value)

        return draw

    def _without_generators(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that draws from a generator of the user's: as if it drew from torch's own."""
        from torch._dynamo.exc import Unsupported

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            try:
                return call_function(variable, tx, args, kwargs)
            except Unsupported as error:
                if "generator" not in kwargs:
                    raise
                self._met(error, user_place(tx), False)
                return call_function(
                    variable, tx, args, {k: v for k, v in kwargs.items() if k != "generator"}
                )

        return called

    def _note(self, tx: Any, fail: Callable[[], Any]) -> None:
        try:
            fail()
        except torch._dynamo.exc.Unsupported as error:
            self._met(error, user_place(tx), False)


_RANDOM: dict[str, Any] = {
    "gb_type": "number of the host",
    "context": "random",
    "explanation": "Python's random module draws a number on the host",
    "hints": ["Make it a tensor before the step, or draw it there"],
}


def _described(result: Any) -> str:
    """What a step returns: see `PastObstacles.returned`."""
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.tensor import TensorVariable

    if isinstance(result, ConstDictVariable):
        losses = [
            value
            for key, value in result.items.items()
            if key.vt.is_python_constant() and key.vt.as_python_constant() == "loss"
        ]
        return _described(losses[0]) if losses else "a dict without 'loss'"
    if type(result) is TensorVariable:
        value = result.proxy.node.meta.get("example_value")
        if not isinstance(value, Tensor):
            return "unknown"
        if value.dim() or not value.requires_grad:
            return f"a tensor of shape {tuple(value.shape)} with requires_grad={value.requires_grad}"
        return "loss"
    if result.is_python_constant():
        return repr(result.as_python_constant())
    return "unknown"


def _is_followed(file: str) -> bool:
    """Whether an instruction of this file may be left out. One of torch's or Python's own belongs to a call of it."""
    _, package, _ = file.rpartition(f"-packages{os.sep}")
    torchs = file.startswith(os.path.dirname(torch.__file__) + os.sep)
    return is_user_file(file) or (bool(package) and not torchs)


def _caller(tx: Any) -> Any:
    return getattr(tx, "parent", None)


def user_place(tx: Any) -> str:
    """The innermost line of the user's that is being traced."""
    while _caller(tx) is not None and not is_user_file(tx.f_code.co_filename):
        tx = tx.parent
    line = getattr(tx.current_instruction.positions, "lineno", None) or tx.lineno
    return f"{tx.f_code.co_filename}:{line}"


def _is_condition(inst: Any) -> bool:
    return (inst.target is not None and "JUMP_IF" in inst.opname) or "_IF_" in inst.opname


def _operands(stack: list[Any], inst: Any) -> list[Any]:
    """What an instruction takes from the stack."""
    if _is_condition(inst) or inst.opname == "UNPACK_SEQUENCE":
        taken = 1
    else:
        effect = dis.stack_effect(inst.opcode, inst.arg, jump=False)
        if inst.opname == "CALL" and "PRECALL" in dis.opmap:  # 3.11 has two instructions for a call
            effect += dis.stack_effect(dis.opmap["PRECALL"], inst.arg)
        taken = (0 if inst.opname.startswith(_NO_RESULT) else 1) - effect
    return stack[len(stack) - taken :] if taken > 0 else []
