"""Trains without one private name of torch at a time: `python -m tests.missing_names [--every N] [NAME...]`.

A name that is gone is gone for the library alone: in what it imports the name is another one, which torch lacks. To
take it out of torch would end trainings in torch itself. Each case is a fork of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib.machinery
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx
from torch import nn

from tests.private_names import Uses, longest, used

STEPS = 12


def hide(name: str) -> None:
    """From now on the sources of the library that are imported ask torch for another name."""
    stock = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, module: str) -> Any:
        if not module.startswith("pygraph_train."):
            return stock(self, module)
        source = self.get_source(module)
        if module.endswith(".torch_private.names"):
            head = "def _find(name: str) -> Any:\n"
            assert head in source
            source = source.replace(head, f"{head}    if name == {name!r}: return _ABSENT\n")
            return compile(source, self.path, "exec")
        if name.rpartition(".")[2] not in source:
            return stock(self, module)
        return compile(without(ast.parse(source), name), self.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def without(tree: ast.Module, name: str) -> ast.Module:
    """The same source, which asks for a name that there is not."""
    for found, node in Uses.of(tree):
        for _ in range(found.count(".") - name.count(".")):
            if isinstance(node, ast.Attribute):
                found, node = found.rpartition(".")[0], node.value
        if found != name:
            continue
        if isinstance(node, ast.alias):
            node.asname = node.asname or node.name
            node.name += "_that_is_gone"
        elif isinstance(node, ast.Attribute):
            node.attr += "_that_is_gone"
        elif isinstance(node, ast.Constant):
            node.value += "_that_is_gone"
    return ast.fix_missing_locations(tree)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(STEPS)
    ]


def train(step_of: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., torch.Tensor]]) -> list[Any]:
    """What has to be equal at the end of a training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = step_of(model, optimizer)
    losses = [step(*batch).detach().clone() for batch in batches()]
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, call: Any = None) -> Callable[..., Any]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy((call or model)(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def with_graphed_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    from pygraph_train import GraphedStep

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    made = GraphedStep(loss_of, model=model, optimizer=optimizer, engine="emulated", warmup_steps=2)
    reports.append(made.report())
    return made


def with_backend(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    import pygraph_train.backend

    options = {"engine": "emulated", "warmup_runs": 1, "compile": False}
    compiled = torch.compile(model, backend=pygraph_train.backend.pygraph, options=options)
    return plainly(model, optimizer, compiled)


reports: list[Any] = []


def case(name: str, expected: list[Any]) -> dict[str, Any]:
    """Train without a name; the answer says what ran from graphs, or what went wrong."""
    if name:
        hide(name)
    told: dict[str, Any] = {"name": name}
    for way in (with_graphed_step, with_backend):
        try:
            found = train(way)
        except Exception as error:
            told[way.__name__] = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            continue
        same = len(found) == len(expected) and all(map(torch.equal, found, expected))
        told[way.__name__] = "" if same else "trained something else"
    told["steps"] = reports[0].steps_replayed if reports else 0
    told["good"] = not (told["with_graphed_step"] or told["with_backend"])
    return told


def in_a_fork(name: str, expected: list[Any]) -> dict[str, Any]:
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            with os.fdopen(write, "w") as answer, open(os.devnull, "w") as nowhere:
                sys.stderr = nowhere
                json.dump(case(name, expected), answer)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"name": name, "good": False, "died": True}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.missing_names")
    parser.add_argument("names", nargs="*", help="instead of all that the sources use")
    parser.add_argument("--every", type=int, default=1, help="of all names one in so many")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    expected = train(plainly)
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2, requires_grad=True))  # imports for all forks
    torch._dynamo.reset()
    assert "pygraph_train" not in sys.modules
    gc.collect()
    gc.freeze()
    rows = [in_a_fork("", expected)]  # nothing is missing
    for number, name in enumerate(options.names or longest(used())[:: options.every], start=1):
        rows.append(in_a_fork(name, expected))
        print(f"{number}: {name} {'' if rows[-1]['good'] else 'FAILED'}", file=sys.stderr, flush=True)
    bad = [row for row in rows if not row["good"]]
    if options.json:
        print(json.dumps(rows))
    else:
        for row in bad:
            print(json.dumps(row, indent=1).replace("\\n", "\n"))
        print(f"{len(rows) - 1} names were missing in turn; {len(bad)} trainings went wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
