"""Train a character GPT on the source of Python's standard library, with PyGraph in a Lightning Trainer.

    pip install lightning
    python examples/lightning_gpt.py                         # tiny model on a CPU, small on a GPU
    python examples/lightning_gpt.py --size base             # 12 layers of width 768: wants a GPU
    python examples/lightning_gpt.py --engine off            # the same training without PyGraph

On a GPU the step is replayed from CUDA graphs; elsewhere an emulation shows the mechanism, without being
faster. Nothing is downloaded. Ends with a short sample of what the model has learned to write.
"""

from __future__ import annotations

import argparse
import dataclasses
import sysconfig
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pygraph_train import PyGraphCallback

CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


@dataclasses.dataclass(frozen=True)
class Size:
    """Shape of the model and of the training run."""

    layers: int
    heads: int
    width: int
    context: int  # characters that the model sees
    batch: int
    steps: int


SIZES = {
    "tiny": Size(layers=2, heads=4, width=64, context=64, batch=16, steps=400),
    "small": Size(layers=6, heads=6, width=384, context=256, batch=32, steps=2000),
    "base": Size(layers=12, heads=12, width=768, context=512, batch=16, steps=5000),
}


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm and with a residual connection."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1 = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm2 = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width),
            nn.GELU(),
            nn.Linear(4 * size.width, size.width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharacterGPT(pl.LightningModule):
    """Predicts the next character. Input: indices into CHARACTERS, (batch, length), int64."""

    def __init__(self, size: Size, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.size = size
        self.learning_rate = learning_rate
        self.tokens = nn.Embedding(len(CHARACTERS), size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, len(CHARACTERS))

    def forward(self, indices: Tensor) -> Tensor:
        positions = torch.arange(indices.shape[1], device=indices.device)
        return self.head(self.norm(self.blocks(self.tokens(indices) + self.positions(positions))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.size.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def sample(self, prompt: str, length: int) -> str:
        """`prompt` continued by `length` characters."""
        indices = torch.tensor([[CHARACTERS.index(c) for c in prompt]], device=self.device)
        for _ in range(length):
            probabilities = self(indices[:, -self.size.context :])[:, -1].softmax(dim=-1)
            indices = torch.cat([indices, torch.multinomial(probabilities, 1)], dim=1)
        return "".join(CHARACTERS[i] for i in indices[0].tolist())


class Excerpts(Dataset):
    """Random excerpts of `length` characters."""

    def __init__(self, text: Tensor, length: int, count: int) -> None:
        self.text, self.length = text, length
        self.starts = torch.randint(len(text) - length, (count,)).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self.starts[index]
        return self.text[start : start + self.length]


def standard_library() -> Tensor:
    """The top-level modules of the standard library as indices into CHARACTERS, (length,), int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    index = {character: i for i, character in enumerate(CHARACTERS)}
    return torch.tensor([index[c] for c in text if c in index])


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A character GPT with Lightning and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--size", choices=tuple(SIZES), default="small" if cuda else "tiny")
    parser.add_argument("--steps", type=int, help="training steps (default: what the size asks for)")
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if cuda else "emulated"
    size = SIZES[args.size]
    if args.steps:
        size = dataclasses.replace(size, steps=args.steps)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")  # the data is in memory

    pl.seed_everything(0)
    excerpts = Excerpts(standard_library(), size.context + 1, count=size.steps * size.batch)
    model = CharacterGPT(size)
    on_cpu = engine == "emulated" or not cuda
    trainer = pl.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
        devices=1,
        precision="32-true" if on_cpu else "bf16-mixed",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[PyGraphCallback(engine=engine)],  # prints its report when training ends
    )
    trainer.fit(model, DataLoader(excerpts, size.batch, pin_memory=not on_cpu))
    print(f"last loss: {trainer.callback_metrics['loss']:.3f}")
    model.eval()
    print(model.sample("def ", length=200))


if __name__ == "__main__":
    main()
