"""Faults that `make planted` plants: each can be, and the contract promises to notice it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import FAULTS

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.quick
def test_a_fault_can_be_planted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fault patches has not gone or got another name."""
    FAULTS[fault](monkeypatch)


def promised(path: Path) -> Iterator[str]:
    """The faults that marks of a file name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            named = [k.value for k in node.keywords if k.arg == "notices"]
            of_mark = isinstance(node.func, ast.Attribute) and node.func.attr == "notices"
            for argument in [*named, *(node.args if of_mark else [])]:
                if isinstance(argument, ast.Constant):
                    yield argument.value


def test_no_test_promises_to_notice_what_is_no_fault() -> None:
    for path in sorted(TESTS.rglob("test_*.py")):
        assert set(promised(path)) <= set(FAULTS), path


def test_the_contract_promises_to_notice_each_fault() -> None:
    contract = "".join(path.read_text() for path in sorted((TESTS / "contract").glob("test_*.py")))
    assert [fault for fault in FAULTS if f'"{fault}"' not in contract] == []
