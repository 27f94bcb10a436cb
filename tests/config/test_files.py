"""Files and keys composed into a config: who sets what, and every fault in one answer, a line each."""

from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.config.files import ConfigError, compose, describe, identity, to_plain
from dynamo_megatron.config.peer_keys import OURS

NEEDED = {"model": {"path": "m"}, "data": {"source": "d"}, "output_dir": "o"}


def refused(*words: str, defaults=NEEDED) -> list[str]:
    """The lines of the refusal."""
    files = [word for word in words if "=" not in word]
    with pytest.raises(ConfigError) as error:
        compose(files, [word for word in words if "=" in word], defaults)
    return str(error.value).splitlines()


def test_all_faults_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("modle: {path: m}\noptimizer: {lr: fast, weight_decay: -1}\nrollout: {temprature: 1}\n")
    Path("b.yaml").write_text("eval: {every: 3}\nparallel: {vpp: 2}\ndata: {train_files: x}\ncheckpoint: {async: 3}\n")
    assert refused("a.yaml", "b.yaml", "trainer.steps=0", defaults={}) == [
        "a.yaml: unknown key modle; did you mean model?",
        "a.yaml: unknown key rollout.temprature; did you mean rollout.temperature?",
        "b.yaml: unknown key data.train_files; of verl, here it is data.source",
        "model.path: missing; set it in a config file or with model.path=...",
        "data.source: missing; set it in a config file or with data.source=...",
        "output_dir: missing; set it in a config file or with output_dir=...",
        "b.yaml: parallel: vpp: 2 chunks a stage need pp above 1",
        "a.yaml: optimizer.lr: Input should be a valid number, unable to parse string as a number, got 'fast'",
        "a.yaml: optimizer.weight_decay: Input should be greater than or equal to 0, got -1",
        "the command line: trainer.steps: Input should be greater than or equal to 1, got 0",
        "b.yaml: checkpoint.async: Input should be a valid boolean, unable to interpret input, got 3",
        "eval: data: name the problems to evaluate on",
    ]


def test_checks_across_sections_report_all_they_find():
    words = ("algorithm.allocation.budget=3", "algorithm.loss.mini_batches=100", "checkpoint.export_hf=best")
    lines = refused(*words)
    assert [line.removeprefix("the command line: ").partition(":")[0] for line in lines] == [
        "algorithm.allocation.budget",
        "algorithm.loss.mini_batches",
        "checkpoint.export_hf",
    ]
    assert "'every' exports each checkpoint" in refused("checkpoint.export_hf=every", "checkpoint.every=null")[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a\n- b\n", ": a config is a mapping of sections, this is a list"),
        ("model: {path: m\ndata: {source: d}\n", ":2: not YAML"),
        ("a: 1\n\tb: 2\n", ":2: not YAML (found character '\\t' that cannot start any token)"),
        ("model: {path: m}\ndata: {source: d}\nmodel: {path: n}\n", ":3: not YAML (model is there twice)"),
        ("data: {template: {{prompt}}}\n", ":1: not YAML (found unhashable key"),
        ("seed: 2026-99-99\n", ": not YAML (month must be in 1..12"),
        ("seed: !!python/object:os.system x\n", ":1: not YAML (could not determine a constructor"),
        ("tracking: {name: 7}\n", ": tracking.name: Input should be a valid string, got 7; put a text"),
        ('"a\\e[31mb": 1\n', ": unknown key a b; --print-config shows all keys"),
        ("base: my.yaml\n", ": base: my.yaml has this file as its own base"),
        ("base: [grpo]\n", ": base: name one config file, not ['grpo']"),
        ("base: gppo\n", "gppo: no such config file"),
    ],
)
def test_a_file_with_one_fault(tmp_path, content, says):
    file = tmp_path / "my.yaml"
    file.write_text(content, encoding="utf-8")
    (line,) = refused(str(file))
    assert line.removeprefix(str(file)).startswith(says) and len(line) < 400


