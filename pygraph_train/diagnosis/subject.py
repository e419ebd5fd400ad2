"""One training step that is to be explained, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.putting_back import Backup
from pygraph_train.step.loss_program import LossProgram
from pygraph_train.trees import tensors_in


@dataclass
class Subject:
    """One call of a step.

    Attributes:
        name: how the text names it.
        program: a `StepProgram`. Its function returns the loss, or makes its backwards itself (`by_hand`).
        args, kwargs: the function is called with them.
        modules: whose parameters and buffers the function may change, besides those of the program's model.
        context: makes the context of a call.
        left_out: what stands in the place of others' calls meanwhile, see `standing_in`.
        notes: sentences for the reader.
    """

    name: str
    program: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modules: Sequence[nn.Module] = ()
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    left_out: list[tuple[Any, str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.program.device.type == "cuda":  # as loops move their batches
            self.args, self.kwargs = _moved((self.args, self.kwargs), self.program.device)

    def tensors(self) -> list[Tensor]:
        """All that a call may write or give a gradient."""
        optimizer = self.program.optimizer
        found = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
        for module in self._all_modules():
            found += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        found += tensors_in((self.args, self.kwargs))
        return list({id(t): t for t in found if not t.is_inference()}.values())

    def _all_modules(self) -> list[nn.Module]:
        roots = [self.program.model, *self.modules, *(m for m in self.args if isinstance(m, nn.Module))]
        return list(dict.fromkeys(module for root in roots for module in root.modules()))

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context: what calls do to tensors, gradients, buffers and random states is undone in the end."""
        tensors, modules = self.tensors(), self._all_modules()
        before = Backup(self.program.device, tensors)
        gradients = [(t, t.grad) for t in tensors if t.is_leaf]
        held = [(table, dict(table)) for m in modules for table in (m._parameters, m._buffers)]
        try:
            yield
        finally:
            for table, entries in held:
                table.clear()
                table.update(entries)  # type: ignore[arg-type]
            before.restore()
            for t, gradient in gradients:
                t.grad = gradient

    def drop_gradients(self) -> None:
        """Leave no tensor a gradient."""
        for t in self.tensors():
            if t.is_leaf:
                t.grad = None


def subject_of(
    name: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    model: nn.Module,
    optimizers: list[Any],
    scaler: Any = None,
) -> Subject:
    """A function that computes the loss, as a step."""
    held: Any = optimizers[0] if len(optimizers) == 1 else OptimizerSet(optimizers) if optimizers else None
    places = [t.device for t in (*model.parameters(), *tensors_in((args, kwargs)))]
    device = places[0] if places else torch.device("cpu")
    return Subject(name, LossProgram(fn, model, held, device, scaler, None), args, kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    # batches of tokenizers and packed sequences move themselves
    return value.to(device) if hasattr(value, "to") and not isinstance(value, nn.Module) else value
