"""Training on this machine's CPU by this project and by TRL's GRPOTrainer: seconds, CPU seconds, memory of both.

    python -P benchmarks/beside_trl.py [--seeds 3] [--steps 16]

The demo's model and sums (`make runs/demo/task`), 32 prompts of 8 responses of at most 6 tokens. Both sides have the
same model, prompts, sampling, loss (GRPO, a mean over tokens, one update a step), Adam, float32 and micro-batches. Ours
is the demo's configuration, also with one rank; TRL generates with transformers, in one process of PEERS_PYTHON (`make
peers`). All processes of a run count, their memory as proportional set size. Writes results/beside_trl.json.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import keep, machine

ROOT = Path(__file__).parents[1]
DEMO = ("configs/demo/rl.yaml", "configs/methods/grpo.yaml")
PEERS = os.environ.get("PEERS_PYTHON", str(ROOT / ".venv-peers/bin/python"))
GROUP, WEIGH_EVERY = 8, 1.0  # seconds: to weigh memory, the kernel goes over all pages
WORK = {"model": "configs/demo/warm_start", "prompts": 32, "tokens": 6, "size": 256, "lr": 2e-4, "steps": 64}
POOL = ROOT / "runs" / "demo" / "task" / "pool.jsonl"
RANKS = {"TRL": 0, "ours": 2, "ours, one rank": 1}


def words(job: dict, ranks: int, folder: Path) -> list[str]:
    """Arguments of `train` for ours: what differs from the demo."""
    own = {"seed": job["seed"], "parallel.tp": ranks, "data.batch_prompts": job["prompts"]}
    own |= {"trainer.steps": job["steps"], "eval.every": "null", "output_dir": folder / "run"}
    own |= {"checkpoint.every": "null", "checkpoint.export_hf": "never"}
    return [*DEMO, *(f"{key}={value}" for key, value in own.items())]


def trl(folder: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    job, rewards = json.loads((folder / "job").read_text(encoding="utf-8")), [0.0]

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        rewards[:] = [float(text.strip() == its) for text, its in pairs]
        return list(rewards)

    class Ended(TrainerCallback):
        def on_step_end(self, *_, **__) -> None:
            with open(folder / "steps", "a") as file:
                file.write(json.dumps({"reward/mean": statistics.fmean(rewards)}) + "\n")

    how = {"num_generations": GROUP, "max_completion_length": job["tokens"], "temperature": 1.0, "beta": 0.0}
    how |= {"per_device_train_batch_size": job["size"], "max_steps": job["steps"]}
    how |= {"gradient_accumulation_steps": job["prompts"] * GROUP // job["size"], "seed": job["seed"]}
    how |= {"loss_type": "dapo", "epsilon": 0.2, "learning_rate": job["lr"], "weight_decay": 0.0, "max_grad_norm": 1.0}
    how |= {"adam_beta1": 0.9, "adam_beta2": 0.95, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    how |= {"use_cpu": True, "bf16": False, "report_to": "none"}
    how |= {"gradient_checkpointing": False, "save_strategy": "no", "model_init_kwargs": {"dtype": "float32"}}
    rows = [json.loads(line) for line in POOL.read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list(rows).rename_column("problem", "prompt")
    GRPOTrainer(job["model"], reward, GRPOConfig(str(folder / "trl"), **how), data, callbacks=[Ended()]).train()


def run(ranks: int, job: dict, folder: Path) -> dict:
    folder.mkdir()
    (folder / "job").write_text(json.dumps(job), encoding="utf-8")
    ours = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", *words(job, ranks, folder)]
    command = ours if ranks else [PEERS, "-P", __file__, "--trl", str(folder)]
    ended, log = folder / ("run/metrics.jsonl" if ranks else "steps"), folder / "log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    used, marks, times = {}, {}, []  # CPU seconds of each process, and of all after a step; when steps ended
    peak, weighed, start, load = 0, 0.0, time.monotonic(), os.getloadavg()[0]
    with open(log, "w") as file:
        process = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    alive = True
    while alive:
        alive, now = process.poll() is None, time.monotonic()
        done = ended.read_bytes().count(b"\n") if ended.exists() else 0
        weighs, memory, family = now - weighed > WEIGH_EVERY, 0, [process]
        if done > len(times) or weighs:
            with contextlib.suppress(psutil.Error):
                family += process.children(recursive=True)
            for each in family:
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    used[each.pid] = sum(each.cpu_times()[:2])
                    memory += each.memory_full_info().pss if weighs else 0
            weighed, peak = now if weighs else weighed, max(peak, memory)
            times += [now - start] * (done - len(times))
            marks.setdefault(done, sum(used.values()))
        time.sleep(0.02)
    if process.returncode or len(times) < job["steps"]:
        sys.exit(f"{log.read_text()[-3000:]}\n{command}: exit code {process.returncode} after {len(times)} steps")
    begin, end = min(step for step in marks if step >= 3), max(marks)
    found = {"seconds to the end of step 1": times[0], "peak bytes": peak, "load average before": load}
    found["seconds a step"] = (times[end - 1] - times[begin - 1]) / (end - begin)
    found["CPU seconds a step"] = (marks[end] - marks[begin]) / (end - begin)
    last = json.loads(ended.read_text(encoding="utf-8").splitlines()[-1])
    return {**found, "reward of the last step": last["reward/mean"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=WORK["steps"], help="of a run, at least 5")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "beside_trl.json")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    if (options := parser.parse_args()).trl is not None:
        return trl(options.trl)
    if options.steps < 5:
        parser.error("--steps: at least 5, since the first ones are not counted")
    described, job = machine(("torch", "sglang", "megatron-core")), {**WORK, "steps": options.steps}
    found: dict[str, list[dict]] = {who: [] for who in RANKS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for who, ranks in RANKS.items():
                found[who].append(run(ranks, {**job, "seed": seed}, Path(folder, f"{seed}-{ranks}")))
    median = {who: {key: statistics.median(r[key] for r in of) for key in of[0]} for who, of in found.items()}
    keep(options.out, "demo", {"machine": described, "work": job, "runs": found, "median": median})


if __name__ == "__main__":
    main()
