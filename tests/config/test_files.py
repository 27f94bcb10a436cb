"""What is wrong with configs: every fault in one answer, a line each that names file, key and the way out."""

import contextlib
import os
import re
from pathlib import Path

import pytest

from dynamo_megatron.cli import main
from dynamo_megatron.config import RewardConfig
from dynamo_megatron.config.files import ConfigError, compose, describe

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
    Path("b.yaml").write_text("eval: {every: 3}\nparallel: {vpp: 2}\ndata: {train_files: x}\nreward: 3\n")
    assert refused("a.yaml", "b.yaml", "trainer.steps=0", defaults={}) == [
        "a.yaml: unknown key modle; did you mean model?",
        "a.yaml: unknown key rollout.temprature; did you mean rollout.temperature?",
        "b.yaml: unknown key data.train_files, of verl; here it is data.source (the same Parquet file, JSONL, "
        "datasets:NAME, reasoning-gym, your iterator)",
        "output_dir: missing; set it in a config file or with output_dir=...",
        "b.yaml: parallel: vpp: 2 chunks a stage need pp above 1",
        f"b.yaml: reward: is a section; give it keys ({', '.join(RewardConfig.model_fields)}), got 3",
        "a.yaml: optimizer.lr: Input should be a valid number, unable to parse string as a number, got 'fast'",
        "a.yaml: optimizer.weight_decay: Input should be greater than or equal to 0, got -1",
        "the command line: trainer.steps: Input should be greater than or equal to 1, got 0",
        "eval: data: name the problems to evaluate on",
    ]


def test_what_is_missing_is_named_key_by_key(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    assert [line.partition(":")[0] for line in refused(str(tmp_path / "empty.yaml"), defaults={})] == [
        "model.path",
        "data.source",
        "output_dir",
    ]


def test_checks_across_sections_report_all_they_find():
    stop = "trainer.stop_when={metric: eval/pass@4, above: 1}"
    words = ("algorithm.allocation.budget=3", "algorithm.loss.mini_batches=100", "checkpoint.export_hf=best")
    streamed = ("data.source=my_data:problems", "algorithm.allocation.prior_by=level")
    words += ("tracking.profile_steps=[3, 12, 4]", "trainer.steps=10")
    lines = refused(*words, *streamed, stop)
    assert [line.removeprefix("the command line: ").partition(":")[0] for line in lines] == [
        "algorithm.allocation.budget",
        "algorithm.loss.mini_batches",
        "algorithm.allocation.prior_by",
        "trainer.stop_when.metric",
        "trainer.stop_when.metric",
        "checkpoint.export_hf",
        "tracking.profile_steps",
    ]
    assert lines[-1].endswith("12 is beyond trainer.steps, 10; name steps of the run")
    assert "eval.k gives eval/pass@1, not eval/pass@4" in lines[3] and "needs the periodic evaluation" in lines[4]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a\n- b\n", "a config is a mapping of sections, this is a list"),
        ("just text\n", "a config is a mapping of sections, this is a str"),
        ("model: {path: m\ndata: {source: d}\n", ":2: not YAML"),
        ("a: 1\n\tb: 2\n", ":2: not YAML (found character '\\t' that cannot start any token)"),
        ("trainer: {steps: 3}\ntrainer: {steps: 4}\n", ":2: not YAML (the key trainer stands twice, first on line 1)"),
        ("trainer:\n  steps: 3\n  steps: 4\n", ":3: not YAML (the key steps stands twice, first on line 2)"),
        ("a: 1\n---\nb: 2\n", ":2: not YAML (but found another document)"),
        ("a: \x00\n", "not YAML"),
        ("{[a]: 1}\n", ":1: not YAML (found unhashable key)"),
        (f"trainer: {{steps: {'x' * 5000}}}\n", "trainer.steps: Input should be a valid integer, unable to parse"),
        ("trainer:\n", "trainer: is a section; give it keys (steps, "),
        ("Модель: {path: m}\n", "unknown key Модель; --print-config shows all keys"),
        ("1: 2\n", "unknown key 1"),
        ("tracking: {name: 7}\n", "tracking.name: Input should be a valid string, got 7; put a text"),
        ("rollout: {offload: 3}\n", "rollout.offload: Input should be 'auto' or Input should be a valid boolean"),
    ],
)
def test_a_file_with_one_fault(tmp_path, content, says):
    file = tmp_path / "my.yaml"
    file.write_text(content, encoding="utf-8")
    (line,) = refused(str(file))
    assert line.startswith(str(file)) and says in line and len(line) < 400


