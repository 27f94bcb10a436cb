"""Shapes of published models from their config.json, for estimates about a model that is not on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# name: {"config": fields of config.json as published, "billion_parameters": the card's, or as transformers counts}
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
