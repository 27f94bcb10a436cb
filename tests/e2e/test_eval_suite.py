"""The suite of the paper's table on real servers: 5 problems of each set, figures computed anew from the responses."""

import json
import zlib

import pytest

from dynamo_megatron.evaluation.results import TABLE, read_results, summarise

pytestmark = pytest.mark.full
PROBLEMS, SAMPLES = 5, 4
REWARD = """
import zlib

def tally(prompt, response):
    return float(zlib.crc32(f"{prompt.prompt_id} {response}".encode()) % 3 == 0)
"""


def test_a_model_and_a_server_side_by_side(tiny_model, sglang_server, command_line, tmp_path, monkeypatch):
    """A server of the command's own and one that runs already, which have the same model. The reward is one that a
    random response may get."""
    (tmp_path / "sets").mkdir()
    for name in TABLE:
        rows = [{"id": f"{name}/{i}", "problem": f"{name}: {i} + 1 = ?", "answer": i + 1} for i in range(PROBLEMS + 3)]
        (tmp_path / "sets" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_tally.py").write_text(REWARD)
    monkeypatch.setenv("SUITE_KEY", sglang_server.endpoint.api_key)
    url, out = sglang_server.endpoint.url, tmp_path / "scores"
    keys = ["eval.data=sets", f"eval.limit={PROBLEMS}", "eval.max_new_tokens=12", f"model.path={tiny_model}"]
    keys += ["rollout.placement=external", f"rollout.urls=[{url}]", "rollout.api_key_env=SUITE_KEY"]
    keys += ["model.max_length=2048", 'data.template="{prompt}\\n"', "reward.functions=[own_tally:tally]"]
    keys += [f"eval.samples={SAMPLES}", f"eval.k=[1,{SAMPLES}]", "--suite", "table", "--out", out]
    code, text = command_line(tmp_path, "eval", *keys, "--model", tiny_model, "--model", url)
    assert code == 0, text[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["models"]) == [tiny_model.name, url.rpartition("/")[2].replace(":", "-")]
    different = 0
    for name in TABLE:
        both = [read_results(out / model / f"{name}.jsonl") for model in summary["models"]]
        for model, results in zip(summary["models"], both, strict=True):
            assert summary["models"][model]["sets"][name] == summarise(results, [1, SAMPLES])
            for result in results:
                texts = [f"{result.prompt_id} {response}" for response in result.responses]
                assert result.successes == [zlib.crc32(text.encode()) % 3 == 0 for text in texts]
        for one, other in zip(*both, strict=True):
            assert one.prompt_id == other.prompt_id and len(one.responses) == SAMPLES
            different += sum(a != b for a, b in zip(one.responses, other.responses, strict=True))
    assert different <= 1  # the same responses but for a token within rounding of another
    assert "| average |" in (out / "table.md").read_text()
