"""The shipped methods: one table of what each file resolves to, over every base that the docs name, against the recipe
that its authors or a peer publish; and what cannot be combined. verl is 0.9.1, TRL 1.16.0."""

from pathlib import Path

import pytest
import yaml

from dynamo_megatron.config import AlgorithmConfig, Config
from dynamo_megatron.config.files import ConfigError, compose, to_plain
from dynamo_megatron.config.method import AdvantageConfig, LossConfig

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted(path.stem for path in (CONFIGS / "methods").glob("*.yaml"))
PAPER, SMOLLM2, DEMO = (CONFIGS / name for name in ("paper.yaml", "smollm2.yaml", "demo/rl.yaml"))
# A user's own file, from other experiments: it sets what makes a method, each key to what no method has.
MINE = """
model: {path: model}
data: {source: train.jsonl}
output_dir: out
algorithm:
  allocation: {kind: waterfill, half_life: 2, variance: empirical, variance_floor: 0.9}
  dynamic_sampling: {rounds: 3}
  sequential: null
  advantage:
    kind: dr_grpo
    singleton: raw
    eps: 0.1
    normalise: batch
    positive_weight: 0.7
    diversity: 0.6
    overlong_buffer: 0.4
    overlong_penalty: 0.9
    process: {weight: 0.3, gamma: 0.8}
    entropy_shaping: {alpha: 0.3}
  modulation: {alpha: 0.7, lambda_min: 0.1, gamma: 5.0, tau: 0.2}
  loss:
    kind: mine:loss
    clip_ratio_low: 0.4
    clip_ratio_high: 0.6
    clip_ratio_c: 4.0
    aggregation: prompt_token_mean
    entropy_coef: 0.7
    entropy_top_ratio: 0.9
    clip_cov: {ratio: 0.5, low: 0.1, high: 0.2}
    kl_cov: {ratio: 0.6, coef: 7.0}
"""


