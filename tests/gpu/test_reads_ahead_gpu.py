"""Values of the batch that lie on a GPU are read before each replay, and a graph holds no read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_host_draws import LayerDrop
from test_host_draws_gpu import STEPS, both, inputs
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def masked(net: Any, x: Tensor) -> Tensor:
    if x.isnan().any():
        raise ValueError("the batch is no batch of numbers")
    if (x > 0).float().mean().item() > 0.5:
        x = x * 2
    result: Tensor = net(x)
    return result


@pytest.mark.parametrize("verify", ["sample", "always"])
def test_conditions_on_the_batch(verify: str) -> None:
    both(lambda: LayerDrop(0.0), masked, inputs(), whole=40, verify=verify)


def test_conditions_on_the_batch_with_compiled_kernels() -> None:
    both(lambda: LayerDrop(0.0), masked, inputs(), whole=30, close=2e-2, compile=True)


def test_conditions_beside_draws() -> None:
    both(lambda: LayerDrop(0.3), masked, inputs(160), whole=30)


def test_the_loss_may_decide() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net(x)
        return result * 2 if result > 1 else result

    both(lambda: LayerDrop(0.0), loss, inputs(30), whole=15)


_SMALL = {
    **{"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "pad_token_id": 0},
}


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM"])
def test_masks_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    numbers = torch.Generator().manual_seed(1)

    def batch(number: int) -> dict[str, Tensor]:
        ids = torch.randint(3, 50, (2, 8), generator=numbers)
        mask = torch.ones_like(ids)
        mask[0, 6:] = number % 2
        return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": ids.cuda()}

    both(
        lambda: kind(kind.config_class(**_SMALL)),
        lambda net, given: net(**given).loss,
        [batch(number) for number in range(STEPS)],
        whole=50,
    )
