"""Switches that torch changes by itself on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIRST_ATTENTION = """
import torch
from torch import nn
from pygraph_train.torch_private.switches import switches

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.before(x)
        torch._dynamo.graph_break()
        q = x[:, None]
        return self.after(nn.functional.scaled_dot_product_attention(q, q, q))

from pygraph_train import backend
torch.manual_seed(0)
net = Net().cuda().half()
compiled = torch.compile(net, backend=backend.pygraph)
x = torch.randn(2, 8, 64, device="cuda", dtype=torch.half)
before = switches()
for _ in range(6):
    compiled(x).sum().backward()
print(before == switches(), torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_the_first_attention_of_a_process_makes_nothing_compile_again() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_ATTENTION], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    changed, graphs = ran.stdout.split()[-2:]
    print(f"torch {'kept' if changed == 'True' else 'changed'} its order of attention kernels")
    assert graphs == "2"
