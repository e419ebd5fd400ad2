"""Random steps in which the host and a device take turns: what runs in front, in a graph and behind it gives the same.

Tensors of int32 stand for those of the host, so that no GPU is needed.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pygraph_train.core import passes
from pygraph_train.core.passes import HostPart, halves, is_on_host

from .test_host_part import graphs_of

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("graphs are split, and none is recorded")]

HOST = torch.int32
WEIGHTS = torch.linspace(-1, 1, 18).view(6, 3).requires_grad_()
LINES = (
    "{new} = torch.zeros(4, dtype=HOST)",
    "{new} = torch.arange(4, dtype=HOST)",
    "{new} = torch.randint(0, 4, (4,), dtype=HOST)",
    "{new} = ({h} + {g}) % 4",
    "{new} = {h}.view(2, 2).flatten()",
    "{new} = torch.cat(list({h}.split(2))[::-1])",
    "{new} = ({d}[:, 0] > 0).to(HOST)",
    "{h}[{i}] = {j}",
    "{h}[{i}] = ({d}.sum() > 0).to(HOST)",
    "{h}[1:] = {g}[:3]",
    "{h}.add_(1).remainder_(4)",
    "torch.add({h}, 1, out={other})",
    "{made} = {d}[{h}.long() % 4]",
    "{made} = {d} * 1.5 + {e}",
    "{made} = {d} + {h}.float()[:, None]",
    "{made} = {d}.clone(); {made}[{h}.long() % 4] = 0.5",
)
"""Of a step: h, g, other and new are tensors of the host; d, e and made of the device."""


def a_step(seed: int) -> tuple[str, Any]:
    """The source of a step, and the step."""
    draw = random.Random(seed)
    host, device = ["h0", "h1"], ["x"]
    lines = ["h1 = torch.ones(4, dtype=HOST)"]
    for n in range(draw.randint(4, 12)):
        h, other = draw.sample(host, 2)
        names = {
            "h": h,
            "g": draw.choice(host),
            "other": other,
            "d": draw.choice(device),
            "e": draw.choice(device),
        }
        line = draw.choice(LINES)
        lines.append(
            line.format(new=f"h{n + 2}", made=f"d{n}", i=draw.randrange(4), j=draw.randrange(4), **names)
        )
        host += [f"h{n + 2}"] if "{new}" in line else []
        device += [f"d{n}"] if "{made}" in line else []
    results = [f"({draw.choice(device)} @ WEIGHTS).sum()", *sorted(draw.sample(host[1:], 1))]
    source = "\n    ".join([f"def step(x, h0):\n    {lines[0]}", *lines[1:], f"return {', '.join(results)}"])
    names = {"torch": torch, "HOST": HOST, "WEIGHTS": WEIGHTS}
    exec(source, names)
    return source, names["step"]


def can_be_recorded(head: GraphModule) -> bool:
    """Whether the host draws nothing, nothing is copied between host and device, and nothing is given to the host."""
    if any(map(passes._draws_on_host, head.graph.nodes)):
        return False
    for n in head.graph.nodes:
        sides = {is_on_host(x) for x in [*n.all_input_nodes, n] if passes._tensors(x)}
        if (n.op.startswith("call") and len(sides) == 2) or (
            n.op == "placeholder" and n.users and is_on_host(n)
        ):
            return False
    return True


class Recording:
    """Gives back what the host has computed in its first call, as a replay does."""

    def __init__(self, head: GraphModule) -> None:
        self.head, self.kept = head, None

    def __call__(self, *given: Tensor) -> list[Tensor]:
        made = list(self.head(*given))
        (output,) = self.head.graph.find_nodes(op="output")
        self.kept = self.kept or made
        on_host = [isinstance(n, Node) and is_on_host(n) for n in output.args[0]]
        return [kept if still else new for kept, new, still in zip(self.kept, made, on_host, strict=True)]


def test_random_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        passes, "is_on_host", on_host := lambda n: {t.dtype for t in passes._tensors(n)} == {HOST}
    )
    monkeypatch.setitem(globals(), "is_on_host", on_host)
    recorded = 0
    for seed in range(100):
        source, step = a_step(seed)
        batches = [
            (torch.randn(4, 6, generator=g), torch.randint(0, 4, (4,), generator=g, dtype=HOST))
            for g in [torch.Generator().manual_seed(i) for i in range(3)]
        ]
        try:
            (gm,) = graphs_of(step, *(t.clone() for t in batches[0]))
        except (RuntimeError, ValueError):  # it writes what is expanded, or has a graph break
            continue
        inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        front = HostPart(gm)
        rest = front.rest if front.any else gm
        head, tail = halves(rest) or (rest, None)
        if not can_be_recorded(head):
            continue
        recording = Recording(head)

        def region(*given: Any, tail: Any = tail, recording: Any = recording) -> Any:
            return tail(*given, *recording(*given)) if tail else recording(*given)

        call, recorded = front.around(region) if front.any else region, recorded + 1
        for number, batch in enumerate(batches):
            x, h = [t.clone() for t in batch]
            torch.manual_seed(number)
            expected = *step(x, h), torch.rand(()), h
            x, h = [t.clone() for t in batch]
            given = [WEIGHTS if t.requires_grad else h if t.dtype is HOST else x for t in inputs]
            torch.manual_seed(number)
            found = *call(*given), torch.rand(()), h
            assert all(map(torch.equal, found, expected)), source
    assert recorded > 30, recorded
