"""The training side's memory released and resumed through a whole run, on the CPU: not a bit changes."""

import json

import pytest
import torch
from safetensors.torch import load_file


@pytest.mark.full
def test_a_run_that_takes_turns_is_the_same_run(replay):
    runs = {how: replay(f"turns-{how}", lambda r: r, f"rollout.offload={how}") for how in ("on", "off")}
    rows, weights = {}, {}
    for how, (code, text, output) in runs.items():
        assert code == 0, text[-3000:]
        rows[how] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        weights[how] = {n: t for f in sorted((output / "hf").glob("*.safetensors")) for n, t in load_file(f).items()}
    assert all(torch.equal(tensor, weights["off"][name]) for name, tensor in weights["on"].items())
    for on, off in zip(rows["on"], rows["off"], strict=True):
        same = {k for k in off if not k.startswith(("time/", "throughput/", "resources/"))}
        assert {k: on[k] for k in same} == {k: off[k] for k in same}
        assert on["memory/released_bytes"] > 0 and on["memory/resumed_bytes"] > 0 and on["time/memory"] > 0
        assert not any(k.startswith("memory/") for k in off)
