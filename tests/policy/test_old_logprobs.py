"""The update's own forward pass gives the statistics of the step, and the gradient that it has after a pass."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from layout_cases import gather_gradients, rollout_batch, rollouts
from rank_cases import run_cases, settings

from dynamo_megatron.config.files import compose
from dynamo_megatron.errors import InputError
from dynamo_megatron.policy.batch import TrainBatch, silent_rollouts

METHODS = Path(__file__).parents[2] / "configs" / "methods"
NEEDS = {  # the key that makes a method need the pass
    "clip_cov": "loss.clip_cov",
    "dapo": "dynamic_sampling",
    "distill": "teacher",
    "dynamo": "modulation.scope",
    "dynamo_published": "loss.mini_batches",
    "entropy_advantages": "advantage.entropy_shaping",
    "fork_tokens": "dynamic_sampling",
    "kl_cov": "loss.kl_cov",
    "otb": "advantage.kind",
    "pilot": "sequential",
    "r1": "loss.mini_batches",
    "reinforce_ada": "sequential",
}
LAYOUTS = (({}, 1), ({}, 2), ({"tp": 2}, 2), ({"pp": 2}, 2), ({"cp": 2}, 2))  # with how many ranks
CHANGES = {
    "recompute": {"kernels": {"gradient": "recompute"}},
    "modulated": {"algorithm": {"advantage": {"kind": "rloo"}, "modulation": {}}},  # needs the pass
    "engine": {"algorithm": {"loss": {"old": "engine"}}},
    "terms": {"algorithm": {"loss": {"entropy_coef": 0.01}, "kl": {"coef": 0.1}}},
    "mask": {"algorithm": {"rollout_correction": {"kind": "mask", "low": 0.5, "high": 1.5}}},
    "truncate": {"algorithm": {"rollout_correction": {"level": "sequence", "high": 3.0}}},
}
LOUD = ("entropy_loss", "history", "ppo", "spo", "terms", "w_reinforce")  # where groups of equal rewards train too
MEASURED = ("clip_cov", "entropy_advantages")  # of those that need the pass
ROUNDED = ("mask", "truncate")  # a token's weight is rounded before the correction, and after it


def algorithm(name: str, *overrides: str):
    given = ["model.path=m", "data.source=d", "output_dir=o", "data.batch_prompts=512", *overrides]
    given += ["algorithm.teacher.path=t"] if name == "distill" else []
    return compose([f"methods/{name}"], given)[0].algorithm


def methods() -> list[str]:
    return sorted(file.stem for file in METHODS.glob("*.yaml"))


@pytest.mark.parametrize("name", methods())
def test_only_methods_that_need_statistics_before_the_update_have_a_pass(name):
    assert algorithm(name).needs_pass == NEEDS.get(name)
    assert algorithm(name, "algorithm.old_logprobs=pass").measures_first
    if name in NEEDS:
        with pytest.raises(InputError, match=f"old_logprobs: update does not go with {NEEDS[name]}"):
            algorithm(name, "algorithm.old_logprobs=update")


@pytest.mark.parametrize(
    "key",
    [  # by which a group of equal rewards trains, or its tokens count beside others
        "advantage.kind=history",
        "advantage.kind=reinforce",
        "advantage.normalise=batch",
        "kl.coef=0.1",
        "loss.entropy_coef=0.1",
        "loss.kl_cov={}",
        "modulation={scope: micro_batch}",
        "modulation={expectation: sequence_mean}",
        "dynamic_sampling={}",
        "teacher.path=t",
        "steps",
    ],
)
def test_groups_of_equal_rewards_are_silent_only_where_nothing_else_is_in_the_loss(key):
    steps = {"step_rewards": np.ones(8)} if key == "steps" else {}
    batch = rollout_batch(["a", "a", "b", "b"], [1] * 4, [2] * 4, [0.0, 0.0, 0.0, 1.0], **steps)
    given = ["model.path=m", "data.source=d", "output_dir=o", "data.batch_prompts=512", "kernels.gradient=recompute"]

    def silent(*keys: str) -> list[bool]:
        config, _ = compose(["methods/grpo"], [*given, *keys])
        return silent_rollouts(batch, config).tolist()

    assert silent() == [not steps, not steps, False, False]
    assert not any(silent(f"algorithm.{key}" if "=" in key else "seed=1"))


def on_rank(case: dict, config, layout) -> dict[str, dict[str, float]]:
    """For each change of the configuration how far the two ways are apart, 0 if bit for bit; how many micro-batches are
    of silent rollouts alone, and how far from the pass's way (gradient and sums) is one where none is."""
    from dynamo_megatron.algorithm.success import Baseline
    from dynamo_megatron.config import Config
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy import policy as module
    from dynamo_megatron.policy.policy import Policy

    spec, found = load_model_config(config.model.path), {}
    source = rollouts(spec.vocab_size, 7, None)
    source.rewards[[group == "g3" for group in source.group_ids]] = 1.0  # most methods give them no advantage
    each = np.ones(len(source.rewards))
    for name, sections in case["changes"].items():
        policy = Policy(spec, Config.model_validate({**case["config"], **sections}), layout)
        values = np.zeros(len(source.engine_logprobs)) if policy.config.of_critic else None
        batch = TrainBatch.build(source, policy.config, baseline=Baseline(0.4 * each, 3 * each), values=values)
        packed = mini, *_ = policy.pack(source, batch.mini_batches)
        with mock.patch.object(module, "silent_rollouts", lambda source, _: np.zeros(len(source.rewards), bool)):
            shared, *_ = policy.pack(source, batch.mini_batches)
        stats = policy.token_stats(source, packed)
        reference, gradients, sums = policy.reference_logprobs(source, [mini]), [], []
        ways = [(shared, stats), (mini, stats), (mini, stats if policy.config.algorithm.needs_pass else None)]
        for packed, given in ways:
            with mock.patch.object(policy, "_run", wraps=policy._run) as run:
                gradient = policy.gradient(batch, packed, given, reference, 1e-3)
            (trained,) = [call.args[0] for call in run.call_args_list if not call.kwargs["forward_only"]]
            assert len(trained) == len(packed.micro_batches) - packed.silent_count
            gather_gradients(policy)
            gradients.append([p.main_grad.clone() for chunk in policy.chunks for p in chunk.parameters()])
            sums.append(gradient.found)
        moved, apart = (
            max(float((a - b).abs().max()) for a, b in zip(other, gradients[1], strict=True))
            for other in (gradients[0], gradients[2])
        )
        moved = max(moved, *(abs(sums[0][key] - sums[1][key]) for key in sums[0]))
        statistics = max(float((a - b).abs().max()) for a, b in zip(stats, gradient.stats or stats, strict=True))
        norms = float(abs(sums[1]["grad_norm"] - sums[2]["grad_norm"]))
        found[name] = {"gradient": apart, "statistics": statistics, "norm": norms, "size": sums[1]["grad_norm"]}
        found[name] |= {"silent": mini.silent_count, "moved": moved}
    return found


