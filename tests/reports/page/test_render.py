import base64
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from importlib import resources

import pytest

from dynamo_megatron.reports.page.render import SCRIPTS, MissingLibrary, as_json, chart_library, render

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]>",
    "\u2028\u2029\0",
    "\ud800",
    "<img src=x>",
    "&lt;",
]
HTML_OF_TEXT = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(")
LIBRARY = "var Plotly = {};"


class Page(HTMLParser):
    """The scripts of a page, and what its attributes point to."""

    def __init__(self, html: str):
        super().__init__()
        self.scripts, self.addresses, self.tags = [], [], set()
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "action", "data")]
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_data(self, data):
        if self.cdata_elem == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def test_texts_of_the_run_end_no_script_and_come_back_as_they_were():
    data = {"runs": [{"name": text} for text in HOSTILE], HOSTILE[0]: 1}
    page = Page(render(data, LIBRARY))
    assert len(page.scripts) == 3 and "img" not in page.tags
    attributes, text = page.scripts[0]
    assert attributes["type"] == "application/json" and json.loads(text) == data
    assert text.isascii() and not set("<>&") & set(text)
    assert as_json({"a": "{{script}}"}) in render({"a": "{{script}}"}, LIBRARY)


def test_the_policy_allows_the_pages_own_scripts_and_no_network():
    html = render({"runs": []}, LIBRARY)
    page = Page(html)
    policy = dict(part.split(" ", 1) for part in re.search(r'Policy" content="([^"]*)"', html)[1].split("; "))
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in page.scripts[1:]]
    assert policy["script-src"].split() == [f"'sha256-{digest}'" for digest in own]
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert set(policy) == {"default-src", "script-src", "style-src", "img-src", "base-uri", "form-action"}
    assert (
        "http:" not in html and "https:" not in html and all(a.startswith("#") or a == "data:," for a in page.addresses)
    )


def test_texts_become_nodes_and_never_html():
    assets = resources.files("dynamo_megatron.reports.page") / "assets"
    assert {f.name for f in assets.iterdir()} == {*SCRIPTS, "page.css", "template.html"}
    for name in SCRIPTS:
        found = HTML_OF_TEXT.findall((assets / name).read_text())
        assert not found, (name, found)


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="JSON compliant"):
        as_json({"a": float("nan")})


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingLibrary, match=r"this interpreter has no plotly.*pip install plotly") as error:
        chart_library()
    assert "\n" not in str(error.value)
