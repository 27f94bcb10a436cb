"""report.md, report.png and report.html of `report`."""

import json
import re
import shutil
from pathlib import Path

import pytest
from background_run import new_rollout
from PIL import Image

from dynamo_megatron.cli import main
from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.errors import ConfigError
from dynamo_megatron.reports.page import token_texts, write_report
from dynamo_megatron.reports.samples import read_pairs
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.rollout.token_spans import LONGEST
from dynamo_megatron.tracking.token_rows import write_token_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ATTACK = "</script><script nonce='report'>window.owned = 1</script><img src=x onerror='window.owned = 1'>\u2028"


def tokens_of(html: Path) -> dict[str, dict]:
    """The tokens of each rollout in the page, by its heading."""
    text = html.read_text()
    heads = re.findall(r"<summary>(.*?) <span", text)
    tokens = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])["tokens"]
    return dict(zip(heads, tokens, strict=True))


@pytest.fixture
def run(folders, tiny_model) -> Path:
    """Four steps of five prompts with hostile texts, statistics of a rollout's tokens, and evaluations."""
    texts = {"prompt": f"{ATTACK} problem", "answer": ATTACK}
    rollouts = [
        new_rollout(step, g, k, reward=float((g + k + step) % 2), response=f"{ATTACK}{step}{g}{k}", **texts)
        for step in range(1, 5)
        for g in range(5)
        for k in range(2)
    ]
    folder = folders.run("run", rollouts)
    (folder / "hf").symlink_to(tiny_model)
    lists = {"logprob": [-1.5, -2.0], "entropy": [0.25, 0.5], "advantage": [-0.5, -0.5], "modulation": [0.6, 1.2]}
    write_token_rows(tokens_file(folder, 4), [{"rollout_id": "000004-0001-001", **lists}])
    for step in (0, 4):
        folders.evaluation(folder, step, [True, False, step > 0])
    return folder


def test_a_report_of_a_run(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["report", str(run), "--out", str(out), "--rollout", "000002-0003-001"]) == 0
    said, text = capsys.readouterr().out, (out / "report.md").read_text()
    assert "## Held-out problems" in text and "| pass@1 |" in text and text[:500] in said
    with Image.open(out / "report.png") as picture:
        assert picture.width >= 1000 and len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10
    tokens = tokens_of(out / "report.html")
    head = next(iter(tokens))
    assert head.startswith("000002-0003-001: reward 0, math 0; 2 tokens, ended by stop, status ok (asked for")
    (shown,) = (its for head, its in tokens.items() if head.startswith("000004-0001-001"))
    values = shown["values"]
    assert values["gap, policy - engine"] == [-0.5, 0.0] and values["modulation"] == [0.6, 1.2]
    assert values["version of the weights"] == [3.0, 3.0] and len(shown["texts"]) == 2
    assert main(["report", str(run), "--out", str(out), "--rollout", "000001-0009-000"]) == 2
    assert "has no rollout '000001-0009-000'" in capsys.readouterr().err


def test_a_report_into_a_file_is_refused(folders, tmp_path):
    run, out = folders.run("run"), tmp_path / "out"
    folders.step(run, 1)
    out.touch()
    with pytest.raises(ConfigError, match="out: File exists; name a folder to write to with --out"):
        write_report([run], out)


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (list("aé€😀b".encode()), ["a", "", "é", "", "", "€", "", "", "", "😀", "b"]),
        ([*b"ab", 0xF0, 0x9F], ["a", "b", "", "\ufffd"]),
        ([0x80] * 40, None),
        ([], []),
    ],
)
def test_tokens_that_are_parts_of_characters(ids, texts):
    given = []

    def decode(part) -> str:
        given.append(len(part))
        return bytes(part).decode("utf-8", errors="replace")

    pieces = token_texts(ids, decode)
    assert texts in (None, pieces) and "".join(pieces) == decode(ids) and len(pieces) == len(ids)
    assert max([0, *given[1:-1]]) <= 2 * LONGEST  # the time is in proportion to the tokens


@pytest.mark.full
def test_the_page_in_a_browser(run, folders, tmp_path):
    """Nothing is fetched, nothing complains, hostile texts do nothing, and tokens have the numbers of the files."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="this interpreter has no playwright")
    other = folders.run("other", [new_rollout(1, 0, k, reward=float(k)) for k in range(2)])
    folders.step(other, 2)
    write_report([run, other], tmp_path)
    path = (tmp_path / "report.html").as_uri()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1280, 390):
            opened, complaints = browser.new_page(viewport={"width": width, "height": 900}), []
            opened.on("console", lambda m, found=complaints: found.append(m.text))
            opened.on("pageerror", lambda error, found=complaints: found.append(str(error)))
            opened.on("request", lambda r, found=complaints: r.url.startswith(path) or found.append(r.url))
            opened.goto(path)
            opened.wait_for_selector("body[data-ready=yes]")
            assert opened.locator("#charts .main-svg").count() > 4
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            shown = opened.locator("details", has_text="000004-0001-001")
            shown.locator("summary").click()
            opened.select_option("#kind", "entropy")
            token = shown.locator(".tokens span").nth(1)
            assert "entropy 0.5; modulation 1.2; gap, policy - engine 0;" in token.get_attribute("title")
            assert "rgba(213, 94, 0, 0.7)" in token.get_attribute("style")
            assert complaints == [] and opened.evaluate("window.owned") is None
            with opened.expect_download() as download:
                opened.click("#pairs")
            download.value.save_as(tmp_path / "pairs.jsonl")
        browser.close()
    # The third group of each step has no rollout in the list; both runs have a group 000001-0000.
    pairs = {f"{run.name}/{row.pop('id')}": row for run in (run, other) for row in map(json.loads, read_pairs(run))}
    prompts = load_prompts(DataConfig(source=str(tmp_path / "pairs.jsonl"), answer_key="chosen"), needs_answer=True)
    assert {p.prompt_id: {"prompt": p.text, "chosen": p.answer, **p.meta} for p in prompts} == {
        name: pair for name, pair in pairs.items() if "-0002" not in name
    }