TIMEOUTS = (
    *("trainer.timeout", "trainer.step_timeout", "rollout.timeout", "rollout.start_timeout"),
    *("rollout.health_timeout", "reward.deadline", "reward.code.seconds"),
)


@pytest.mark.parametrize("key", TIMEOUTS)
def test_a_wait_beyond_what_the_system_can_count_is_refused_by_name(key):
    for seconds in ("1e18", "1.0e+300"):
        (line,) = refused(f"{key}={seconds}")
        assert line.startswith(f"the command line: {key}: Input should be less than or equal to 1000000, got ")


def test_a_learning_rate_above_1_is_refused():
    assert refused("optimizer.lr=1.0e+30")[0].startswith("the command line: optimizer.lr: Input should be less than or")


def test_a_merged_mapping_of_yaml_may_be_overridden(tmp_path):
    (tmp_path / "my.yaml").write_text("trainer: &base {steps: 3, timeout: 9}\n<<: {trainer: {<<: *base, steps: 4}}\n")
    assert "stands twice" not in refused(str(tmp_path / "my.yaml"), "trainer.steps=0")[0]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data.source=", "data.source=: no value; give data.source=VALUE, data.source=null for none"),
        ("=3", "'=3': neither a file nor key=value"),
        ("model..path=3", "'model..path=3': neither a file nor key=value"),
        ("model.path=[a", "model.path=[a: not YAML (expected ',' or ']'"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: Field required, got [0.9]"),
        ("data.template={prompt}", "in quotes, as in data.template='\"...\"'"),
        ("data.source", "data.source: is a key, not a config file; set it with data.source=VALUE"),
        ("configs.d", "configs.d: is a folder; name a config file in it: mine.yaml"),
        ("mien.yaml", "mien.yaml: no such config file, nor a shipped one; did you mean mine.yaml?"),
        ("configs.d/mien.yaml", "did you mean configs.d/mine.yaml?"),
        ("methods/dynmo", "methods/dynmo: no such config file, nor a shipped one; did you mean methods/dynamo?"),
        ("dynamo", "did you mean methods/dynamo?"),
        ("qqq", "qqq: no such config file, nor a shipped one; `dynamo-megatron configs` lists those"),
        ("", "no such config file"),
        ("x" * 5000, "no such config file"),
    ],
)
def test_a_word_with_one_fault(tmp_path, monkeypatch, word, says):
    monkeypatch.chdir(tmp_path)
    Path("configs.d").mkdir()
    for file in ("mine.yaml", "configs.d/mine.yaml"):
        Path(file).write_text("")
    (line,) = refused(word)
    assert says in line


def test_a_file_that_cannot_be_read_hides_no_other_fault(tmp_path, monkeypatch):
    """Nor is a key reported as missing that it may hold."""
    monkeypatch.chdir(tmp_path)
    lines = refused("nowhere.yaml", "optimizer.lr=fast", "optimzer.lr=1", defaults={})
    assert [line.partition(" ")[0] for line in lines] == ["nowhere.yaml:", "the", "the"] and "missing" not in str(lines)


