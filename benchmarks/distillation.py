"""Does a teacher teach the demo's student better than rewards alone, with the same rollouts? docs/evidence.md has the
table, benchmarks/results/distillation.json the scores of every run.

    make runs/demo/teacher/hf
    python -P benchmarks/distillation.py [--seeds 5] [--only ARM-SEED]

The teacher has twice the student's width and runs as an SGLang server. A run that was interrupted is resumed, one that
is in the results is not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
from pathlib import Path

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "benchmarks" / "results" / "distillation.json", ROOT / "runs" / "demo" / "distillation"
TEACHER = ROOT / "runs" / "demo" / "teacher" / "hf"
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "transformers")
KEY = "TEACHER_KEY"  # environment variable
STEPS, EVERY, ROLLOUTS = 24, 8, 256  # rollouts of a step
ARMS = {  # words after those of configs/demo/rl.yaml, whose learning rate is 2e-4
    "rewards": ["methods/grpo"],
    "teacher": ["methods/distill"],
    "both": ["methods/distill", "algorithm.teacher.reward_weight=1"],
    "teacher_6e-4": ["methods/distill", "optimizer.lr=6e-4"],
}


def scores(folder: Path) -> list[float]:
    """Those of the first STEPS steps that there are."""
    file = folder / "evaluations.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line)["eval/pass@1"] for line in lines][: STEPS // EVERY + 1]


def train(arm: str, seed: int) -> list[float]:
    """pass@1 on the held-out problems before training and after every EVERY steps."""
    folder = RUNS / f"{arm}-{seed}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if len(done := scores(folder)) == STEPS // EVERY + 1:
        return done
    words = [
        "configs/demo/rl.yaml",
        *ARMS[arm],
        "data.batch_prompts=32",
        f"seed={seed}",
        f"trainer.steps={STEPS}",
        f"output_dir={folder}",
    ]
    words += [f"eval.every={EVERY}", "eval.limit=512", "eval.samples=4", "eval.k=[1]", "checkpoint.export_hf=never"]
    server = None
    if "methods/distill" in ARMS[arm]:
        os.environ.setdefault(KEY, secrets.token_hex(16))
        config = RolloutConfig(api_key_env=KEY, placement="external", urls=["http://unused"])
        server = SGLangServer(config, ModelConfig(path=str(TEACHER), dtype="float32"), RUNS / "teacher.log")
        words += [f"algorithm.teacher.path={server.endpoint.url}", f"algorithm.teacher.api_key_env={KEY}"]
    try:
        if server is not None:
            server.start()
            asyncio.run(server.wait_ready())
        command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *words]
        subprocess.run(command, cwd=ROOT, check=True)
    finally:
        if server is not None:
            server.stop()
    return scores(folder)


def known() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"scores": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", help="one run, such as teacher-0")
    options = parser.parse_args()
    runs = [(arm, seed) for seed in range(options.seeds) for arm in ARMS]
    for arm, seed in runs:
        name = f"{arm}-{seed}"
        if name not in known()["scores"] and options.only in (None, name):
            found = train(arm, seed)
            results = known()  # another process may have finished a run meanwhile
            results["scores"][name] = found
            results["rollouts"] = list(range(0, STEPS * ROLLOUTS + 1, EVERY * ROLLOUTS))
            results["machine"] = machine(PACKAGES)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = known()
    print(f"| arm | runs | {' | '.join(map(str, results['rollouts']))} |")
    for arm in ARMS:
        runs = [each for name, each in results["scores"].items() if name.rpartition("-")[0] == arm]
        points = zip(*runs, strict=True)
        means = [f"{100 * statistics.mean(at):.1f} ({100 * min(at):.1f} to {100 * max(at):.1f})" for at in points]
        print(f"| {arm} | {len(runs)} | {' | '.join(means)} |")


if __name__ == "__main__":
    main()
