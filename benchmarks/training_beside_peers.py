"""An update of the same model on the same recorded rollouts: ours, TRL's GRPO trainer and verl's actor.

    python -P benchmarks/training_beside_peers.py [--tiny] [--peers PYTHON]

All get the tokens, advantages and old logprobs that are in the recording, GRPO's loss as a mean over tokens, one update
a step, Adam with float32 master weights, no activation recomputation. PYTHON (default: PEERS_PYTHON or
.venv-peers/bin/python, of `make peers`) has TRL and verl; peer_steps.py says what of theirs runs. Writes
FOLDER/beside_peers.json, anew after each contender: of each step loss, gradient norm, seconds; of the last step tokens
a second, peak memory and MFU by one formula. Exits 1 where one fails, or where in float32 losses or gradient norms
differ by more than BAR.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
import numpy as np
import torch
import training_steps
from measure import VERSIONS, machine, run_logged
from planned import gpu_here
from training_steps import QWEN_1_5B, ROOT, TINY, Work, write_model, write_rollouts

from dynamo_megatron.algorithm.advantages import group_advantages
from dynamo_megatron.config import OptimizerConfig
from dynamo_megatron.rollout.store import read_rollouts, step_file

BAR = 1e-5  # of losses absolute, of gradient norms relative
CLIP_RATIO = 0.2
KEYS = ("algorithm.loss.old=engine", f"algorithm.loss.clip_ratio_low={CLIP_RATIO}")
NO_TE = Path(__file__).parent / "gpu" / "hooks" / "no_te"
OURS, TE = "ours", "ours, TransformerEngine"
PEERS = ("trl", "verl")
LEAST = 45.0  # seconds of a contender on an H200: each has them, and leaves them to those after it, if they are there


def write_job(work: Work, folder: Path) -> None:
    """What peer_steps.py reads. The model is where other runs beside `folder` find it."""
    folder.mkdir(parents=True)
    (folder.parent / "models").mkdir(exist_ok=True)
    (folder / "models").symlink_to(folder.parent / "models")
    model, problems = write_model(work, folder)
    write_rollouts(work, folder / "recorded", problems, model)
    rows = [r for step in range(1, work.steps + 1) for r in read_rollouts(step_file(folder / "recorded", step))]
    rewards, groups = np.array([r.reward for r in rows]), [r.group_id for r in rows]
    arrays = {
        "tokens": np.concatenate([r.tokens for r in rows]),
        "offsets": np.cumsum([0, *(len(r.tokens) for r in rows)]),
        "prompt_lengths": np.array([r.response_mask.index(1) for r in rows]),
        "old_logprobs": np.concatenate([r.engine_logprobs for r in rows]).astype(np.float32),
        "advantages": group_advantages(rewards, groups, kind="grpo").astype(np.float32),
        "steps": np.array([r.step for r in rows]),
    }
    np.savez(folder / "rollouts.npz", **arrays)
    optimizer = OptimizerConfig()
    job = {name: getattr(optimizer, name) for name in ("lr", "weight_decay", "betas", "eps", "clip_grad")}
    job |= {"clip_ratio": CLIP_RATIO, "dtype": work.dtype, "model": str(model)}
    job |= {"rollouts": work.rollouts, "micro_batch_tokens": work.micro_batch_tokens, "scratch": str(folder / "trl")}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")


def ours(work: Work, folder: Path, timeout: float, transformer_engine: bool) -> dict[str, Any]:
    without = {"PYTHONPATH": os.pathsep.join([str(NO_TE), os.environ.get("PYTHONPATH", "")])}
    words = (str(ROOT / "configs" / "methods" / "grpo.yaml"), *KEYS)
    environment = {} if transformer_engine else without
    backend = training_steps.backend_here()
    ran = training_steps.run(work, folder, backend, timeout, words=words, environment=environment)
    if "steps" not in ran:
        return {"exit code": ran["exit code"], "log": ran["log"]}
    steps = ran["steps"]
    names = {"loss": "loss", "gradient norm": "gradient norm", "seconds": "update seconds"}
    found = {name: [step[key] for step in steps] for name, key in names.items()}
    return {"exit code": ran["exit code"], **found, "peak bytes": ran["headline"]["peak GPU bytes"], "replaced": {}}


def theirs(peer: str, python: str, site: str | None, folder: Path, timeout: float) -> dict[str, Any]:
    """The figures that peer_steps.py has written, or why there are none. `site`: a folder that has the peers."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if site is not None:
        environment["PYTHONPATH"] = site
    elif python != sys.executable:
        environment.pop("PYTHONPATH", None)  # what this interpreter needs, another one may not be able to load
    words = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer!r}) is None)"
    if not shutil.which(python) or subprocess.run([python, "-P", "-c", words], env=environment).returncode:
        return {"skipped": f"{python} has no {peer}"}
    out = folder / f"{peer}.json"
    command = [python, "-P", str(Path(__file__).with_name("peer_steps.py")), peer, str(folder), str(out)]
    ended = run_logged(command, folder / f"{peer}.log", timeout, cwd=folder, env=environment)
    return ended if ended["exit code"] != 0 else {**ended, **json.loads(out.read_text(encoding="utf-8"))}


