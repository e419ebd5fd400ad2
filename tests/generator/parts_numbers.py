"""Numbers that steps compute with and that change, and objects that steps return."""

from __future__ import annotations

from .part import Part, by_name

__all__ = ["NUMBERS"]

NUMBERS = by_name(
    Part("extra_object", extra='"held": Held(out)'),
    Part(
        "annealed_weight",
        setup="warmth = [1.0]",
        before="warmth[0] = 0.97 ** i",
        loss="loss = loss * warmth[0] + (1 - warmth[0]) * out.pow(2).mean()",
    ),
    Part(
        "temperature",
        init="self.temperature = 1.0",
        before="model.temperature = 1 + 0.01 * i",
        loss="loss = loss + (out / model.temperature).logsumexp(1).mean() / 7",
    ),
    Part(
        "decay_written",
        init="self.decay = 1.0",
        loss="model.decay *= 0.98\nloss = loss * (0.5 + model.decay)",
    ),
    Part(
        "power_of_a_counter",
        init="self.made = 0",
        loss="model.made += 1\nloss = loss + 0.9 ** min(model.made, 50) * out.abs().mean()",
    ),
    Part(
        "weight_that_decides",
        setup="share = {'w': 0.0}",
        before="share['w'] = max(0.0, (i % 11 - 4) / 10)",
        loss="""
if share['w'] > 0:
    loss = loss - share['w'] * out.tanh().mean()
""",
    ),
)
