"""Steps of `dynamo-megatron train` on one rank from recorded rollouts: no server, no network, no model from anywhere.

Model and rollouts are random. What is measured is the trainer's part of a step: log-probabilities, update, weights to
disk. Generation is not in it.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from measure import run_logged
from planned import gpu_here, training_peak

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.templates import encode_prompt, load_tokenizer
from dynamo_megatron.planning.plan import Workload
from dynamo_megatron.rollout.result import group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import Prompt, Rollout

ROOT = Path(__file__).parents[1]
TEMPLATE = "{prompt}\n"


@dataclass(frozen=True)
class Work:
    """A model's shape and what one step trains. Every prompt gets `rollouts` responses, their lengths in turns."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    dtype: str
    prompts: int
    rollouts: int
    prompt_tokens: int
    response_tokens: tuple[int, ...]
    micro_batch_tokens: int
    steps: int = 3
    tied: bool = True
    family: str = "qwen2"

    @property
    def lengths(self) -> list[int]:
        """Tokens that go through the model, of every sequence of a step: all but a sequence's last."""
        turns = itertools.cycle(self.response_tokens)
        return [self.prompt_tokens + next(turns) - 1 for _ in range(self.prompts * self.rollouts)]

    @property
    def parameters(self) -> int:
        """Those that take part in matrix products; the tied embedding counts once, as the head."""
        head_dim = self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocab * self.hidden

    @property
    def tokens(self) -> Workload:
        """Of a step whose responses have `response_tokens` in turns."""
        longest = self.prompt_tokens + max(self.response_tokens)
        return Workload(self.prompt_tokens, float(np.mean(self.response_tokens)), longest)

    @property
    def forward_flops(self) -> int:
        """Of one pass over a step: 2 a parameter and token, and attention's two products, half of them masked."""
        attention = self.layers * sum(2 * length**2 * self.hidden for length in self.lengths)
        return 2 * self.parameters * sum(self.lengths) + attention


# Qwen2.5-1.5B's shape
QWEN_1_5B = Work(
    layers=28,
    hidden=1536,
    ffn=8960,
    heads=12,
    kv_heads=2,
    vocab=151936,
    dtype="bfloat16",
    prompts=8,
    rollouts=8,
    prompt_tokens=64,
    response_tokens=(256, 512, 768, 1024),
    micro_batch_tokens=8192,
)
TINY = Work(
    layers=2,
    hidden=32,
    ffn=64,
    heads=4,
    kv_heads=2,
    vocab=256,
    dtype="float32",
    prompts=2,
    rollouts=4,
    prompt_tokens=8,
    response_tokens=(5, 9),
    micro_batch_tokens=64,
)


def write_rollouts(work: Work, folder: Path, source: Path, model: Path) -> None:
    """Random responses to the problems of `source`, for every step, as a run leaves them; right or wrong in turns."""
    generator, store = np.random.default_rng(0), RolloutStore(folder)
    tokenizer = load_tokenizer(model)
    config = DataConfig(source=str(source), template=TEMPLATE)
    prompts: list[Prompt] = load_prompts(config)
    for step in range(1, work.steps + 1):
        turns = itertools.cycle(work.response_tokens)
        for position, prompt in enumerate(prompts):
            tokens, group = encode_prompt(prompt, tokenizer, config), group_id(step, position)
            assert len(tokens) == work.prompt_tokens
            for index in range(work.rollouts):
                n, right = next(turns), index % 3 == 0
                store.append(
                    Rollout(
                        rollout_id=rollout_id(group, index),
                        group_id=group,
                        prompt_id=prompt.prompt_id,
                        step=step,
                        tokens=[*tokens, *generator.integers(work.vocab, size=n).tolist()],
                        response_mask=[0] * len(tokens) + [1] * n,
                        engine_logprobs=(generator.normal(0, 0.2, n) - math.log(work.vocab)).tolist(),
                        weight_versions=[(step - 1, 0, n)],
                        finish_reason="length",
                        reward=float(right),
                        success=right,
                        reward_parts={},
                    )
                )
    store.close()


