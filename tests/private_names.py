"""Which private names of torch the sources use, found by reading them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def sources() -> list[Path]:
    """Of the library."""
    found = [p for folder in ("pygraph_train", "integrations") for p in (ROOT / folder).rglob("*.py")]
    return [p for p in sorted(found) if "pygraph_train/integrations" not in str(p)]


class Uses(ast.NodeVisitor):
    """Finds (name of torch, node) in a file; `Uses.of` says where they are."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self._known: dict[str, str] = {}  # what names of the present scope mean

    @classmethod
    def of(cls, tree: ast.AST) -> list[tuple[str, ast.AST]]:
        visitor = cls()
        visitor.visit(tree)
        return [(name, node) for name, node in visitor.found if is_private(name)]

    def dotted(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            owner = self.dotted(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "torch":
                self._known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                self.found.append((alias.name, alias))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if (node.module or "").split(".")[0] == "torch":
                self._known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                self.found.append((f"{node.module}.{alias.name}", alias))

    def _scope(self, node: ast.AST) -> None:
        outer, self._known = self._known, dict(self._known)
        if isinstance(node, FUNCTIONS):
            arguments = node.args
            for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                self._known.pop(a.arg, None)
        self.generic_visit(node)
        self._known = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _scope

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self.dotted(node)) is not None:
            self.found.append((name, node))
        else:
            self.generic_visit(node)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """A change of Dynamo is (owner, name, value)."""
        owner = self.dotted(node.elts[0]) if len(node.elts) == 3 else None
        name = node.elts[1].value if owner and isinstance(node.elts[1], ast.Constant) else None
        if isinstance(name, str) and not name.startswith("__"):
            self.found.append((f"{owner}.{name}", node.elts[1]))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`private("torch...")`."""
        if isinstance(node.func, ast.Name) and node.func.id == "private":
            assert isinstance(node.args[0], ast.Constant)
            self.found.append((node.args[0].value, node.args[0]))
        self.generic_visit(node)


def is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def used() -> dict[str, set[Path]]:
    """Each name, and the files that use it."""
    found: dict[str, set[Path]] = {}
    for path in sources():
        for name, _ in Uses.of(ast.parse(path.read_text())):
            found.setdefault(name, set()).add(path.relative_to(ROOT))
    return found


def longest(names: Iterator[str] | list[str]) -> list[str]:
    """Without those that others begin with."""
    names = sorted(names)
    return [n for n in names if not any(other.startswith(f"{n}.") for other in names)]
