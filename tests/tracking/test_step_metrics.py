import dataclasses
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from background_run import made_rollout

from dynamo_megatron.config import Config
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.rollout.result import Outcome, RolloutResult, ServerUse
from dynamo_megatron.tracking.phases import Clock
from dynamo_megatron.tracking.step_metrics import StepRecord, step_metrics
from dynamo_megatron.types import REWARD_STATES, RolloutBatch, TokenStats
from dynamo_megatron.weight_sync.sync import SyncReport

OPTIONAL = {
    "policy/kl",
    "policy/selected_share",
    "reward/overlong_penalty",
    "rollout_correction/truncated",
    "rollout_correction/weight_mean",
    "rollout/refill_rounds",
    "rollout/missing_groups",
}


def metrics(
    clock: Clock | None = None,
    synced: SyncReport | None = None,
    rejected=(),
    *,
    steps=None,
    implicit=None,
    process=None,
    scores=({}, {}),
    version=0,
    fits=(),
    values=(None, None),
    rounds=(([2], [0]),),
    **algorithm,
) -> dict[str, float]:
    """Two rollouts of 2 and 8 tokens, of at most 8; the policy gives each token e^0.1 times the engine's chance.
    `rejected`: indices of those that the policy is said to reject. `steps`, `implicit`: process rewards; `process`:
    what they add to the tokens' advantages; `version`: of the weights that sampled all tokens; `fits`: updates of a
    critic, `values`: its values and returns; `rounds`: of each, its prompts' rollouts and positions in the draw.
    `rewards`: those of RolloutResult."""
    engine = np.linspace(-1, -2, 10).astype(np.float32)
    sampled = [
        {"right": k == 1, "engine_logprobs": part, "weight_versions": [(version, 0, len(part))]}
        for k, part in enumerate((engine[:2], engine[2:]))
    ]
    made = [made_rollout(1, 0, k, "p", [0], [0] * n, **sampled[k]) for k, n in enumerate((2, 8))]
    rollouts = dataclasses.replace(RolloutBatch.from_rollouts(made), step_rewards=steps)
    outcomes = {
        name: Outcome(kind, "server-0", scores=own, tokens=int(tokens))
        for name, kind, own, tokens in zip(
            rollouts.rollout_ids, ("completed", "truncated"), scores, rollouts.response_lengths, strict=True
        )
    }
    uses = {
        "server-0": ServerUse(tokens=10, busy=1.0, kv_cache=0.25, retries=1),
        "server-1": ServerUse(busy=2.5, restarts=2),
    }
    result = RolloutResult(rollouts, outcomes, 2.0, [], uses=uses).without(rejected, [])
    allocations = [
        SimpleNamespace(counts=np.array(n), history=np.full(len(n), number > 0)) for number, (n, _) in enumerate(rounds)
    ]
    origins = [np.array(positions) for _, positions in rounds]
    config = Config(
        model={"path": "m"}, data={"source": "d"}, output_dir="o", rollout={"max_new_tokens": 8}, algorithm=algorithm
    )
    update = {"loss": 0.5, "grad_norm": 2.0, "skipped": 0.0, "selected": 3.0, "kl": 1.0}
    return step_metrics(
        StepRecord(1, allocations, origins, result, {"data/epoch": 0}),
        TrainBatch(rollouts, np.array([-1.0, 1.0]), [np.arange(2)], np.ones(2), process, implicit, None, *values),
        TokenStats(torch.from_numpy(engine + np.float32(0.1)), torch.ones(10), torch.zeros(10), torch.full((10,), 0.5)),
        [update, {"skipped": 1.0}],
        fits,
        synced or SyncReport(),
        clock or Clock(),
        config,
    )


def test_the_mismatch_is_always_there_and_options_bring_their_own_keys():
    plain = metrics()
    assert not OPTIONAL & plain.keys()
    assert plain["rollout_correction/kl"] == pytest.approx(np.exp(0.1) - 1.1, rel=1e-4)
    assert plain["rollout_correction/ratio_max"] == pytest.approx(np.exp(0.1), rel=1e-5)
    assert plain["policy/skipped_updates"] == 1 and plain["policy/loss"] == 0.5
    full = metrics(
        advantage={"overlong_buffer": 0.5},
        loss={"entropy_top_ratio": 0.3},
        kl={"coef": 0.1},
        rollout_correction={"level": "sequence", "high": 2.0},
        dynamic_sampling={"rounds": 1},
    )
    assert full.keys() == plain.keys() | OPTIONAL
    assert full["policy/selected_share"] == 0.3 and full["policy/kl"] == 0.1
    assert full["rollout/missing_groups"] == 31 and full["rollout/zero_variance_groups"] == 0
    assert full["reward/overlong_penalty"] == -0.25 and full["reward/mean"] == 0.5
    assert full["rollout_correction/ratio_max"] == pytest.approx(np.exp(0.8), rel=1e-4)
    assert full["rollout_correction/truncated"] == 0.8
    assert full["rollout_correction/weight_mean"] == pytest.approx(0.2 * np.exp(0.2) + 0.8 * 2, rel=1e-4)