def write_model(work: Work, folder: Path) -> tuple[Path, Path]:
    """Paths of a random model, which is made once, on the GPU where there is one, in the folder models beside `folder`,
    and of problems of `prompt_tokens` tokens each, in `folder`."""
    problems = folder / "problems.jsonl"
    model = folder.parent / "models" / f"{work.family}-{work.layers}x{work.hidden}-{work.dtype}"
    if not model.exists():
        names = ("family", "dtype", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
        shape = {name: getattr(work, name) for name in names}
        shape["device"] = "cuda" if torch.cuda.is_available() else "cpu"
        words = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        making = model.with_name(f"{model.name}.{os.getpid()}")
        # A process of its own: this one would keep the GPU's memory.
        command = [sys.executable, "-P", str(ROOT / "tools" / "tiny_model.py"), str(making), *words]
        subprocess.run([*command, *(["--tied"] if work.tied else [])], check=True)
        _fill_vocabulary(making / "tokenizer.json", work.vocab)
        making.rename(model)
    # The tokenizer makes a token of every character; the template adds the newline.
    rows = [{"id": f"p{i}", "problem": f"{i:0{work.prompt_tokens - 1}d}", "answer": "0"} for i in range(work.prompts)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return model, problems


def _fill_vocabulary(file: Path, rows: int) -> None:
    """Gives each of the embedding's `rows` a token: a tokenizer with far fewer is another model's to `preflight`."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), rows)}
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def prepare(work: Work, folder: Path, steps: int, rollout: Mapping[str, Any], **sections: Any) -> Config:
    """Model, problems and config.yaml of a run in `folder`, which is emptied first; returns the config. `rollout`: what
    a benchmark adds to that section; `sections`: further ones."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, problems = write_model(work, folder)
    allocation = {"budget": work.prompts * work.rollouts, "rollout_n_max": max(work.rollouts, 24)}
    config = {
        "model": {"path": str(model), "dtype": work.dtype},
        "data": {"source": str(problems), "template": TEMPLATE, "batch_prompts": work.prompts},
        "rollout": {"max_new_tokens": max(work.response_tokens), **rollout},
        "algorithm": {"allocation": {"kind": "uniform", **allocation}},
        "optimizer": {"warmup_steps": 0},
        "trainer": {"steps": steps, "micro_batch_tokens": work.micro_batch_tokens},
        "checkpoint": {"every": None, "export_hf": "never", "keep_last": 1},  # free disk is checked for those kept
        "output_dir": str(folder / "run"),
        **sections,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return Config(**config)  # refuses here what the run would refuse


def backend_here() -> str:
    """`kernels.backend` of the runs: Triton's on a GPU, or in its interpreter where that is asked for."""
    return "triton" if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else "torch"


def step_figures(work: Work, line: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """One line of metrics.jsonl: seconds, and the share that model FLOPs took of the `peak` FLOP/s of all
    devices (null: unknown).

    Update: three forward passes' FLOPs (forward, and twice that backward), log-probabilities: one. The head is counted
    for every token, though prompts never reach it.
    """
    update, logprobs = line["time/update"], line["time/logprobs"]
    return {
        "step": line["step"],
        "seconds": line["time/step"],
        "update seconds": update,
        "logprobs seconds": logprobs,
        "weight sync seconds": line["time/weight_sync"],
        "update MFU": 3 * work.forward_flops / update / peak if peak else None,
        "update and logprobs MFU": 4 * work.forward_flops / (update + logprobs) / peak if peak else None,
        "tokens a second": sum(work.lengths) / (update + logprobs),
        "peak GPU bytes": line["resources/gpu_memory_max"] or None,
        "loss": line["policy/loss"],
        "gradient norm": line["policy/grad_norm"],
    }


def train_here(
    folder: Path, timeout: float, ranks: int, words: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains by the config.yaml in `folder` and `words` on ranks of this machine, with its output in train.log there;
    returns as `run_logged`, and the lines of metrics.jsonl."""
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", str(folder / "config.yaml"), *words]
    command += ["--ranks", str(ranks)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    ended = run_logged(command, folder / "train.log", timeout, cwd=folder, env=env)
    metrics = folder / "run" / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    return ended, [json.loads(line) for line in lines if line.endswith("\n")]  # a full disk cuts the last one off


def run(
    work: Work,
    folder: Path,
    backend: str,
    timeout: float,
    ranks: int = 1,
    parallel: dict[str, int] | None = None,
    profile_steps: Sequence[int] = (),
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Runs the steps on `ranks` ranks in the layout `parallel`, in `folder`, which is emptied first and left with the
    log, and returns the figures. The profiler's events of `profile_steps` stay in `folder`/profile. `words`: configs
    and KEY=VALUE after the run's own config. `environment`: of the run, besides this process's.

    "headline" is the last step: the first ones compile and fill caches. A run that fails, or takes more than `timeout`
    seconds, gives what `run_logged` does, and figures only where all its steps were done.
    """
    proof = {"max_mean_gap": None}  # the recording's logprobs are made up
    config = prepare(
        work,
        folder,
        work.steps,
        {"engine": "recorded", "recorded": str(folder / "recorded"), "proof": proof},
        kernels={"backend": backend},
        parallel=parallel or {},
        tracking={"profile_steps": list(profile_steps)},
    )
    write_rollouts(work, folder / "recorded", Path(config.data.source), Path(config.model.path))
    ended, lines = train_here(folder, timeout, ranks, words, environment)
    result: dict[str, Any] = {
        "parameters": work.parameters,
        "tokens a step": sum(work.lengths),
        "work": {**work.__dict__},
        "backend": backend,
        "ranks": ranks,
        "layout": parallel or {},
        **ended,
    }
    if len(lines) == work.steps:
        gpu, planned = gpu_here(), training_peak(folder / "config.yaml", work.tokens, ranks)
        steps = [step_figures(work, line, gpu and gpu.flops * ranks) for line in lines]
        measured = steps[-1]["peak GPU bytes"]
        ratio = measured / planned if measured else None
        result |= {"planned peak GPU bytes": planned, "steps": steps, "headline": steps[-1], "peak over plan": ratio}
    if ended["exit code"] == 0:
        if profile_steps:
            (folder / "run" / "profile").rename(folder / "profile")
        for heavy in ("run", "recorded"):
            shutil.rmtree(folder / heavy, ignore_errors=True)
    return result
