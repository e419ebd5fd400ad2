"""Train a GPT on the source of Python's standard library in a stock Accelerate loop, with PyGraph as a plugin.

    pip install accelerate
    python examples/accelerate_gpt.py                        # tiny model on a CPU, small on a GPU
    python examples/accelerate_gpt.py --engine off           # the same training without PyGraph

Forward, backward and optimizer each run from a CUDA graph; the loop between them is ordinary Python. On a CPU an
emulation shows the mechanism, without being faster. Nothing is downloaded: the tokenizer is built from the text.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pygraph_train import Accelerator, PyGraph

PIECE = re.compile(r"[A-Za-z_]+|[0-9]|\n *| +|.")  # words, digits, line breaks with their indent, signs


class Tokenizer:
    """The most frequent pieces of a text get numbers; 0 stands for all others."""

    def __init__(self, text: str, size: int) -> None:
        frequent = Counter(PIECE.findall(text)).most_common(size - 1)
        self.pieces = ["�", *(piece for piece, _ in frequent)]
        self.numbers = {piece: number for number, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> Tensor:
        """(length,), int64."""
        return torch.tensor([self.numbers.get(piece, 0) for piece in PIECE.findall(text)])


class GPT(nn.Module):
    """Predicts the next token. Input: (batch, length), int64; output: (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def standard_library() -> str:
    """The top-level modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files[:60])


def excerpts_of_text(length: int, count: int) -> tuple[TensorDataset, int]:
    """Tokens of `count` places in the standard library, each (`length`,), and the size of the vocabulary."""
    text = standard_library()
    tokenizer = Tokenizer(text, size=2048)
    tokens = tokenizer.encode(text)
    starts = torch.randint(len(tokens) - length + 1, (count,))
    excerpts = torch.stack([tokens[s : s + length] for s in starts.tolist()])
    return TensorDataset(excerpts), len(tokenizer.pieces)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="A GPT with Accelerate and PyGraph")
    parser.add_argument("--engine", choices=("auto", "cuda", "emulated", "off"), default="auto")
    parser.add_argument("--steps", type=int, default=2000 if cuda else 60)
    args = parser.parse_args()
    engine = args.engine
    if engine == "auto":
        engine = "cuda" if cuda else "emulated"
    on_cpu = engine == "emulated" or not cuda
    context, width, layers, batch = (32, 64, 2, 16) if on_cpu else (256, 384, 6, 32)

    torch.manual_seed(0)
    excerpts, vocabulary = excerpts_of_text(context + 1, args.steps * batch)
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no" if on_cpu else "bf16",
        plugins=[PyGraph(engine=engine)],
    )
    model = GPT(vocabulary, context, width, layers, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, DataLoader(excerpts, batch), schedule
    )
    loss = torch.zeros(())
    for step, (excerpt,) in enumerate(loader):
        logits = model(excerpt[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), excerpt[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % max(1, args.steps // 10) == 0:
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.print(f"last loss: {loss.item():.3f}")
    accelerator.print(accelerator.pygraph.report())
    accelerator.end_training()


if __name__ == "__main__":
    main()
