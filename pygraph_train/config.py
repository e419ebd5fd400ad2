"""User options: the only place where they and their defaults are written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

AutoOnOff = Literal["auto", "on", "off"] | bool

_SWITCHES = ("forward", "backward", "optimizer")

_CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SWITCHES, ("auto", "on", "off")),
    "compile": ("auto", True, False),
    "verify": ("off", "first", "sample", "always"),
    "engine": ("auto", "cuda", "emulated", "off"),
    "on_failure": ("fallback", "raise"),
    "log_metrics": (True, False),
    "print_report": (True, False),
}


class StepOptions(TypedDict, total=False):
    """Single options of a `PyGraphConfig` as keyword arguments, where `optimizer` is the optimizer itself."""

    forward: AutoOnOff
    backward: AutoOnOff
    compile: bool | Literal["auto"]
    warmup_steps: int
    max_signatures: int | None
    verify: Literal["off", "first", "sample", "always"]
    engine: Literal["auto", "cuda", "emulated", "off"]
    on_failure: Literal["fallback", "raise"]
    log_metrics: bool
    print_report: bool


class PyGraphOptions(StepOptions, total=False):
    """Single options of a `PyGraphConfig` as keyword arguments: type checkers see their names and values."""

    optimizer: AutoOnOff


@dataclass(frozen=True)
class PyGraphConfig:
    """Options of pygraph-train. Frozen; derive variants with `replace`.

    Args:
        forward, backward, optimizer: whether this phase may run from a graph. "off" means never; without a graph of the
            forward there is none of the backward. "on" logs reasons against graphs as warnings, and of the
            forward also keeps graphs that are slower than plain steps. True and False mean "on" and "off".
        compile: True has Inductor's kernels in the graphs of forward and backward, on CUDA. False has eager kernels,
            with the bits of plain training. "auto" means False at present.
        warmup_steps: each part of a step is recorded in its call of this number (>= 2). After so many steps the
            optimizer gets kernels that a graph can hold.
        max_signatures: the number of sets of shapes of one part that are recorded (>= 1). Others run without a graph.
            None: 64.
        verify: which replays are compared with the same work without a graph. "off": none. "first": the first replay
            of each recording. "sample": also later replays, at growing intervals, in at most 0.2% of the time, where
            the device has room for it.
            "always": every replay, for debugging.
        engine: "cuda" needs a CUDA device. "emulated" replays a CPU tape with the rules of CUDA graphs; it is
            slower than plain training, and serves tests and demonstrations. "off" uses no graphs. "auto" is "cuda"
            if there is a CUDA device, and "off" otherwise.
        on_failure: "fallback" continues without the graph, and the report gives the reason. "raise" raises it.
        log_metrics: whether the loggers of a Lightning Trainer or Fabric, the trackers of an Accelerator, and the logs
            of a Trainer of transformers get `pygraph/share_from_graphs` and, on CUDA, `pygraph/step_ms`
            (docs/report.md). A plain loop has no loggers: its report has the numbers.
        print_report: whether a Trainer of Lightning or transformers prints the report when training ends.

    Raises:
        ValueError: an option has a value that is not allowed. The message names the field.
    """

    forward: AutoOnOff = "auto"
    backward: AutoOnOff = "auto"
    optimizer: AutoOnOff = "auto"
    compile: bool | Literal["auto"] = "auto"
    warmup_steps: int = 3
    max_signatures: int | None = None
    verify: Literal["off", "first", "sample", "always"] = "sample"
    engine: Literal["auto", "cuda", "emulated", "off"] = "auto"
    on_failure: Literal["fallback", "raise"] = "fallback"
    log_metrics: bool = False
    print_report: bool = True

    def __post_init__(self) -> None:
        for name in _SWITCHES:
            if isinstance(value := getattr(self, name), bool):
                object.__setattr__(self, name, "on" if value else "off")
        check_values(self, _CHOICES, {"warmup_steps": 2, "max_signatures": 1}, "PyGraphConfig.{}={!r}")

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
                raise TypeError(f"pygraph-train has no option {name!r}; the options are: {', '.join(names)}")
        return dataclasses.replace(config or cls(), **overrides)


_BACKEND_CHOICES: dict[str, tuple[Any, ...]] = {
    "engine": ("auto", "cuda", "emulated", "off"),
    "phases": ("both", "forward"),
    "compile": (True, False),
    "verify": ("off", "first", "sample", "always"),
    "on_failure": ("fallback", "raise"),
}


@dataclass(frozen=True)
class BackendOptions:
    """The options of the compile backend.

    Args:
        engine: "cuda", "emulated" (a CPU tape with CUDA-graph rules, below aten kernels instead of Inductor's), "off"
            (Inductor alone); "auto" is "cuda" for graphs on a CUDA device.
        phases: "forward" leaves backwards to Inductor's kernels without a graph.
        compile: use Inductor's kernels. False: the kernels of eager PyTorch.
        warmup_runs: runs of a region before it is recorded (>= 1).
        max_signatures: sets of shapes of one region that are recorded (>= 1). None: 64.
        verify: which replays are compared with the same call without a graph: as in `PyGraphConfig`.
        inductor: settings of Inductor, by the names that Inductor's own `options` have ("max_autotune", ...).
        on_failure: if a region cannot be recorded, "fallback" runs it without a graph and gives the reason in the
            report; "raise" raises it.

    Raises:
        ValueError: an option has a value that is not allowed. The message names the option.
        TypeError: an option does not exist. The message names the options that exist.
    """

    engine: Literal["auto", "cuda", "emulated", "off"] = "auto"
    phases: Literal["both", "forward"] = "both"
    compile: bool = True
    warmup_runs: int = 3
    max_signatures: int | None = None
    verify: Literal["off", "first", "sample", "always"] = "sample"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    on_failure: Literal["fallback", "raise"] = "fallback"

    def __post_init__(self) -> None:
        least = {"warmup_runs": 1, "max_signatures": 1}
        check_values(self, _BACKEND_CHOICES, least, "option {}={!r} of backend 'pygraph'")

    @property
    def warmup_steps(self) -> int:
        """The call that is the first one from a graph."""
        return self.warmup_runs + 1

    @property
    def backward(self) -> str:
        """As in `PyGraphConfig`."""
        return "off" if self.phases == "forward" else "auto"

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


def check_values(
    options: object, choices: Mapping[str, tuple[Any, ...]], least: Mapping[str, int], message: str
) -> None:
    """Raise ValueError for an option that is none of its `choices`, or no whole number from its `least` on.

    `max_signatures` may be None.

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
        if name == "max_signatures" and value is None:
            continue
        if type(value) is not int or value < minimum:
            raise ValueError(f"{message.format(name, value)} is not allowed: use a whole number >= {minimum}")


def disabled_by_environment() -> bool:
    """Whether PYGRAPH_DISABLE is set, and to nothing that says no: 0, false, no, off, or an empty string."""
    return os.environ.get("PYGRAPH_DISABLE", "").strip().lower() not in ("", "0", "false", "no", "off")
