"""On-policy distillation beside autograd through transformers in float64, on tensor-parallel ranks."""

import numpy as np
import pytest
import torch
from layout_cases import make_models, rollouts, transformers_logprobs
from rank_cases import run_cases, settings

WEIGHT, REWARD_WEIGHT = 0.3, 0.5


def on_rank(case: dict, config, layout) -> dict:
    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.batch import TrainBatch
    from dynamo_megatron.policy.policy import Policy

    spec = load_model_config(config.model.path)
    policy, source = Policy(spec, config, layout), rollouts(spec.vocab_size, 7, None)
    minis = policy.pack(source, [np.arange(len(source.prompt_ids))])
    stats = policy.token_stats(source, minis)
    gap = policy.token_stats(source, minis, "algorithm.teacher.path").logprobs.double().numpy() - stats.logprobs.numpy()
    batch = TrainBatch.build(source, config, teacher_gap=gap)
    found = policy.gradient(batch, minis[0], stats, None, 1e-3).found
    fields = {"gap": gap, "advantages": batch.advantages, "weights": batch.weights}
    return {"norm": found["grad_norm"], **{name: value.tolist() for name, value in fields.items()}}


@pytest.mark.full
def test_the_gradient_is_that_of_the_reverse_kl_and_the_reward(tmp_path):
    from transformers import AutoModelForCausalLM

    models = make_models(tmp_path / "models")
    teacher = {"path": str(models["other"]), "weight": WEIGHT, "reward_weight": REWARD_WEIGHT}
    algorithm = {"modulation": None, "advantage": {"kind": "grpo"}, "teacher": teacher}
    sections = {"algorithm": algorithm, "rollout": {"max_new_tokens": 32}, "trainer": {"micro_batch_tokens": 200}}
    case = {"config": settings(models["qwen3"], {"tp": 2}, **sections), "ranks": 2}
    found, _ = run_cases(__file__, [case], tmp_path)[0]
    policy, other = (AutoModelForCausalLM.from_pretrained(models[m], dtype=torch.float64) for m in ("qwen3", "other"))
    policy.get_input_embeddings().padding_idx = None  # a random token may be the padding's, whose row has a gradient
    source = rollouts(policy.config.vocab_size, 7, None)
    own, its = (transformers_logprobs(model, source) for model in (policy, other))
    advantages, weights = (torch.from_numpy(source.per_token(np.array(found[n]))) for n in ("advantages", "weights"))
    gaps = (its - own).detach()
    (-weights * (advantages + WEIGHT * gaps) * own).sum().backward()
    np.testing.assert_allclose(found["gap"], gaps, atol=1e-5)
    assert 0 < max(map(abs, found["advantages"])) < 2.5 * REWARD_WEIGHT and gaps.abs().max() > 0.1
    norm = torch.stack([p.grad.norm() for p in policy.parameters() if p.grad is not None]).norm()
    assert found["norm"] == pytest.approx(norm.item(), rel=1e-5)
