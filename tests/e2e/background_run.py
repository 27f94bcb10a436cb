"""A `dynamo-megatron` command in the background, with all processes that it has started; what runs are given and what
they write."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import yaml
from living_processes import living
from safetensors.torch import load_file

from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.types import Rollout

FROM_STEP_0 = "nothing is saved yet: the same command starts from step 0"
LIVE_STEPS = 20  # of the run in the fixture `live`
# Responses of up to 220 tokens, of which an untrained model ends one in a hundred: they last for several steps.
AHEAD = ("rollout.max_new_tokens=220", "algorithm.rollout_correction.kind=truncate", "rollout.max_staleness=2")
# A sitecustomize.py, for the interpreters of a run.
FAILS_ON_RANK_1 = """
import os
if os.environ.get("RANK") == "1":
    from dynamo_megatron import config
    rate = config.Config.learning_rate
    def learning_rate(self, step):
        if step == 3:
            raise KeyError("this rank has had enough")
        return rate(self, step)
    config.Config.learning_rate = learning_rate
"""
# Another: rank 0 waits in an update after the step that the file `hold` in its folder names, while that is there and it
# is not told to stop.
HOLDS = """
import os, time
if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0" and os.path.exists("hold"):
    from dynamo_megatron import config
    from dynamo_megatron.runtime.coordination import StopFlag
    last, told, rate, note = int(open("hold").read()), [], config.Config.learning_rate, StopFlag._set
    def learning_rate(self, step):
        while step > last and not told and os.path.exists("hold"):
            time.sleep(0.05)
        return rate(self, step)
    def _set(self, *given):
        told.append(given)
        note(self, *given)
    config.Config.learning_rate, StopFlag._set = learning_rate, _set
"""


def runs_first(folder: Path, code: str) -> dict[str, str]:
    """The environment of a run whose interpreters begin with `code`, which becomes `folder`'s sitecustomize.py."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def json_lines(file: Path) -> list[dict]:
    """The whole lines of a file whose last one may be being written."""
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def step_lines(output: Path) -> list[dict]:
    return json_lines(output / "metrics.jsonl")


def timeless(row: dict) -> dict:
    """A line of metrics.jsonl but for what the machine decides."""
    return {key: value for key, value in row.items() if not key.startswith(("time/", "throughput/", "resources/"))}


def exported(folder: Path) -> dict[str, torch.Tensor]:
    weights = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert weights, f"{folder} has no weights"
    return weights


def same_weights(one: Path, other: Path) -> bool:
    """Names, dtypes and bits of two exports."""
    a, b = exported(one), exported(other)
    alike = (a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)
    return a.keys() == b.keys() and all(alike)


def small_run(folder: Path, model: Path, steps: int, answers: str, **rollout: object) -> Path:
    """The folder, with problems, a reward function and the config of a run on two ranks: is the answer in the response?
    `rollout`: keys of this section."""
    rows = [{"id": f"problem-{i}", "problem": f"Write {a!r}.", "answer": a} for i, a in enumerate(answers)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "own_reward.py").write_text(
        "import os, time\n"
        "def contains(prompt, response):\n"
        "    if os.path.exists('fail-now'):\n"
        "        raise KeyError('the reward table has no such entry')\n"
        "    time.sleep(0.02)\n"
        "    return float(prompt.answer in response)\n"
    )
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_length": 256},
        "data": {"source": str(folder / "problems.jsonl"), "batch_prompts": 3, "template": "{prompt}\n"},
        "parallel": {"pp": 2},
        "rollout": {"max_new_tokens": 16, "start_timeout": 400, **rollout},
        "reward": {"functions": ["own_reward:contains"], "workers": 1},
        "algorithm": {"allocation": {"budget": 24, "rollout_n_min": 2, "rollout_n_max": 15, "variance_floor": 0.0}},
        "optimizer": {"lr": 3e-3, "warmup_steps": 0},
        "trainer": {"steps": steps, "micro_batch_tokens": 256},
        "checkpoint": {"every": 4},
        "output_dir": "unset",
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


