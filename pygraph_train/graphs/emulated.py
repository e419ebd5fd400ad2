"""CUDA-graph rules on the CPU: a tape of dispatched operations with fixed addresses.

Capturing runs the function for real below a dispatch mode and then puts back every byte and every
random state, so that it leaves the world as a CUDA stream capture does: nothing was executed.
Replaying runs the recorded operations on the recorded storages. It exists to test, without a GPU,
everything that is built on graphs; it is slower than plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from pygraph_train.graphs.emulated_trees import RecordedNumbers, aliases, poison
from pygraph_train.graphs.engine import CaptureError
from pygraph_train.graphs.inputs import CopiedInputs
from pygraph_train.graphs.memory import extent, span
from pygraph_train.graphs.one_capture import OneCapture
from pygraph_train.problems import user_location
from pygraph_train.torch_private.dispatch import (
    FakeTensor,
    TorchDispatchMode,
    below_autograd,
    computes_shapes,
    has_no_memory,
    no_torch_function,
    schema_of,
    unsent,
    wait_for,
)
from pygraph_train.torch_private.memory import storage_key
from pygraph_train.trees import leaves_of, map_leaves, tensors_in

T = TypeVar("T")

_one_capture = OneCapture()

# These read a tensor on the host without a dispatched operation, so only a function mode sees them.
_HOST_READS = {
    torch.Tensor.numpy: "`.numpy()`",
    torch.Tensor.__array__: "a conversion to a NumPy array",
    torch.Tensor.tolist: "`.tolist()`",
    torch.Tensor.__repr__: "printing a tensor",
    torch.Tensor.__format__: "formatting a tensor",
    torch.Tensor.__dlpack__: "DLPack export",
    torch.Tensor.__reduce_ex__: "pickling a tensor",
}

_aten = torch.ops.aten

_FUNCTIONAL, _IN_PLACE = "_c10d_functional", "c10d"  # operators in which other processes take part


class EmulatedEngine:
    """Makes `EmulatedGraph`s. Keeps the `Engine` contract, but each graph has memory of its own."""

    name: str = "emulated"
    device: torch.device = torch.device("cpu")

    def __init__(self) -> None:
        self._closed = False

    def scratch_pool(self, pool: Any = None) -> AbstractContextManager[Any]:
        """A pool is a name only: see `allocating_in`."""
        return nullcontext(pool or object())

    def allocating_in(self, pool: Any) -> AbstractContextManager[None]:
        """Nothing to do: each tensor has memory of its own."""
        return nullcontext()

    def lasting_memory(self) -> AbstractContextManager[None]:
        """Nothing to do: memory is not kept in segments."""
        return nullcontext()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def capture(self, fn: Callable[[], T]) -> tuple[EmulatedGraph, T]:
        """Record the operations that `fn()` dispatches in this thread, without a lasting effect.

        See `Engine.capture`. Python state that `fn` sets stays, as on CUDA: a `p.grad` that was None is
        afterwards a tensor without defined values.

        Raises:
            CaptureError: `fn` read a value on the host, set the random state, or used something that the
                tape cannot hold (sparse tensors, other devices).
            RuntimeError: another capture is under way, or the engine is closed.
        """
        if self._closed:
            raise RuntimeError("this emulated engine is closed: it cannot capture any more")
        with _one_capture():
            return self._capture(fn)

    def _capture(self, fn: Callable[[], T]) -> tuple[EmulatedGraph, T]:
        tape = _Tape()
        try:
            # A cast cached before would not be recorded, and one cached now would outlive its values.
            torch.clear_autocast_cache()
            with tape, _RefuseHostReads(tape):
                result = fn()
            tape.check_random_state()
        except Exception as error:
            if tape.refusal is not None and error is not tape.refusal:
                raise tape.refusal from error  # user code had wrapped it
            raise
        finally:
            torch.clear_autocast_cache()
            tape.undo()
        if tape.refusal is not None:  # user code had swallowed it: the tape lacks something
            raise tape.refusal
        return EmulatedGraph(tape.operations), result

    def movable(self, inputs: Sequence[torch.Tensor]) -> CopiedInputs:
        """By copies, where a GPU has pointers."""
        return CopiedInputs(inputs)

    def trim(self) -> None:
        """The CPU allocator keeps nothing back."""

    def peak_memory(self) -> int:
        """The CPU has as much as anybody wants."""
        return 0

    def room(self) -> int:
        return 0

    def close(self) -> None:
        """Refuse further captures."""
        self._closed = True


class EmulatedGraph:
    """Recorded operations, and the storages they read and write. Keeps the `Graph` contract."""

    def __init__(self, operations: list[_Operation]) -> None:
        self._operations = operations
        self._emptied = _emptied(operations)
        self.nodes: int = len(operations)
        self.closed: bool = False

    def replay(self) -> None:
        """Run the recorded operations in order, in the current random state."""
        if self.closed:
            raise RuntimeError("this graph is closed: capture it again instead of replaying it")
        empty = [row for row in self._emptied if row[0].nbytes() < row[1]]
        sizes = [storage.nbytes() for storage, _, _ in empty]
        for storage, needed, _ in empty:
            storage.resize_(needed)
        with below_autograd():
            for operation in self._operations:
                operation.run()
        for (storage, _, freed), size in zip(empty, sizes, strict=True):
            if freed:
                storage.resize_(size)

    def close(self) -> None:
        """Release the recorded storages that nobody else holds."""
        self._operations, self._emptied = [], []
        self.closed = True

    def numbers(self, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> RecordedNumbers:
        return RecordedNumbers(self._operations, sets, kernels)


def _emptied(operations: list[_Operation]) -> list[tuple[torch.UntypedStorage, int, bool]]:
    """Storages that may lose their memory between replays, as FSDP's gathered ones do, how many bytes the operations
    use, and whether they have none after the capture.
    """
    needed: dict[int, tuple[torch.UntypedStorage, int, bool]] = {}
    for tensor in (tensor for operation in operations for tensor in operation.tensors()):
        storage = tensor.untyped_storage()
        if not tensor.numel() or not storage.resizable():
            continue
        end = (int(tensor.storage_offset()) + extent(tensor.size(), tensor.stride())) * tensor.element_size()
        key = storage_key(storage)
        known = needed[key][1] if key in needed else 0
        needed[key] = (storage, max(end, known), not storage.nbytes())
    return list(needed.values())


@dataclass(slots=True)
class _Operation:
    """One dispatched operation, with aliases of the very tensors it used."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[tuple[int, torch.Tensor]]
    """Outputs in memory of their own: position among the output tensors, recorded tensor."""
    grad: bool = field(default_factory=torch.is_grad_enabled)
    """Kernels look at it although they run below autograd: oneDNN's LSTM returns a workspace or not."""
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    """Tensors made in inference mode can be written in inference mode only."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    """Of what is made without a dtype."""

    def tensors(self) -> list[torch.Tensor]:
        """Every recorded alias, in an order that equal operations share."""
        return [*tensors_in((self.args, self.kwargs)), *(recorded for _, recorded in self.results)]

    def run(self) -> None:
        before = torch.get_default_dtype()
        if before is not self.default_dtype:
            torch.set_default_dtype(self.default_dtype)
        try:
            with torch.inference_mode() if self.inference else torch.set_grad_enabled(self.grad):
                self._run()
        finally:
            if before is not self.default_dtype:
                torch.set_default_dtype(before)

    def _run(self) -> None:
        returned = self.func(*self.args, **self.kwargs)
        tensors = tensors_in(returned)
        if self.func.namespace == _IN_PLACE:
            wait_for(returned)
        for sent in tensors if self.func.namespace == _FUNCTIONAL else ():
            getattr(torch.ops, _FUNCTIONAL).wait_tensor(sent)
        for position, recorded in self.results:
            new = tensors[position]
            if (new.shape, new.stride(), new.dtype) != (recorded.shape, recorded.stride(), recorded.dtype):
                raise RuntimeError(
                    f"{self.func} returned {tuple(new.shape)} in a replay and {tuple(recorded.shape)} in the "
                    "capture: its output shape depends on values, which a graph cannot hold"
                )
            if new.numel():
                span(recorded).copy_(span(new))


class _Tape(TorchDispatchMode):
    """Records what is dispatched, and keeps what is needed to undo it."""

    supports_higher_order_operators = True  # so that they reach us and can be refused

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.refusal: CaptureError | None = None
        self._created: dict[int, tuple[torch.UntypedStorage, torch.dtype]] = {}
        self._external: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: dict[torch.Generator, torch.Tensor] = {}
        self._random_state_before = torch.get_rng_state()
        self._random_state = self._random_state_before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if computes_shapes() or any(t is FakeTensor for t in types):
            return func(*args, **(kwargs or {}))  # shapes are computed, and nothing else
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a tensor subclass unwraps itself, its inner operations come back here
        kwargs = kwargs or {}
        # Function modes of the user have seen the public call already, and not this one in eager.
        with no_torch_function():
            self._check(func, args, kwargs)
            inputs = tensors_in((args, kwargs))
            if func is _aten.lift_fresh.default and self._record_constant(inputs[0]):
                return func(*args, **kwargs)
            for tensor in inputs:
                self._keep_external(tensor)
            for leaf in leaves_of((args, kwargs)):
                if isinstance(leaf, torch.Generator) and leaf not in self._generators:
                    self._generators[leaf] = leaf.get_state()
            # Aliases now: an in-place change of shape below must not reach the tape.
            recorded_args, recorded_kwargs = aliases(args), aliases(kwargs)
            talks = func.namespace in (_FUNCTIONAL, _IN_PLACE)
            returned = _sent(func, args, kwargs) if talks else func(*args, **kwargs)
            self._random_state = torch.get_rng_state()
            self._record(func, recorded_args, recorded_kwargs, inputs, returned)
            return returned

    def refuse(self, reason: str) -> CaptureError:
        """Remember and return the error: user code may swallow it, the capture is lost all the same."""
        error = CaptureError(reason, user_location())
        self.refusal = self.refusal or error
        return error

    def check_random_state(self) -> None:
        """Every change of the default generator has to come from a recorded operation."""
        if not torch.equal(torch.get_rng_state(), self._random_state):
            raise self.refuse(
                "the random state was set or used outside of tensor operations (manual_seed, set_rng_state, "
                "checkpoint with preserve_rng_state=True), which a replay would not repeat"
            )

    def undo(self) -> None:
        """Put back every byte and random state, and make values that were never computed visible."""
        torch.set_rng_state(self._random_state_before)
        for storage, before in self._external.values():
            if not (storage.nbytes() and before.nbytes()):
                continue  # the captured function frees it in every step, or gives it memory (FSDP)
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)
        for storage, dtype in self._created.values():
            poison(storage, dtype)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not hasattr(func, "overloadpacket"):
            raise self.refuse(f"the higher-order operator {func} cannot be recorded by the CPU emulation")
        if func is _aten._local_scalar_dense.default:
            raise self.refuse("`.item()`, float(), int(), bool() or `if` reads a tensor's value on the host")
        elif torch.Tag.data_dependent_output in func.tags:
            raise self.refuse(f"{func} returns a tensor's value to the host")
        if _shape_depends_on_values(func, args, kwargs):
            raise self.refuse(f"{func} has an output or a workspace whose shape depends on tensor values")
        self.check_random_state()

    def _check_memory(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise self.refuse(f"a tensor of layout {tensor.layout} cannot be recorded by the CPU emulation")
        if tensor.device.type != "cpu" and not has_no_memory(tensor):
            raise self.refuse(f"a tensor on {tensor.device} cannot be recorded by the CPU emulation")

    def _record_constant(self, tensor: torch.Tensor) -> bool:
        """torch.tensor(numbers): memory filled outside of any operation, so its bytes are baked in.

        Every replay writes them again: the captured function may update the tensor in place.
        """
        storage = tensor.untyped_storage()
        # Not resizable is memory that someone else owns, such as a NumPy array: an ordinary input.
        key = storage_key(storage)
        if key in self._external or key in self._created or not storage.resizable():
            return False
        self._keep_external(tensor)
        constant = tensor.clone()
        self.operations.append(_Operation(_aten.copy_.default, [tensor.data, constant], {}, []))
        return True

    def _keep_external(self, tensor: torch.Tensor) -> None:
        """The first time an operation meets memory from outside of the capture, copy its bytes.

        What an operation's schema says about mutation is not relied on: batch norm's is silent about
        its running statistics. Holding the storage also keeps its address from being used again.
        """
        self._check_memory(tensor)
        if has_no_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        if key not in self._created and key not in self._external:
            self._external[key] = (storage, storage.clone())

    def _record(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor], returned: Any) -> None:
        outputs = [
            t for t in tensors_in(returned) if type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        ]
        borrowed = {storage_key(tensor.untyped_storage()) for tensor in inputs}
        results = []
        for position, output in enumerate(outputs):
            self._check_memory(output)
            if has_no_memory(output):
                continue
            storage = output.untyped_storage()
            key = storage_key(storage)
            if key in borrowed:
                continue
            self._created.setdefault(key, (storage, output.dtype))
            results.append((position, output.data))
        if func.namespace in (_IN_PLACE, "fsdp"):
            runs = True  # schemas there say nothing of what is written
        elif schema_of(func).is_mutable:
            # set_, resize_, t_, ... change the tensor object but no memory; our aliases have it already.
            runs = torch.Tag.inplace_view not in func.tags
        else:
            # Views do not run; nor does what has no tensors at all (profiler marks). An operation with
            # tensors but no output does, such as an assertion.
            runs = bool(results) or (bool(inputs) and not outputs)
        if runs:
            self.operations.append(_Operation(func, args, kwargs, results))


class _RefuseHostReads(TorchFunctionMode):
    """Refuses `_HOST_READS`.

    Not inside backward hooks: `backward` itself is a call that function modes handle, and a mode is off
    while it handles one. `.item()` and the like are dispatched, so the tape refuses them there too.
    """

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = _HOST_READS.get(func)
        if read is not None:
            raise self._tape.refuse(f"{read} reads a tensor's values on the host")
        return func(*args, **(kwargs or {}))


def _sent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a collective gives, without its values: no other process notices a capture."""
    if func.namespace == _IN_PLACE:
        return unsent(args[0])
    if schema_of(func).is_mutable or "wait_tensor" in func.name():
        return args[0]
    shaped = map_leaves(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, (args, kwargs))
    return map_leaves(lambda t: torch.zeros_like(t, device="cpu"), func(*shaped[0], **shaped[1]))


def _shape_depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """As on CUDA, where these operations synchronise with the host."""
    if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_):
        masks = [index for index in tensors_in(args[1]) if index.dtype in (torch.bool, torch.uint8)]
        if func.overloadpacket is _aten.index or not masks:
            return bool(masks)
        # x[mask] = number is a masked fill; anything else looks for the indices of the mask first.
        accumulate = len(args) > 3 and args[3]
        return accumulate or len(masks) > 1 or args[2].numel() != 1
    if func is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.dynamic_output_shape in func.tags
