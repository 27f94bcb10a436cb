"""The order of a rank's life, on a real rank."""

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.cli import main
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs import run
from dynamo_megatron.rollout.result import RolloutError

JOB = """
import os
import sys
from dynamo_megatron.config import Config
from dynamo_megatron.errors import InputError
from dynamo_megatron.jobs.run import Job, run_rank


class Waits(Job):
    def check(self, ranks):
        return {}

    def prepare(self, spec):
        match os.environ.get("FAILS"):
            case "input":
                raise InputError("data.source: it is empty")
            case "argument":
                raise ValueError("kind: 'no such kind' is unknown")
            case "interrupt":
                print("step 1")
                raise KeyboardInterrupt

    def wait_ready(self, coordinator, layout):
        print(f"waited with {layout.world_size} rank", flush=True)


sys.exit(run_rank(Waits(Config.model_validate_json(sys.argv[1]))))
"""


VARIABLES = ("NCCL_CUMEM_ENABLE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(
    ("keys", "given", "expected"),
    [
        ([], {}, ("0", None)),
        (["parallel.cp=2"], {}, ("0", "1")),
        (["parallel.tp=2"], dict.fromkeys(VARIABLES, "7"), ("7", "7")),
    ],
)
def test_what_cuda_and_nccl_read_is_set_before_a_rank_asks_for_a_gpu(keys, given, expected, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("{model: {path: model}, data: {source: data}, output_dir: run}")
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # what a rank sets goes after the test
        monkeypatch.delenv(name)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **given}.items():
        monkeypatch.setenv(name, value)
    seen = []

    def note(*_: object) -> bool:
        seen.append(tuple(map(os.environ.get, VARIABLES)))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", note)
    monkeypatch.setattr(run, "run_rank", note)
    main(["train", str(tmp_path / "config.yaml"), *keys])
    assert len(seen) == 2 and set(seen) == {expected}


def one_rank(tiny_model, tmp_path, **environment: str) -> subprocess.CompletedProcess:
    """JOB on the only rank, with a model folder that has no weights."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    config = {"model": {"path": str(tmp_path), "dtype": "float32"}, "data": {"source": "none"}}
    config["output_dir"] = str(tmp_path / "run")
    (tmp_path / "run").mkdir()
    with socket.socket() as held:  # bound until the rank has ended: the system gives the port to no other process
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # and the rank may listen there
        held.bind(("127.0.0.1", 0))
        return subprocess.run(
            [sys.executable, "-P", "-c", JOB, json.dumps(config)],
            env={**os.environ, **rank, "MASTER_PORT": str(held.getsockname()[1]), **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )


def test_servers_are_waited_for_before_the_policy_is_built(tiny_model, tmp_path):
    """SGLang takes a share of what is free while it starts. The policy of a folder without weights cannot be built."""
    done = one_rank(tiny_model, tmp_path)
    assert done.returncode != 0 and "safetensors" in done.stderr, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "waited with 1 rank"


@pytest.mark.full
@pytest.mark.parametrize(
    ("fails", "code", "out", "last"),
    [
        ("input", 2, "", "data.source: it is empty"),
        ("argument", 1, "", "ValueError: kind: 'no such kind' is unknown"),
        ("interrupt", 130, "step 1\n", "interrupted"),  # what was printed comes before it
    ],
)
def test_the_exit_code_and_the_last_line_follow_from_the_error(tiny_model, tmp_path, fails, code, out, last):
    done = one_rank(tiny_model, tmp_path, FAILS=fails)
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (code, out, last), done.stderr
    assert ("Traceback" in done.stderr) == (fails == "argument")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RolloutError("the rollout process ended"), "RolloutError: the rollout process ended; resumes\n"),
        (
            RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
            "ConnectionError: lost the connection to another rank (Connection closed by peer); resumes\n",
        ),
        (OSError(28, "No space left"), "OSError: [Errno 28] No space left\n"),
    ],
)
def test_after_the_end_of_another_process_the_last_line_names_the_next_start(capsys, error, said):
    assert run._report(error, 0, None, lambda: "; resumes") == 1
    assert capsys.readouterr().err == said


def test_a_new_output_folder_may_take_a_network_file_system_a_while(tmp_path, monkeypatch):
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds
        if now >= 60:
            (tmp_path / "run").mkdir(exist_ok=True)

    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    run._wait_for_folder(tmp_path / "run", 8)
    assert now == 60
    with pytest.raises(InputError, match=r"^output_dir: rank 8 does not see .*/other; all nodes must see it$"):
        run._wait_for_folder(tmp_path / "other", 8)