def test_both_ways_give_the_same_gradient_and_statistics_bit_for_bit(tiny_model, tmp_path):
    sections = {"rollout": {"max_new_tokens": 32}, "trainer": {"micro_batch_tokens": 200}}
    changes = {name: {"algorithm": json.loads(algorithm(name).model_dump_json())} for name in methods()}
    changes = {name: section for name, section in changes.items() if name not in NEEDS or name in MEASURED}
    for name, change in CHANGES.items():
        changes[name] = {**change, "algorithm": {"modulation": None, **change.get("algorithm", {})}}
    cases = [
        {
            "config": settings(tiny_model, parallel, **sections),
            "ranks": ranks,
            "changes": changes if ranks == 1 else {name: changes[name] for name in ("grpo", "terms", *ROUNDED)},
        }
        for parallel, ranks in LAYOUTS
    ]
    for (parallel, _), ranks in zip(LAYOUTS, run_cases(__file__, cases, tmp_path), strict=True):
        for name, gaps in ((name, gaps) for found in ranks for name, gaps in found.items()):
            assert (gaps.pop("silent") > 0) == (name not in LOUD), (parallel, name)
            assert gaps.pop("moved") < 1e-5 * max(1, gaps["size"]), (parallel, name, gaps)
            bar = 1e-6 if name in ROUNDED else 0
            assert gaps.pop("size") > 1e-3 and all(gap <= bar for gap in gaps.values()), (parallel, name, gaps)
