"""What a training process imports, and when: to read modules from a disk takes long where nobody has read them yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "functorch", "triton", "sympy", "networkx", "cuda", "transformers")

PROGRAM = """
import json, random, sys
import torch
from torch import nn

WAITING = 40
lengths = random.Random(0).choices(range(16, 33), k=WAITING + 60)


def training(graphed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(tokens):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    if graphed:
        from pygraph_train import GraphedStep
        from pygraph_train.selection.returns import TraceReturns
        from pygraph_train.step.launch_bound import LaunchBoundCheck

        # as on a GPU that waits for the host, with plain steps of 20 ms
        ran = TraceReturns.ran
        LaunchBoundCheck.wanted = staticmethod(lambda config, engine: True)
        TraceReturns.ran = lambda self, seconds: ran(self, 0.02)
        TraceReturns.pays = lambda self, left: self.steps > WAITING
        options = {"engine": "emulated", **json.loads(sys.argv[1])}
        return model, GraphedStep(loss_of, model=model, optimizer=optimizer, **options)

    def plainly(tokens):
        optimizer.zero_grad()
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, plainly


def run(graphed):
    model, step = training(graphed)
    made, losses = set(sys.modules), []
    for number, length in enumerate(lengths):
        tokens = torch.randint(0, 11, (4, length), generator=torch.Generator().manual_seed(number))
        losses.append(step(tokens))
        if number == WAITING - 1:
            waited = set(sys.modules)
    state = [p.detach().clone() for p in model.parameters()]
    return torch.stack(losses), state, made, waited, step


losses, state, _, plain, _ = run(False)
graphed_losses, graphed_state, made, waited, step = run(True)
print(json.dumps({
    "same": torch.equal(losses, graphed_losses) and all(map(torch.equal, state, graphed_state)),
    "before": sorted(waited - plain),
    "in_steps": sorted(waited - made),
    "later": sorted(set(sys.modules) - waited),
    "replays": step.report().steps_replayed,
}))
"""


def trained(**options: Any) -> dict[str, Any]:
    """What a process of its own has imported, at different times of two trainings: first without, then with graphs."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("tests", "."))},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("options", [{}, {"compile": False}], ids=["defaults", "eager"])
def test_steps_that_wait_for_a_trace_import_nothing(options: dict[str, Any]) -> None:
    found = trained(**options)
    assert found["same"] and found["replays"] > 10
    assert not found["in_steps"], "steps of a shape that waits are those of the plain loop"
    assert not [name for name in found["before"] if name.split(".")[0] in HEAVY], (
        "nor does anything before them"
    )
    assert found["later"], "the trace shows that imports are seen"
