"""What torch imports with Dynamo and needs for little: it waits until that little is asked for."""

from __future__ import annotations

import builtins
import contextlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["networkx_waits"]

_LATE = "networkx"

_USERS = tuple(
    f"torch._functorch._activation_checkpointing.{name}"
    for name in ("graph_info_provider", "knapsack_evaluator")
)
"""Import it in their first lines, and need it where a memory budget is set for what a backward computes again."""


def networkx_waits() -> None:
    """Before Dynamo is used for the first time: let torch import networkx where it needs it. (2.11, 2.13)

    These are 300 modules, most of what a first trace has to read from the disk. Nobody else who imports networkx, or
    who has imported it, sees anything of this.
    """
    users = [name for name in _USERS if name not in sys.modules]
    if _LATE in sys.modules or not users:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with contextlib.suppress(
            Exception
        ):  # of another version: torch imports it by itself, and says what is wrong
            for name in users:
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _USERS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderOfUser(spec, spec.loader)
        return spec


class _LoaderOfUser(Loader):
    """Runs the module with an `import` of its own: its names are those of the module, and of nobody else."""

    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec, self._loader = spec, loader

    def exec_module(self, module: ModuleType) -> None:
        late = _Late(module)

        def imported(name: str, *args: Any, **kwargs: Any) -> Any:
            return late if name == _LATE else builtins.__import__(name, *args, **kwargs)

        module.__spec__, module.__loader__ = self._spec, self._loader
        self._spec.loader = self._loader
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": imported}
        self._loader.exec_module(module)
        vars(late)["is_read"] = True


class _Late(ModuleType):
    """Stands for networkx in one module, until something of it is used there."""

    is_read = False
    """Whether the module has been run: until then it names classes in annotations only."""

    def __init__(self, user: ModuleType) -> None:
        super().__init__(_LATE)
        vars(self)["user"] = user

    def __getattr__(self, name: str) -> Any:
        if not self.is_read:
            return f"{_LATE}.{name}"
        names, networkx = vars(self.user), importlib.import_module(_LATE)
        names.update({key: networkx for key, value in names.items() if value is self})
        return getattr(networkx, name)