class Sampler:
    """Random responses, with the logprobs that a model gives them."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        from dynamo_megatron.data.templates import load_tokenizer

        self._model, self._tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(folder)
        self.rng = np.random.default_rng(0)

    def group(self, text: str, size: int, length: int) -> tuple[list[int], list[tuple[list[int], list[float]]]]:
        """The tokens of the prompt, and (tokens, logprobs) of each response."""
        prompt, responses = self._tokenizer.encode(text), self.rng.integers(5, 90, (size, length))
        tokens = torch.tensor([prompt + response.tolist() for response in responses])
        with torch.no_grad():
            logprobs = self._model(tokens).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
        chosen = logprobs.gather(2, tokens[:, len(prompt) :, None])[..., 0]
        return prompt, list(zip(responses.tolist(), chosen.tolist(), strict=True))


def engine_gap(rollout: Rollout, models: dict[int, torch.nn.Module], shift: int = 0) -> float:
    """Nats: between the engine's logprobs and those of the weights that each token names, in its segment (`shift`: of
    other weights)."""
    versions = [max(0, v + shift) for v, start, end in rollout.weight_versions for _ in range(start, end)]
    starts, k, gaps = rollout.episode.starts if rollout.episode else [0], 0, []
    for start, end in itertools.pairwise([*starts, len(rollout.tokens)]):
        tokens = torch.tensor([rollout.tokens[start:end]])
        with torch.no_grad():
            tables = {v: models[v](tokens).logits[0].float().log_softmax(-1) for v in set(versions)}
        for p in range(start, end):
            if rollout.response_mask[p]:
                logprob = tables[versions[k]][p - start - 1, rollout.tokens[p]].item()
                gaps.append(abs(logprob - rollout.engine_logprobs[k]))
                k += 1
    assert k == len(rollout.engine_logprobs)
    return max(gaps)


def made_rollout(step: int, place: int, k: int, prompt_id: str, prompt: list[int], response: list[int], /, **others):
    """Rollout `k` of the step's group `place`. `others`: `right`, and further fields."""
    group, right = group_id(step, place), others.pop("right")
    fields = {
        "rollout_id": rollout_id(group, k),
        "group_id": group,
        "prompt_id": prompt_id,
        "step": step,
        "tokens": prompt + response,
        "response_mask": [0] * len(prompt) + [1] * len(response),
        "weight_versions": [(step - 1, 0, len(response))],
        "finish_reason": "length",
        "reward": float(right),
        "success": bool(right),
        "reward_parts": {},
    }
    return Rollout(**fields | others)


def new_rollout(step: int, place: int, k: int, reward: float = 0.0, prompt_id: str = "", **others) -> Rollout:
    """One with texts: a prompt of two tokens, a response of two."""
    fields = {
        "engine_logprobs": [-1.0, -2.0],
        "finish_reason": "stop",
        "right": reward > 0.5,
        "reward": reward,
        "reward_parts": {"math": reward},
        "prompt": f"What is {place}?",
        "response": f"I say {k}.\nNo more.",
        "answer": str(place),
    }
    return made_rollout(step, place, k, prompt_id or f"p{place}", [20, 21], [30 + place, 31], **fields | others)


class Run:
    """A run in the background. Its output goes to a file: a child that outlives a rank would hold a pipe for ever."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None, command="train"):
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"console-{time.monotonic_ns()}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dynamo_megatron.cli", *command.split(), *map(str, arguments)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []
        self._looked = 0.0

    def look(self, every: float = 0.0) -> None:
        """Notes the processes that belong to the run, where it did not within `every` seconds: it costs a core else."""
        if time.monotonic() - self._looked < every:
            return
        self._looked = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            for p in psutil.Process(self.process.pid).children(recursive=True):
                if p not in self.family:
                    self.family.append(p)

    def servers(self) -> dict[str, list[psutil.Process]]:
        """The SGLang processes of each server that the run has now; the HTTP server is the first."""
        self.look()
        found = {}
        for process in self.family:
            try:
                words = process.cmdline()
                if "dynamo_megatron.runtime.guard" in words and "--served-model-name" in words:
                    name = words[words.index("--served-model-name") + 1].rpartition("-")[0]
                    found[name] = process.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return {name: processes for name, processes in found.items() if processes}

    def kill_server(self, name: str) -> None:
        """kill -9 of all its processes; once the first is gone, its guard ends the others, too."""
        for process in self.servers()[name]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def wait(self, timeout: float = 240) -> int:
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            self.look(every=0.5)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the run took more than {timeout} s:\n{self.text[-3000:]}")
            time.sleep(0.1)
        return self.process.returncode

    def wait_until(self, condition, what: str, timeout: float = 240) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the run ended before {what}:\n{self.text[-3000:]}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"waited {timeout} s for {what}:\n{self.text[-3000:]}")
            self.look(every=0.5)
            time.sleep(0.005)

    def kill(self) -> None:
        """kill -9 of the launcher's whole process group."""
        self.look()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def left_behind(self) -> list[psutil.Process]:
        """The run's processes still alive after at most two minutes."""
        deadline = time.monotonic() + 120
        while True:
            alive = living(self.family)
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.1)

    @property
    def text(self) -> str:
        return self.log.read_text()
