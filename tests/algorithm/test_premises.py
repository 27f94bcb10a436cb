import pytest

from dynamo_megatron.algorithm.premises import premise_warnings
from dynamo_megatron.config import Config

UNIFORM, GAE = {"kind": "uniform"}, {"kind": "gae"}


@pytest.mark.parametrize(
    ("algorithm", "others", "said"),
    [
        ({}, {}, []),
        ({"allocation": UNIFORM, "advantage": {"kind": "grpo"}, "loss": {"aggregation": "token_mean"}}, {}, []),
        ({"advantage": {"kind": "grpo"}}, {}, ["advantage.kind=grpo"]),
        ({"allocation": {"kind": "my.module:Mine"}, "advantage": {"kind": "grpo"}}, {}, ["advantage.kind=grpo"]),
        ({"loss": {"aggregation": "prompt_token_mean"}}, {}, []),
        ({"loss": {"aggregation": "sequence_mean"}}, {}, ["loss.aggregation=sequence_mean"]),
        ({"advantage": {"kind": "dr_grpo"}}, {}, ["advantage.kind=dr_grpo"]),
        ({}, {"reward": {"functions": ["math", "a:b"]}}, ["allocation.variance=bernoulli"]),
        ({"allocation": {"variance": "empirical"}}, {"reward": {"functions": ["math", "a:b"]}}, []),
        ({"allocation": UNIFORM, "loss": {"clip_ratio_high": 0.28}}, {}, ["loss.mini_batches=1"]),
        ({"allocation": UNIFORM, "modulation": None, "loss": {"clip_ratio_high": 0.28, "old": "engine"}}, {}, []),
        ({"allocation": UNIFORM, "loss": {"kl_cov": {}, "mini_batches": 2}}, {}, []),
        ({"advantage": GAE}, {}, ["loss.mini_batches=1"]),
        ({"advantage": GAE, "loss": {"mini_batches": 2}}, {}, []),
        ({"advantage": GAE}, {"critic": {"value_clip": None}}, []),
        ({"advantage": {"kind": "reinforce"}}, {}, ["advantage.kind=reinforce"]),
        ({"allocation": UNIFORM, "advantage": {"kind": "reinforce"}, "dynamic_sampling": {}}, {}, ["dynamic_sampling"]),
        ({"advantage": {"kind": "history"}}, {}, []),
        ({}, {"reward": {"functions": ["math"], "reward_model": {"path": "m"}}}, ["reward.reward_model"]),
        ({"kl": {"coef": 0.1, "kind": "k1"}}, {}, ["kl.kind=k1"]),
        ({}, {"optimizer": {"lr": 0}}, ["optimizer.lr=0"]),
    ],
)
def test_warnings(algorithm, others, said):
    """The keys that each warning begins with; each is one line that says how to mend it."""
    algorithm = {"advantage": {"kind": "rloo"}, "loss": {"aggregation": "prompt_mean"}, **algorithm}
    base = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o", "reward": {"functions": ["math"]}}
    found = premise_warnings(Config.model_validate({**base, "algorithm": algorithm, **others}))
    assert all("\n" not in line and ("; set " in line or "set a learning" in line) for line in found)
    assert sum("critic.value_clip" in line for line in found) == (algorithm["advantage"] == GAE and len(said))
    assert [line.split()[0].removeprefix("algorithm.").rstrip(":") for line in found] == said
