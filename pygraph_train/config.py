"""User options: the only place where they and their defaults are written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

__all__ = ["PyGraphConfig", "PyGraphOptions", "StepOptions", "check_values", "disabled_by_environment"]

AutoOnOff = Literal["auto", "on", "off"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "forward": ("auto", "on", "off"),
    "backward": ("auto", "on", "off"),
    "optimizer": ("auto", "on", "off"),
    "fuse": ("auto", "on", "off"),
    "compile": ("auto", True, False),
    "indirection": ("auto", "device", "host", "copy"),
    "verify": ("off", "first", "sample", "always"),
    "engine": ("auto", "cuda", "emulated", "off"),
    "on_failure": ("fallback", "raise"),
    "log_metrics": (True, False),
}


class StepOptions(TypedDict, total=False):
    """Single options of a `PyGraphConfig` as keyword arguments, where `optimizer` is the optimizer itself."""

    forward: AutoOnOff
    backward: AutoOnOff
    fuse: AutoOnOff
    compile: bool | Literal["auto"]
    warmup_steps: int
    max_signatures: int | None
    indirection: Literal["auto", "device", "host", "copy"]
    verify: Literal["off", "first", "sample", "always"]
    engine: Literal["auto", "cuda", "emulated", "off"]
    on_failure: Literal["fallback", "raise"]
    log_metrics: bool


class PyGraphOptions(StepOptions, total=False):
    """Single options of a `PyGraphConfig` as keyword arguments: type checkers see their names and values."""

    optimizer: AutoOnOff


@dataclass(frozen=True)
class PyGraphConfig:
    """Options of pygraph-train. Frozen; derive variants with `replace`.

    Args:
        forward, backward, optimizer: whether this phase may run from a graph. "off" means never. "auto" measures
            while training runs, and keeps the fastest plan. "on" uses a graph whenever it is legal, and logs a
            warning if steps run without one. If only one of forward and backward is "off", the other one comes
            from a region of the compile backend, on CUDA with Inductor's kernels unless `compile` is False.
        fuse: whether adjacent phases may share one graph. The values mean the same as for the phases.
        compile: whether the graphs hold Inductor's kernels. "auto" compiles if the remaining training steps save
            more time than compilation takes. If the number of remaining steps is unknown, the library assumes as
            many as have run. A loop of your own runs forward and backward as they are until then, and keeps Inductor's
            kernels if its steps are faster with them. True calls Inductor at once. False captures eager kernels, and
            steps have the bits of plain training. On CUDA, forward and backward have graphs of their own then only if
            `forward` or `backward` is "on".
        warmup_steps: the number of steps in which the library watches the reads and writes of a step (>= 2). Two
            more steps run with the kernels of the later graph, and step `warmup_steps + 3` is the first one from
            a graph. Four cases delay it: on CUDA the library may time one or two plain steps first; compilation
            takes one step; a capture may wait until gradients are empty; and under DistributedDataParallel the
            graph is captured after 11 steps. If a batch has another shape, `warmup_steps` steps of this shape run
            before the library watches one. In a loop of your own (Accelerate, Fabric, transformers, manual
            optimization) each forward and each backward runs `warmup_steps` times before its graph is made.
        max_signatures: the number of variants that keep captures (>= 1). The captures of the least recently used
            variant are released. None keeps as many as memory has room for, and 8 where each variant needs a trace
            of its own (several processes, manual optimization, loops of your own).
        indirection: how the graphs of regions get inputs at new addresses: "copy" copies them into fixed buffers,
            "device" and "host" rewrite the addresses in the graph, and "auto" measures.
        verify: which replays are compared with the same step without a graph. "off": none. "first": the first
            replay of each capture. "sample": also later replays, at growing intervals, in at most 0.2% of the
            time; where shapes share a trace, only the 1st, 2nd, 4th, 8th, ... capture is compared at once.
            "always": every replay, for debugging; this doubles the cost of a step.
        engine: "cuda" needs a CUDA device. "emulated" replays a CPU tape with the rules of CUDA graphs; it is
            slower than plain training, and serves tests and demonstrations. "off" uses no graphs. "auto" is "cuda"
            if there is a CUDA device, and "off" otherwise.
        on_failure: "fallback" continues without the graph, and the report gives the reason. "raise" raises it.
        log_metrics: whether the loggers of a Lightning Trainer, and the trackers of an Accelerator, get
            `pygraph/share_from_graphs` and, on CUDA, `pygraph/step_ms` and `pygraph/gpu_idle_fraction`
            (docs/report.md). Other loops have no loggers.

    Raises:
        ValueError: an option has a value that is not allowed, or options contradict each other. The
            message names the field.
    """

    forward: AutoOnOff = "auto"
    backward: AutoOnOff = "auto"
    optimizer: AutoOnOff = "auto"
    fuse: AutoOnOff = "auto"
    compile: bool | Literal["auto"] = "auto"
    warmup_steps: int = 3
    max_signatures: int | None = None
    indirection: Literal["auto", "device", "host", "copy"] = "auto"
    verify: Literal["off", "first", "sample", "always"] = "sample"
    engine: Literal["auto", "cuda", "emulated", "off"] = "auto"
    on_failure: Literal["fallback", "raise"] = "fallback"
    log_metrics: bool = False

    def __post_init__(self) -> None:
        least = (
            {"warmup_steps": 2} if self.max_signatures is None else {"warmup_steps": 2, "max_signatures": 1}
        )
        check_values(self, _CHOICES, least, "PyGraphConfig.{}={!r}")
        if self.fuse == "on":
            off = [p for p in ("forward", "backward", "optimizer") if getattr(self, p) == "off"]
            if off:
                raise ValueError(
                    f"PyGraphConfig.fuse='on' contradicts {', '.join(f'{p}={chr(39)}off{chr(39)}' for p in off)}: "
                    "a fused step holds every phase"
                )

    @property
    def region_phases(self) -> Literal["both", "forward", "backward", "none"]:
        """What regions of the compile backend may graph."""
        if self.forward == "off":
            return "none" if self.backward == "off" else "backward"
        return "forward" if self.backward == "off" else "both"

    @classmethod
    def of(cls, config: PyGraphConfig | None, overrides: Mapping[str, Any]) -> PyGraphConfig:
        """`config` (or the defaults) with `overrides` applied.

        Raises:
            TypeError: `config` is not a PyGraphConfig, or an override names no field.
        """
        if config is not None and not isinstance(config, PyGraphConfig):
            raise TypeError(f"config must be a PyGraphConfig, got {type(config).__name__}")
        names = [f.name for f in dataclasses.fields(cls)]
        for name in overrides:
            if name not in names:
                raise TypeError(f"PyGraphConfig has no option {name!r}; the options are: {', '.join(names)}")
        return dataclasses.replace(config or cls(), **overrides)


def check_values(
    options: object, choices: Mapping[str, tuple[Any, ...]], least: Mapping[str, int], message: str
) -> None:
    """Raise ValueError for an option that is none of its `choices`, or no whole number from its `least` on.

    `message` is the format of an option's name and value in the message.
    """
    for name, allowed in choices.items():
        value = getattr(options, name)
        # `in` would accept 1 for True
        if not any(type(value) is type(a) and value == a for a in allowed):
            one_of = ", ".join(repr(a) for a in allowed)
            raise ValueError(f"{message.format(name, value)} is not allowed: use one of {one_of}")
    for name, minimum in least.items():
        value = getattr(options, name)
        if type(value) is not int or value < minimum:
            raise ValueError(f"{message.format(name, value)} is not allowed: use a whole number >= {minimum}")


def disabled_by_environment() -> bool:
    """Whether PYGRAPH_DISABLE is set, and to nothing that says no: 0, false, no, off, or an empty string."""
    return os.environ.get("PYGRAPH_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")
