"""verl's keys and slime's options: the table of docs/names.md is the code's, and its right-hand column exists here."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import ConfigError, compose
from dynamo_megatron.config.peer_keys import TABLE, markdown_table

PAGE = (Path(__file__).parents[2] / "docs" / "names.md").read_text(encoding="utf-8")
NEEDED = ["model.path=m", "data.source=d", "output_dir=o"]


def test_the_page_has_the_table_of_the_code():
    assert PAGE[PAGE.index("| verl | slime | here |") :].strip() == markdown_table()


def test_the_defaults_on_the_page_are_those_after_methods_grpo():
    config, _ = compose(["methods/grpo"], NEEDED)
    rows = re.findall(r"^\|.*\| `(\S+)` \| `(.+?)`[^|]*\|$", PAGE[: PAGE.index("## Names")], re.MULTILINE)
    values = {key: attrgetter(key)(config) for key, _ in rows}
    assert values == {key: tuple(v) if isinstance(v := yaml.safe_load(text), list) else v for key, text in rows}
    assert len(rows) > 10


@pytest.mark.parametrize("here", sorted({name for row in TABLE for name in row.here.split()}))
def test_what_the_table_names_is_there(here, capsys):
    if here.startswith("--"):
        with pytest.raises(SystemExit):
            main(["launch", "slurm", "--help"])
        assert here in capsys.readouterr().out
        return
    if here.startswith("methods/"):
        compose([here], NEEDED)
        return
    with pytest.raises(ConfigError) as refused:  # a section or a key: never an unknown one
        compose([], [*NEEDED, f"{here}=[{{}}]"])
    assert "unknown" not in str(refused.value) and here.rpartition(".")[2] in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("data.train_files", "of verl; here it is data.source (the same Parquet file"),
        ("actor_rollout_ref.rollout.n", "of verl; here it is algorithm.allocation (a budget per step"),
        ("rollout.n", "of verl; here it is algorithm.allocation"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "of verl; here it is algorithm.loss.mini_batches"),
        ("ppo_mini_batch_size", "of verl; here it is algorithm.loss.mini_batches"),
        ("+actor_rollout_ref.actor.clip_ratio_c", "of verl; here it is algorithm.loss.clip_ratio_c"),
        ("actor_rollout_ref.model.path", "verl's actor_rollout_ref. is left out here: model.path"),
        ("actor_rollout_ref.actor.use_torch_compile", "of verl; no key here corresponds to it"),
        ("actor_rollout_ref.rollout.temperature", "verl's actor_rollout_ref. is left out here: rollout.temperature"),
        ("algorithm.adv_estimator", "of verl; here it is methods/grpo (the file of a method, named after your config"),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "of verl; here it is trainer.recompute (full"),
        ("trainer.total_epochs", "trainer.steps (epochs x problems of the data / data.batch_prompts)"),
        ("critic.optim.lr", "critic.optim.lr, of verl; no key here corresponds to it"),
        ("custom_reward_function.path", "of verl; here it is reward.functions (module:function"),
        ("reward.custom_reward_function.path", "of verl; here it is reward.functions"),
        (
            "algorithm.lam",
            "of verl; here it is algorithm.advantage.process.gamma (the discount of process rewards; ",
        ),
        ("algorithm.advantage.process.lam", "without a critic, GAE's lambda only multiplies gamma"),
        ("trainer.test_freq", "of verl; here it is eval.every"),
        ("prompt_data", "of slime; here it is data.source"),
        ("n_samples_per_prompt", "of slime; here it is algorithm.allocation"),
    ],
)
def test_a_key_of_a_peer_is_answered_with_ours(theirs, ours):
    with pytest.raises(ConfigError) as refused:
        compose([], [*NEEDED, f"{theirs}=1"])
    assert "unknown key " in str(refused.value) and ours in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("theirs", ["trainer.critic_warmup", "data.image_key", "trainer.device"])
def test_a_key_that_is_near_to_none_is_answered_with_none(theirs):
    with pytest.raises(ConfigError) as refused:
        compose([], [*NEEDED, f"{theirs}=1"])
    assert str(refused.value) == f"the command line: unknown key {theirs}; --print-config shows all keys"


def test_a_pasted_section_of_verl_is_answered_key_by_key(tmp_path):
    pasted = "{actor: {ppo_mini_batch_size: 4, loss_agg_mode: token-mean}, rollout: {n: 8, enforce_eager: true}}"
    (tmp_path / "verl.yaml").write_text(f"actor_rollout_ref: {pasted}\n")
    with pytest.raises(ConfigError) as refused:
        compose([str(tmp_path / "verl.yaml")], NEEDED)
    lines = str(refused.value).splitlines()
    assert [line.partition("unknown key actor_rollout_ref.")[2].partition(",")[0] for line in lines] == [
        "actor.ppo_mini_batch_size",
        "actor.loss_agg_mode",
        "rollout.n",
    ]


def test_an_option_of_slime_is_answered_with_our_key(capsys):
    assert main(["train", *NEEDED, "--n-samples-per-prompt", "8", "--prompt-data", "x.jsonl"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("unknown option --n-samples-per-prompt, of slime; here it is algorithm.allocation")
    assert said[1].startswith("unknown option --prompt-data, of slime; here it is data.source") and len(said) == 2
