"""The wheel holds every module, and `integrations/` arrives as `pygraph_train.integrations`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _expected_files() -> set[str]:
    """Every source file of the tree under the name that it has when installed."""
    library = {p.relative_to(ROOT).as_posix() for p in (ROOT / "pygraph_train").rglob("*.py")}
    adapters = {
        f"pygraph_train/{p.relative_to(ROOT).as_posix()}" for p in (ROOT / "integrations").rglob("*.py")
    }
    return library | adapters | {"pygraph_train/py.typed"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist of a copy of the tree: building in place would leave files behind."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pygraph_train", "integrations"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module_and_the_type_marker(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == _expected_files()
    assert any(name.endswith("LICENSE") for name in names)


_TRAINS = """
import importlib.metadata, torch, pygraph_train, pygraph_train.integrations, pygraph_train.backend

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
step = pygraph_train.GraphedStep(
    lambda x: model(x).square().mean(), model=model, optimizer=optimizer, engine="emulated", warmup_steps=2
)
small = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
compiled = torch.compile(small, backend="pygraph", options={"engine": "emulated"})
for _ in range(16):
    step(torch.randn(3, 4))
    compiled(torch.randn(3, 4)).sum().backward()
assert step.report().steps_from_graphs > 3, step.report()
assert sum(row.replays for row in pygraph_train.backend.report().regions) > 12, pygraph_train.backend.report()
assert importlib.metadata.version("pygraph-train") == pygraph_train.__version__
for module in (pygraph_train, pygraph_train.integrations, pygraph_train.backend):
    print(module.__file__)
"""


def test_an_installed_wheel_trains_outside_of_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = f"{sys.executable} -m pip --disable-pip-version-check install --quiet --no-deps --target".split()
    subprocess.run([*pip, str(site), str(wheel)], check=True, timeout=120)
    (tmp_path / "train.py").write_text(_TRAINS)
    # PYTHONPATH comes before the editable install of the checkout that runs these tests
    run = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    places = [Path(line) for line in run.stdout.splitlines()]
    assert len(places) == 3
    assert all(place.is_relative_to(site / "pygraph_train") for place in places), places


def test_sdist_holds_every_file_of_the_repository(tmp_path: Path) -> None:
    """So the tests, the documents and `make` work from it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    files = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    for name in files:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path)]
    subprocess.run([*command, str(tmp_path / "tree")], check=True, capture_output=True, timeout=120)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert files - held == set()


def test_checkout_resolves_integrations_inside_the_package() -> None:
    import pygraph_train.integrations

    assert Path(pygraph_train.integrations.__file__).parent == ROOT / "integrations"


def test_importing_the_package_imports_no_framework() -> None:
    program = (
        "import sys, pygraph_train\n"
        "print(sorted({'torch', 'lightning', 'pytorch_lightning', 'accelerate', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"
