"""The shape of the house: imports go one way, there are no circles, and private names of torch live in one place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pygraph_train import StepReport

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]

LEVELS = (
    ("config", "identity", "patches", "plans", "problems", "random_state", "trees", "versions"),
    ("boundary",),
    ("torch_private",),
    ("graphs", "parallel", "putting_back", "report", "verification"),
    ("core",),
    ("optimizers",),
    ("step",),
    ("backend", "diagnosis"),
    ("integrations",),
    ("__main__",),
)
"""A package imports only from lines above its own, and packages of one line know nothing of each other."""


def sources() -> Iterator[Path]:
    for folder in ("pygraph_train", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.relative_to(ROOT).is_relative_to(
                "pygraph_train/integrations"
            ):  # a link to the other folder
                yield path


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "integrations":
        parts.insert(0, "pygraph_train")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sources()}
TREES = {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Modules of ours that these statements import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pygraph_train"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("pygraph_train"))


def test_packages_import_only_what_stands_above_them() -> None:
    level = {package: k for k, packages in enumerate(LEVELS) for package in packages}
    wrong = []
    for module, tree in TREES.items():
        here = package_of(module)
        for other in imported(ast.walk(tree)):
            there = package_of(other)
            if here and there and here != there and level[there] >= level[here]:
                wrong.append(f"{module} imports {other}")
    assert not wrong


def test_every_package_has_a_level() -> None:
    assert {package_of(m) for m in MODULES} - {""} == {package for packages in LEVELS for package in packages}


def test_no_module_imports_itself_by_way_of_others() -> None:
    at_import = {m: set(imported(iter(tree.body))) & set(MODULES) - {m} for m, tree in TREES.items()}
    tuple(TopologicalSorter(at_import).static_order())  # raises CycleError, which names the circle


def test_private_names_of_torch_live_in_torch_private() -> None:
    """A name counts as torch's when it begins with one underscore and nothing of ours has that name."""
    ours = {"_replace", "_fields"}  # of named tuples
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                ours.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                ours.add(node.id if isinstance(node, ast.Name) else node.attr)
    found = []
    for module, tree in TREES.items():
        if package_of(module) in ("torch_private", "integrations"):  # the latter: private names of frameworks
            continue
        for node in ast.walk(tree):
            for name, of in _private(node):
                if name not in ours and of not in (
                    "aten",
                    "_aten",
                    "sys",
                ):  # operators have such public names
                    found.append(f"{MODULES[module].relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}")
    assert not found


def _private(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names that a node reads, each with the name of what it is read from."""
    if isinstance(node, ast.Attribute):
        names = [(node.attr, ast.unparse(node.value))]
    elif isinstance(node, ast.ImportFrom):
        names = [(part, "") for part in (node.module or "").split(".")]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "attrgetter")):
        names = [(a.value, "") for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    else:
        names = []
    yield from ((name, of) for name, of in names if name.startswith("_") and not name.startswith("__"))


def test_no_two_public_classes_have_one_name() -> None:
    homes = defaultdict(list)
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                homes_of = [t.id for t in targets if isinstance(t, ast.Name)]
                for name in homes_of:
                    if name[0].isupper() and not name.isupper() and package_of(module) != "torch_private":
                        homes[name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_the_library_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in MODULES.values()) <= 18_000


def test_a_report_is_written_by_its_own_methods_only() -> None:
    """From outside a report takes events; nobody sets or fills what it holds."""
    fields = {name for base in StepReport.__mro__ for name in vars(base).get("__annotations__", {})}
    written = []
    for module, tree in TREES.items():
        if package_of(module) == "report":
            continue
        for node in ast.walk(tree):
            target = node
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr not in (
                    "append",
                    "add",
                    "clear",
                    "extend",
                    "insert",
                    "pop",
                    "remove",
                    "update",
                ):
                    continue
                target = node.func.value
            elif not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                continue
            if isinstance(target, ast.Attribute) and target.attr in fields:
                of = ast.unparse(target.value)
                if of == "report" or of.endswith((".report", "._report")):
                    written.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    assert not written
