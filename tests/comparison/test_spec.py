"""What a comparison's file asks for: its runs, and one line for what is wrong with it."""

import copy

import pytest
import yaml

from dynamo_megatron.cli import main
from dynamo_megatron.comparison.spec import planned_runs, read_spec
from dynamo_megatron.config import shipped
from dynamo_megatron.config.files import ConfigError, to_plain

BASE = {
    "model": {"path": "models/tiny"},
    "data": {"source": "pool.jsonl", "batch_prompts": 4},
    "eval": {"data": "held_out.jsonl", "every": 2, "samples": 4, "k": [1, 4]},
}
SPEC = {
    "base": ["base.yaml", "trainer.steps=6"],
    "arms": {"grpo": ["methods/grpo"], "wide": ["methods/rloo", "data.batch_prompts=8"]},
    "control": "grpo",
    "seeds": [3, 5],
    "learning_rates": [1e-6, 1.5e-6],
    "output_dir": "out",
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    return tmp_path


def spec(**changes):
    with open("spec.yaml", "w") as file:
        yaml.safe_dump({**copy.deepcopy(SPEC), **changes}, file)
    return read_spec("spec.yaml")


def test_one_run_for_each_arm_seed_and_rate():
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


def test_the_words_of_a_run_are_its_config():
    from dynamo_megatron.config.files import compose

    for run in planned_runs(spec()):
        files, keys = [w for w in run.words if "=" not in w], [w for w in run.words if "=" in w]
        assert to_plain(compose(files, keys)[0]) == to_plain(run.config)


def test_runs_of_other_server_options_come_after_each_other():
    arms = {"a": [], "b": ["rollout.tp=2"], "c": ["algorithm.allocation.kind=uniform"]}
    runs = planned_runs(spec(arms=arms, control="a", learning_rates=[1e-6]))
    assert [(run.arm, run.seed) for run in runs] == [("a", 3), ("c", 3), ("a", 5), ("c", 5), ("b", 3), ("b", 5)]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"armz": {}}, "spec.yaml: unknown key armz; did you mean arms?; the keys are base, arms"),
        ({"control": "gpro"}, "spec.yaml: control: 'gpro' is none of the arms; did you mean grpo?"),
        ({"arms": {"grpo": []}}, "spec.yaml: arms: 1 given; a comparison needs a control and another arm"),
        ({"arms": {"a/b": [], "grpo": []}}, "spec.yaml: arms: 'a/b' names folders; use letters"),
        ({"arms": {"grpo": ["seed=1"], "b": []}}, "arms: grpo: seed=1: every run has its own seed, from seeds"),
        (
            {"arms": {"grpo": [], "b": ["methods/gropo"]}},
            "arms.b: methods/gropo: no such config file, nor a shipped one",
        ),
        ({"arms": {"grpo": [], "b": ["traner.steps=1"]}}, "arms.b: the command line: unknown key traner; did you mean"),
        (
            {"arms": {"grpo": [], "b": ["model.path=x"]}},
            "arms.b: model.path is x, of grpo models/tiny; compare scores of",
        ),
        ({"arms": {"grpo": [], "b": ["eval.every=null"]}}, "arms.b: eval.every: scores come from evaluations during"),
        ({"seeds": [1, 1]}, "seeds: a seed stands there twice"),
        ({"seeds": 3}, "spec.yaml: seeds: Input should be a valid list, got 3"),
        ({"seeds": []}, "spec.yaml: seeds: List should have at least 1 item"),
        ({"learning_rates": ["fast"]}, "learning_rates: not numbers; give a list for all arms, or a list for each arm"),
        ({"learning_rates": {"grpo": 1e-6, "wide": [1]}}, "learning_rates: not numbers; give a list for all arms"),
        ({"learning_rates": []}, "learning_rates: []: give distinct rates above 0"),
        ({"learning_rates": {"grpo": [1e-6], "wild": [1]}}, "learning_rates: wide has no rates; give a list for all"),
        (
            {"learning_rates": {"grpo": [1e-6], "wide": [1e-6], "wde": [1]}},
            "learning_rates: wde is none of the arms; did you mean wide?",
        ),
        ({"metric": "eval/pass@2"}, "metric: eval.k of grpo gives eval/pass@1, eval/pass@4, not eval/pass@2"),
        ({"metric": "reward/mean"}, "metric: reward/mean is no figure of an evaluation; name one such as eval/pass@1"),
    ],
)
def test_a_fault_is_one_line_and_nothing_is_started(folder, capsys, changes, says):
    with open("spec.yaml", "w") as file:
        yaml.safe_dump({**SPEC, **changes}, file)
    assert main(["compare", "spec.yaml"]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and not captured.out
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["spec.yml"], "spec.yml: no such spec"),
        (["compare/dmo"], "compare/dmo: no such spec; did you mean compare/demo?"),
        (["spec.yaml", "--part", "9/8"], "--part: '9/8'; give I/N with 1 <= I <= N <= 8"),
        (["spec.yaml", "--jobs", "999"], "--jobs: 999 for"),
        (["spec.yaml", "--table"], "out: 0 of 8 runs have ended, and all of no seed; start it without --table"),
    ],
)
def test_words_that_do_not_fit_are_one_line(capsys, words, says):
    spec()
    assert main(["compare", *words]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tracking.openmetrics=9400"], "tracking.openmetrics: 9400: with --jobs 2 several runs would listen there at"),
        (["rollout.port=30000"], "rollout.port: 30000: with --jobs 2 several runs would listen there at once; set it"),
        (
            ["rollout.placement=external", "rollout.urls=[http://h:1]"],
            "rollout.placement: external: with --jobs 2 several runs would push their weights to the same servers",
        ),
    ],
)
def test_runs_side_by_side_cannot_share_a_port_or_servers(capsys, folder, words, says):
    spec(base=[*SPEC["base"], *words])
    assert main(["compare", "spec.yaml", "--jobs", "2"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == 1 and not (folder / "out").exists()


def test_runs_side_by_side_cannot_start_reward_servers_at_one_port(capsys, folder):
    words = ["reward.functions=[reward_model]", "reward.reward_model.path=rm", "reward.servers.port=31000"]
    spec(base=[*SPEC["base"], *words])
    assert main(["compare", "spec.yaml", "--jobs", "2"]) == 2
    assert capsys.readouterr().err.startswith("reward.servers.port: 31000: with --jobs 2 several runs would listen")


def test_a_run_on_disk_that_is_another_one_is_refused():
    runs = planned_runs(spec())
    saved = to_plain(runs[0].config)
    saved["rollout"] |= {"placement": "external", "urls": ["http://127.0.0.1:1"], "api_key_env": "K", "port": 1}
    runs[0].folder.mkdir(parents=True)
    file = runs[0].folder / "config.yaml"
    file.write_text(yaml.safe_dump(saved))
    planned_runs(spec())  # other servers are no other run
    saved["trainer"]["steps"] = 7
    file.write_text(yaml.safe_dump(saved))
    with pytest.raises(ConfigError) as refused:
        planned_runs(spec())
    assert str(refused.value) == (
        "out/runs/grpo-lr1e-06-seed3: the run there has another trainer.steps than the spec asks for; remove that "
        "folder, or name another output_dir"
    )


def test_rates_far_apart_are_named():
    assert spec().wide() == [] and spec(learning_rates=[2.8e-4, 2e-4, 1.4e-4]).wide() == []
    (line,) = spec(learning_rates={"grpo": [1e-6, 1.6e-6], "wide": [1e-6, 1.5e-6]}).wide()
    assert line == "grpo: learning rates 1e-06 and 1.6e-06 are more than a factor 1.5 apart"


@pytest.mark.parametrize("name", [name for name in shipped.names() if name.startswith("compare/")])
def test_every_shipped_spec_has_valid_runs(name):
    spec = read_spec(name)
    assert len(planned_runs(spec)) >= len(spec.arms) * len(spec.seeds) > 1


@pytest.mark.parametrize("name", [name for name in shipped.names() if name.startswith("compare/")])
def test_an_arm_with_the_name_of_an_advantage_has_it(name):
    """Also after a method's file has changed."""
    for run in planned_runs(read_spec(name)):
        kind = run.arm.split("_")[0]
        if kind in ("grpo", "rloo", "history"):
            assert run.config.algorithm.advantage.kind == kind, run.arm


def test_the_shipped_spec_names_its_arms_and_good_rates(capsys):
    spec = read_spec("compare/demo")
    assert list(spec.arms) == ["grpo", "grpo_wide", "dynamo", "allocation_only", "modulation_only"]
    assert spec.wide() == [] and len(spec.seeds) >= 5
    by_arm = {run.arm: run.config.algorithm for run in planned_runs(spec)}
    assert by_arm["allocation_only"].modulation is None and by_arm["modulation_only"].allocation.kind == "uniform"
    assert main(["compare", "compare/demo", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 75
    assert main(["compare", "compare/demo", "--dry-run", "--ranks", "3"]) == 0
    assert all(line.endswith(" --ranks 3") for line in capsys.readouterr().out.splitlines())
