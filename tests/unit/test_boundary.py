"""The boundary between the library and a training."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from pygraph_train import PyGraphConfig, PyGraphError
from pygraph_train.boundary import Boundary, arranged, plainly, surely, theirs
from pygraph_train.graphs.devices import make_engine
from pygraph_train.trees import map_leaves

pytestmark = pytest.mark.passes_without_graphs("no graph is made")


def fails() -> NoReturn:
    raise RuntimeError("a fault")


@pytest.mark.parametrize("faults", [0, 3])
def test_a_fault_in_what_is_ours_of_a_plain_step_says_in_which_state_training_is(faults: int) -> None:
    boundary = Boundary()
    for _ in range(faults):  # after which it rests
        assert boundary.make(fails, lambda: 1) == 1
    engine: Any = make_engine("emulated", torch.device("cpu"))
    engine.close()
    with pytest.raises(PyGraphError, match=r"this emulated engine is closed.* The state of training is"):
        boundary.make(fails, lambda: engine.capture(lambda: None))


def test_what_the_users_code_raises_goes_through_unchanged() -> None:
    mine = KeyError("mine")

    def user() -> NoReturn:
        raise mine

    with pytest.raises(KeyError) as found:
        Boundary().make(fails, user)
    assert found.value is mine


def test_an_exception_of_the_user_comes_out_of_a_second_attempt_as_it_is() -> None:
    attempts = []

    def make() -> None:
        attempts.append(True)
        raise KeyError("of the library") if len(attempts) == 1 else theirs(KeyError("of the user"))

    with pytest.raises(KeyError, match="of the user"):
        surely(make, "a test")
    assert len(attempts) == 2


def test_a_type_error_is_the_users_only_where_the_library_raises_it() -> None:
    """A wrong option has to be mended by the user; a call that fails within the library is a fault of it."""
    wrong: Any = None
    told: list[Any] = []
    assert arranged(lambda: map_leaves(wrong, 1), told.append) is None
    assert "pygraph-train failed while it was set up" in str(told[0]) and "TypeError" in str(told[0])
    with pytest.raises(PyGraphError, match=r"a test .*TypeError"):
        surely(lambda: map_leaves(wrong, 1), "a test")
    with pytest.raises(PyGraphError, match="The state of training is"):
        plainly(lambda: map_leaves(wrong, 1))
    for make in (arranged, plainly):
        with pytest.raises(ValueError, match="forward"):
            make(lambda: PyGraphConfig(forward="sometimes"))
        with pytest.raises(TypeError, match="no option"):
            make(lambda: PyGraphConfig.of(None, {"forwards": "on"}))
