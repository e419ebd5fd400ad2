"""Step time of LightningModules that optimize by hand: eager, compiled parts, reduce-overhead, PyGraph.

`ppo_loop` is the update of PPO in a plain loop, with one optimizer for both networks; PyGraph is `GraphedStep` there.

    python -m benchmarks.manual_step --json manual.json                       # one CUDA GPU, everything
    python -m benchmarks.manual_step --scale tiny                             # does the script work? (CPU)

benchmarks/README.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.command import told_in
from benchmarks.lightning_step import COMPILE_OPTIONS, measured, parse, run
from benchmarks.workloads import Batch
from pygraph_train import GraphedStep

LATENT = 100
BATCHES = 4


class Dcgan(pl.LightningModule):
    """The deep convolutional GAN of Radford et al.: two optimizers, toggled, and a step of each for every batch."""

    def __init__(self, mode: str, width: int, doublings: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        widths = [width * 2**i for i in reversed(range(doublings))]
        made: list[nn.Module] = [
            nn.ConvTranspose2d(LATENT, widths[0], 4, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(True),
        ]
        for wide, narrow in itertools.pairwise(widths):
            made += [
                nn.ConvTranspose2d(wide, narrow, 4, 2, 1, bias=False),
                nn.BatchNorm2d(narrow),
                nn.ReLU(True),
            ]
        made += [nn.ConvTranspose2d(widths[-1], 3, 4, 2, 1), nn.Tanh()]
        seen: list[nn.Module] = [nn.Conv2d(3, widths[-1], 4, 2, 1), nn.LeakyReLU(0.2, True)]
        for wide, narrow in reversed(list(itertools.pairwise(widths))):
            seen += [
                nn.Conv2d(narrow, wide, 4, 2, 1, bias=False),
                nn.BatchNorm2d(wide),
                nn.LeakyReLU(0.2, True),
            ]
        seen += [nn.Conv2d(widths[0], 1, 4), nn.Flatten(0)]
        self.generator, self.discriminator = nn.Sequential(*made), nn.Sequential(*seen)
        _call_compiled(self, mode, generate=self.generator, judge=self.discriminator)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        generator, discriminator = self.optimizers()  # type: ignore[misc]
        images = batch["images"]
        noise = torch.randn(len(images), LATENT, 1, 1, device=self.device)
        self.toggle_optimizer(discriminator)
        real, fake = self.judge(images), self.judge(self.generate(noise).detach())
        judged = F.softplus(-real).mean() + F.softplus(fake).mean()
        discriminator.zero_grad()
        self.manual_backward(judged)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.judge(self.generate(noise))).mean()
        generator.zero_grad()
        self.manual_backward(loss)
        generator.step()
        self.untoggle_optimizer(generator)
        self.log("judged", judged, prog_bar=True)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(part.parameters(), lr=2e-4, betas=(0.5, 0.999), fused=True)
            for part in (self.generator, self.discriminator)
        ]


class Ppo(pl.LightningModule):
    """The update of proximal policy optimization on one minibatch: an actor and a critic, clipped by hand."""

    def __init__(self, mode: str, observed: int, width: int, actions: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = _mlp(observed, width, actions), _mlp(observed, width, 1)
        _call_compiled(self, mode, act=self.actor, value=self.critic)

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the actor and of the critic."""
        logits = self.act(batch["observed"]).float().log_softmax(-1)
        chosen = logits.gather(1, batch["actions"][:, None]).squeeze(1)
        ratio = (chosen - batch["chosen_before"]).exp()
        clipped = ratio.clamp(0.8, 1.2) * batch["advantages"]
        entropy = -(logits.exp() * logits).sum(-1).mean()
        loss = -torch.minimum(ratio * batch["advantages"], clipped).mean() - 0.01 * entropy
        return loss, F.mse_loss(self.value(batch["observed"]).float().squeeze(1), batch["returns"])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        actor, critic = self.optimizers()  # type: ignore[misc]
        loss, error = self.losses(batch)
        for optimizer, part in ((actor, loss), (critic, error)):
            optimizer.zero_grad()
            self.manual_backward(part)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
        self.log("error", error, prog_bar=True)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(part.parameters(), lr=3e-4, fused=True) for part in (self.actor, self.critic)
        ]


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def _call_compiled(module: nn.Module, mode: str, **parts: nn.Module) -> None:
    """Give a module each part under another name, compiled where the mode says so.

    The parameters belong to the part alone: `module` does not hold what compiles it as a part of its own.
    """
    for name, part in parts.items():
        compiled = torch.compile(part, **COMPILE_OPTIONS[mode]) if mode in COMPILE_OPTIONS else part
        vars(module)[name] = compiled


