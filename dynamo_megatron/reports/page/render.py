"""The page as one HTML file: template, styles, programs, the chart library and the data, all in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from dynamo_megatron.errors import InputError
from dynamo_megatron.runtime.whole_files import replacing

SCRIPTS = ("dom.js", "charts.js", "allocation.js", "episode.js", "tokens.js", "rollouts.js", "pairs.js", "main.js")
# Texts of the run are data, but if one ever got into the document as HTML, nothing of it could run or load.
POLICY = "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
POLICY += "form-action 'none'"
HTML_IN_JSON = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


class MissingLibrary(InputError):
    """The chart library is not installed."""


def chart_library() -> str:
    """plotly.js. Raises MissingLibrary where this interpreter has no plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            f"report.html is not written: this interpreter has no {error.name}; pip install plotly"
        ) from None
    return get_plotlyjs()


def as_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: ASCII alone, without a character that HTML could take for a tag."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(HTML_IN_JSON)


def render(data: Mapping[str, Any], library: str) -> str:
    """The HTML of `page_data`'s data; `library`: as `chart_library` gives it."""
    assets = resources.files("dynamo_megatron.reports.page") / "assets"
    script = "\n".join((assets / name).read_text(encoding="utf-8") for name in SCRIPTS)
    for code in (library, script):
        assert "</script" not in code.lower(), "the code would end its own script element"
    parts = {
        "policy": POLICY.format(scripts=" ".join(f"'sha256-{_digest(code)}'" for code in (library, script))),
        "style": (assets / "page.css").read_text(encoding="utf-8"),
        "data": as_json(data),
        "library": library,
        "script": script,
    }
    template = (assets / "template.html").read_text(encoding="utf-8")
    pieces = re.split(r"\{\{(\w+)\}\}", template)  # what is filled in is not looked at again
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _digest(code: str) -> str:
    return base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()


def write_html(path: Path, html: str) -> None:
    """At once: a browser that reads the file meanwhile gets the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(html.encode())
