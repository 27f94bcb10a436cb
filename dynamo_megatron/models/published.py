"""Shapes of published models from their config.json, for estimates about a model that is not on this machine."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

# name: {"config": fields of config.json as published, "billion_parameters": what the model's card says}
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))


def published_config(path: str) -> dict[str, Any] | None:
    """The config.json fields of the model that the last part of `path` names (in upper or lower case); None if it is
    not known here."""
    name = PurePath(path).name.lower()
    return next((model["config"] for known, model in PUBLISHED.items() if known.lower() == name), None)
