"""What a training process imports, and when: to read modules from a disk takes long where nobody has read them yet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

OF_INDUCTOR = (
    *("torch._functorch.aot_autograd", "torch._inductor.codecache", "torch._inductor.sizevars"),
    *("torch._dynamo.testing", "torch.distributed.tensor.experimental", "torch.export._trace"),
)
"""What Dynamo imports for each first trace by itself, and needs for few. That of 2.13 reads a class of the last one."""

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
    assert "pygraph_train.torch_private.past_obstacles" in found["later"], (
        "the trace shows that imports are seen"
    )
    tools = OF_INDUCTOR if torch.__version__ < "2.13" else ()  # compares versions, not text
    unused = {"networkx", *tools}.intersection(found["later"])
    assert not unused, "a trace that runs with eager kernels needs none of these"


@pytest.mark.passes_without_graphs("traces only")
def test_what_a_trace_does_not_import_is_there_where_it_is_asked_for() -> None:
    program = """
import sys
import torch
from torch import nn
from pygraph_train.torch_private.dynamo import through_dynamo
from pygraph_train.torch_private.late_imports import tools_wait
from pygraph_train.torch_private.tracing import dynamo_region_config

kept, tools = [getattr(owner, name) for owner, name, _ in tools_wait()], tools_wait()


def twice(x):
    return (x * 2).relu() + (x * 2).relu()


def traced(function, **settings):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    call = through_dynamo(function, backend, fullgraph=True)
    with dynamo_region_config(**settings):
        assert torch.equal(call(torch.ones(3)), function(torch.ones(3)))
    return graphs[0]


plain = traced(twice)
assert torch.__version__ >= "2.13" or "torch._inductor.codecache" not in sys.modules
assert torch.__version__ >= "2.13" or "torch._dynamo.testing" not in sys.modules
assert "stack_trace" in next(n for n in plain.graph.nodes if n.op == "call_function").meta

# repeated regions, for which Dynamo compares nodes as Inductor's cache does
traced(twice, use_graph_deduplication=True, track_nodes_for_deduplication=True)
assert "torch._inductor.codecache" in sys.modules

# the minifier
torch._dynamo.config.repro_after, torch._dynamo.config.repro_level = "dynamo", 1
traced(twice)
torch._dynamo.config.repro_after = None
assert "torch._dynamo.repro.after_dynamo" in sys.modules

# inside of vmap Dynamo says that its backend has to be the eager one
call = through_dynamo(twice, lambda graph, inputs: graph, fullgraph=True)
try:
    with dynamo_region_config(suppress_errors=False):
        torch.vmap(call)(torch.ones(2, 3))
except Exception as error:
    assert "torch.func.vmap" in str(error), error
else:
    raise AssertionError("traced inside of vmap")

from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable as LocalMap
from torch.distributed.tensor.experimental._func_map import _local_map_wrapped

asked = tools[-1][2].__get__(None, LocalMap)
with LocalMap.enable():
    assert asked(_local_map_wrapped) and not asked(twice)
assert kept == [getattr(owner, name) for owner, name, _ in tools], "all of it is undone"

from torch.fx.experimental.symbolic_shapes import uninteresting_files

assert tools[0][2]() == uninteresting_files()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.passes_without_graphs("imports only")
def test_torch_has_networkx_where_it_needs_it() -> None:
    program = """
import sys
from pygraph_train.torch_private.late_imports import networkx_waits

networkx_waits()
from torch._functorch import partitioners
from torch._functorch._activation_checkpointing import graph_info_provider as user
from torch._functorch._activation_checkpointing import knapsack_evaluator

assert "networkx" not in sys.modules
times = {"a": 1.0, "b": 1.0}
made = user.GraphInfoProvider(["a", "b"], [("a", "b")], ["a", "b"], times, times).recomputable_node_only_graph
import networkx

assert type(made) is networkx.DiGraph and list(made.edges) == [("a", "b")], made
assert list(knapsack_evaluator.nx.topological_sort(made)) == ["a", "b"] and knapsack_evaluator.nx is networkx
assert user.nx is networkx and partitioners.GraphInfoProvider is user.GraphInfoProvider
assert type(user.__spec__.loader).__module__ == type(partitioners.__spec__.loader).__module__
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.passes_without_graphs("imports only")
def test_nothing_waits_that_is_there_already() -> None:
    program = """
import sys
import networkx
from pygraph_train.torch_private.late_imports import networkx_waits

finders = list(sys.meta_path)
networkx_waits()
assert sys.meta_path == finders
import torch._functorch._activation_checkpointing.graph_info_provider as user

assert user.nx is networkx
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
