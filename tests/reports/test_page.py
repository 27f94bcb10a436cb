"""report.md, report.png and report.html of `report`, and `--watch`."""

import fcntl
import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from dynamo_megatron.cli import main
from dynamo_megatron.reports import page
from dynamo_megatron.reports.page import rollout_view, token_texts, watch, write_report
from dynamo_megatron.rollout.store import tokens_file
from dynamo_megatron.tracking.token_rows import response_hash, write_token_rows
from dynamo_megatron.types import EpisodeRecord

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ATTACK = "</script><script nonce='report'>window.owned = 1</script><img src=x onerror='window.owned = 1'>\u2028"


def data_of(html: Path) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', html.read_text(), re.S)[1])


@pytest.fixture
def run(folders, new_rollout, tiny_model) -> Path:
    """Four steps of four prompts with hostile texts, statistics of a rollout's tokens, and evaluations."""
    texts = {"prompt": f"{ATTACK} problem", "response": ATTACK, "answer": ATTACK}
    rollouts = [
        new_rollout(step, g, k, reward=float((g + k + step) % 2), **texts)
        for step in range(1, 5)
        for g in range(4)
        for k in range(2)
    ]
    folder = folders.run("run", rollouts)
    (folder / "hf").symlink_to(tiny_model)
    lists = {"logprob": [-1.5, -2.0], "entropy": [0.25, 0.5], "advantage": [-0.5, -0.5], "modulation": [0.6, 1.2]}
    row = {"rollout_id": "000004-0001-001", "response": response_hash([31, 31])}
    write_token_rows(tokens_file(folder, 4), [{**row, **lists}])
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
    views = {view["id"]: view for view in data_of(out / "report.html")["rollouts"]}
    assert next(iter(views)) == "000002-0003-001" and views["000002-0003-001"]["labels"][0] == "asked for"
    values = views["000004-0001-001"]["values"]
    assert values["gap, policy - engine"] == [-0.5, 0.0] and values["modulation"] == [0.6, 1.2]
    assert values["version of the weights"] == [3.0, 3.0] and len(views["000004-0001-001"]["texts"]) == 2
    assert main(["report", str(run), "--out", str(out), "--rollout", "000001-0009-000"]) == 2
    assert "has no rollout '000001-0009-000'" in capsys.readouterr().err


def test_statistics_of_another_response_are_not_shown(run, tmp_path):
    row = {"rollout_id": "000004-0001-001", "response": response_hash([1, 2]), "entropy": [0.25, 0.5]}
    write_token_rows(tokens_file(run, 4), [row])
    write_report([run], tmp_path)
    views = {view["id"]: view for view in data_of(tmp_path / "report.html")["rollouts"]}
    assert "entropy" not in views["000004-0001-001"]["values"]


def test_an_episode_has_its_conversation(new_rollout):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    episode = EpisodeRecord([0], {"turns": 1}, messages)
    view = rollout_view(new_rollout(1, 0, 0, episode=episode), {}, None)
    assert view["conversation"] == ["user:\n1+1?", 'assistant:\n{"name": "add", "arguments": {"a": 1}}']
    assert view["texts"] == ["[30]", "[31]"]


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
    assert max([0, *given[:-1]]) <= 2 * page.LONGEST  # the time is in proportion to the tokens


@pytest.mark.parametrize("steps", [4, 2])
def test_a_watch_follows_the_run_to_its_last_step_or_its_end(folders, new_rollout, tmp_path, steps):
    run, seen = folders.run("run"), []
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def wait(seconds: float) -> None:
            """A step a call, in place of time. After `steps` the run ends."""
            html = tmp_path / "report.html"
            seen.append(data_of(html)["refresh"] if html.exists() else "no page")
            if len(seen) <= steps:
                folders.step(run, len(seen), [new_rollout(len(seen), 0, 0)])
            else:
                fcntl.flock(lock, fcntl.LOCK_UN)

        watch([run], tmp_path, 30, say=lambda line: None, wait=wait)
    assert seen == ["no page", *[30] * (3 if steps == 4 else 2)]
    assert data_of(tmp_path / "report.html")["refresh"] is None


@pytest.mark.full
def test_the_page_in_a_browser(run, folders, new_rollout, tmp_path):
    """Nothing is fetched, nothing complains, hostile texts do nothing, and tokens have the numbers of the files."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="this interpreter has no playwright")
    write_report([run, folders.run("other", [new_rollout(1, 0, 0)])], tmp_path)
    path = (tmp_path / "report.html").as_uri()
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (1280, 390):
            opened, complaints = browser.new_page(viewport={"width": width, "height": 900}), []
            opened.on("console", lambda m, found=complaints: found.append(m.text))
            opened.on("pageerror", lambda error, found=complaints: found.append(str(error)))
            opened.on("request", lambda r, found=complaints: r.url.startswith(path) or found.append(r.url))
            opened.goto(f"{path}#rollouts/000004-0001-001")
            opened.wait_for_selector("body[data-ready=yes]")
            assert opened.locator("#metrics .main-svg").count() > 4 and opened.locator("#allocation .plot").count() == 1
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
            assert "000004-0001-001" in opened.inner_text("#detail")
            opened.select_option("#kind", "entropy")
            opened.locator("#tokens span").nth(1).click()
            assert "entropy 0.5; gap, policy - engine 0; modulation 1.2" in opened.inner_text("#detail")
            listed = opened.locator("#list button")
            everything = listed.count()
            opened.select_option("#label", "best")
            assert 0 < listed.count() < everything
            assert complaints == [] and opened.evaluate("window.owned") is None
        browser.close()
