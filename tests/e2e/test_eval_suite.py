"""The suite of the paper's table on real servers: 5 problems of each set, figures computed anew from the responses."""

import json
import zlib
from pathlib import Path

import pytest
from eval_figures import mean, read, set_pass_at_k

from dynamo_megatron.evaluation.suite import TABLE

pytestmark = pytest.mark.full
PROBLEMS, SAMPLES = 5, 4
KEY = "EVAL_SUITE_KEY"
REWARD = """
import zlib

def tally(prompt, response):
    return float(zlib.crc32(f"{prompt.prompt_id} {response}".encode()) % 3 == 0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sets of more problems than are taken, and a reward that a random response may get."""
    made = tmp_path_factory.mktemp("suite")
    (made / "sets").mkdir()
    for name in TABLE:
        rows = [{"id": f"{name}/{i}", "problem": f"{name}: {i} + 1 = ?", "answer": i + 1} for i in range(PROBLEMS + 3)]
        (made / "sets" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "own_tally.py").write_text(REWARD)
    return made


@pytest.fixture(scope="module")
def suite(folder, tiny_model, sglang_server, command_line):
    """suite(name, *words): output folder of the suite on a server of its own and on one that runs already, which have
    the same model."""

    def run(name: str, *words: object) -> Path:
        out = folder / name
        keys = ["eval.data=sets", f"eval.limit={PROBLEMS}", "eval.max_new_tokens=12", f"model.path={tiny_model}"]
        keys += [
            "rollout.placement=external",
            f"rollout.urls=[{sglang_server.endpoint.url}]",
            f"rollout.api_key_env={KEY}",
        ]
        keys += ["model.max_length=2048", 'data.template="{prompt}\\n"', "reward.functions=[own_tally:tally]"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY, sglang_server.endpoint.api_key)
            code, text = command_line(folder, "eval", "--suite", "table", "--out", out, *keys, *words)
        assert code == 0, text[-3000:]
        return out

    return run


def test_a_model_and_a_server_side_by_side(suite, tiny_model, sglang_server):
    url = sglang_server.endpoint.url
    out = suite("scores", "--model", tiny_model, "--model", url, f"eval.samples={SAMPLES}", f"eval.k=[1,{SAMPLES}]")
    summary = json.loads((out / "summary.json").read_text())
    first, second = summary["models"]
    assert (first, second) == (tiny_model.name, url.rpartition("/")[2])
    folders = {first: out / first, second: out / second.replace(":", "-")}
    different = 0
    for name in TABLE:
        problems = [read(folders[model] / f"{name}.jsonl") for model in (first, second)]
        for one, other in zip(*problems, strict=True):
            assert one["prompt_id"] == other["prompt_id"] and len(one["responses"]) == SAMPLES
            for r, success in zip(one["responses"], one["successes"], strict=True):
                assert success == (zlib.crc32(f"{one['prompt_id']} {r}".encode()) % 3 == 0)
            different += sum(a != b for a, b in zip(one["responses"], other["responses"], strict=True))
    assert different <= 1  # docs/how-it-works.md, Seeds: the same responses but for a token within rounding of another
    seen = set()
    for k in (1, SAMPLES):
        key = f"eval/pass@{k}"
        by_model = {m: [set_pass_at_k(folder / f"{name}.jsonl", k) for name in TABLE] for m, folder in folders.items()}
        for model, passes in by_model.items():
            figures = summary["models"][model]
            assert [figures["sets"][name][key] for name in TABLE] == pytest.approx(
                [float(p) for p in passes], abs=1e-12
            )
            assert figures["average"][key] == pytest.approx(float(mean(passes)), abs=1e-12)
            assert [figures["sets"][name]["eval/problems"] for name in TABLE] == [PROBLEMS] * len(TABLE)
            seen.update(passes)
        gain = [b - a for a, b in zip(by_model[first], by_model[second], strict=True)]
        differences = summary["differences"][second]
        assert [differences["sets"][name][key] for name in TABLE] == pytest.approx([float(g) for g in gain], abs=1e-12)
        assert differences["average"][key] == pytest.approx(float(mean(gain)), abs=1e-12)
    assert len(seen) > 3, "a figure that is always the same proves nothing"
    assert "| average |" in (out / "table.md").read_text()


def test_greedy_responses_are_all_the_same(suite, sglang_server):
    url = sglang_server.endpoint.url
    out = suite("greedy", "--model", url, "eval.samples=2", "eval.temperature=0")
    (model,) = (path for path in out.iterdir() if (path / "aime24.jsonl").is_file())
    problems = [problem for name in TABLE for problem in read(model / f"{name}.jsonl")]
    assert len(problems) == PROBLEMS * len(TABLE)
    assert all(len(set(problem["responses"])) == 1 for problem in problems)
    assert ", greedy, " in (out / "table.md").read_text()