def test_a_gap_is_reported_only_of_tokens_of_the_newest_weights():
    assert metrics()["rollout/logprob_gap_mean"] == pytest.approx(0.1, rel=1e-5)
    assert not any("logprob_gap" in key for key in metrics(version=-1))


def test_the_parts_of_a_step_add_up_to_its_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = Clock()
    # An evaluation and a save come after the metrics of the step before. A try that lost its servers counts, too.
    for phase in ("evaluate", "save", "read data", "generate", "weight sync", "generate", "logprobs", "update"):
        clock.begin(phase)
        now[0] += 2.0
    clock.begin("weight sync")
    now[0] += 5.0
    found = metrics(clock, SyncReport(seconds=7.0))
    parts = ("generate", "logprobs", "update", "weight_sync", "evaluate", "save", "other")
    assert sum(found[f"time/{part}"] for part in parts) == pytest.approx(found["time/step"], abs=1e-9)
    assert (found["time/step"], found["time/generate"], found["time/weight_sync"], found["time/other"]) == (21, 4, 7, 2)
    assert found["throughput/tokens_per_second"] == pytest.approx(12 / 17)


def test_what_was_asked_for_counts_whatever_became_of_it():
    for rejected, length in (([], 5.0), ([0], 8.0), ([1], 2.0)):
        found = metrics(rejected=rejected)
        assert (found["rollout/requested"], found["rollout/response_tokens"]) == (2, 10)
        assert (found["rollout/rejected"], found["rollout/response_length_mean"]) == (len(rejected) / 2, length)


@pytest.mark.parametrize(("position", "expected"), [(1, (2, 2, 6, 0.0)), (2, (3, 2, 4, 1 / 3))])
def test_rollouts_are_counted_by_prompt_over_the_rounds(position, expected):
    """The later round samples a prompt again (`sequential`), or another one (`dynamic_sampling`)."""
    found = metrics(rounds=(([2, 2], [0, 1]), ([4], [position])))
    assert tuple(found[f"allocation/{key}"] for key in ("prompts", "n_min", "n_max", "history_share")) == expected


def test_diversity_is_of_groups_of_two_or_more():
    found = metrics()  # of the 4-grams, (0, 0) and five times (0, 0, 0, 0), two are distinct
    assert found["reward/unique_answers"] == 1.0 and found["rollout/distinct_4grams"] == pytest.approx(1 / 3)
    assert not {"reward/unique_answers", "rollout/distinct_4grams"} & metrics(rejected=[1]).keys()


def test_what_the_servers_did():
    found = metrics()
    assert found["rollout/truncated"] == 0.5
    assert found["fleet/retries"] == 1 and found["fleet/restarts"] == 2
    per_server = {"tokens_per_second": 5.0, "busy_share": 0.5, "kv_cache": 0.25, "rollouts": 2}
    assert {k: found[f"fleet/server-0/{k}"] for k in per_server} == per_server
    assert (found["fleet/server-1/rollouts"], found["fleet/server-1/busy_share"]) == (0, 1.0)
    assert "fleet/server-1/kv_cache" not in found  # nobody has asked for it


def test_of_a_critic():
    returns = np.arange(10.0)
    fits = [{"loss": 1.0, "grad_norm": 2.0, "clipped": 3.0}, {"loss": 2.0, "grad_norm": 4.0, "clipped": 1.0}]
    clock = Clock()
    for phase in ("values", "critic"):
        clock.begin(phase)
    found = metrics(clock, values=(returns / 2, returns), fits=fits, advantage={"kind": "gae"})
    assert found["critic/explained_variance"] == 0.75 and found["critic/value"] == 2.25
    assert found["critic/loss"] == 1.5 and found["critic/clip_share"] == 0.4 and found["critic/return"] == 4.5
    assert found["critic/learning_rate"] == pytest.approx(1e-6) and "time/values" in found
    assert not any("critic" in key for key in metrics())


def test_rewards_of_steps_and_of_tokens_are_means_of_sums_over_rollouts():
    steps = np.array([0.5, np.nan, *[np.nan] * 6, 0.25, 1.0])
    found = metrics(steps=steps, implicit=np.full(10, 0.1))
    assert found["reward/steps"] == 0.875 and found["reward/prime"] == pytest.approx(0.5)
    assert not {"reward/steps", "reward/prime"} & metrics().keys()


def test_states_and_means_are_counted_by_reward_function():
    url = "http://127.0.0.1:80/score?x=1"
    found = metrics(scores=({"judge": 0.5, url: 2.0}, {url: 1.0, "judge": "timed_out"}))
    of_judge = {state: found[f"reward/judge/{state}"] * 2 for state in REWARD_STATES}
    assert of_judge == {"scored": 1, "wrong_format": 0, "timed_out": 1, "crashed": 0}
    assert found["reward/judge/mean"] == 0.5
    unscored = metrics(scores=({}, {"judge": "crashed"}))
    assert unscored["reward/judge/crashed"] == 0.5 and "reward/judge/mean" not in unscored
    name = "reward/http:_127.0.0.1:80_score_x_1"
    assert found[f"{name}/scored"] * 2 == 2 and found[f"{name}/mean"] == 1.5
