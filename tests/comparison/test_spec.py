"""What a comparison's file asks for: its runs, and one line for what is wrong with it."""

import pytest
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.comparison.spec import planned_runs, read_spec
from dynamo_megatron.config import shipped
from dynamo_megatron.config.files import ConfigError, to_plain


def test_runs_come_by_server_options_then_by_seed(spec):
    arms = {"a": [], "b": ["rollout.tp=2"], "c": ["algorithm.allocation.kind=uniform"]}
    runs = planned_runs(spec(arms=arms, control="a", learning_rates=[1e-6]))
    assert [(run.arm, run.seed) for run in runs] == [("a", 3), ("c", 3), ("a", 5), ("c", 5), ("b", 3), ("b", 5)]


def test_one_run_for_each_arm_seed_and_rate(spec, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert str(planned_runs(spec(output_dir="~/out"))[0].folder.parent) == "/home/me/out/runs"
    runs = planned_runs(spec(learning_rates={"grpo": [1.5e-6, 1e-6], "wide": [2e-6]}))
    assert [run.name for run in runs] == [
        *("grpo-lr1e-06-seed3", "grpo-lr1.5e-06-seed3", "wide-lr2e-06-seed3"),
        *("grpo-lr1e-06-seed5", "grpo-lr1.5e-06-seed5", "wide-lr2e-06-seed5"),
    ]
    last = runs[-1]
    assert (last.config.seed, last.config.optimizer.lr, last.config.data.batch_prompts) == (5, 2e-6, 8)
    assert last.config.trainer.steps == 6 and last.config.algorithm.advantage.kind == "rloo"
    assert last.words == (
        *("base.yaml", "trainer.steps=6", "methods/rloo", "data.batch_prompts=8"),
        *("seed=5", "optimizer.lr=2e-06", "output_dir=out/runs/wide-lr2e-06-seed5"),
    )
    assert len({run.folder for run in runs}) == 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"control": "gpro"}, "control: 'gpro' is none of the arms: grpo, wide"),
        ({"arms": {"grpo": []}}, "spec.yaml: arms: "),
        ({"arms": {"a/b": [], "grpo": []}}, "spec.yaml: arms.a/b.[key]: String should match"),
        ({"arms": {"grpo": ["seed=1"], "b": []}}, "arms: grpo: seed=1: it differs from run to run and comes from"),
        ({"arms": {"grpo": [], "b": ["methods/gropo"]}}, "arms.b: methods/gropo: no such config file"),
        ({"arms": {"grpo": [], "b": ["model.path=x"]}}, "arms.b: model.path is x, of grpo models/tiny; compare"),
        (
            {"arms": {"grpo": [], "b": ["rollout.temperature=0.5"]}},
            "arms.b: eval.temperature is 0.5, of grpo 1.0; c",
        ),
        ({"arms": {"grpo": [], "b": ["data.system_prompt=Think."]}}, "arms.b: data.system_prompt is Think., of grpo N"),
        ({"arms": {"grpo": [], "b": ["eval.every=null"]}}, "arms.b: eval.every: scores come from evaluations during"),
        (
            {"metric": "eval/reward", "arms": {"grpo": [], "b": ["reward.functions=[math,length]"]}},
            "arms.b: reward.functions is ['math', 'length'], of grpo ['math']; compare",
        ),
        ({"arms": {"grpo": [], "b": ["data.batch_prompts=4"]}}, "arms.b: its config is that of grpo; all files come"),
        ({"seeds": [1, 1]}, "seeds: a seed stands there twice"),
        ({"learning_rates": []}, "learning_rates: []: give distinct rates above 0"),
        ({"learning_rates": {"grpo": [1e-6], "wild": [1]}}, "learning_rates: wide: give a list for all arms"),
        ({"metric": "eval/pass@2"}, "metric: eval.k of grpo gives eval/pass@1, eval/pass@4, not eval/pass@2"),
    ],
)
def test_a_fault_is_one_line_and_nothing_is_started(write_spec, tmp_path, capsys, changes, says):
    write_spec(**changes)
    assert main(["compare", "spec.yaml"]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not (tmp_path / "out").exists()


def test_a_run_on_disk_that_is_another_one_is_refused(spec):
    runs = planned_runs(spec())
    saved = to_plain(runs[0].config)
    saved["rollout"] |= {"placement": "external", "urls": ["http://127.0.0.1:1"], "api_key_env": "K", "port": 1}
    runs[0].folder.mkdir(parents=True)
    file = runs[0].folder / "config.yaml"
    file.write_text(yaml.safe_dump(saved))
    del saved["rollout"]["agent_turns"]  # a key of a later version
    file.write_text(yaml.safe_dump(saved))
    planned_runs(spec())  # other servers are no other run, and a missing key has its default
    saved["trainer"]["steps"] = 7
    file.write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError, match=r"^out/runs/grpo-lr1e-06-seed3: .* another trainer\.steps than"):
        planned_runs(spec())


def test_runs_side_by_side_cannot_share_servers(spec, capsys):
    spec(base=["base.yaml", "rollout.placement=external", "rollout.urls=[http://h:1]"])
    assert main(["compare", "spec.yaml", "--jobs", "2"]) == 2
    assert capsys.readouterr().err.startswith("rollout.placement: external")


@pytest.mark.parametrize("name", [name for name in shipped.names() if name.startswith("compare/")])
def test_every_shipped_spec_has_valid_runs(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # without the runs of a checkout
    spec = read_spec(name)
    assert main(["compare", name, "--dry-run", "--ranks", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= len(spec.arms) * len(spec.seeds) and all(line.endswith(" --ranks 3") for line in lines)
