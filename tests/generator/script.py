"""From a case to the Python script of its training run."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable

from .case import Case, Change
from .part import Part
from .parts_batches import KINDS as BATCHES
from .parts_changes import CHANGES
from .parts_model import BLOCKS
from .parts_numbers import NUMBERS
from .parts_optimizers import GROUPS, SCHEDULES
from .parts_optimizers import KINDS as OPTIMIZERS
from .parts_step import LOSSES, STEP

__all__ = ["parts_of", "script_of"]

_HEADER = """\
import copy
import random
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
"""

_STEPS = STEP | NUMBERS
_TYPES = {
    "Pair(": 'Pair = namedtuple("Pair", "x y")',
    "Point(": "@dataclass\nclass Point:\n    x: torch.Tensor\n    y: torch.Tensor",
    "Data(": "class Data:\n    def __init__(self, **values):\n        self.__dict__.update(values)",
    "Held(": "class Held:\n    def __init__(self, out):\n        self.out, self.parts = out, [out.mean(), 3]",
    "leaves(": "def leaves(batch):\n    items = batch.values() if isinstance(batch, dict) else batch\n"
    "    return [t for t in items if isinstance(t, torch.Tensor) and t.is_floating_point()]",
}

_STEP_OPTIONS = {
    "clip": "max_grad_norm=0.5",
    "scaler_off": 'scaler=torch.amp.GradScaler("cpu", enabled=False)',
    "scaler": 'scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)',
}


def parts_of(case: Case) -> list[Part]:
    """All parts of a case, in the order in which their lines come."""
    parts = [BLOCKS[name] for name in case.blocks] + [_STEPS[name] for name in case.step]
    return [*parts, *(CHANGES[change.what] for change in case.changes), SCHEDULES[case.optimizer.schedule]]


def script_of(case: Case) -> str:
    """The script: it defines `train(loop)`, where `loop` is plain or the library's."""
    parts = parts_of(case)
    optimizer = OPTIMIZERS[case.optimizer.kind]
    body = [
        f"# {case}",
        _HEADER,
        *_unique(part.module for part in parts),
        optimizer.module,
        _net(parts),
        _batches(case),
        "\n\ndef train(loop):\n" + _indent(_train(case, parts)),
    ]
    text = "\n".join(line.rstrip() for line in "\n".join(filter(None, body)).split("\n")) + "\n"
    types = "\n\n".join(definition for used, definition in _TYPES.items() if used in text)
    return text.replace("\nclass Net(", f"\n{types}\n\nclass Net(" if types else "\nclass Net(", 1)


def _net(parts: list[Part]) -> str:
    init = ["super().__init__()", "self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)"]
    init += [part.init for part in parts]
    forward = ["h = torch.tanh(self.first(x))", *(part.forward for part in parts), "return self.last(h)"]
    return (
        "\nclass Net(nn.Module):\n    def __init__(self):\n"
        f"{_indent(_joined(init), 8)}\n\n    def forward(self, x):\n{_indent(_joined(forward), 8)}"
    )


def _batches(case: Case) -> str:
    kind, rows = BATCHES[case.batches.kind], case.batches.lengths
    count = min(case.batches.kept or case.steps, case.steps)
    length = str(rows[0]) if len(rows) == 1 else f"{rows}[i % {len(rows)}]"
    if case.batches.last and not case.batches.kept:
        length = f"{case.batches.last} if i == {case.steps - 1} else {length}"
    lines = [
        "g, made = torch.Generator().manual_seed(1), []",
        f"for i in range({count}):",
        f"    n = {length}",
        "    x, y = torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)",
        _indent(kind.make),
        "    made.append(batch)",
        f"return [made[i % {count}] for i in range({case.steps})]",
    ]
    return "\n\ndef make_batches():\n" + _indent("\n".join(lines))


def _step(case: Case, parts: list[Part], *, net: str) -> str:
    """The function `step_fn(batch)`, which returns the loss or a dict with it."""
    call = next((part.call for part in parts if part.call), "net(x)").replace("net(", f"{net}(")
    call = call.replace("checkpoint(net,", f"checkpoint({net},")
    inner = f"out = {call}\nloss = {LOSSES[case.loss]}\n" + _joined(
        part.loss.replace("net(", f"{net}(") for part in parts
    )
    for part in parts:
        if part.context:
            inner = f"with {part.context}:\n{_indent(inner)}"
    extra = ", ".join(part.extra for part in parts if part.extra)
    lines = [
        BATCHES[case.batches.kind].take,
        *(part.begin for part in parts),
        inner,
        f'return {{"loss": loss, {extra}}}' if extra else "return loss",
    ]
    return "def step_fn(batch):\n" + _indent(_joined(lines))


def _train(case: Case, parts: list[Part]) -> str:
    kind, options = case.loop.kind, case.loop.options
    criterion = "criterion = nn.CrossEntropyLoss()" if case.loss == "module" else ""
    lines = ["model = Net()", criterion, *(part.setup for part in parts), _optimizer(case)]
    net = "net" if kind in ("backend", "accelerate") and "step" not in options else "model"
    step = _step(case, parts, net=net)
    before, after = _before(case, parts), _joined(part.after for part in parts)
    ready = _joined(part.ready for part in parts)
    end = _joined(part.end for part in parts)
    lines.append("loop.watch(model, optimizer)")
    if kind == "lightning":
        return _joined([*lines, step, ready, _lightning(case, before, after), end])
    lines += _beginning(case, step)
    around = [
        f"({CHANGES[c.what].around} if {c.at} <= i < {c.until} else nullcontext())"
        for c in case.changes
        if CHANGES[c.what].around
    ]
    call = _call(case)
    if any(part.raises for part in parts):
        call = f"try:\n{_indent(call)}\nexcept Exception as error:\n    result = loop.raised(error)"
    if around:
        call = f"with {', '.join(around)}:\n{_indent(call)}"
    return _joined(
        [
            *lines,
            ready,
            "for i, batch in enumerate(make_batches()):",
            _indent(_joined([before, call, "loop.after(i, result, batch)", after])),
            end,
        ]
    )


