"""Conditional jumps of Dynamo, where the library knows the answer to a condition. (2.11, 2.13)"""

from __future__ import annotations

import dis
from collections.abc import Callable
from typing import Any

from pygraph_train.torch_private.changes import Around

__all__ = ["conditional_jumps", "instructions"]

Answer = Callable[[Any, Any], bool | None]
"""Takes Dynamo's translator and the variable that is the condition; None for what Dynamo itself has to answer."""

_JUMPS = ("POP_JUMP_IF", "POP_JUMP_FORWARD_IF", "POP_JUMP_BACKWARD_IF", "JUMP_IF")
_NOT_OF_TRUTH = ("NONE", "MATCH")


def conditional_jumps(answer: Answer) -> list[tuple[Any, str, Any]]:
    """Changes of Dynamo, in the tables of instructions that each class of its has."""

    def around(table: list[Any]) -> list[Any]:
        made = list(table)
        for name, code in dis.opmap.items():
            if name.startswith(_JUMPS) and not name.endswith(_NOT_OF_TRUTH) and code < len(made):
                made[code] = _jump(name, made[code], answer)
        return made

    return _in_tables(around)


def instructions(name: str, around: Callable[[Any], Any]) -> list[tuple[Any, str, Any]]:
    """Changes of Dynamo: what `around` makes of its handler of an instruction."""

    def changed(table: list[Any]) -> list[Any]:
        made = list(table)
        made[dis.opmap[name]] = around(made[dis.opmap[name]])
        return made

    return _in_tables(changed)


def _in_tables(around: Callable[[list[Any]], list[Any]]) -> list[tuple[Any, str, Any]]:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    classes: list[type] = [InstructionTranslatorBase]
    for kind in classes:
        classes += kind.__subclasses__()
    return [(kind, "dispatch_table", Around(around)) for kind in classes if "dispatch_table" in vars(kind)]


def _jump(name: str, handler: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    from torch._dynamo.variables.constant import ConstantVariable

    def jump(tx: Any, inst: Any) -> Any:
        truth = answer(tx, tx.stack[-1]) if tx.stack else None
        if truth is None:
            return handler(tx, inst)
        if not name.endswith("_OR_POP"):
            tx.stack[-1] = ConstantVariable.create(truth)
            return handler(tx, inst)
        if truth is ("IF_TRUE" in name):
            return tx.jump(inst)
        tx.stack.pop()
        return None

    return jump
