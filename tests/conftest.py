"""What tests of several rooms share: a tiny model and one SGLang server on the CPU for the whole session."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from preloaded import run_preloaded  # tests/policy

# Triton decides between its interpreter and a GPU when it and the kernels are imported: here, before anything else
# does. Processes that tests start decide for themselves.
if os.environ.get("KERNEL_TESTS_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon  # noqa: F401  what the interpreter would import with its first kernel

    import dynamo_megatron.kernels.layer_kernels
    import dynamo_megatron.kernels.tile_hash
    import dynamo_megatron.kernels.triton_kernels  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

from dynamo_megatron.config import ModelConfig, RolloutConfig

ROOT = Path(__file__).parents[1]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """With REQUIRED_TOOLS=1 a test that is skipped because bubblewrap or chromium is missing fails."""
    report = (yield).get_result()
    if report.skipped and os.environ.get("REQUIRED_TOOLS") == "1":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        if reason.endswith(("needs bubblewrap", "needs chromium")):
            report.outcome, report.longrepr = "failed", f"REQUIRED_TOOLS=1: {reason}"


@pytest.fixture(scope="session")
def vectors():
    """vectors(name) -> cases with the values of a reference, of tests/vectors."""
    return lambda name: json.loads((ROOT / "tests" / "vectors" / f"{name}.json").read_text())


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A folder that is a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # also while files of it are open


@pytest.fixture(scope="session")
def make_tiny_model():
    """`make_tiny_model(out, family=..., dtype=..., seed=...)` of tools/tiny_model.py."""
    return runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"]


@pytest.fixture(scope="session")
def model_of(make_tiny_model, tmp_path_factory):
    """model_of(family, **options) -> the folder of its tiny model, made once a session. Do not change it."""
    made = {}

    def model(family="qwen2", **options):
        key = json.dumps([family, options], sort_keys=True)
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(family) / "model", family, **options)
        return made[key]

    return model


@pytest.fixture(scope="session")
def tiny_model(make_tiny_model, tmp_path_factory) -> Path:
    """A Qwen2 of 2 layers in float32, one token a character; a response ends about every 100 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", family="qwen2", dtype="float32")


@pytest.fixture(scope="session")
def tiny_reward_model(make_tiny_model, tmp_path_factory) -> Path:
    """A Llama of 2 layers in float32 whose head gives one number, with the tokenizer of `tiny_model`."""
    import torch
    from transformers import AutoModelForSequenceClassification

    causal = make_tiny_model(tmp_path_factory.mktemp("models") / "causal", family="llama", seed=3)
    folder = causal.with_name("reward")
    model = AutoModelForSequenceClassification.from_pretrained(causal, num_labels=1, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    for file in causal.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(causal / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="session")
def transformers_score(tiny_reward_model):
    """transformers_score(problem, response) -> what transformers gives the chat in `tiny_reward_model`."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tiny_reward_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_reward_model)

    def score(problem: str, response: str) -> float:
        messages = [{"role": "user", "content": problem}, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            return model(ids).logits.item()  # one sequence without padding: of its last token

    return score


@pytest.fixture(scope="session")
def server_parameters():
    """server_parameters(spec, tensors, tp_rank, tp_size) -> {server parameter: a server rank's values, flat}, of every
    parameter that the Hugging Face `tensors` touch."""
    import torch

    from dynamo_megatron.models.server_layout import server_layout, server_shard

    def made(spec, tensors: dict[str, torch.Tensor], tp_rank: int, tp_size: int) -> dict[str, torch.Tensor]:
        layout, result = server_layout(spec, tp_size), {}
        for name, tensor in tensors.items():
            parameter, start = layout.places[name]
            shard = server_shard(spec, name, tensor, tp_rank, tp_size)
            whole = result.setdefault(parameter, shard.new_zeros(layout.sizes[parameter]))
            whole[start : start + shard.numel()] = shard.flatten()
        return result

    return made


@pytest.fixture(scope="session")
def interpreter():
    """Triton's interpreter, here or in a process of its own: skips where it cannot run our kernels."""
    triton, numpy = (tuple(map(int, metadata.version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):  # it makes a number of a 1-element array at every loop bound
        pytest.skip("Triton's interpreter before 3.7 does not work with NumPy 2.4 and later")


@pytest.fixture(scope="session")
def verifiers_python() -> str:
    """The interpreter that has verifiers: EXTRA_PYTHON or .venv-extra/bin/python. Skips without it."""
    python = os.environ.get("EXTRA_PYTHON", str(ROOT / ".venv-extra" / "bin" / "python"))
    if not Path(python).is_file():
        pytest.skip(f"no {python} (make extra)")
    return python


@pytest.fixture(scope="session")
def other_megatron() -> str:
    """A PYTHONPATH with the other supported megatron-core: MEGATRON or .venv-extra/megatron."""
    folder = os.environ.get("MEGATRON", str(ROOT / ".venv-extra" / "megatron"))
    if not (Path(folder) / "megatron").is_dir():
        pytest.skip(f"no {folder} (make extra)")
    return os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def command_line():
    """run(folder, *words) -> (exit code, output): `dynamo-megatron WORDS` in the folder, to its end.

    Its output goes to a file: a child that outlives a rank would hold a pipe for ever.
    """

    def run(folder: Path, *words: object) -> tuple[int, str]:
        log = folder / f"{words[0]}-{len(list(folder.glob('*.log')))}.log"
        with open(log, "w") as file:
            code = subprocess.run(
                [sys.executable, "-P", "-m", "dynamo_megatron.cli", *map(str, words)],
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=240,
            ).returncode
        return code, log.read_text()

    return run


@pytest.fixture(scope="session")
def run_script():
    """run(script, cases, folder, timeout): runs `python -P SCRIPT folder/cases.json`, which has `cases`, and holds that
    it succeeds within `timeout` seconds. Its output is in folder/log."""

    def run(script: Path, cases: object, folder: Path, timeout: float) -> None:
        (folder / "cases.json").write_text(json.dumps(cases))
        run_preloaded(script, str(folder / "cases.json"), log=folder / "log", timeout=timeout)

    return run


@pytest.fixture(scope="session")
def sglang_server(tiny_model, tmp_path_factory):
    """A running SGLangServer of `tiny_model`."""
    from dynamo_megatron.rollout.servers.server import SGLangServer

    log = tmp_path_factory.mktemp("server") / "logs" / "sglang.log"
    # The log names every request, which tests count. A stop text gives it a tokenizer, which tests need.
    config = RolloutConfig(start_timeout=400, server_args=["--log-level-http", "info"], stop=["stop"])
    model = ModelConfig(path=str(tiny_model), dtype="float32")
    server = SGLangServer(config, model, log, name="shared")  # no test that hurts "server-0" takes it for its own
    server.start()
    try:
        asyncio.run(server.wait_ready())
        yield server
    finally:
        server.stop()
