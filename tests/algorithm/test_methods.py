from pathlib import Path

import pytest

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose, identity, to_plain

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "configs" / "methods"
ALL = sorted(path.stem for path in METHODS.glob("*.yaml"))
DEMO = str(ROOT / "configs" / "demo" / "rl.yaml")

ROUNDS = {"lower": 0.125, "upper": 0.25, "explore": 0.0, "exit": "balanced", "keep": 4}
# What a method sets otherwise than GRPO. `dynamo*`: the whole algorithm section is its own.
DIFFERENCES = {
    "clip_higher": {"loss.clip_ratio_high": 0.28},
    "entropy_loss": {"loss.entropy_coef": 0.001},
    "fork_tokens": {
        "dynamic_sampling.rounds": 9,
        "loss.clip_ratio_high": 0.28,
        "loss.clip_ratio_c": 10.0,
        "advantage.overlong_buffer": 0.2,
        "loss.entropy_top_ratio": 0.2,
    },
    "entropy_advantages": {"advantage.entropy_shaping.alpha": 0.4, "advantage.entropy_shaping.kappa": 2.0},
    "clip_cov": {
        "loss.clip_ratio_low": 1.0,
        "loss.clip_ratio_high": 1.0,
        "loss.clip_cov.ratio": 0.0002,
        "loss.clip_cov.low": 1.0,
        "loss.clip_cov.high": 5.0,
    },
    "kl_cov": {
        "loss.clip_ratio_low": 1.0,
        "loss.clip_ratio_high": 1e9,
        "loss.kl_cov.ratio": 0.002,
        "loss.kl_cov.coef": 1.0,
    },
    "w_reinforce": {"advantage.kind": "reinforce", "advantage.positive_weight": 0.1, "loss.entropy_coef": 0.001},
    "dapo": {
        "dynamic_sampling.rounds": 9,
        "loss.clip_ratio_high": 0.28,
        "loss.clip_ratio_c": 10.0,
        "advantage.overlong_buffer": 0.2,
    },
    "dr_grpo": {"advantage.kind": "dr_grpo", "loss.aggregation": "constant_length"},
    "rloo": {"advantage.kind": "rloo", "loss.ratio": "sequence", "loss.aggregation": "sequence_sum"},
    "gspo": {
        "loss.ratio": "sequence_mean",
        "loss.clip_ratio_low": 3e-4,
        "loss.clip_ratio_high": 4e-4,
        "loss.aggregation": "sequence_mean",
    },
    "cispo": {"loss.kind": "cispo", "loss.clip_ratio_low": 1.0, "loss.clip_ratio_high": 4.0},
    "otb": {"advantage.kind": "otb"},
    "history": {
        "allocation.half_life": 4.0,
        "advantage.kind": "history",
        "advantage.score_ratio": "auto",
        "loss.aggregation": "prompt_mean",
    },
    "pilot": {
        "allocation.budget": 12288,
        "allocation.rollout_n_max": 64,
        **{f"sequential.{key}": value for key, value in ROUNDS.items()},
        "sequential.kind": "pilot",
        "sequential.round_n": 16,
        "loss.clip_ratio_high": 0.28,
        "loss.clip_ratio_c": 10.0,
    },
    "reinforce_ada": {
        "allocation.rollout_n_max": 32,
        **{f"sequential.{key}": value for key, value in ROUNDS.items()},
        "sequential.kind": "reinforce_ada",
        "sequential.round_n": 8,
        "advantage.kind": "rloo",
        "loss.clip_ratio_high": 0.28,
        "loss.clip_ratio_c": 10.0,
    },
    "spo": {
        "allocation.rollout_n_min": 1,
        "allocation.rollout_n_max": 1,
        "allocation.on_shortfall": "clip",
        "allocation.half_life": 5.2,
        "advantage.kind": "history",
        "advantage.normalise": "batch",
        "loss.clip_ratio_high": 0.28,
        "loss.clip_ratio_c": 10.0,
    },
}


def load(name: str, *overrides: str) -> Config:
    wanted = ["model.path=model", "data.source=train.jsonl", "output_dir=out", *overrides]
    return compose([str(METHODS / f"{name}.yaml")], wanted)[0]


def flat(name: str) -> dict:
    return identity(to_plain(load(name)), ["algorithm"])


@pytest.mark.parametrize("kind", ["rloo", "grpo", "mine:advantages"])
def test_another_advantage_can_follow_a_method_with_a_history(kind):
    """`score_ratio: auto` of the file does nothing then."""
    assert load("dynamo", f"algorithm.advantage.kind={kind}").algorithm.advantage.kind == kind


def test_presets_are_valid_and_what_they_say():
    grpo, dynamo, published = (load(name).algorithm for name in ("grpo", "dynamo", "dynamo_published"))
    assert (grpo.allocation.kind, grpo.advantage.kind, grpo.modulation) == ("uniform", "grpo", None)
    assert (dynamo.allocation.kind, dynamo.advantage.kind, dynamo.loss.aggregation) == (
        "neyman",
        "history",
        "prompt_mean",
    )
    assert (dynamo.modulation.expectation, dynamo.modulation.scope) == ("exact", "mini_batch")
    assert (published.allocation.kind, published.allocation.power) == ("waterfill", "sigma2")
    assert (published.modulation.expectation, published.modulation.scope) == ("sequence_mean", "micro_batch")
    assert (published.loss.clip_ratio_high, published.loss.clip_ratio_c) == (0.28, 10.0)


