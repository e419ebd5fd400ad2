"""What batches look like: how one is made of `x` (rows, 6) and `y` (rows,), and how the step takes it apart."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "BatchKind"]


@dataclass(frozen=True)
class BatchKind:
    """Lines that put a batch together, and lines that take it apart.

    Attributes:
        name: how a case calls it.
        make: lines that leave `batch`, made of `x`, `y`, the number `i` and the generator `g`.
        take: lines of the step that leave `x` and `y`.
        loops: the kinds of loops that can have it; empty for all.
        weight: how often it is taken, relative to others.
    """

    name: str
    make: str
    take: str
    loops: tuple[str, ...] = ()
    weight: float = 1.0


_DICT = 'x, y = batch["x"], batch["y"]'

_KINDS = (
    BatchKind("pair", "batch = (x, y)", "x, y = batch", weight=16),
    BatchKind("dict", 'batch = {"x": x, "y": y}', _DICT, weight=6),
    BatchKind(
        "dict_with_constants",
        'batch = {"x": x, "y": y, "id": "name", "none": None, "scale": 0.5}',
        f'{_DICT}\nx = x * batch["scale"]',
    ),
    BatchKind(
        "changing_number",
        'batch = {"x": x, "y": y, "epoch": i // 6}',
        f'{_DICT}\nx = x * (1 + batch["epoch"])',
    ),
    BatchKind("number_every_step", 'batch = {"x": x, "y": y, "n": i}', _DICT, weight=0.4),
    BatchKind(
        "number_used_every_step",
        'batch = {"x": x, "y": y, "n": i}',
        f'{_DICT}\nx = x + batch["n"]',
        weight=0.4,
    ),
    BatchKind(
        "string_changes",
        'batch = {"x": x, "y": y, "of": "ab"[i // 9 % 2]}',
        f'{_DICT}\nif batch["of"] == "b":\n    x = -x',
    ),
    BatchKind(
        "none_sometimes",
        'batch = {"x": x, "y": y, "w": x.abs() if i % 2 else None}',
        f'{_DICT}\nif batch["w"] is not None:\n    x = x + batch["w"]',
    ),
    BatchKind("twice", 'batch = {"x": x, "again": x, "y": y}', f'{_DICT}\nx = x + batch["again"]'),
    BatchKind(
        "twice_or_not",
        'batch = {"x": x, "again": x if i < 10 else x.clone(), "y": y}',
        f'{_DICT}\nx = x + batch["again"]',
    ),
    BatchKind(
        "views", 'batch = {"x": x, "part": x[:, :3], "y": y}', f'{_DICT}\nx = x + batch["part"].mean()'
    ),
    BatchKind(
        "overlapping",
        'w = torch.randn(n, 9, generator=g)\nbatch = {"x": w[:, :6], "z": w[:, 3:], "y": y}',
        f'{_DICT}\nx = x + batch["z"]',
    ),
    BatchKind("expanded", "batch = (x[:1].expand(n, 6), y)", "x, y = batch"),
    BatchKind(
        "part_expanded", 'batch = {"x": x, "m": x[0].expand(n, 6), "y": y}', f'{_DICT}\nx = x - batch["m"]'
    ),
    BatchKind("transposed", "batch = (x.t().contiguous().t(), y)", "x, y = batch"),
    BatchKind("strided", "batch = (torch.randn(n, 12, generator=g)[:, ::2], y)", "x, y = batch"),
    BatchKind("strides_change", "batch = (x if i % 3 else x.t().contiguous().t(), y)", "x, y = batch"),
    BatchKind("offset", "batch = (torch.randn(n * 6 + 1, generator=g)[1:].view(n, 6), y)", "x, y = batch"),
    BatchKind("float64", "batch = (x.double(), y)", "x, y = batch\nx = x.float()"),
    BatchKind("bfloat16", "batch = (x.bfloat16(), y)", "x, y = batch\nx = x.float()"),
    BatchKind("dtype_changes", "batch = (x.double() if i % 4 == 3 else x, y)", "x, y = batch\nx = x.float()"),
    BatchKind("int32", "batch = ((x * 4).int(), y.int())", "x, y = batch\nx, y = x / 4, y.long()"),
    BatchKind(
        "bool_mask", 'batch = {"x": x, "y": y, "m": x > 0}', f'{_DICT}\nx = torch.where(batch["m"], x, -x)'
    ),
    BatchKind(
        "numpy",
        "batch = (x.numpy(), y.numpy())",
        "x, y = torch.from_numpy(batch[0]), torch.from_numpy(batch[1])",
        weight=0.6,
    ),
    BatchKind(
        "numpy_scalar",
        'batch = {"x": x, "y": y, "w": np.float64(0.3 + i // 9)}',
        f'{_DICT}\nx = x * float(batch["w"])',
        weight=0.6,
    ),
    BatchKind("requires_grad", "batch = (x.requires_grad_(), y)", "x, y = batch", weight=0.6),
    BatchKind(
        "nested",
        'batch = {"in": [x, (x * 2, None)], "y": y}',
        'x, y = batch["in"][0] + batch["in"][1][0], batch["y"]',
    ),
    BatchKind("unused_tensor", "batch = (x, y, torch.randn(3, generator=g))", "x, y, _ = batch"),
    BatchKind(
        "scalar_tensor",
        'batch = {"x": x, "y": y, "t": torch.tensor(0.1 * i)}',
        f'{_DICT}\nx = x * (1 + batch["t"])',
    ),
    BatchKind("empty_tensor", "batch = (x, y, torch.empty(0, 6))", "x, y, e = batch\nx = x + e.sum()"),
    BatchKind(
        "long_list", "batch = ([row for row in x], y)", "x, y = torch.stack(batch[0]), batch[1]", weight=0.6
    ),
    BatchKind("named_tuple", "batch = Pair(x, y)", "x, y = batch.x, batch.y"),
    BatchKind("dataclass", "batch = Point(x, y)", "x, y = batch.x, batch.y", loops=("graphed", "backend")),
    BatchKind("object", "batch = Data(x=x, y=y)", "x, y = batch.x, batch.y", loops=("graphed", "backend")),
    BatchKind(
        "object_in_object",
        "batch = Data(inside=[Data(x=x)], y=y, n=i)",
        "x, y = batch.inside[0].x, batch.y",
        loops=("graphed", "backend"),
    ),
    BatchKind(
        "weight_every_step",
        'batch = {"x": x, "y": y, "w": 0.97**i}',
        f'{_DICT}\nx = x * batch["w"]',
    ),
    BatchKind("last_used_first", "batch = (x, y)", "x, y = batch\nx = x.flip(0)"),
)
KINDS = {kind.name: kind for kind in _KINDS}