def _optimizer(case: Case) -> str:
    chosen = case.optimizer
    kernels = {"": "", "fused": "fused=True", "foreach": "foreach=True", "for loop": "foreach=False"}
    groups, kind = GROUPS[chosen.groups], OPTIMIZERS[chosen.kind]
    option = kernels[chosen.kernels] if chosen.kernels in kind.kernels else ""
    return f"optimizer = {kind.make[0]}({', '.join(filter(None, [groups, kind.make[1], option]))})"


def _beginning(case: Case, step: str) -> list[str]:
    """What stands between the optimizer and the loop."""
    kind, options = case.loop.kind, case.loop.options
    if kind == "graphed":
        given = [_STEP_OPTIONS[name] for name in options if name in _STEP_OPTIONS]
        given = (
            ["model=model", *given]
            if "no_optimizer" in options
            else ["model=model", "optimizer=optimizer", *given]
        )
        return [step, f"step = loop.graphed_step(step_fn, {', '.join(given)})"]
    if kind == "backend":
        if "step" in options:
            return [step, "compiled = loop.compile(step_fn)"]
        return ["net = loop.compile(model)", step, "compiled = step_fn"]
    precision = ', mixed_precision="bf16"' if "bf16" in options else ""
    lines = [
        f"accelerator = loop.accelerator(gradient_accumulation_steps={case.loop.accumulate}{precision})",
        "net, optimizer = accelerator.prepare(model, optimizer)",
        step,
    ]
    clip = "if accelerator.sync_gradients:\n    accelerator.clip_grad_norm_(model.parameters(), 0.5)"
    whole = [
        "result = step_fn(batch)",
        'accelerator.backward(result["loss"] if isinstance(result, dict) else result)',
        clip if "clip" in options else "",
        "optimizer.step()",
        "optimizer.zero_grad()" if "kept_gradients" not in options else "",
    ]
    if "kept_gradients" in options:
        whole.insert(0, "optimizer.zero_grad()")
    return [
        *lines,
        "@loop.graphed" if "graphed_step" in options else "",
        f"def step(batch):\n    with accelerator.accumulate(net):\n{_indent(_joined(whole), 8)}\n    return result",
    ]


def _call(case: Case) -> str:
    """The lines that make one step and leave `result`."""
    kind, options, groups = case.loop.kind, case.loop.options, case.loop.accumulate
    last = f"i % {groups} == {groups - 1}"
    if kind == "accelerate":
        return "result = step(batch)"
    if kind == "graphed" and "no_optimizer" not in options:
        return (
            "result = step(batch)"
            if groups == 1
            else f"result = (step if {last} else step.accumulate)(batch)"
        )
    update = "optimizer.step()" if groups == 1 else f"if {last}:\n    optimizer.step()"
    empty = "optimizer.zero_grad()" if groups == 1 else f"if i % {groups} == 0:\n    optimizer.zero_grad()"
    if kind == "graphed":
        return _joined([empty, "result = step(batch)", update])
    backward = '(result["loss"] if isinstance(result, dict) else result).backward()'
    if "emptied_late" in options and groups == 1:
        return _joined(["result = compiled(batch)", empty, backward, update])
    return _joined([empty, "result = compiled(batch)", backward, update])


def _lightning(case: Case, before: str, after: str) -> str:
    """The hooks of a callback, with the names that lines assign declared as the script's."""
    names = sorted(_assigned(before) | _assigned(after))
    declared = f"nonlocal {', '.join(names)}\n" if names else ""
    around = [
        f"({CHANGES[c.what].around} if {c.at} <= i < {c.until} else nullcontext())"
        for c in case.changes
        if CHANGES[c.what].around
    ]
    options = [f"accumulate_grad_batches={case.loop.accumulate}"]
    options += ["gradient_clip_val=0.5"] if "clip" in case.loop.options else []
    options += ['precision="bf16-mixed"'] if "bf16" in case.loop.options else []
    epochs = 2 if case.steps < 16 else 1
    return _joined(
        [
            *(f"{name} = None" for name in names),
            f"def before(i, batch):\n{_indent(declared + before + chr(10) + 'return [' + ', '.join(around) + ']')}",
            f"def after(i, result, batch):\n{_indent(declared + (after or 'pass'))}",
            f"loop.fit(step_fn, make_batches(), before, after, epochs={epochs}, {', '.join(options)})",
        ]
    )


def _before(case: Case, parts: list[Part]) -> str:
    lines = [part.before for part in parts]
    for change in case.changes:
        lines += [_at(change, CHANGES[change.what].once), _at(change, CHANGES[change.what].back, end=True)]
    return _joined(lines)


def _at(change: Change, lines: str, *, end: bool = False) -> str:
    return f"if i == {change.until if end else change.at}:\n{_indent(lines.strip())}" if lines else ""


def _assigned(code: str) -> set[str]:
    """Names that lines assign themselves, outside of functions and comprehensions."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Import)):
            return
        if not isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp, ast.Lambda)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(code))
    return names


def _joined(lines: Iterable[str]) -> str:
    return "\n".join(line.strip("\n") for line in lines if line.strip())


def _indent(text: str, width: int = 4) -> str:
    return textwrap.indent(text.strip("\n"), " " * width)


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(text for text in texts if text))
