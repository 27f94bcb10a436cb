"""The work that beside_trl.py gives to both sides."""

import json

import beside_trl

from dynamo_megatron.config.files import compose


def test_what_ours_is_asked_for(tmp_path, monkeypatch):
    shipped = [beside_trl.ROOT / config for config in beside_trl.DEMO]
    pool = tmp_path / "runs" / "demo" / "task" / "pool.jsonl"
    pool.parent.mkdir(parents=True)
    pool.write_text(json.dumps({"id": "1+2", "problem": "1+2=", "answer": "3"}) + "\n")
    monkeypatch.setattr(beside_trl, "ROOT", tmp_path)
    job = {**beside_trl.WORK, "seed": 1}
    beside_trl.prepare(job, 1, tmp_path / "run")
    config, _ = compose([*map(str, shipped), str(tmp_path / "run" / "config.yaml")], [])
    rollouts = job["prompts"] * beside_trl.GROUP
    assert config.rollout_budget == rollouts and rollouts % job["size"] == 0
    assert config.algorithm.allocation.kind == "uniform" and config.algorithm.kl.coef == 0
    assert config.algorithm.loss.aggregation == "token_mean" and config.algorithm.loss.mini_batches == 1
    assert not config.algorithm.measures_first and config.optimizer.weight_decay == 0
    theirs = json.loads((tmp_path / "run" / "job").read_text())["rows"]
    assert theirs == [json.loads(line) for line in (tmp_path / "run" / "problems.jsonl").read_text().splitlines()]
