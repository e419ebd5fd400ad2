"""Decisions kept between runs: one small JSON file for each question, under a directory of the user's choice.

A file of its own for each key, written aside and renamed into place, needs no lock: concurrent writers lose
nothing of each other's, and nobody reads half a file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pygraph_train.selection.arms import Arm, Phase, Plan

__all__ = ["Decision", "DecisionCache"]

log = logging.getLogger("pygraph_train")

_FORMAT = 1


@dataclass(frozen=True)
class Decision:
    """What an earlier run settled on.

    Attributes:
        arm: the winner.
        seconds: a step of it.
    """

    arm: Arm
    seconds: float


class DecisionCache:
    """Decisions under `directory`; a cache that never stands in the way.

    Args:
        directory: made when the first decision is stored; None keeps nothing.
    """

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._warned = False

    def get(self, key: Mapping[str, Any]) -> Decision | None:
        """The decision for `key`, None where there is none that can be trusted.

        Args:
            key: everything that the decision depends on, as JSON.
        """
        if self._directory is None:
            return None
        path = self._path(key)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"{path} cannot be read ({error}); it is ignored")
            return None
        try:
            if entry["format"] != _FORMAT or entry["key"] != json.loads(_canonical(key)):
                raise ValueError("it was written for something else")
            plan = Plan(tuple(tuple(Phase(p) for p in graph) for graph in entry["graphs"]))
            seconds = float(entry["seconds"])
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"a step of {seconds} s")
            return Decision(Arm(plan, bool(entry["compiled"])), seconds)
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"{path} holds no decision ({type(error).__name__}: {error}); it is ignored")
            return None

    def put(self, key: Mapping[str, Any], decision: Decision) -> None:
        """Keep a decision, in place of an earlier one for the same key."""
        if self._directory is None:
            return
        entry = {
            "format": _FORMAT,
            "key": key,
            "graphs": [[phase.value for phase in graph] for graph in decision.arm.plan.graphs],
            "compiled": decision.arm.compiled,
            "seconds": decision.seconds,
        }
        temporary = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entry, file, indent=1, sort_keys=True)
            os.replace(temporary, self._path(key))
        except OSError as error:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
            self._warn(f"decisions cannot be kept in {self._directory} ({error}); training goes on")

    def _path(self, key: Mapping[str, Any]) -> Path:
        assert self._directory is not None
        return self._directory / f"{hashlib.sha256(_canonical(key).encode()).hexdigest()[:32]}.json"

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("pygraph: %s", text)


def _canonical(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