@pytest.mark.parametrize("word", ["methods/grpo", "methods/grpo.yaml", "configs/methods/grpo.yaml"])
def test_a_shipped_config_is_named_in_any_folder(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    config, origins = compose([word], [], NEEDED)
    assert config.algorithm.advantage.kind == "grpo"
    assert "kind: grpo  # methods/grpo (shipped)" in describe(config, origins, {})


def test_a_mapping_is_set_and_shown_as_a_whole():
    config, origins = compose([], ["reward.judge.request={seed: 1}"], NEEDED)
    assert config.reward.judge.request == {"seed": 1}
    assert "    request: {seed: 1}  # the command line\n" in describe(config, origins, {})


@pytest.mark.parametrize("word", ["methods/grpo", "methods/grpo.yaml"])
def test_a_file_of_ones_own_comes_first(tmp_path, monkeypatch, word):
    monkeypatch.chdir(tmp_path)
    Path("methods").mkdir()
    Path("methods/grpo.yaml").write_text("algorithm: {advantage: {kind: dr_grpo}}\n")
    config, origins = compose([word], [], NEEDED)
    assert config.algorithm.advantage.kind == "dr_grpo"
    assert origins["algorithm.advantage.kind"] == "methods/grpo.yaml"


def test_the_shipped_configs_are_listed_and_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    root = Path(__file__).parents[2] / "configs"
    assert listed == sorted(str(file.relative_to(root).with_suffix("")) for file in root.rglob("*.yaml"))
    assert main(["configs", "methods/dynamo"]) == 0
    assert capsys.readouterr().out == (root / "methods" / "dynamo.yaml").read_text(encoding="utf-8")
    assert main(["configs", "methods/dynmo"]) == 2
    assert "methods/dynmo: no such shipped config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "what", "instead"),
    [
        ("reward.functions=[http://u:hunter22@h/score]", "a user or password", "with reward.api_key_env"),
        ("reward.functions=https://hunter22@h/score", "a user or password", "with reward.api_key_env"),
        ("reward.functions=[math,'http://h/?api_key=hunter22']", "the parameter api_key", "with reward.api_key_env"),
        ("rollout.urls=[http://:hunter22@h:1]", "a user or password", "with rollout.api_key_env"),
        ("data.source=datasets:private?split=train&token=hunter22", "the parameter token", "as HF_TOKEN"),
        ("eval.data=https://u:hunter22@h/x.jsonl", "a user or password", "as HF_TOKEN"),
        ("tracking.project=http://u:hunter22@h", "a user or password", "give it to the job's environment"),
        ("rollout.server_args=[--model-loader=s3://u:hunter22@h/m]", "a user or password", "environment"),
    ],
)
def test_a_url_with_a_secret_in_it_is_refused_and_not_shown(word, what, instead):
    (line,) = refused(word, "trainer.steps=0")
    key = word.partition("=")[0]
    assert line.startswith(f"the command line: {key}: the URL has {what} in it") and instead in line
    assert "hunter22" not in line


@pytest.mark.parametrize(
    "word",
    [
        "reward.functions=[http://h/score?max_tokens=5&strict=1]",
        "data.source=hf://datasets/a@main/x.parquet",
        "data.source=reasoning_gym:chain_sum?size=9&num_keys=2",
        "data.few_shot='mail me@example.org: http://example.org'",
    ],
)
def test_urls_without_secrets_are_taken(word):
    with contextlib.suppress(ConfigError):
        compose([], [word, "data.template={prompt}"], NEEDED)
        return
    assert "the URL has" not in "".join(refused(word, "data.template={prompt}"))


SECRET_NAMES = ("key", "token", "pass", "sig", "Signature", "api-key", "apikey", "openai_api_key", "access_token")
SECRET_NAMES += ("auth-token", "X-Amz-Signature", "X-Amz-Security-Token", "client_secret", "password", "api%5Fkey")
PLAIN_NAMES = ("max_token", "cache_key", "sort_key", "prompt_key", "stop-token", "compass", "tokens", "keys", "design")


