"""On a GPU the generator of the CPU is for the host alone: what it decides is drawn before each replay."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_host_draws import LayerDrop
from torch import Tensor, nn

from pygraph_train import GraphedStep, PyGraphConfig, StepReport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 100


def states() -> list[Any]:
    """Of all random numbers, those of the device included."""
    _, numbers, place, *_ = np.random.get_state()
    mine = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return [*(s.tolist() for s in mine), random.getstate(), numbers.tolist(), place]


def both(
    make: Callable[[], nn.Module],
    loss: Callable[[Any, Any], Tensor],
    batches: list[Any],
    *,
    whole: int,
    close: float | None = None,
    **config: Any,
) -> StepReport:
    """Train plainly and graphed. Losses and parameters have the same bits, or are `close`; random states are equal.

    Args:
        whole: how many steps have to run from one graph at least; 0 where none may.
    """
    kept: list[list[Any]] = []
    for graphed in (False, True):
        torch._dynamo.reset()
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        model = make().cuda().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True, capturable=True)
        step = (
            GraphedStep(
                lambda batch, net=model: loss(net, batch),
                model=model,
                optimizer=optimizer,
                config=PyGraphConfig(**{"compile": False, **config}),
            )
            if graphed
            else None
        )
        kept.append([])
        for batch in batches:
            if step is not None:
                found = step(batch)
            else:
                optimizer.zero_grad()
                found = loss(model, batch)
                found.backward()
                optimizer.step()
            kept[-1] += [found.detach().clone(), *(p.detach().clone() for p in model.parameters()), states()]
        if step is not None:
            report = copy.copy(step.report())
            step.close()
    for index, (expected, got) in enumerate(zip(*kept, strict=True)):
        if not isinstance(expected, Tensor):
            assert expected == got, f"entry {index}: random states differ\n{report}"
        elif close is None:
            assert torch.equal(expected, got), f"entry {index}: {expected} became {got}\n{report}"
        else:
            assert torch.allclose(expected, got, rtol=close, atol=close), f"entry {index}\n{report}"
    assert (report.steps_replayed > 0) == (whole > 0) and report.steps_replayed >= whole, str(report)
    return report


def inputs(count: int = STEPS) -> list[Tensor]:
    return list(torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(1)).cuda())


class WithDropout(LayerDrop):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.2, self.training))


@pytest.mark.parametrize("layerdrop", [0.0, 0.5])
def test_layerdrop_beside_dropout_of_the_device(layerdrop: float) -> None:
    both(lambda: WithDropout(layerdrop), lambda net, x: net(x), inputs(), whole=50)


def test_layerdrop_with_compiled_kernels() -> None:
    both(lambda: LayerDrop(0.0), lambda net, x: net(x), inputs(), whole=50, close=2e-2, compile=True)


def test_numbers_of_python_and_numpy_decide() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            x = x.flip(0)
        result: Tensor = net(x) * random.choice([1.0, 2.0])
        torch.rand(3)  # for nothing
        return result if np.random.rand() < 0.5 else 2 * result

    both(lambda: LayerDrop(0.0), loss, inputs(160), whole=50)


def test_gradients_are_checked_again_in_mid_run() -> None:
    both(lambda: WithDropout(0.3), lambda net, x: net(x), inputs(), whole=40, verify="always")


def test_a_draw_of_the_device_that_decides_every_other_step_is_left_soon() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net(x)
        return result if torch.rand((), device="cuda") < 0.5 else 2 * result

    report = both(lambda: LayerDrop(0.0), loss, inputs(60), whole=1)
    assert report.steps_replayed < 30 and "went another way than their graph" in str(report.fallbacks)


def test_what_no_graph_can_hold() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        result: Tensor = net(x)
        return result / torch.rand(
            ()
        )  # a device divides by a number of the host in another way than by its own

    both(lambda: LayerDrop(0.0), loss, inputs(30), whole=0)


def mixed(x: Tensor) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x[torch.randperm(len(x)).to(x.device)]


def masked(x: Tensor) -> Tensor:
    mask = np.random.rand(*x.shape) < 0.3
    return x.masked_fill(torch.tensor(mask, device=x.device), 0.0)


def of_two_draws(x: Tensor) -> Tensor:
    numbers = torch.empty(4)
    numbers.uniform_()
    return x * numbers[torch.randperm(4)].to(x)[:, None] + torch.normal(0.0, 1.0, (6,)).cuda()


def shuffled(x: Tensor) -> Tensor:
    order = list(range(len(x)))
    random.shuffle(order)
    return x[torch.tensor(order).to(x.device)] + x[random.sample(range(4), 4)]


INTO_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch, a permutation": lambda x: x[torch.randperm(4).to(x.device)],
    "torch, an index of the host": lambda x: x[:, torch.randint(0, 6, (6,))],
    "torch, a number": lambda x: x * torch.rand(()) + torch.rand(()),
    "torch, a number that is read": lambda x: x * torch.rand(()).item(),
    "torch, of another type": lambda x: x + (3 * torch.rand(4, 6)).to(x.device, torch.long),
    "torch, of two draws": of_two_draws,
    "a fraction": lambda x: x * random.random() / (1 + random.random()) - random.gauss(0, 1),
    "an array": lambda x: x + torch.from_numpy(np.random.randn(4, 6)).float().to(x.device),
    "a permutation": lambda x: x[torch.from_numpy(np.random.permutation(4)).to(x.device)],
    "a mixture": mixed,
    "a mask": masked,
    "shuffled": shuffled,
}


@pytest.mark.parametrize("name", INTO_TENSORS)
def test_what_is_drawn_gets_into_tensors(name: str) -> None:
    make = INTO_TENSORS[name]
    report = both(lambda: WithDropout(0.0), lambda net, x: net(make(x)), inputs(60), whole=40)
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize("name", ["torch, a permutation", "a mixture", "a mask"])
def test_what_is_drawn_gets_into_tensors_of_compiled_steps(name: str) -> None:
    make = INTO_TENSORS[name]
    both(lambda: LayerDrop(0.0), lambda net, x: net(make(x)), inputs(60), whole=30, close=2e-2, compile=True)


def test_half_precision_takes_fractions_of_the_host() -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return net(random.random() * x[torch.randperm(4).to(x.device)])  # type: ignore[no-any-return]

    both(lambda: LayerDrop(0.0), loss, inputs(60), whole=40)


_SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "BartForConditionalGeneration": {**_SMALL, "max_position_embeddings": 32},
    "WhisperForConditionalGeneration": {
        **_SMALL,
        "num_mel_bins": 8,
        "max_source_positions": 16,
        "max_target_positions": 16,
    },
    "OPTForCausalLM": {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "ffn_dim": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "word_embed_proj_dim": 32,
    },
}


@pytest.mark.parametrize("layerdrop", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, layerdrop: float) -> None:
    if name.startswith("Whisper") and torch.__version__ < "2.13":
        pytest.skip("Dynamo of torch 2.11 does not trace the dataclasses of Whisper's configuration")
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, name)
    own = {"layerdrop": layerdrop, "encoder_layerdrop": layerdrop, "decoder_layerdrop": layerdrop}
    numbers = torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        labels = torch.randint(3, 50, (2, 8), generator=numbers).cuda()
        if name.startswith("Whisper"):
            return {
                "input_features": torch.randn(2, 8, 32, generator=numbers).cuda(),
                "labels": labels,
            }
        return {"input_ids": labels, "labels": labels}

    both(
        lambda: kind(kind.config_class(**MODELS[name], **own)),
        lambda net, given: net(**given).loss,
        [batch() for _ in range(STEPS)],
        whole=60 if layerdrop == 0.0 else 10,
    )


def test_what_a_cache_holds_was_drawn_on_the_device_where_it_stands() -> None:
    """After the dropout of the same step, and not when the step is traced or a guard looks."""

    @functools.lru_cache
    def noise(rows: int) -> Tensor:
        return torch.rand(rows, device="cuda")

    def make() -> nn.Module:
        noise.cache_clear()
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    both(make, lambda net, x: (net(x) * noise(4)).square().mean(), inputs(), whole=50)
