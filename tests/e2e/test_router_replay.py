"""Every trained token has the route that its server took, through weight syncs in mid-response and a kill."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from background_run import AHEAD, json_lines, step_lines

from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
WITNESS = Path(__file__).with_name("route_witness")
STEPS = int(os.environ.get("ROUTER_REPLAY_STEPS", 14))  # docs/evidence.md has 1,000
KILLS = (5, *range(125, STEPS, 125))  # the run is killed once it has done this many steps

Pass = tuple[int, int, list[list[int]]]  # tokens that the request came with; the token at a position, and its route


def passes(folder: Path) -> dict[tuple[str, int], list[Pass]]:
    """(rollout, position) -> what the servers computed there. A request's name is its rollout's and more."""
    found = defaultdict(list)
    for file in folder.iterdir():
        given: dict[str, int] = {}
        for line in json_lines(file):
            end, name = line["start"] + len(line["tokens"]), line["rid"].removeprefix("alone-")[:15]
            came = given.setdefault(line["rid"], end)
            for place, (token, route) in enumerate(zip(line["tokens"], line["routes"], strict=True), line["start"]):
                found[name, place].append((came, token, [sorted(experts) for experts in route]))
    return found


@pytest.mark.timeout(900 + 4 * STEPS)
def test_all_trained_tokens_have_the_servers_routes(workspace, start_run, make_tiny_model, tmp_path):
    model = make_tiny_model(tmp_path / "model", family="qwen3_moe", fields={"num_experts": 8})
    output, written = tmp_path / "output", tmp_path / "witness"
    written.mkdir()
    path = os.pathsep.join(filter(None, [str(WITNESS), os.environ.get("PYTHONPATH")]))
    keys = (*AHEAD, f"model.path={model}", f"trainer.steps={STEPS}", "checkpoint.every=3", f"output_dir={output}")
    given = {"environment": {"PYTHONPATH": path, "ROUTE_WITNESS": str(written)}}
    for steps in KILLS:
        run = start_run(workspace, workspace / "config.yaml", *keys, **given)
        run.wait_until(lambda steps=steps: len(step_lines(output)) >= steps, f"{steps} steps", 240 + STEPS)
        run.kill()
    run = start_run(workspace, workspace / "config.yaml", *keys, **given)
    assert run.wait(400 + STEPS) == 0, run.text[-3000:]

    computed, tokens, mixed, otherwise = passes(written), 0, 0, 0
    for step in range(1, STEPS + 1):
        for rollout in read_rollouts(step_file(output, step)):
            mixed += len(rollout.weight_versions) > 1
            for t in (t for t, trained in enumerate(rollout.response_mask) if trained):
                own = [sorted(experts) for experts in rollout.routes[t].tolist()]
                here = [p for p in computed[rollout.rollout_id, t - 1] if p[1] == rollout.tokens[t - 1]]
                assert own in [route for came, _, route in here if came <= t], (rollout.rollout_id, t)
                # A later request read the token again, with other weights.
                otherwise += any(route != own for came, _, route in here if came > t)
                tokens += 1
    print(f"{tokens} tokens, {otherwise} with another route later; {mixed} rollouts of several versions")
    assert tokens > 10_000 and mixed and otherwise
    rows = step_lines(output)
    assert len(rows) == STEPS and all(row["moe/replayed"] == 1 and "moe/route_mismatch" in row for row in rows)
