"""Draw the pictures of docs/benchmarks.md from results/: `python -m benchmarks.pictures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
COLOURS = ("#8f8f8f", "#e08a00", "#3f9fd8")  # seen on white and on black
STYLE = "text{font:12px sans-serif;fill:#333}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
NAMES = {
    "mlp": "16-layer MLP, batch 64",
    "bert": "BERT base, 8×128",
    "gpt2": "GPT-2 small, 4×256",
    "vit_small": "ViT-S/16, batch 16",
    "mobilenetv3": "MobileNetV3-L, batch 32",
}
WHOLE = {
    "llama_lora": "Llama of 4 layers, LoRA",
    "llama_lora_checkpointing": "the same with gradient checkpointing",
    "llama_lora_checkpointing_dropout": "the same with dropout in the checkpoint",
    "bert_padding": "BERT, dynamic padding",
    "nanogpt": "nanoGPT of 124M",
    "sentence_pairs": "MiniLM, contrastive loss",
    "diffusion": "diffusion U-Net",
    "convnext_mixup": "ConvNeXt-T, mixup",
    "distillation": "distillation",
    "speech_ctc": "speech, CTC",
    "ppo": "PPO",
    "lstm_forecast": "LSTM",
}
Bars = list[tuple[str, int, float]]  # title, colour, length


def _rows(name: str, *numbers: int) -> list[dict[str, Any]]:
    files = [FOLDER.parents[1] / "benchmarks" / "results" / f"{name}_h200_{n}.json" for n in numbers]
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _drawn(legend: tuple[str, ...], bars: Bars) -> str:
    """Bars in groups with a title, 400 wide as a phone is."""
    parts, y, last, longest = [], 4 + 17 * len(legend), "", max(bar[2] for bar in bars)
    for at, hue, name in zip(range(4, 99, 17), COLOURS, legend, strict=False):
        parts.append(f'<rect y="{at}" width="12" height="12" fill="{hue}"/>')
        parts.append(f'<text x="18" y="{at + 10}">{name}</text>')
    for title, colour, length in bars:
        if title != last:
            parts.append(f'<text y="{y + 18}" style="font-weight:bold">{title}</text>')
            y, last = y + 24, title
        width = max(1, length * 310 / longest)
        parts.append(f'<rect y="{y}" width="{width:.1f}" height="11" fill="{COLOURS[colour]}"/>')
        parts.append(f'<text x="{width + 5:.1f}" y="{y + 10}">{length:.{1 if length >= 10 else 2}f}</text>')
        y += 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 {y + 4}"><style>{STYLE}</style>'
    return "\n".join([head, *parts, "</svg>", ""])


def pictures() -> dict[str, str]:
    """What stands in each file."""
    steps, whole, inputs = Bars(), Bars(), Bars()
    for r in _rows("phases", 2):
        steps += [(NAMES[r["model"]], i, r[f"{way}_ms"]) for i, way in enumerate(("plain", "ours"))]
    for recipe, title in WHOLE.items():
        files = [
            {r["way"]: r for r in _rows("recipes", n) if r["recipe"] == recipe}
            for n in (20, 21, 13, 14, 15, 2)
        ]
        found = next(rows for rows in files if len(rows) > 1)
        for way in ("plain", "ours"):
            whole.append((f"{title}, {found[way]['steps_made']} steps", way == "ours", found[way]["whole_s"]))
    for r in _rows("inputs", 1):
        inputs += [(f"{r['mib']} MiB", i, r[k] - r["stay"]) for i, k in enumerate(("copy", "host", "device"))]
    return {
        "steps.svg": _drawn(("plain, ms a step", "with graphs"), steps),
        "whole_runs.svg": _drawn(("plain, s", "with the library"), whole),
        "inputs.svg": _drawn(("µs of a copy", "of pointers that the host rewrites", "by a kernel"), inputs),
    }


if __name__ == "__main__":
    for file, text in pictures().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