def recipe(
    advantage="grpo", clip=(0.2, 0.2), aggregation="token_mean", *, c=None, kind="clip", ratio="token", **others
):
    """Everything that makes the loss; what is not named is off."""
    low, high = clip
    loss = {"kind": kind, "ratio": ratio, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": c}
    loss |= {"aggregation": aggregation, "entropy_coef": 0.0, "entropy_top_ratio": None, "clip_cov": None}
    section = {"loss": loss | {"kl_cov": None}, "dynamic_sampling": None, "sequential": None, "modulation": None}
    section["advantage"] = {"kind": advantage, "positive_weight": 1.0, "overlong_buffer": None, "entropy_shaping": None}
    section["advantage"] |= {"singleton": "zero", "eps": 1e-6, "prior_strength": 1.0, "score_ratio": 1.0}
    section["advantage"] |= {"normalise": "none", "process": {"weight": 1.0, "gamma": 1.0}, "diversity": 0.0}
    section["advantage"] |= {"gamma": 1.0, "lambda": 0.95}
    section["allocation"] = {"kind": "uniform"}
    for key, value in others.items():
        part, _, name = key.rpartition("__")
        (section[part] if part else section)[name] = value
    return section


CLIP_HIGHER = (0.2, 0.28)
UNIFORM = {"kind": "uniform"}
NEYMAN = {"kind": "neyman", "variance": "bernoulli", "variance_floor": 0.2, "half_life": 4.0}
WATERFILL = {"kind": "waterfill", "power": "sigma2", "budget": 8192, "rollout_n_min": 8, "rollout_n_max": 24}
PILOT = UNIFORM | {"budget": 384 * 16 + 128 * 48, "rollout_n_min": 2, "rollout_n_max": 16 + 48}
ROUNDS = {"round_n": 8, "lower": 0.125, "upper": 0.25, "keep": 4}
DAPO = {"dynamic_sampling": {"rounds": 9}, "advantage__overlong_buffer": 0.2}
HISTORY = {"advantage": "history", "aggregation": "prompt_mean", "advantage__score_ratio": "auto"}
DECAY6 = {"alpha": 0.2, "lambda_min": 0.6, "gamma": 50.0, "tau": 0.99}
RECIPES = {
    # TRL GRPOConfig: epsilon 0.2, epsilon_high and delta (the dual clip) off, loss_type bnpo for the token mean
    "grpo": recipe(),
    # arXiv 2503.14476, section 4.1
    "clip_higher": recipe(clip=CLIP_HIGHER),
    # verl's recipe/dapo/run_dapo_qwen2.5_32b.sh: max_num_gen_batches 10, the first one counted, buffer 4096 of
    # 20480, clip_ratio_c 10
    "dapo": recipe(clip=CLIP_HIGHER, c=10.0, **DAPO),
    # Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR: the same script with entropy_top_ratio 0.2
    "fork_tokens": recipe(clip=CLIP_HIGHER, c=10.0, loss__entropy_top_ratio=0.2, **DAPO),
    # TRL GRPOConfig: loss_type dr_grpo, scale_rewards none
    "dr_grpo": recipe("dr_grpo", aggregation="constant_length"),
    # TRL RLOOConfig: epsilon 0.2, the ratio exp(sum of the response's log ratios)
    "rloo": recipe("rloo", aggregation="sequence_sum", ratio="sequence"),
    # verl's examples/gspo_trainer and arXiv 2507.18071, section 5.1
    "gspo": recipe("grpo", (3e-4, 4e-4), "sequence_mean", ratio="sequence_mean"),
    # arXiv 2506.13585, Eq. 4 (no lower bound); the upper one is ScaleRL's (arXiv 2510.13786), TRL's epsilon_high 5.0
    "cispo": recipe(clip=(1.0, 4.0), kind="cispo"),
    # verl's compute_policy_loss_clip_cov with recipe/entropy/7b_clip_cov.sh; the function has no dual clip
    "clip_cov": recipe(clip=(1.0, 1.0), loss__clip_cov={"ratio": 2e-4, "low": 1.0, "high": 5.0}),
    # verl's compute_policy_loss_kl_cov with recipe/entropy/7b_kl_cov.sh; the function has no clip at all
    "kl_cov": recipe(clip=(1.0, 1e9), loss__kl_cov={"ratio": 0.002, "coef": 1.0}),
    # verl's ppo_trainer.yaml of 2025: entropy_coeff 0.001
    "entropy_loss": recipe(loss__entropy_coef=0.001),
    # arXiv 2506.14758, section 3
    "entropy_advantages": recipe(advantage__entropy_shaping={"alpha": 0.4, "kappa": 2.0}),
    # TianHongZXY/RLVR-Decomposed: run_qwen2.5-math-7b_psr_nsr.sh over its ppo_trainer.yaml (entropy_coeff 0.001)
    "w_reinforce": recipe("reinforce", advantage__positive_weight=0.1, loss__entropy_coef=0.001),
    # verl's docs/algo/otb.md and its examples/otb_trainer
    "otb": recipe("otb"),
    # ours
    "history": recipe(**HISTORY, allocation=UNIFORM | {"half_life": 4.0}),
    # verl's recipe/spo: train.sh, and clip_lower 0.875 of its config as a constant
    "spo": recipe(
        "history", CLIP_HIGHER, c=10.0, advantage__normalise="batch", allocation=UNIFORM | {"half_life": 5.2}
    ),
    # databricks/pilot-commit: train_scripts/pc_qwen3-4b_p16c48.sh (verl's script with clip_ratio_c 10)
    "pilot": recipe(clip=CLIP_HIGHER, c=10.0, sequential=ROUNDS | {"kind": "pilot", "round_n": 16}, allocation=PILOT),
    # RLHFlow/Reinforce-Ada: scripts/run_reinforce_ada.sh, with round_repeat 8 and max_rounds 4 of its ppo_trainer.yaml
    "reinforce_ada": recipe(
        "rloo",
        CLIP_HIGHER,
        c=10.0,
        sequential=ROUNDS | {"kind": "reinforce_ada"},
        allocation=UNIFORM | {"rollout_n_min": 2, "rollout_n_max": 4 * 8},
    ),
    # arXiv 2602.19208: the theory with our baseline, and the script's values (its "0.2" runs 0.28)
    "dynamo": recipe(**HISTORY, modulation=DECAY6 | {"expectation": "exact", "scope": "mini_batch"}, allocation=NEYMAN),
    # arXiv 2306.13649 with lambda 1: the policy's own samples, the reverse KL
    "distill": recipe(teacher={"path": "teacher", "weight": 1.0, "reward_weight": 0.0, "api_key_env": None}),
    # arXiv 2501.12948v2: epsilon 10 (3.2.1)
    "r1": recipe("grpo", (1.0, 10.0), "sequence_mean", allocation=UNIFORM | {"budget": 512 * 16}),
    # TRL PPOConfig: gamma 1, lam .95, cliprange and cliprange_value .2, advantages whitened
    "ppo": recipe("gae", advantage__normalise="batch"),
    "dynamo_published": recipe(
        clip=CLIP_HIGHER,
        c=10.0,
        modulation=DECAY6 | {"expectation": "sequence_mean", "scope": "micro_batch"},
        allocation=WATERFILL | {"initial_budget": 8},
    ),
}
SEQUENTIAL = ("pilot", "reinforce_ada")  # their rounds need sizes of their own


def load(name: str, *overrides: str) -> Config:
    wanted = ["model.path=model", "data.source=train.jsonl", "output_dir=out", *overrides]
    return compose([f"methods/{name}"], wanted)[0]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("base", ["paper", "smollm2", "demo", "mine", "paper after"])
def test_a_method_is_its_published_recipe_over_every_base(tmp_path, name, base):
    mine, method = tmp_path / "my.yaml", CONFIGS / "methods" / f"{name}.yaml"
    mine.write_text(MINE)
    keys = ["model.path=model", "data.source=train.jsonl", "output_dir=out"]
    if name == "distill":  # the user names the teacher
        keys += ["algorithm.teacher.path=teacher"]
    if name == "dynamo_published" and base in ("smollm2", "demo", "mine"):
        keys += ["data.batch_prompts=512", "algorithm.allocation.budget=8192"]
    if name in SEQUENTIAL and base == "paper after":
        keys += [f"algorithm.allocation.{key}={value}" for key, value in RECIPES[name]["allocation"].items()]
    orders = {"mine": [mine, PAPER, method], "paper after": [method, PAPER]}
    files = orders.get(base) or [{"paper": PAPER, "smollm2": SMOLLM2, "demo": DEMO}[base], method]
    got = to_plain(compose([str(file) for file in files], keys)[0])["algorithm"]
    for part, value in RECIPES[name].items():
        # Of these what the recipe is about: not mini_batches, the size of a penalty, an allocation's sizes.
        seen = {k: got[part][k] for k in value} if part in ("loss", "advantage", "allocation") else got[part]
        assert seen == value, part


def test_the_base_of_all_methods_sets_every_key_that_makes_one():
    own = yaml.safe_load((CONFIGS / "methods" / "grpo.yaml").read_text())["algorithm"]
    assert set(LossConfig.model_fields) - {"mini_batches", "old"} <= set(own["loss"])  # old: of rollout.max_staleness
    assert {field.alias or name for name, field in AdvantageConfig.model_fields.items()} <= set(own["advantage"])
    others = {"kl", "rollout_correction", "teacher", "old_logprobs"}  # these go with any method
    assert set(AlgorithmConfig.model_fields) - others <= set(own)


def test_spo_draws_by_its_priority_from_all_of_the_data():
    selection = load("spo").data.selection
    assert (selection.kind, selection.candidates, selection.exploration) == ("priority", None, 0.05)
    assert load("grpo").data.selection.kind == "uniform"
    visits = load("spo").algorithm.allocation.half_life
    assert 0.5 ** (1 / visits) == pytest.approx(0.875, abs=1e-3)


def test_r1_has_the_papers_sizes_rewards_kl_and_template():
    config = load("r1")
    assert (config.algorithm.kl.coef, config.algorithm.kl.kind) == (1e-3, "k3")
    assert (config.data.batch_prompts, config.algorithm.loss.mini_batches, config.optimizer.lr) == (512, 16, 3e-6)
    assert (config.reward.functions, config.reward.fusion) == (["math", "format"], "sum")
    assert (config.reward.format.tags, config.rollout.temperature) == (["think", "answer"], 1.0)
    assert config.data.template.startswith("A conversation between User and Assistant. The user asks a question, and")
    assert config.data.template.endswith("<answer> answer here </answer>. User: {prompt}. Assistant:")


def test_ppo_s_critic_has_trl_s_clip_and_is_of_gae_alone():
    config = load("ppo", "critic.path=other", "critic.optimizer.warmup_steps=2")
    assert (config.critic.value_clip, config.critic.optimizer.lr, config.critic.warmup_steps) == (0.2, 1e-5, 0)
    own = config.of_critic
    assert (own.model.path, own.optimizer.lr, own.frozen_models) == ("other", 1e-5, {})
    late = load("ppo", "critic.warmup_steps=3", "trainer.steps=7", "optimizer={warmup_steps: 2, schedule: linear}")
    rates = [late.learning_rate(step) / late.optimizer.lr for step in range(1, 8)]
    assert rates == [0.5, 0.5, 0.5, 0.5, 1, 1, 0.5]  # the policy is trained from step 4 on
    assert late.of_critic.learning_rate(4) == 0.4 * late.critic.optimizer.lr  # 4 of its 10
    offloaded = load("ppo", "optimizer.cpu_offload=true").of_critic.optimizer
    assert offloaded == config.optimizer.model_copy(update={"lr": 1e-5, "cpu_offload": True})
    assert load("ppo").of_critic.model.path == "model" and load("grpo").of_critic is None
    for method, overrides, message in (
        ("grpo", ["critic.path=other"], "critic: only algorithm.advantage.kind gae has one, and it is grpo; leave it"),
        ("grpo", ["algorithm.advantage.lambda=0.5"], "lambda: no option of kind grpo; set it to 0.95"),
        ("ppo", ["model.lora={}"], "model.lora: adapters of the policy beside a whole critic"),
        ("spo", ["algorithm.advantage.positive_weight=0.1"], "positive_weight: normalise batch subtracts"),
        ("ppo", ["algorithm.advantage.positive_weight=0.1"], "positive_weight: is of a rollout's advantage"),
        ("ppo", ["algorithm.advantage.process.gamma=0.9"], "process.gamma: kind gae discounts by its own gamma"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(method, *overrides)


def test_without_a_method_a_run_is_dynamo_with_the_groups_baseline():
    keys = ["model.path=model", "data.source=train.jsonl", "output_dir=out"]
    assert compose([], keys)[0].algorithm.advantage.kind == "rloo"
    keys += ["algorithm.advantage={kind: history, score_ratio: auto}", "algorithm.allocation.half_life=4"]
    assert compose([], keys)[0].algorithm == load("dynamo").algorithm


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.loss={kind: cispo, clip_ratio_c: 3}", "clip_ratio_c: 3 is a dual clip, which kind cispo lacks"),
        (
            "algorithm.loss={ratio: sequence, kl_cov: {}}",
            "kl_cov: is about the ratio of a token, and ratio is sequence",
        ),
        ("algorithm={loss: {kind: cispo}, modulation: {}}", "loss.kind: cispo does not go with modulation"),
        ("algorithm={loss: {ratio: sequence}, modulation: {}}", "loss.ratio: sequence does not go with modulation"),
        ("algorithm.loss.clip_cov.low=7", "clip_cov: low: 7.0 is not below high 5.0"),
        ("algorithm.rollout_correction={low: 3}", "rollout_correction: low: 3.0 is not below high 2.0"),
        ("algorithm.advantage={kind: reinforce, overlong_buffer: 0.2}", "advantage: overlong_buffer: its penalty"),
        ("algorithm.advantage={kind: history, overlong_buffer: 0.2}", "advantage: overlong_buffer: its penalty"),
        ("algorithm.advantage={kind: rloo, score_ratio: 2}", "score_ratio: no option of kind rloo"),
        ("algorithm.advantage={kind: rloo, eps: 1}", "eps: no option of kind rloo"),
        ("algorithm.advantage.overlong_penalty=1", "overlong_penalty: there is no overlong_buffer"),
        ("algorithm.allocation={budget: 40, on_shortfall: scale}", "rollout_n_min: 1 rollout has no other"),
        (
            "algorithm={allocation: {rollout_n_min: 1, rollout_n_max: 1, budget: 32}, advantage: {kind: history}, "
            "dynamic_sampling: {}}",
            "algorithm.dynamic_sampling: goes by groups of equal rewards",
        ),
        ("algorithm.advantage={kind: otb, diversity: 0.5}", "diversity: is of a rollout's advantage, and those of"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override, message):
    with pytest.raises(ConfigError) as refusal:
        load("clip_cov", override)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
