"""Thin adapters, installed as `pygraph_train.integrations`. No engine logic lives here."""

from __future__ import annotations

from pathlib import Path

from pygraph_train.problems import not_the_users

not_the_users(folder=str(Path(__file__).parent))
