"""Options of the compile backend: `torch.compile(model, backend="pygraph", options={...})`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pygraph_train.config import check_values
from pygraph_train.torch_private.inductor import inductor_settings

__all__ = ["BackendOptions"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "engine": ("auto", "cuda", "emulated", "off"),
    "phases": ("both", "forward", "backward"),
    "compile": (True, False),
    "transform": (True, False),
    "direct": (True, False),
    "indirection": ("auto", "device", "host", "copy"),
    "selection": (True, False),
    "on_failure": ("fallback", "raise"),
}


@dataclass(frozen=True)
class BackendOptions:
    """The options of the backend.

    Args:
        engine: "cuda", "emulated" (a CPU tape with CUDA-graph rules, below aten kernels instead of
            Inductor's), "off" (Inductor alone); "auto" is "cuda" for regions on a CUDA device.
        phases: the phases that may run from a graph. The other phase runs its compiled kernels without a graph. A
            callable that needs no gradients counts as a forward.
        compile: use Inductor's kernels. False: regions hold eager kernels on AOTAutograd's trace, as those of the
            emulation always do, and nothing is rewritten: `transform` and `inductor` have no effect.
        transform: rewrite operations that block a capture (CPU scalars, host-to-device copies, CPU outputs), and
            join short kernels into one (casts, counters, the last steps of sums).
        direct: call a compiled function without AOTAutograd's runtime, if it has no aliases and no mutations.
        indirection: how a graph gets inputs at new addresses. "copy" copies them into fixed buffers, "device" and
            "host" rewrite the addresses in the graph, and "auto" measures.
        selection: measure each region with and without a graph, and keep the faster way. False: use every graph
            that can be captured. Always False under the emulation, which is slower by nature.
        warmup_runs: runs of a region before it may be captured (>= 1).
        max_signatures: sets of shapes of one region that keep graphs; the least recently used set is dropped (>= 1).
            None: as many as find room in the device's memory.
        inductor: settings of Inductor for the regions, by the names that Inductor's own `options` have
            ("max_autotune", "combo_kernels", ...). The emulation has no use for them.
        on_failure: if a region cannot be captured, "fallback" runs it without a graph and gives the reason in the
            report; "raise" raises it.

    Raises:
        ValueError: an option has a value that is not allowed. The message names the option.
        TypeError: an option does not exist. The message names the options that exist.
    """

    engine: Literal["auto", "cuda", "emulated", "off"] = "auto"
    phases: Literal["both", "forward", "backward"] = "both"
    compile: bool = True
    transform: bool = True
    direct: bool = True
    indirection: Literal["auto", "device", "host", "copy"] = "auto"
    selection: bool = True
    warmup_runs: int = 3
    max_signatures: int | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    on_failure: Literal["fallback", "raise"] = "fallback"

    def __post_init__(self) -> None:
        least = {"warmup_runs": 1, "max_signatures": 1}
        if self.max_signatures is None:
            del least["max_signatures"]
        check_values(self, _CHOICES, least, "option {}={!r} of backend 'pygraph'")
        if self.inductor:
            _check_settings(self.inductor)

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Checked options from what `torch.compile(options=...)` was given."""
        names = [f.name for f in dataclasses.fields(cls)]
        for name in options or {}:
            if name not in names:
                raise TypeError(
                    f"backend 'pygraph' has no option {name!r}; the options are: {', '.join(names)}"
                )
        return cls(**(options or {}))


def _check_settings(settings: Mapping[str, Any]) -> None:
    known = inductor_settings()
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known)
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"option inductor of backend 'pygraph': Inductor has no setting {name!r}{hint}")
        if name.startswith("triton.cudagraph"):
            raise ValueError(
                f"option inductor of backend 'pygraph': {name!r} is not for you to set: CUDA graphs are made by "
                "the backend, not by Inductor"
            )