CORRECTED = "algorithm.rollout_correction={level: sequence}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("algorithm.kl.coef=True", "algorithm.kl.coef: needs a number, got true"),
        ("trainer.step_timeout=no", "trainer.step_timeout: needs a number, got false"),
        ("data.source=", "data.source=: no value; give data.source=VALUE, data.source=null for none"),
        ("=3", "'=3': neither a file nor key=value"),
        ("reward.functions=[a", "reward.functions=[a: not YAML (expected ',' or ']'"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: Field required, got [0.9]"),
        ("eval.k=8", "eval.k: Input should be a valid list, got 8; give a list, as in eval.k=[...]"),
        ("data.source", "data.source: is a key, not a config file; set it with data.source=VALUE"),
        ("configs.d", "configs.d: is a folder; name a config file in it"),
        ("mien.yaml", "mien.yaml: no such config file, nor a shipped one; did you mean mine.yaml?"),
        ("methods/dynmo", "methods/dynmo: no such config file, nor a shipped one; did you mean methods/dynamo?"),
        ("x" * 5000, "no such config file, nor a shipped one; `dynamo-megatron configs` lists those"),
        ("trainer.step_timeout=1e18", "trainer.step_timeout: Input should be less than or equal to 1000000"),
        ("reward.functions=[judg]", "did you mean judge?"),
        ("reward.functions=['my.py:f']", "'my.py:f' names a file; name its module: my:f"),
        ("reward.functions=[http://h/x,http://k/x]", ""),
        ("rollout={host: 0.0.0.0}", "host: 0.0.0.0 opens the servers to every network"),
        ("rollout.agent=my:agent", ""),
        ("rollout={agent: 'my:agent'}", ""),
        ("reward={functions: [prime], prime: {model: p}}", "functions: prime rewards tokens, and whether"),
        ("reward.functions=[math,prime]", "prime.model: name the folder of the implicit process reward model"),
        ("reward={functions: [http://h/x, http://k/x], api_key_env: K}", "of one host, and functions has h, k"),
        ("rollout.quantization=fp8", "fp8 samples from rounded weights, and the loss has to correct that"),
        ("rollout.max_staleness=1", "trains on tokens of older weights, which the loss has to correct for"),
        ("algorithm={rollout_correction: {}, loss: {old: engine}, modulation: null}", "corrects from the engine's log"),
        (["rollout.quantization=fp8", CORRECTED], ""),
        (["rollout.quantization=fp8", CORRECTED, "model.dtype=float32"], "set model.dtype to bfloat16"),
        (["rollout.max_staleness=2", CORRECTED], ""),
        (["rollout.max_staleness=2", "algorithm={modulation: null, loss: {old: engine}}"], ""),
        (["rollout={max_staleness: 1, at_sync: drain, stop: [.]}", CORRECTED], ""),
        (["rollout={max_staleness: 1, stop: [.]}", CORRECTED], "set rollout.at_sync to drain"),
        (["rollout={max_staleness: 1, offload: true}", CORRECTED], "set max_staleness to 0"),
        (["rollout.max_staleness=1", CORRECTED, "algorithm.dynamic_sampling={}"], "algorithm.dynamic_sampling needs"),
        (["parallel.cp=2", "algorithm.modulation.expectation=sequence_mean"], "needs whole sequences on a rank"),
        (["rollout.agent=my:agent", "data.template='{prompt}'"], "set data.template to chat"),
    ],
)
def test_words_with_at_most_one_fault(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    Path("configs.d").mkdir()
    Path("mine.yaml").write_text("")
    words = [words] if isinstance(words, str) else words
    if not says:
        compose([], words, NEEDED)
        return
    (line,) = refused(*words)
    assert says in line


def test_what_cannot_be_read_is_told_before_anything_that_it_may_have_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = refused("nowhere.yaml", "a.b=[", "optimizer.lr=fast", defaults={})
    assert [line.partition(" ")[0] for line in lines] == ["nowhere.yaml:", "a.b=[:"]


@pytest.mark.parametrize("word", ["methods/rloo", "methods/rloo.yaml", "configs/methods/rloo.yaml"])
def test_a_shipped_config_is_named_in_any_folder_and_its_base_comes_before_it(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    Path("before.yaml").write_text("algorithm: {advantage: {kind: otb}, loss: {entropy_coef: 0.5}}")
    config, origins = compose(["before.yaml", word], [], NEEDED)
    assert (config.algorithm.advantage.kind, config.algorithm.loss.entropy_coef) == ("rloo", 0.0)
    shown = describe(config, origins, {})
    assert "kind: rloo  # methods/rloo (shipped)" in shown and "entropy_coef: 0.0  # methods/grpo (shipped)" in shown


@pytest.mark.parametrize("base", ["base", "base.yaml", "sub/base.yaml", "dapo"])
def test_a_base_is_beside_its_file_or_named_as_on_the_command_line(tmp_path, monkeypatch, base):
    """And a file of one's own comes before a shipped one of its name."""
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    for name in ("base", "dapo"):
        Path(f"sub/{name}.yaml").write_text("optimizer: {lr: 3.0e-3, clip_grad: 7}\n")
    Path("sub/mine.yaml").write_text(f"base: {base}\noptimizer: {{clip_grad: 2}}\n")
    config, origins = compose(["sub/mine.yaml"], [], NEEDED)
    assert (config.optimizer.lr, config.optimizer.clip_grad) == (3e-3, 2)
    assert origins["optimizer.clip_grad"] == "sub/mine.yaml" and origins["optimizer.lr"].startswith("sub/")


def test_an_empty_section_sets_nothing_and_null_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("optimizer: {lr: 3.0e-3}\nalgorithm: {modulation: {alpha: 0.5}}\n")
    Path("b.yaml").write_text("optimizer:\n  # lr: 1\nalgorithm: {modulation: null}\n")
    keys = ["optimizer.clip_grad=2", "algorithm.modulation.gamma=10"]
    config, origins = compose(["a.yaml", "b.yaml"], keys, NEEDED)
    assert config.optimizer.lr == 3e-3 and origins["optimizer.lr"] == "a.yaml"
    assert config.algorithm.modulation.alpha != 0.5 and "algorithm.modulation.alpha" not in origins


def test_numbers_are_decimal(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 010\ndata: {template_args: {a: 0x10, b: 010, c: 1:30, d: 1:3.5}}\n")
    config, _ = compose([str(tmp_path / "a.yaml")], ["trainer.steps=0100"], NEEDED)
    assert (config.seed, config.trainer.steps) == (10, 100)
    assert config.data.template_args == {"a": 16, "b": "010", "c": "1:30", "d": "1:3.5"}


def test_a_mapping_is_set_and_shown_as_a_whole():
    judged = ["reward={functions: [judge], judge: {url: 'http://h', model: j}}"]
    config, origins = compose([], [*judged, "reward.judge.request={seed: 1}"], NEEDED)
    assert config.reward.judge.request == {"seed": 1}
    assert "    request: {seed: 1}  # the command line\n" in describe(config, origins, {})
    words = ["reward.judge.request.seed=2", *(f"data.template_args.{key}" for key in ("a.b=1", "a.d=x #y", "c=false"))]
    config, _ = compose([], [*judged, *words], NEEDED)  # a dotted key sets one entry
    assert config.reward.judge.request == {"max_tokens": 1024, "temperature": 0.0, "seed": 2}
    assert to_plain(config)["data"]["template_args"] == {"a": {"b": 1, "d": "x #y"}, "c": False}


def test_a_text_on_the_command_line_is_kept_as_it_is(monkeypatch):
    def read(text: str) -> str:
        return compose([], [f"data.system_prompt={text}"], NEEDED)[0].data.system_prompt

    monkeypatch.setenv("HOME", "/home/me")
    texts = ("# Task", "Write #### and the number.", "Line one.\nLine two: x.\n\n Line four.", "7", "{prompt}", "[a] b")
    for text in (*texts, "'a' or b", "yes"):
        assert read(text) == text
    assert (read("'a # b'"), read('"a\\nb"'), read("~/b"), read("null")) == ("a # b", "a\nb", "/home/me/b", None)


def test_what_follows_from_the_machine_is_not_written():
    config = compose([], [], NEEDED)[0]
    assert not {"servers", "memory_fraction", "host"} & to_plain(config.with_servers(8, 1))["rollout"].keys()
    given = {"servers": 2, "memory_fraction": 0.3}
    assert given.items() <= to_plain(compose([], [f"rollout={given}"], NEEDED)[0])["rollout"].items()


def test_the_shipped_configs_are_listed_and_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    root = Path(__file__).parents[2] / "configs"
    assert listed == sorted(str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.yaml"))
    assert main(["configs", "methods/dynamo"]) == 0
    assert capsys.readouterr().out == (root / "methods" / "dynamo.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "word",
    [
        "reward.functions=[http://u:hunter22@h/score]",
        "reward.functions=[math,'http://h/?api_key=hunter22']",
        "data.source=datasets:private?split=train&token=hunter22",
        "data.source=datasets:private?AccountKey=hunter22",
        "rollout.server_args=[--model-loader=s3://u:hunter22@h/m]",
    ],
)
def test_a_url_with_a_secret_in_it_is_refused_and_not_shown(word):
    (line,) = refused(word, "trainer.steps=0")
    assert line.startswith(f"the command line: {word.partition('=')[0]}: the URL has ") and "hunter22" not in line


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("actor_rollout_ref.rollout.n", "of verl, here it is algorithm.allocation (a budget a step"),
        ("+actor_rollout_ref.actor.clip_ratio_c", "of verl, here it is algorithm.loss.clip_ratio_c"),
        ("actor_rollout_ref.actor.use_torch_compile", "--print-config shows all keys"),
        ("n_samples_per_prompt", "of slime, here it is algorithm.allocation"),
        ("trainer.device", "--print-config shows all keys"),
        (
            "algorithm.adv_estimator",
            "of verl, here it is methods/grpo for grpo, methods/ppo for gae",
        ),
        ("clip_ratio_low", "the nearest key is algorithm.loss.clip_ratio_low"),
        ("algorithm.teacher.url", "give the URL as algorithm.teacher.path"),
        ("algorithm.teacher.kind", "reverse KL is the only one; leave it out"),
        ("model.lora.dropout", "adapters have none; leave it out"),
        ("parallel.fsdp", "not supported; optimizer.cpu_offload keeps the optimizer in host memory"),
    ],
)
def test_a_key_of_a_peer_is_answered_with_ours(theirs, ours):
    line, *_ = refused(f"{theirs}=1")  # of a teacher the path is missing besides
    assert line.startswith(f"the command line: unknown key {theirs}; {ours}")


def test_a_pasted_section_of_verl_is_answered_key_by_key(tmp_path):
    pasted = "{actor: {ppo_mini_batch_size: 4, loss_agg_mode: token-mean}, rollout: {n: 8, enforce_eager: true}}"
    (tmp_path / "verl.yaml").write_text(f"actor_rollout_ref: {pasted}\n")
    keys = [line.partition("unknown key actor_rollout_ref.")[2] for line in refused(str(tmp_path / "verl.yaml"))]
    assert [key.partition(";")[0] for key in keys] == ["actor.ppo_mini_batch_size", "actor.loss_agg_mode", "rollout.n"]


@pytest.mark.parametrize("here", OURS)
def test_what_the_table_of_peers_names_is_there(here):
    name = here.partition(" ")[0].rstrip(",")
    if name.startswith("--"):
        with pytest.raises(SystemExit):
            main(["launch", "slurm", "--help"])
    elif name.startswith("methods/"):
        compose([name], [], NEEDED)
    else:
        assert not any("unknown key" in line for line in refused(f"{name}=[{{}}]", "trainer.steps=0"))


SETTINGS = {
    "format": "reward.format.tags=[answer]",
    "code": "reward.code.score=all",
    "judge": "reward.judge.template='{response}'",
    "prime": "reward.prime.beta=0.1",
}
REACHED = {"judge": ["reward.judge={url: 'http://h/v1', model: j}"], "prime": ["reward.prime.model=p"]}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_a_reward_are_of_a_runs_identity_where_the_run_has_it(name):
    used = [f"reward.functions=[math,{name}]", *REACHED.get(name, [])]
    before, after = (identity(to_plain(compose([], [*used, *w], NEEDED)[0])) for w in ([], [SETTINGS[name]]))
    assert {k for k in before if before[k] != after[k]} == {SETTINGS[name].partition("=")[0]}


def test_defaults_that_depend_on_other_keys():
    def of(*words):
        config = compose([], list(words), NEEDED)[0]
        return config.parallel.cuts_sequences, config.rollout.memory_fraction

    assert of() == (False, 0.7) and of("rollout.offload=false") == (False, 0.5)
    assert of("parallel.tp=2", "rollout.placement=split") == (True, 0.85)
    own = ("parallel={tp: 2, sequence_parallel: false}", "rollout={placement: split, memory_fraction: 0.6}")
    assert of(*own) == (False, 0.6)


def test_the_models_beside_the_policy():
    words = ["reward={functions: [math, prime], prime: {model: p}}", "algorithm.kl.coef=0.1"]
    beside = {"algorithm.kl.reference": "m", "reward.prime.model": "p", "reward.prime.reference": "m"}
    assert compose([], words, NEEDED)[0].frozen_models == beside
