"""What servers that generate ahead of the training save: the time of the same steps at several bounds.

    python -P benchmarks/asynchrony.py [--steps 40] [--repetitions 3] [--bounds 0 1 2]

One rank has one core, and its SGLang server another one. The lengths of responses are heavy-tailed: Pareto, drawn by
the seed of each rollout, so that every run has the same ones (benchmarks/long_tail). Training takes about as long as
generation. Runs of the bounds take turns, after the server alone has been timed (benchmarks/asynchrony_service.py).
Reported of each run: seconds of its steps, and means of its metrics; of each bound the median over the repetitions.
Writes benchmarks/results/asynchrony.json. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import asynchrony_service
from measure import machine

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.store import read_rollouts, step_file

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "asynchrony.json"
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang")
LEAST, MOST, ALPHA = 12, 240, 1.1  # of the responses' lengths, tokens
PROMPTS, ROLLOUTS = 8, 80  # a step
LIMIT = 900  # seconds, for a run
SHOWN = (
    "time/step",
    "time/generate",
    "time/logprobs",
    "time/update",
    "time/reshard",
    "rollout/response_length_mean",
    "rollout/staleness_mean",
    "rollout/mixed_versions",
    "fleet/idle_share",
)
REPORTED = ("bound", "repetition", "seconds", *SHOWN)


def prepare(folder: Path, cores: tuple[int, int]) -> Path:
    """Model, problems, the server's interpreter, and a config; returns the config."""
    model = runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"](
        folder / "model", layers=4, hidden=384, heads=6, kv_heads=2, ffn=1152
    )
    rows = [{"id": f"p{i}", "problem": f"{i} + {i} =", "answer": str(2 * i)} for i in range(400)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "length_reward.py").write_text("def even(prompt, response):\n    return float(len(response) % 2)\n")
    server = server_at(folder / "server", cores[1], LEAST)
    config = {
        "model": {"path": str(model), "dtype": "float32", "max_length": 512},
        "data": {"source": str(folder / "problems.jsonl"), "batch_prompts": PROMPTS, "template": "{prompt}\n"},
        "rollout": {"max_new_tokens": MOST, "python": str(server), "start_timeout": 400},
        "reward": {"functions": ["length_reward:even"], "workers": 1},
        "algorithm": {"allocation": {"budget": ROLLOUTS}, "rollout_correction": {"kind": "truncate"}},
        "optimizer": {"lr": 1e-5},
        "trainer": {"micro_batch_tokens": 2048},
        "checkpoint": {"every": None},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def server_at(file: Path, core: int, least: int) -> Path:
    """The interpreter of a server on this core. Each of its responses has `least` tokens or more."""
    environment = {
        "LONG_TAIL_LEAST": least,
        "LONG_TAIL_MOST": MOST,
        "LONG_TAIL_ALPHA": ALPHA,
        "SGLANG_CPU_OMP_THREADS_BIND": core,
    }
    command = ["taskset", "-c", str(core), "env", *(f"{k}={v}" for k, v in environment.items()), sys.executable]
    lengths = shlex.quote(str(ROOT / "benchmarks" / "long_tail"))
    file.write_text(f'#!/bin/sh\nexport PYTHONPATH={lengths}:"$PYTHONPATH"\nexec {shlex.join(command)} "$@"\n')
    file.chmod(0o755)
    return file


def probe(config: Path, core: int) -> list[dict[str, float]]:
    """What the server takes alone (asynchrony_service.py). Each response is as long as it may be."""
    plain, folder = yaml.safe_load(config.read_text()), config.parent
    rollout = plain["rollout"] | {"python": str(server_at(folder / "server-of-one-length", core, MOST))}
    vocab_size = json.loads((Path(plain["model"]["path"]) / "config.json").read_text())["vocab_size"]
    model = ModelConfig(**plain["model"])
    return asynchrony_service.probe(RolloutConfig(**rollout), model, vocab_size, folder / "probe.log")


def run(config: Path, bound: int, steps: int, core: int) -> dict[str, Any]:
    """Seconds of all steps of one run, and means of its metrics."""
    output, log = config.parent / f"run-{bound}", config.parent / f"log-{bound}"
    words = [f"rollout.max_staleness={bound}", f"trainer.steps={steps}", f"output_dir={output}"]
    command = ["taskset", "-c", str(core), sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", config, *words]
    with open(log, "w") as file:
        code = subprocess.run(
            command,
            cwd=config.parent,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=LIMIT,
        ).returncode
    if code != 0:
        sys.exit(f"the run at bound {bound} ended with exit code {code}:\n{log.read_text()[-3000:]}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rollouts = [read_rollouts(step_file(output, step)) for step in range(1, steps + 1)]
    shutil.rmtree(output)
    means = {name: statistics.mean(row[name] for row in rows) for name in SHOWN if name in rows[0]}
    found = {"seconds": sum(row["time/step"] for row in rows), **means}
    if bound == 0:  # what benchmarks/asynchrony_simulated.py goes by
        found["generate"] = [row["time/generate"] for row in rows]
        found["lengths"] = [sorted(sum(r.response_mask) for r in of_step) for of_step in rollouts]
        found["prompt tokens"] = statistics.mean(r.response_mask.count(0) for of_step in rollouts for r in of_step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="the rank's, the server's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    at_start, runs = machine(PACKAGES), []
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), tuple(options.cores))
        probes = probe(config, options.cores[1])
        for repetition in range(options.repetitions):
            for bound in options.bounds:
                found = {
                    "bound": bound,
                    "repetition": repetition,
                    **run(config, bound, options.steps, options.cores[0]),
                }
                print(json.dumps({name: value for name, value in found.items() if name in REPORTED}), flush=True)
                runs.append(found)
    seconds = {bound: [r["seconds"] for r in runs if r["bound"] == bound] for bound in options.bounds}
    medians = {bound: statistics.median(values) for bound, values in seconds.items()}
    for bound, values in seconds.items():
        relative = medians[bound] / medians[options.bounds[0]]
        shown = ", ".join(f"{value:.0f}" for value in values)
        print(f"bound {bound}: {shown} s; the median is {relative:.3f} of that at bound {options.bounds[0]}")
    shape = {
        "concurrency": RolloutConfig().concurrency,
        "steps": options.steps,
        "prompts": PROMPTS,
        "rollouts": ROLLOUTS,
        "lengths": [LEAST, MOST, ALPHA],
    }
    result = {**shape, "probes": probes, "runs": runs, "medians": medians, "machine": at_start}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