def wrong_with(found: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    lines = [f"{name}: exit code {ran['exit code']}" for name, ran in found.items() if ran.get("exit code", 0) != 0]
    want = found[OURS]
    for name, ran in found.items():
        if dtype != "float32" or "loss" not in ran or "loss" not in want:
            continue
        for key, scale in (("loss", np.ones(len(want["loss"]))), ("gradient norm", np.array(want["gradient norm"]))):
            off = np.abs(np.array(ran[key]) - want[key]) / scale
            if not (off <= BAR).all():
                lines.append(f"{name}: {key} {ran[key]}, ours {want[key]}")
    return lines


def run(work: Work, folder: Path, python: str, site: str | None, timeout: float, out: Path) -> dict[str, Any]:
    """Every contender in a process of its own, in an empty folder; all within `timeout` seconds. `out`: the file that
    has the figures of those that have run."""
    end, before = time.monotonic() + timeout, machine(VERSIONS)
    shutil.rmtree(folder, ignore_errors=True)
    write_job(work, folder)
    contenders: dict[str, Callable[[float], dict[str, Any]]] = {OURS: lambda s: ours(work, folder / "ours", s, False)}
    for peer in PEERS:
        contenders[peer] = lambda s, peer=peer: theirs(peer, python, site, folder, s)
    contenders[TE] = lambda s: ours(work, folder / "ours-te", s, True)
    found: dict[str, dict[str, Any]] = {}
    gpu, begin = gpu_here(), time.monotonic()
    for later, (name, contend) in zip(reversed(range(len(contenders))), contenders.items(), strict=True):
        if name == TE and not (torch.cuda.is_available() and importlib.util.find_spec("transformer_engine")):
            ran = {"skipped": "it needs a GPU and the package"}
        elif (left := end - time.monotonic()) < LEAST / 3:
            ran = {"skipped": "no time was left"}
        else:
            ran = contend(max(left - LEAST * later, min(left, LEAST)))
        begin, ran["wall seconds"] = time.monotonic(), time.monotonic() - begin
        if "loss" in ran:
            last = ran["seconds"][-1]
            ran["tokens a second"] = sum(work.lengths) / last
            ran["MFU"] = 3 * work.forward_flops / last / gpu.flops if gpu else None
        found[name] = ran
        print(line_of(name, ran), flush=True)
        wrong = wrong_with(found, work.dtype)
        result = {"machine": before, "contenders": found, "work": {**work.__dict__}, "wrong": wrong}
        out.write_text(json.dumps(result, indent=1).replace(f"{ROOT}/", "") + "\n", encoding="utf-8")
    said = [line_of(name, ran) for name, ran in found.items()]
    return {**result, "said": said, "exit code": int(bool(wrong))}


def line_of(name: str, ran: dict[str, Any]) -> str:
    if "loss" not in ran:
        return f"{name}: {ran.get('skipped') or ran['log'][-1]}"
    figures = {"tokens a second": ran["tokens a second"], "MFU": ran["MFU"], "peak bytes": ran["peak bytes"]}
    figures |= {"loss": ran["loss"][-1], "gradient norm": ran["gradient norm"][-1]}
    told = ", ".join(f"{key} {value:.7g}" for key, value in figures.items() if value is not None)
    return f"{name}: {told}" + "".join(f"; {this} replaced by {that}" for this, that in ran["replaced"].items())


def peers_python() -> str:
    own = ROOT / ".venv-peers" / "bin" / "python"
    return os.environ.get("PEERS_PYTHON", str(own) if own.exists() else sys.executable)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model; runs on a CPU")
    parser.add_argument("--peers", default=peers_python(), metavar="PYTHON")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "beside-peers" / "run")
    parser.add_argument("--seconds", type=float, default=1200, help="of all contenders")
    options = parser.parse_args()
    work, folder = TINY if options.tiny else QWEN_1_5B, options.folder.absolute()
    found = run(work, folder, options.peers, None, options.seconds, folder / "beside_peers.json")
    print("\n".join(found["wrong"]))
    return found["exit code"]


if __name__ == "__main__":
    sys.exit(main())