def _dcgan(mode: str, scale: str) -> tuple[pl.LightningModule, list[Batch]]:
    width, doublings, count = (64, 4, 64) if scale == "full" else (4, 2, 4)
    draw = torch.Generator().manual_seed(1)
    size = 4 * 2**doublings
    batches = [{"images": torch.rand(count, 3, size, size, generator=draw) * 2 - 1} for _ in range(BATCHES)]
    return Dcgan(mode, width, doublings), _pinned(batches)


def _ppo(mode: str, scale: str) -> tuple[Ppo, list[Batch]]:
    observed, width, actions, count = (64, 256, 8, 256) if scale == "full" else (8, 16, 3, 8)
    draw = torch.Generator().manual_seed(1)
    batches = [
        {
            "observed": torch.randn(count, observed, generator=draw),
            "actions": torch.randint(0, actions, (count,), generator=draw),
            "chosen_before": -torch.rand(count, generator=draw) - 1,
            "advantages": torch.randn(count, generator=draw),
            "returns": torch.randn(count, generator=draw),
        }
        for _ in range(BATCHES)
    ]
    return Ppo(mode, observed, width, actions), _pinned(batches)


def _pinned(batches: list[Batch]) -> list[Batch]:
    if not torch.cuda.is_available():
        return batches
    return [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]


MODELS: dict[str, Callable[[str, str], tuple[pl.LightningModule, list[Batch]]]] = {
    "dcgan": _dcgan,
    "ppo": _ppo,
}


def _measure_loop(mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of PPO in a plain loop."""
    row: dict[str, Any] = {"model": "ppo_loop", "mode": mode, "error": None, "skipped": None, "step_ms": None}
    cuda = args.device == "cuda"
    if not cuda and mode in COMPILE_OPTIONS:
        return {**row, "skipped": "needs CUDA: on a CPU it would be compared with an emulation"}
    torch._dynamo.reset()
    with told_in(row, args.timeout_s):
        torch.manual_seed(0)
        made, batches = _ppo(mode, args.scale)
        module = made.to(args.device)

        def loss_of(batch: Batch) -> Tensor:
            loss, error = module.losses(batch)
            return loss + 0.5 * error

        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
        graphed = None
        if mode.startswith("pygraph"):
            graphed = GraphedStep(
                loss_of,
                model=module,
                optimizer=optimizer,
                max_grad_norm=0.5,
                compile=mode == "pygraph",
                engine="cuda" if cuda else "emulated",
            )

        def step(batch: Batch) -> Tensor:
            if graphed is not None:
                return graphed(batch)  # type: ignore[no-any-return]
            batch = {name: value.to(args.device, non_blocking=True) for name, value in batch.items()}
            optimizer.zero_grad()
            loss = loss_of(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        turns = itertools.cycle(batches)
        losses = [step(next(turns)).clone() for _ in range(args.max_warmup)]
        windows = []
        for _ in range(args.windows):
            _synchronize(cuda)
            started = time.perf_counter()
            for _ in range(args.steps):
                loss = step(next(turns))
            _synchronize(cuda)
            windows.append((time.perf_counter() - started) / args.steps * 1e3)
        row.update(
            step_ms=statistics.median(windows),
            windows_ms=windows,
            first_losses=torch.stack(losses).tolist(),
            final_loss=float(loss),
            steady=True,
        )
        if graphed is not None:
            report = graphed.report().to_dict()
            first = report["first_replay_step"]
            row.update(report=report, first_replay_step=first, steady=first is not None)
            graphed.close()
    return row


def _synchronize(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def measure(model: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row: train `model` in `mode`. A crash or a time-out is part of the row, never raised."""
    if model == "ppo_loop":
        return _measure_loop(mode, args)
    # under mixed precision Lightning clips no gradients of fused optimizers
    precision = "32-true" if model == "ppo" else "bf16-mixed"
    return measured(
        model, mode, args, lambda: MODELS[model](mode, args.scale), updates=2, precision=precision
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON. Returns 1 if any mode crashed or timed out."""
    return run("manual_step", parse(argv, __doc__, (*MODELS, "ppo_loop")), measure)


if __name__ == "__main__":
    raise SystemExit(main())
