"""The page in headless Chromium: nothing is fetched or refused, and what it shows is what the run's files say."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dynamo_megatron.evaluation.results import read_results, results_file, summarise, write_results
from dynamo_megatron.reports.page.command import write_page
from dynamo_megatron.reports.page.data import page_data
from dynamo_megatron.reports.page.render import chart_library, render, write_html
from dynamo_megatron.rollout.store import read_rollouts, step_file, tokens_file
from dynamo_megatron.tracking.token_rows import read_token_rows, response_hash, write_token_rows
from dynamo_megatron.types import EpisodeRecord, ProblemResult, TurnRecord

pytestmark = pytest.mark.full
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ATTACK = "</script><script>window.owned = 1</script><img src=x onerror='window.owned = 1'>\u2028"
STEPS, WIDTHS, PARTS = 30, (1280, 390), ("overview", "allocation", "rollouts", "pairs")
LARGEST = 10_000_000  # bytes


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    pytest.importorskip("plotly")
    playwright = pytest.importorskip("playwright.sync_api", reason="this interpreter has no playwright")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def run(make_run, new_rollout, add_step, tiny_model):
    """make(name, seed) -> a run with rollouts whose texts are hostile, an evaluation, and statistics of some tokens."""

    def make(name: str, seed: int) -> Path:
        responses = [f"{ATTACK} {name} {g} {k}" for g in range(4) for k in range(3)]
        rollouts = [
            new_rollout(
                step,
                g,
                k,
                reward=float((g + k + step + seed) % 2),
                tokens=[20, 21, *range(30, 40)],
                response_mask=[0, 0] + [1] * 10,
                engine_logprobs=[-0.1 * (i + k) for i in range(10)],
                weight_versions=[(step - 1, 0, 4), (step, 4, 10)],
                prompt=f"{ATTACK} problem {g}",
                response=responses[3 * g + k],
            )
            for step in range(1, STEPS + 1)
            for g in range(4)
            for k in range(3)
        ]
        folder = make_run(name, rollouts, steps=STEPS, algorithm={"advantage": {"kind": "rloo"}})
        (folder / "hf").symlink_to(tiny_model)
        lists = {"logprob": [-0.11 * i for i in range(10)], "entropy": [0.2 * i for i in range(10)]}
        lists |= {"advantage": [-0.5] * 10, "modulation": [0.6 + 0.06 * i for i in range(10)]}
        row = {"rollout_id": f"{STEPS:06d}-0001-001", "response": response_hash(range(30, 40))}
        write_token_rows(tokens_file(folder, STEPS), [{**row, **lists}])
        columns = {"rewards": [1.0], "successes": [True], "lengths": [3], "finish_reasons": ["stop"]}
        results = [
            ProblemResult(f"p{i}", "d", **columns, statuses=["ok"], responses=[f"{name} {i}"], prompt=f"{ATTACK} {i}")
            for i in range(20)
        ]
        write_results(results_file(folder, STEPS), results)
        (folder / "evaluations.jsonl").write_text(json.dumps({"step": STEPS, **summarise(results, [1])}) + "\n")
        return folder

    return make


class Opened:
    """A page whose every complaint and request is kept."""

    def __init__(self, browser, path: Path, width: int = 1280):
        self.page = browser.new_page(viewport={"width": width, "height": 900})
        self.complaints, self.requests = [], []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("body[data-ready=yes]")

    def part(self, name: str) -> None:
        self.page.click(f"#tabs a[href='#{name}']")
        self.page.wait_for_selector(f"#part-{name}:not([hidden])")

    def check(self, path: Path) -> None:
        foreign = [u for u in self.requests if not u.startswith((path.as_uri(), "data:", "blob:"))]
        assert (self.complaints, foreign) == ([], []) and self.page.evaluate("window.owned") is None


@pytest.mark.parametrize("width", WIDTHS)
def test_every_part_shows_and_nothing_complains(browser, run, tmp_path, width):
    path = write_page([run("a", 0), run("b", 1)], tmp_path)
    opened = Opened(browser, path, width)
    assert path.stat().st_size < LARGEST
    for part in PARTS:
        opened.part(part)
        frames = opened.page.locator(f"#part-{part} .plot").count()
        assert frames > 1 if part in PARTS[:2] else frames == 0, (part, frames)
        if frames:
            opened.page.locator(f"#part-{part} .plot").nth(frames - 1).locator(".main-svg").first.wait_for()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, part
    opened.check(path)


def test_the_tokens_and_numbers_are_those_of_the_files(browser, run, tmp_path):
    folder, name = run("a", 0), f"{STEPS:06d}-0001-001"
    opened = Opened(browser, write_page([folder], tmp_path, [name]))
    opened.page.goto(f"{(tmp_path / 'report.html').as_uri()}#rollouts/{name}")
    opened.page.wait_for_selector("#detail")
    rollout = next(r for r in read_rollouts(step_file(folder, STEPS)) if r.rollout_id == name)
    lists = read_token_rows(tokens_file(folder, STEPS))[name].lists
    assert name in opened.page.inner_text("#detail h3")
    opened.page.click("#detail details summary")
    opened.page.wait_for_selector("#detail table tr")
    head, *rows = [
        [cell.inner_text() for cell in row.locator("th, td").all()]
        for row in opened.page.locator("#detail table tr").all()
    ]
    columns = {key: [row[i] for row in rows] for i, key in enumerate(head)}
    assert columns["id"] == [str(i) for i in rollout.tokens[2:]]
    assert "".join(json.loads(text) for text in columns["text"]) == opened.page.text_content("#tokens")
    expected = {"engine_logprob": rollout.engine_logprobs, "version": [STEPS - 1] * 4 + [STEPS] * 6, **lists}
    expected["gap"] = [p - e for p, e in zip(lists["logprob"], rollout.engine_logprobs, strict=True)]
    for key, values in expected.items():
        assert [float(v) for v in columns[key]] == pytest.approx(values, rel=1e-2, abs=1e-9), key
    for kind in ("advantage", "entropy", "modulation", "gap", "surprise", "version"):
        opened.page.select_option("#detail select", kind)
        assert opened.page.locator("#tokens .token").count() == 10
    opened.page.click("#tokens .token >> nth=3")
    assert f"id {rollout.tokens[5]}" in opened.page.inner_text("#detail .about")
    listed = opened.page.locator("#part-rollouts .list button")
    everything = listed.count()
    opened.page.fill("#search", "PROBLEM 1")
    found = [button.get_attribute("data-rollout") for button in listed.all()]
    assert 0 < len(found) < everything and all("-0001-" in each for each in found)
    opened.check(tmp_path / "report.html")


@pytest.mark.parametrize("width", WIDTHS)
def test_an_episode_is_a_conversation_with_its_tokens(browser, make_run, new_rollout, tiny_model, tmp_path, width):
    call = {"id": "c", "type": "function", "function": {"name": ATTACK, "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": f"{ATTACK} 1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": f"edited {ATTACK}"},
        {"role": "tool", "content": f"{ATTACK} 2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    turns = [TurnRecord(2, 5, 0.0, 0.5, 1), TurnRecord(8, 9, 0.125, 1.5, None), TurnRecord(6, 7, 1.5, 1.75, 4)]
    record = EpisodeRecord([0, 7], {"turns": 3, "segments": 2}, messages, turns=turns)
    rollout = new_rollout(
        1,
        0,
        0,
        reward=0.75,
        tokens=[20, 21, 30, 31, 32, 22, 33, 23, 34],
        response_mask=[0, 0, 1, 1, 1, 0, 1, 0, 1],
        engine_logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5],
        weight_versions=[(0, 0, 2), (1, 2, 5)],
        episode=record,
    )
    folder = make_run("agent", [rollout], steps=1)
    (folder / "hf").symlink_to(tiny_model)
    path = write_page([folder], tmp_path)
    opened = Opened(browser, path, width)
    opened.page.goto(f"{path.as_uri()}#rollouts/{rollout.rollout_id}")
    opened.page.wait_for_selector("#tokens")
    assert "reward 0.75" in opened.page.inner_text("#detail") and "turns 3, segments 2" in opened.page.inner_text(
        "#detail"
    )
    said = opened.page.locator("#tokens .said")
    roles = [each.get_attribute("data-role") for each in said.all()]
    assert roles == ["user", "assistant", "assistant", "tool", "assistant", "before it", "assistant"]
    heads = [each.inner_text() for each in opened.page.locator("#tokens .who").all()]
    assert "answer 1 of 3: 0 to 0.5 s, weights of step 0, 1, 3 tokens, trained" in heads[1]
    assert "as the agent wrote it, not trained" in heads[2] and "in segment 2, not trained" in heads[5]
    assert "answer 3 of 3: 1.5 to 1.75 s, weights of step 1, 1 tokens, trained" in heads[4]
    assert [each.locator(".token").count() for each in said.all()] == [0, 3, 0, 0, 1, 0, 1]
    tokens = [token.get_attribute("data-token") for token in opened.page.locator("#tokens .token").all()]
    assert tokens == ["0", "1", "2", "3", "4"]
    opened.page.click("#tokens .token >> nth=3")
    assert "id 33" in opened.page.inner_text("#detail .about")
    opened.page.select_option("#detail select", "version")
    assert opened.page.locator("#tokens .token").count() == 5
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.check(path)


def test_marks_become_preference_pairs(browser, run, tmp_path):
    runs = [run("a", 0), run("b", 1)]
    opened = Opened(browser, write_page(runs, tmp_path))
    opened.part("pairs")
    assert opened.page.is_disabled("#export")
    sides = opened.page.locator("#part-pairs .sides .box").all_inner_texts()
    opened.page.click("[data-mark=left]")
    opened.page.click("#next")
    opened.page.click("[data-mark=equal]")
    with opened.page.expect_download() as download:
        opened.page.click("#export")
    (line,) = Path(download.value.path()).read_text().splitlines()
    row = json.loads(line)
    assert [row["chosen"], row["rejected"]] == sides and {row["chosen_run"], row["rejected_run"]} == {"a", "b"}
    assert row["prompt"] == f"{ATTACK} {row['prompt_id'][1:]}" and download.value.suggested_filename.endswith(".jsonl")
    opened.page.reload()
    opened.page.wait_for_selector("#part-pairs .sides")
    assert "2 marked, 1 with a preference" in opened.page.inner_text("#progress")
    file = results_file(runs[1], STEPS)  # of a rerun in the same folder
    write_results(file, [dataclasses.replace(r, responses=["anew"]) for r in read_results(file)])
    write_page(runs, tmp_path)
    opened.page.reload()
    opened.page.wait_for_selector("#part-pairs .sides")
    assert "0 marked, 0 with a preference" in opened.page.inner_text("#progress")
    opened.check(tmp_path / "report.html")


@pytest.mark.parametrize(
    ("address", "part"),
    [
        *[("constructor", "overview"), ("%", "overview"), ("pairs", "overview")],  # there are no pairs
        *[("rollouts/%", "rollouts"), ("rollouts/none", "rollouts")],
    ],
)
def test_every_address_shows_a_part(browser, run, tmp_path, address, part):
    path = write_page([run("a", 0)], tmp_path)
    opened = Opened(browser, path)
    opened.page.goto(f"{path.as_uri()}#{address}")
    opened.page.reload()
    opened.page.wait_for_selector("body[data-ready=yes]")
    assert opened.page.is_visible(f"#part-{part} h2")
    assert opened.page.locator("#tabs a").all_inner_texts() == ["Overview", "Allocation", "Rollouts and tokens"]
    opened.check(path)


def test_the_overview_begins_with_the_scores_and_leaves_out_what_says_nothing(browser, run, tmp_path):
    folder = run("a", 0)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"time/generate": 2.0, "time/evaluate": 3.0 * (row["step"] == STEPS), "policy/clip_share": 0.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations = folder / "evaluations.jsonl"
    after = json.loads(evaluations.read_text())
    evaluations.write_text("".join(json.dumps({**after, "step": step}) + "\n" for step in (0, STEPS)))
    write_results(results_file(folder, 0), read_results(results_file(folder, STEPS)))
    opened = Opened(browser, write_page([folder], tmp_path))
    overview = opened.page.locator("#part-overview")
    assert overview.locator("h2").all_inner_texts() == ["Held-out problems before and after", "Checks", "Metrics"]
    cells = overview.locator("tr").nth(1).locator("td").all_inner_texts()
    assert cells == ["pass@1", "100.0", "100.0", "+0.0 (-16.1 to +16.1)"]
    assert overview.locator("summary").inner_text() == "1 fine, 4 not measured"
    assert overview.locator("details[open]").count() == 0
    assert "0 at every step: Clipped tokens." in overview.inner_text()
    assert "Clipped tokens" not in overview.locator("h3").all_inner_texts()
    overview.locator(".plot .barlayer .point").first.wait_for(state="attached")
    opened.check(tmp_path / "report.html")


def test_a_page_of_a_run_under_way_reads_itself_again(browser, run, tmp_path):
    folder, path = run("a", 0), tmp_path / "report.html"
    data, library = page_data([folder], refresh=1), chart_library()
    data["runs"][0]["step"] = STEPS - 1
    write_html(path, render(data, library))
    opened = Opened(browser, path)
    opened.part("allocation")
    assert f"{STEPS - 1} of {STEPS} steps" in opened.page.inner_text("#made")
    data["runs"][0]["step"] = STEPS
    write_html(path, render(data, library))
    opened.page.get_by_text(f"{STEPS} of {STEPS} steps").wait_for(timeout=20_000)
    assert opened.page.is_visible("#part-allocation")  # as before
    opened.check(path)
