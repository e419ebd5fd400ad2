"""Options that make no sense are refused with their name."""

from __future__ import annotations

import dataclasses

import pytest
from training import Net

from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.config import disabled_by_environment

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": "yes"}, "forward='yes'.*'auto', 'on', 'off'"),
        ({"compile": 1}, "compile=1.*'auto', True, False"),
        ({"verify": True}, "verify=True"),
        ({"engine": "cpu"}, "engine='cpu'"),
        ({"warmup_steps": 1}, "warmup_steps=1.*>= 2"),
        ({"warmup_steps": 2.5}, "warmup_steps=2.5"),
        ({"warmup_steps": True}, "warmup_steps=True"),
        ({"max_signatures": 0}, "max_signatures=0"),
        ({"on_failure": "ignore"}, "on_failure='ignore'"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        PyGraphConfig(**options)


def test_overrides():
    config = PyGraphConfig.of(None, {"warmup_steps": 5})
    assert config.warmup_steps == 5
    assert PyGraphConfig.of(config, {"optimizer": "off"}) == dataclasses.replace(config, optimizer="off")
    with pytest.raises(TypeError, match=r"no option 'warmup'.*warmup_steps"):
        PyGraphConfig.of(None, {"warmup": 5})
    with pytest.raises(TypeError, match="config must be a PyGraphConfig, got dict"):
        PyGraphConfig.of({"optimizer": "off"}, {})  # type: ignore[arg-type]


def test_graphed_step_refuses_another_config():
    with pytest.raises(TypeError, match="PyGraphConfig"):
        GraphedStep(lambda x: x, model=Net(), config={"engine": "off"})  # type: ignore[arg-type]


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PyGraphConfig().forward = "off"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "off"),
    [
        ("1", True),
        ("true", True),
        ("yes", True),
        *((no, False) for no in ("", "0", "false", "False", "no", "off", " ")),
    ],
)
@pytest.mark.quick
def test_values_of_the_switch_in_the_environment(
    value: str, off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPH_DISABLE", value)
    assert disabled_by_environment() is off


def test_phases_are_switched_by_bools_as_well():
    assert PyGraphConfig(forward=True, backward=False) == PyGraphConfig(forward="on", backward="off")
