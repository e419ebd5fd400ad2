"""What torch imports with Dynamo and needs for little: it waits until that little is asked for."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pygraph_train.torch_private.traces_of_threads import no_other_trace

__all__ = ["minifier_waits", "networkx_waits", "tools_wait"]

_LATE = "networkx"

_OF_LOCAL_MAP = "torch.distributed.tensor.experimental._func_map"

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


@contextlib.contextmanager
def minifier_waits() -> Iterator[None]:
    """Inside, `torch.compile` imports what makes small programs of failing ones only where it was asked for.

    That is Dynamo's minifier (`TORCHDYNAMO_REPRO_AFTER`). It comes with the code generators of Inductor, which a trace
    that runs with eager kernels has no use for. (2.11, 2.13)
    """
    eval_frame: Any = importlib.import_module("torch._dynamo.eval_frame")
    with no_other_trace():  # nobody else changes Dynamo
        stock = eval_frame.get_compiler_fn

        def made(backend: Any) -> Any:
            return stock(backend) if backend is None or isinstance(backend, str) else _Backend(backend, stock)

        eval_frame.get_compiler_fn = made
        try:
            yield
        finally:
            eval_frame.get_compiler_fn = stock


class _Backend:
    """A backend as Dynamo takes it, without the minifier.

    Args:
        backend: called with a graph and its inputs.
        with_minifier: makes a backend as Dynamo takes it, where the minifier is wanted.
    """

    def __init__(self, backend: Callable[..., Any], with_minifier: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, backend)
        self._torchdynamo_orig_backend = backend
        self._with_minifier = with_minifier

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        import torch._dynamo.config as config

        backend = self._torchdynamo_orig_backend
        if config.repro_after is not None:
            backend = self._with_minifier(backend)
        return backend(graph, inputs, **options)


@functools.cache
def tools_wait() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while it traces, so that it imports what the trace has a use for.

    Otherwise each first trace imports the caches and code generators of Inductor, AOTAutograd, all backends and context
    parallelism: hundreds of milliseconds, and more where nobody has read these files yet. (2.11, 2.13)
    """
    import torch._dynamo.graph_region_tracker as graph_region_tracker
    import torch._dynamo.output_graph as output_graph
    import torch.fx.experimental.symbolic_shapes as symbolic_shapes
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.higher_order_ops import LocalMapWrappedHigherOrderVariable as LocalMap

    pickler, throw, is_it = (
        graph_region_tracker.InputPickler,
        InstructionTranslator._throw_if_in_functorch,
        LocalMap.should_wrap_in_hop,
    )

    class Pickler:
        """Compares nodes where Dynamo looks for repeated regions, which it does where its settings say so."""

        @functools.cached_property
        def dumps(self) -> Any:
            return pickler().dumps

    def throw_in_functorch(self: Any) -> None:
        # which backend is the eager one matters inside of vmap and the like only
        if torch._C._functorch.peek_interpreter_stack() is not None:
            throw(self)

    def is_local_map(cls: type, value: Any) -> bool:
        return _OF_LOCAL_MAP in sys.modules and is_it(value)

    return (
        (output_graph, "uninteresting_files", _files_of_torch),
        (symbolic_shapes, "uninteresting_files", _files_of_torch),
        (graph_region_tracker, "InputPickler", Pickler),
        (InstructionTranslator, "_throw_if_in_functorch", throw_in_functorch),
        (LocalMap, "should_wrap_in_hop", classmethod(is_local_map)),
    )


@functools.cache
def _files_of_torch() -> set[str]:
    """Files whose lines Dynamo does not tell of. It imports two of them for their names."""
    import torch._dynamo.guards as guards

    specs = [importlib.util.find_spec(f"torch.{name}") for name in _PLUMBING]
    operators = Path(torch.__file__).with_name("_higher_order_ops").glob("*.py")
    files = {spec.origin for spec in specs if spec is not None and spec.origin is not None}
    return {*files, *map(str, operators), torch.__file__, "<string>", *guards.uninteresting_files()}


_PLUMBING = (
    *("_compile", "_dynamo.eval_frame", "_inductor.sizevars", "_library.custom_ops", "_library.fake_impl"),
    *("_logging._internal", "_logging.structured", "_subclasses.fake_tensor", "_subclasses.meta_utils"),
    *("export._trace", "fx._symbolic_trace", "fx.interpreter", "fx.experimental.recording"),
    *("fx.experimental.sym_node", "fx.experimental.symbolic_shapes"),
)


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