def test_published_preset_has_the_papers_sizes():
    config = load("dynamo_published")
    assert config.rollout_budget == 16 * config.data.batch_prompts
    assert config.data.batch_prompts // config.algorithm.loss.mini_batches == 32


def test_spo_draws_by_its_priority_from_all_of_the_data():
    selection = load("spo").data.selection
    assert (selection.kind, selection.candidates, selection.exploration) == ("priority", None, 0.05)
    assert not selection.weights and load("grpo").data.selection.kind == "uniform"
    visits = load("spo").algorithm.allocation.half_life
    assert 0.5 ** (1 / visits) == pytest.approx(0.875, abs=1e-3)


def test_one_rollout_a_prompt_needs_a_baseline_from_elsewhere():
    """Also where the budget is cut down to it."""
    with pytest.raises(ValueError, match="rollout_n_min: 1 rollout has no other to be compared with"):
        load("spo", "algorithm.advantage={kind: rloo}")


def test_without_a_method_a_run_is_dynamo_with_the_groups_baseline():
    history = ["algorithm.advantage={kind: history, score_ratio: auto}", "algorithm.allocation.half_life=4"]
    default = compose([], ["model.path=model", "data.source=train.jsonl", "output_dir=out"])[0]
    assert default.algorithm == Config.model_fields["algorithm"].default
    assert default.algorithm.advantage.kind == "rloo"
    assert (
        load("dynamo").algorithm
        == compose([], ["model.path=model", "data.source=train.jsonl", "output_dir=out", *history])[0].algorithm
    )


@pytest.mark.parametrize("name", [n for n in ALL if n != "grpo" and not n.startswith("dynamo")])
def test_a_method_differs_from_grpo_in_its_own_keys_alone(name):
    base, own = flat("grpo"), flat(name)
    changed = {key.removeprefix("algorithm."): value for key, value in own.items() if base.get(key) != value}
    assert changed == DIFFERENCES[name]


@pytest.mark.parametrize("name", ALL)
def test_every_method_composes_over_the_demo(name):
    sizes = []
    if name == "dynamo_published":  # it brings the paper's batch
        sizes = ["data.batch_prompts=32", "algorithm.allocation.budget=512", "algorithm.loss.mini_batches=1"]
    if name == "pilot":
        sizes = ["data.batch_prompts=16", "algorithm.allocation.budget=512"]
    config, origins = compose([DEMO, str(METHODS / f"{name}.yaml")], sizes)
    one_each = config.data.batch_prompts if name == "spo" else 256
    assert config.rollout_budget == (512 if sizes else one_each)
    assert origins["algorithm.advantage.kind"].endswith(f"{name}.yaml")


def test_the_ablations_of_the_docs_change_what_they_name_and_nothing_else():
    text = (ROOT / "docs" / "methods.md").read_text().split("## Ablations")[1].split("##")[0]
    rows = [line.split("|") for line in text.splitlines() if "algorithm." in line and line.startswith("|")]
    assert len(rows) == 8
    base = flat("dynamo")
    for _, what, overrides, _ in rows:
        words = overrides.strip().strip("`").split()
        own = identity(to_plain(load("dynamo", *words)), ["algorithm"])
        named = {word.partition("=")[0] for word in words}
        changed = {key for key in own.keys() | base.keys() if own.get(key) != base.get(key)}
        if "modulation=null" in overrides:
            changed = {"algorithm.modulation" if key.startswith("algorithm.modulation") else key for key in changed}
        # waterfill's sigma is the default already
        assert changed == named - ({"algorithm.allocation.power"} if what.strip().endswith("sigma") else set()), what


def test_the_docs_list_every_method():
    table = (ROOT / "docs" / "methods.md").read_text().split("## Selections")[0]
    assert sorted(line.split("`")[1] for line in table.splitlines() if line.startswith("| `")) == ALL


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
        (
            "algorithm.advantage={kind: history, overlong_buffer: 0.2}",
            "advantage: overlong_buffer: its penalty is not in",
        ),
        (
            "algorithm.advantage={kind: rloo, score_ratio: 2}",
            "score_ratio: an option of kind history, and kind is rloo",
        ),
        ("algorithm.allocation={budget: 40, on_shortfall: scale}", "rollout_n_min: 1 rollout has no other"),
        (
            "algorithm={allocation: {rollout_n_min: 1, rollout_n_max: 1, budget: 32}, advantage: {kind: history}, "
            "dynamic_sampling: {}}",
            "algorithm.dynamic_sampling: goes by groups of equal rewards",
        ),
        ("algorithm.modulation={scope: micro_batch, stabiliser: quantile}", "modulation: stabiliser: quantile goes"),
        ("algorithm.advantage.process.gamma=1.5", "process.gamma: Input should be less than or equal to 1, got 1.5"),
        ("algorithm.loss.entropy_top_ratio=1.5", "entropy_top_ratio: Input should be less than or equal to 1, got 1.5"),
        ("algorithm.advantage.entropy_shaping.alpa=1", "did you mean algorithm.advantage.entropy_shaping.alpha?"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(override, message):
    with pytest.raises(ConfigError) as refusal:
        load("clip_cov", override)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)