def test_parameters_of_urls_are_secrets_by_their_whole_names():
    for name in SECRET_NAMES:
        (line,) = refused(f"reward.functions=[math,'http://h/?a=b,c&{name}=hunter22']")
        assert "the URL has the parameter" in line and "hunter22" not in line, name
    for name in PLAIN_NAMES:
        compose([], [f"reward.functions=['http://h/?a=b&{name}=2']"], NEEDED)


def test_one_reward_function_needs_no_list():
    assert compose([], ["reward.functions=my:f"], NEEDED)[0].reward.functions == ["my:f"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("functions=[maths]", "no built-in 'maths'; give math, qa_f1, qa_exact, choice, format, code, reasoning_gym, "),
        ("functions=[judg]", "reward_model, prime, module:function or an http:// URL; did you mean judge?"),
        ("functions=[math,math]", "a function is named twice in ['math', 'math']"),
        ("functions=['my.py:f:x']", "'my.py:f:x' is not of the form module:function"),
        ("functions=['my.py:f']", "'my.py:f' names a file; name its module: my:f"),
        ("functions=[./src/r.py:f]", "start in the folder ./src, or put it on PYTHONPATH, and give r:f"),
        ("deadline=1e300", "less than or equal to 1000000"),
        ("code.seconds=1e18", "less than or equal to 1000000"),
        ("code.cpu_seconds=1000000000000000000", "less than or equal to 1000000"),
        ("workers=100000", f"one per CPU is enough, and this machine has {os.cpu_count()}"),
    ],
)
def test_rewards_that_cannot_be_are_found_with_the_other_faults(word, says):
    other, ours = refused(f"reward.{word}", "trainer.stepps=3")
    assert ours.startswith(f"the command line: reward.{word.partition('=')[0]}: ") and says in ours
    assert "trainer.stepps" in other


def test_a_key_goes_to_services_of_one_host():
    assert refused("reward.functions=[http://a/x,http://b/x]", "reward.api_key_env=K") == [
        "the command line: reward: api_key_env: the key is for services of one host, and functions has a, b"
    ]
    assert refused("reward.api_key_env=K")[0].endswith("services of one host, and functions has none")
    assert compose([], ["reward.functions=[math,http://a/x,http://a/y]", "reward.api_key_env=K"], NEEDED)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data: {source: s\n", r":2: not YAML \(expected ',' or '}', .*\)"),
        ("data: " + "[" * 2000, r": not YAML \(too many levels of brackets or indentation\)"),
        (BOMB, r":1: not YAML \(its aliases stand for more than 100000 values\)"),
        ("seed: 1\ndata: &a {b: *a}\n", r":1: not YAML \(its aliases .*\)"),
        ("data:\n  source: s\nseed: 1\nseed: 2\n", r":4: not YAML \(the key seed stands twice, first on line 3\)"),
        ("data: {source: s}\nseed: " + "9" * 6000, r":2: not YAML \('99*\.\.\.9*' is not a valid int\)"),
        ("data: {source: s}\nseed: 0x" + "f" * 6000, r":2: not YAML \('0xf*\.\.\.f*' is not a valid int\)"),
        ("seed: 2026-99-99\n", r":1: not YAML \('2026-99-99' is not a valid timestamp\)"),
        ("seed: !!bool x\n", r":1: not YAML \('x' is not a valid bool\)"),
        ("seed: !!timestamp x\n", r":1: not YAML \('x' is not a valid timestamp\)"),
        ("seed: !!python/object:os.system x\n", r":1: not YAML \(could not determine a constructor .*\)"),
        ("a: \0", r": not YAML \(unacceptable character #x0000: .*\)"),
        ('data: {source: s}\n"a\\e[31mb": 1\n', ": unknown key a b; .*"),
    ],
)
def test_a_file_that_no_parser_should_be_given_is_one_line(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        compose([str(file)], ["model.path=m", "output_dir=o"])
    assert re.fullmatch(re.escape(str(file)) + says, str(refused.value)), refused.value
