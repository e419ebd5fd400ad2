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
    max_signatures: int
    indirection: Literal["auto", "device", "host", "copy"]
    verify: Literal["off", "first", "sample", "always"]
    engine: Literal["auto", "cuda", "emulated", "off"]
    on_failure: Literal["fallback", "raise"]
    cache_dir: str | os.PathLike[str] | None
    log_metrics: bool


class PyGraphOptions(StepOptions, total=False):
    """Single options of a `PyGraphConfig` as keyword arguments: type checkers see their names and values."""

    optimizer: AutoOnOff


@dataclass(frozen=True)
class PyGraphConfig:
    """Options of pygraph-train. Frozen; derive variants with `replace`.

    Args:
        forward, backward, optimizer: may this phase run from a graph. "off" is obeyed exactly; "auto"
            measures while training runs and keeps what is fastest; "on" takes a graph wherever it is legal,
            and logs a warning when steps run without one. A forward or a backward whose other half is off
            comes from a region of the compile backend, on CUDA with Inductor's kernels.
        fuse: may adjacent phases share one graph; "on" is meant like the phases'.
        compile: use Inductor's kernels inside the graphs. "auto" compiles when the training steps left
            make up for the compile time; where their number is unknown, it is taken to be as large as the
            number of steps made. False captures eager kernels: no compile time.
        warmup_steps: steps in which the library watches what a step reads and writes (>= 2). Two more steps
            run with the kernels that the graph will hold, and the next step is the first one that a graph
            runs: step `warmup_steps + 3`. It is a later one where the library times plain steps first (one
            or two, on CUDA), compiles (one step), waits for gradients that are added up, or trains under
            DistributedDataParallel (the graph is captured after 11 steps). Steps with a batch of another
            shape run `warmup_steps` times before they are watched. In a loop that the user wrote (Accelerate,
            Fabric, transformers, manual optimization) each forward and backward runs so often before its graph
            is made.
        max_signatures: captures kept; the least recently used one is released (>= 1).
        indirection: how inputs at new addresses are served; only "copy" and "auto" exist so far.
        verify: compare replays with the same step run without a graph: never, on the first replay of
            each capture, also at growing intervals from then on ("sample": at most 0.2% of the time), or on
            every replay ("always" is for debugging: it doubles the cost of a step).
        engine: "cuda" needs a CUDA device; "emulated" replays a CPU tape with CUDA-graph rules (for
            tests and for seeing the mechanism; it is slower than plain training); "off" does nothing;
            "auto" is "cuda" where there is a CUDA device and "off" elsewhere.
        on_failure: "fallback" goes on without the graph and says why in the report; "raise" raises.
        cache_dir: a directory where decisions are kept: the next run of the same model, signature, GPU,
            driver and versions starts with the winner and only verifies it. None keeps nothing.
        log_metrics: whether the loggers of a Lightning Trainer, and the trackers of an Accelerator, get
            `pygraph/share_from_graphs` and, on CUDA, `pygraph/step_ms` and `pygraph/gpu_idle_fraction`
            (docs/report.md). Other loops have no loggers.

    Raises:
        ValueError: an option has a value that is not allowed, or options contradict each other. The
            message names the field.
        TypeError: `cache_dir` is no path.
    """

    forward: AutoOnOff = "auto"
    backward: AutoOnOff = "auto"
    optimizer: AutoOnOff = "auto"
    fuse: AutoOnOff = "auto"
    compile: bool | Literal["auto"] = "auto"
    warmup_steps: int = 3
    max_signatures: int = 8
    indirection: Literal["auto", "device", "host", "copy"] = "auto"
    verify: Literal["off", "first", "sample", "always"] = "sample"
    engine: Literal["auto", "cuda", "emulated", "off"] = "auto"
    on_failure: Literal["fallback", "raise"] = "fallback"
    cache_dir: str | os.PathLike[str] | None = None
    log_metrics: bool = False

    def __post_init__(self) -> None:
        check_values(self, _CHOICES, {"warmup_steps": 2, "max_signatures": 1}, "PyGraphConfig.{}={!r}")
        if self.cache_dir is not None:
            _check_directory(self.cache_dir)
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


def _check_directory(cache_dir: Any) -> None:
    message = f"PyGraphConfig.cache_dir={cache_dir!r} is not allowed: use a path, or None"
    if not isinstance(cache_dir, (str, os.PathLike)):
        raise TypeError(message)
    path = os.fspath(cache_dir)
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(message)


def disabled_by_environment() -> bool:
    """True when PYGRAPH_DISABLE is set to anything but an empty string or 0."""
    return os.environ.get("PYGRAPH_DISABLE", "") not in ("", "0")
