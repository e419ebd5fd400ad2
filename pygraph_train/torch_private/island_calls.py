"""Calls of modules that Dynamo follows, or takes for one operation of its graph. (2.11, 2.13)"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.island_gaps import island
from pygraph_train.torch_private.islands import Island, Look
from pygraph_train.torch_private.module_state import reachable_from

__all__ = ["CallsOfModules", "Kind", "kind_of_call"]

Kind = tuple[Any, ...]
"""What two calls of a module have in common: how their arguments are nested, and what the tensors in these are like."""

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _Unfit(Exception):
    """An argument that no graph can hand to an island."""


class _Place:
    """In the place of a tensor among arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


def kind_of_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Kind, list[Tensor]] | None:
    """What a call is like, and the tensors in its arguments; None where no graph can hand these to an island."""
    tensors: list[Tensor] = []

    def look(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return (*_look_of(value), value.requires_grad)
        if type(value) in (tuple, list):
            return (type(value), *map(look, value))
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return (dict, *((key, look(x)) for key, x in value.items()))
        if type(value) in _CONSTANTS:
            return (type(value), value)
        raise _Unfit

    try:
        return (look(list(args)), look(dict(kwargs))), tensors
    except _Unfit:
        return None


def _look_of(x: Tensor) -> tuple[Any, ...]:
    return "tensor", tuple(x.shape), x.dtype, x.device.type


class CallsOfModules:
    """Watches how Dynamo follows modules.

    Attributes:
        broken: the innermost module in which the last trace ended, and the outermost one around it; None where the
            trace ended outside of modules, or inside of a graph in the graph of the step.
        unfit: why a module that values break cannot be an island.
    """

    def __init__(self) -> None:
        self.broken: tuple[nn.Module, nn.Module] | None = None
        self.unfit: str | None = None
        self._around: list[nn.Module] = []
        self._followed: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()

    @property
    def inside(self) -> tuple[nn.Module, nn.Module] | None:
        """The innermost and the outermost of the modules that Dynamo is following; None outside of modules."""
        return (self._around[-1], self._around[0]) if self._around else None

    def ends_at(self, node: torch.fx.Node) -> None:
        """Let `broken` tell of a node of the graph."""
        names = [name.partition("@")[0] for name in node.meta.get("nn_module_stack") or ()]
        module = self._followed.get(names[-1]) if names else None
        outer = self._followed.get(names[0]) if names else None
        self.broken = None if module is None or outer is None else (module, outer)

    def results_of(self, module: nn.Module, kind: Kind) -> list[Look | None] | None:
        """What a module that is an island returns for such a call; None for another module or call."""
        raise NotImplementedError

    def single(self, module: nn.Module) -> bool:
        """Whether such a module returns a tensor, and not a tuple."""
        raise NotImplementedError

    def wants(self, module: nn.Module) -> bool:
        """Whether a module is an island."""
        raise NotImplementedError

    def made(self, one: Island) -> None:
        """An island is in the graph."""
        raise NotImplementedError

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """(owner, attribute, value), for one trace."""
        from torch._dynamo.exc import ObservedException, RestartAnalysis
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        self.broken = None
        self._around.clear()

        def around(stock: Callable[..., Any]) -> Callable[..., Any]:
            def call_function(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
                module, outside = variable.value, tx.output.root_tracer is tx.output.current_tracer
                if outside and self.wants(module):
                    made = self._as_one_node(variable, tx, args, kwargs)
                    if made is not None:
                        return made
                self._around.append(module)
                self._followed[str(id(module))] = module
                try:
                    return stock(variable, tx, args, kwargs)
                except (ObservedException, RestartAnalysis):
                    raise
                except Exception as error:
                    if not hasattr(error, "in_module"):
                        error.in_module = True  # type: ignore[attr-defined]
                        self.broken = (module, self._around[0]) if outside else None
                    raise
                finally:
                    self._around.pop()

            return call_function

        return ((UnspecializedNNModuleVariable, "call_function", Around(around)),)

    def _as_one_node(self, variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of an island; None where this call cannot be one."""
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.variables.builder import wrap_fx_proxy
        from torch._dynamo.variables.constant import ConstantVariable
        from torch._dynamo.variables.lists import TupleVariable

        module: nn.Module = variable.value
        proxies: list[Any] = []
        try:
            tree, kind = _taken((list(args), dict(kwargs)), proxies)
        except _Unfit:
            return None
        results = self.results_of(module, kind)
        examples = [proxy.node.meta.get("example_value") for proxy in proxies]
        if (
            results is None
            or not examples
            or variable.source is None
            or tx.symbolic_torch_function_state.mode_stack
        ):
            return None
        if any(x.requires_grad and x.is_leaf for x in examples):
            return None
        if _has_written(tx, module):
            self.unfit = (
                f"{type(module).__name__} may read an object that the step writes to before it is called"
            )
            return None
        trained = [name for name, x in module.named_parameters() if x.requires_grad]
        frozen = [name for name, x in module.named_parameters() if not x.requires_grad]
        buffers = [name for name, _ in module.named_buffers()]
        try:
            members = [_member(variable, tx, name) for name in (*trained, *frozen, *buffers)]
        except (NotImplementedError, AttributeError):
            return None
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        requires = [bool(x.requires_grad) for x in examples]
        one = Island(weakref.ref(module), _arguments(tree), requires, trained, frozen, buffers, results)
        self.made(one)
        proxy = tx.output.create_proxy("call_function", island, (one.number, *proxies, *members), {})
        of_graph: Any = wrap_fx_proxy(tx, proxy)
        found = iter(of_graph.items)
        made = [ConstantVariable.create(None) if look is None else next(found) for look in results]
        return made[0] if self.single(module) else TupleVariable(made)


_MOST_OBJECTS = 5000


def _has_written(tx: Any, module: nn.Module) -> bool:
    """Whether the step, as far as it was followed, has written to an object that a module may read.

    Dynamo makes these writes when its graph has run. What is reached through slots, closures and globals of functions
    is not looked at, but any global that was written counts.
    """
    from torch._dynamo.variables.misc import NewGlobalVariable

    effects = tx.output.side_effects
    if any(isinstance(x, NewGlobalVariable) for x in effects.store_attr_mutations):
        return True
    existing = [(key, x) for key, x in effects.id_to_variable.items() if x.mutation_type is not None]
    written = {key for key, x in existing if x.source is not None and effects.is_modified(x)}
    return bool(written) and not written.isdisjoint(reachable_from(module, _MOST_OBJECTS))


def _arguments(tree: tuple[list[Any], dict[str, Any]]) -> Callable[[Sequence[Any]], Any]:
    def filled(value: Any, tensors: Sequence[Any]) -> Any:
        if isinstance(value, _Place):
            return tensors[value.number]
        if type(value) in (tuple, list):
            return type(value)(filled(x, tensors) for x in value)
        if type(value) is dict:
            return {key: filled(x, tensors) for key, x in value.items()}
        return value

    def arguments(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = filled(tree, tensors)
        return tuple(args), kwargs

    return arguments


def _taken(calls: tuple[list[Any], dict[str, Any]], proxies: list[Any]) -> tuple[Any, Kind]:
    """Variables of Dynamo's as values, with places for tensors; and what a call with these is like."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    def take(variable: Any) -> tuple[Any, Any]:
        if type(variable) in (list, dict):
            values = variable if type(variable) is list else variable.values()
            found = [take(x) for x in values]
            if type(variable) is list:
                return [x for x, _ in found], (list, *(kind for _, kind in found))
            keys = list(variable)
            return (
                {key: x for key, (x, _) in zip(keys, found, strict=True)},
                (dict, *((key, kind) for key, (_, kind) in zip(keys, found, strict=True))),
            )
        variable = variable.realize()
        if type(variable) is TensorVariable:
            proxy = variable.as_proxy()
            example = proxy.node.meta.get("example_value")
            if not isinstance(example, Tensor):
                raise _Unfit
            proxies.append(proxy)
            return _Place(len(proxies) - 1), (*_look_of(example), example.requires_grad)
        if type(variable) in (ListVariable, TupleVariable):
            kind = list if type(variable) is ListVariable else tuple
            found = [take(x) for x in variable.items]
            return kind(x for x, _ in found), (kind, *(each for _, each in found))
        if type(variable) is ConstDictVariable and not variable.items:
            return {}, (dict,)
        if isinstance(variable, ConstantVariable):
            value = variable.as_python_constant()
            if type(value) in _CONSTANTS:
                return value, (type(value), value)
        raise _Unfit

    (args, of_args), (kwargs, of_kwargs) = take(calls[0]), take(calls[1])
    return (args, kwargs), (of_args, of_kwargs)


def _member(variable: Any, tx: Any, name: str) -> Any:
    """The proxy of a parameter or a buffer of a module."""
    for part in name.split("."):
        variable = variable.var_getattr(tx, part).realize()
    return variable.as_proxy()
