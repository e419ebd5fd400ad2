"""Models that keep results of a step with their autograd graph until the next step replaces them (RecurrentGemma)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import text_of
from test_failures import fail_in_capture
from torch import Tensor, nn
from training import Diary, PlainStep, adamw, batches, both, frozen

from pygraph_train.graphs.emulated import EmulatedEngine

STEPS = 20
ENOUGH = 12


class Recurrent(nn.Module):
    """Its state begins anew in each forward, and stays on the module after it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.state: Any = None
        self.parts: Any = None
        self.last: Any = None
        self.register_buffer("seen", None)
        self.kept: dict[str, Any] = {"state": None}
        self.before: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.state = None
        gates, values = torch.sigmoid(self.gate(x)), self.into(x)
        hidden = []
        for gate, value in zip(gates.unbind(), values.unbind(), strict=True):
            self.state = value if self.state is None else gate * self.state + value
            hidden.append(self.state)
        result: Tensor = self.out(torch.stack(hidden))
        return result


def attribute(net: Recurrent, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def a_tuple(net: Recurrent, batch: Any) -> Tensor:
    out = net(batch[0])
    net.parts = (net.state, [out, out.detach()], 3)
    return nn.functional.cross_entropy(out, batch[1])


def buffer_and_entry(net: Recurrent, batch: Any) -> Tensor:
    out = net(batch[0])
    net.seen = out[0]
    net.kept["state"] = net.state
    return nn.functional.cross_entropy(out, batch[1])


KINDS: dict[str, Callable[[Recurrent, Any], Tensor]] = {
    fn.__name__: fn for fn in (attribute, a_tuple, buffer_and_entry)
}


def tagged(net: nn.Module) -> list[weakref.ref[Any]]:
    """One mark for each node that adds to a gradient, which dies with it."""

    class Tag:
        pass

    marks = []
    for parameter in net.parameters():
        mark = Tag()
        torch.autograd.graph.get_gradient_edge(parameter).node.metadata["mark"] = mark
        marks.append(weakref.ref(mark))
    return marks


@pytest.fixture
def at_captures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each capture: how many nodes were marked, and how many of them were alive then."""
    found: list[tuple[int, int]] = []
    capture = EmulatedEngine.capture

    def looking(self: EmulatedEngine, *args: Any, **options: Any) -> Any:
        found.append((len(MARKS), sum(mark() is not None for mark in MARKS)))
        return capture(self, *args, **options)

    monkeypatch.setattr(EmulatedEngine, "capture", looking)
    return found


MARKS: list[weakref.ref[Any]] = []


def state_of(net: Recurrent) -> dict[str, Any]:
    kept = {"state": net.state, "parts": net.parts, "seen": net.seen, "entry": net.kept["state"]}
    tensors = [x for x in (net.state, net.seen, net.kept["state"]) if x is not None]
    tensors += [] if net.parts is None else [net.parts[0], *net.parts[1]]
    told = [(x.requires_grad, x.is_leaf, list(x.stride())) for x in tensors]
    return {**frozen(kept), "told": told}


def script_of(
    kind: Callable[[Recurrent, Any], Tensor],
    *,
    count: int = STEPS,
    between: Callable[[Recurrent], None] = lambda net: None,
) -> Callable[[Diary], None]:
    """Some steps are made before the library is asked, as it makes some itself while it asks whether a GPU waits."""

    def script(diary: Diary) -> None:
        MARKS.clear()
        net = Recurrent()
        optimizer = adamw(net)
        data = batches(count)
        plain = PlainStep(lambda batch: kind(net, batch), model=net, optimizer=optimizer)
        for batch in data[:2]:
            diary.write("result", plain(batch).detach())
        optimizer.zero_grad()
        MARKS[:] = tagged(net)
        step = diary.step(lambda batch: kind(net, batch), model=net, optimizer=optimizer)
        for batch in data[2:]:
            diary.write("result", step(batch).detach())
            diary.write("kept", state_of(net))
            between(net)
        diary.write_state(net, optimizer)

    return script


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_step_replaces_keeps_no_autograd_graph_alive_in_a_capture(kind, at_captures):
    """On a GPU its nodes that add to gradients belong to the default stream, and would break the capture."""
    both(script_of(KINDS[kind]), replays=ENOUGH, plan="{F B O}")
    assert at_captures == [(6, 0)]


def test_a_capture_for_another_shape_is_free_of_plain_steps_in_between(at_captures):
    """The first steps of a shape are plain ones, and are traced before it gets its graph."""

    def script(diary: Diary) -> None:
        MARKS.clear()
        net = Recurrent()
        optimizer = adamw(net)
        step = diary.step(lambda batch: a_tuple(net, batch), model=net, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(60)):
            size = 8 if index < 12 else 5
            if index == 13:
                MARKS[:] = tagged(net)  # of a plain step, as the model keeps it
            diary.write("result", step((x[:size], y[:size])).detach())
            diary.write("kept", state_of(net))
        diary.write_state(net, optimizer)

    both(script, replays=20, plan="{F B O}")
    assert at_captures == [(0, 0), (6, 0)]


def test_an_autograd_graph_that_the_loop_holds_as_well_stays_as_it_is(at_captures):
    held: list[Any] = []

    def hold(net: Recurrent) -> None:
        if net.state.grad_fn.name() != "_UsedBackward":
            held.append((net.state, net.state.grad_fn, net.state.clone()))

    both(script_of(attribute, between=hold), replays=ENOUGH, plan="{F B O}")
    assert len(held) > 2
    assert all(state.grad_fn is node and torch.equal(state, copy) for state, node, copy in held)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_go_on_plainly_after_a_capture_that_fails(kind, monkeypatch):
    left = fail_in_capture(monkeypatch, RuntimeError("planted"))
    report = both(script_of(KINDS[kind]), replays=1)
    assert left == [0] and report.steps_replayed == 0, str(report)


def test_an_attribute_that_the_step_reads_as_well_is_refused_with_its_name():
    """Its history is needed, so nothing may take it away."""

    def reads(net: Recurrent, batch: Any) -> Tensor:
        before = net.last
        loss = attribute(net, batch)
        net.last = net.state * 0.5
        return loss if before is None else loss + before.detach().sum()

    report = both(script_of(reads, count=24), replays=1)
    assert report.steps_replayed == 0
    assert "net.last is replaced by the step and requires a gradient" in text_of(report), str(report)


def test_recurrent_gemma_is_one_graph(at_captures):
    transformers = pytest.importorskip("transformers")

    def script(diary: Diary) -> None:
        MARKS.clear()
        config = transformers.RecurrentGemmaConfig(
            vocab_size=50,
            hidden_size=16,
            lru_width=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            attention_window_size=8,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
        )
        net = transformers.RecurrentGemmaForCausalLM(config).train()
        optimizer = adamw(net)
        layers = [module for module in net.modules() if hasattr(module, "recurrent_states")]
        data = torch.randint(2, 50, (16, 2, 8), generator=torch.Generator().manual_seed(1))
        options = {"model": net, "optimizer": optimizer}
        plain = PlainStep(lambda ids: net(input_ids=ids, labels=ids).loss, **options)
        for ids in data[:2]:
            diary.write("result", plain(ids).detach())
        optimizer.zero_grad()
        MARKS[:] = tagged(net)
        step = diary.step(lambda ids: net(input_ids=ids, labels=ids).loss, **options)
        for ids in data[2:]:
            diary.write("result", step(ids).detach())
            diary.write("kept", [layer.recurrent_states for layer in layers])
            told = [(x.recurrent_states.requires_grad, list(x.recurrent_states.stride())) for x in layers]
            diary.write("told", told)
        diary.write_state(net, optimizer)

    both(script, replays=8, plan="{F B O}")
    ((marked, alive),) = at_captures
    assert marked > 20 and alive == 0
