"""Updates by TRL or verl on recorded rollouts, run by an interpreter that has them: `peer_steps.py PEER JOB OUT`.

JOB: a folder with job.json and rollouts.npz, as training_beside_peers.py writes them. Writes JSON: loss, gradient norm
(before clipping) and seconds of each step, the most memory, the versions, and under "replaced" what this machine cannot
run with what took its place. It imports nothing of this project.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from importlib import machinery, metadata, util
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

CUDA = torch.cuda.is_available()
PACKAGES = ("torch", "transformers", "trl", "accelerate", "liger-kernel", "flash-attn", "verl", "tensordict")
VERSIONS = {package.name.replace("_", "-"): package.version for package in metadata.distributions()}
RAY = ("", ".actor", ".experimental.state.api", ".util.placement_group", ".util.scheduling_strategies")
Batch = dict[str, list[torch.Tensor]]  # of a step, by rollout


def batches_of(folder: Path) -> list[Batch]:
    """Prompt and response tokens, old logprobs, and the advantage of each response token."""
    arrays = np.load(folder / "rollouts.npz")
    batches: list[Batch] = [{} for _ in range(arrays["steps"].max())]
    first = 0
    for row, step in enumerate(arrays["steps"]):
        tokens = torch.from_numpy(arrays["tokens"][slice(*arrays["offsets"][row : row + 2])])
        prompt, response = tokens.split([arrays["prompt_lengths"][row], len(tokens) - arrays["prompt_lengths"][row]])
        old = torch.from_numpy(arrays["old_logprobs"][first : first + len(response)])
        first += len(response)
        advantages = torch.full_like(old, float(arrays["advantages"][row]))
        rollout = {"prompts": prompt, "responses": response, "old_log_probs": old, "advantages": advantages}
        for name, value in rollout.items():
            batches[step - 1].setdefault(name, []).append(value)
    return batches


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def attention(replaced: dict[str, str]) -> str:
    if CUDA and util.find_spec("flash_attn"):
        if VERSIONS["flash-attn"].endswith("+torch"):  # of the archive
            replaced["flash-attn's kernels of attention"] = "torch's FlashAttention 2"
        return "flash_attention_2"
    replaced["flash_attention_2"] = "sdpa"
    return "sdpa"


def trl(job: dict[str, Any], batches: list[Batch], replaced: dict[str, str]) -> dict[str, Any]:
    """`GRPOTrainer.train`, whose generation is replaced by the recording; micro-batches are padded and of one size."""
    from datasets import Dataset
    from torch.nn.utils.rnn import pad_sequence
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    waiting, times = list(batches), [0.0]

    class Recorded(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            batch = waiting.pop(0)
            prompts = torch.stack(batch["prompts"])
            mask = pad_sequence([torch.ones_like(r) for r in batch["responses"]], batch_first=True)
            found = {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": pad_sequence(batch["responses"], batch_first=True),
                "completion_mask": mask,
                "advantages": torch.stack([each[0] for each in batch["advantages"]]),
                "old_per_token_logps": pad_sequence(batch["old_log_probs"], batch_first=True),
                "num_items_in_batch": mask.sum(),
            }
            return {name: value.to(self.accelerator.device) for name, value in found.items()}

    class Watch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            times[-1] -= now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            times[-1] += now()
            times.append(0.0)

    count = len(batches[0]["responses"])
    longest = len(batches[0]["prompts"][0]) + max(map(len, batches[0]["responses"]))
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    size = min(sizes, key=lambda n: abs(n * longest - job["micro_batch_tokens"]))
    liger = CUDA and util.find_spec("liger_kernel") is not None
    if not liger:
        replaced["Liger's layers"] = "transformers' own"
    elif util.find_spec("cutlass") is None:
        replaced["Liger's CuTe kernels"] = "its Triton kernels"
    how = {"beta": 0.0, "loss_type": "dapo", "epsilon": job["clip_ratio"], "max_completion_length": longest}
    how |= {"num_generations": job["rollouts"], "per_device_train_batch_size": size}
    how |= {"gradient_accumulation_steps": count // size, "max_steps": len(batches), "bf16": job["dtype"] == "bfloat16"}
    how |= {"learning_rate": job["lr"], "weight_decay": job["weight_decay"], "max_grad_norm": job["clip_grad"]}
    how |= {"adam_beta1": job["betas"][0], "adam_beta2": job["betas"][1], "adam_epsilon": job["eps"]}
    how |= {"lr_scheduler_type": "constant", "use_cpu": not CUDA, "use_liger_kernel": liger}
    how |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    how["model_init_kwargs"] = {"dtype": "float32", "attn_implementation": attention(replaced)}
    rows = Dataset.from_list([{"prompt": "0"}] * count)
    no_reward = [lambda completions, **_: [0.0] * len(completions)]
    trainer = Recorded(job["model"], no_reward, GRPOConfig(job["scratch"], **how), rows, callbacks=[Watch()])
    trainer.train()
    steps = [row for row in trainer.state.log_history if "grad_norm" in row]
    figures = {"loss": [row["loss"] for row in steps], "gradient norm": [row["grad_norm"] for row in steps]}
    return {**figures, "seconds": times[:-1], "rollouts of a micro-batch": size}


def without_ray(replaced: dict[str, str]) -> None:
    """verl's modules import ray, of which an engine of one process calls nothing."""
    if util.find_spec("ray") is None:
        replaced["ray"] = "empty modules"
        for part in RAY:
            name = f"ray{part}"
            sys.modules[name] = mock.MagicMock(__spec__=machinery.ModuleSpec(name, None), __path__=[])


def cpu_platform() -> Any:
    """verl knows CUDA and NPUs. This has what an engine of one process asks of a platform."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Platform(PlatformCUDA):
        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def is_available(self) -> bool:
            return True

    return Platform()


def verl(job: dict[str, Any], batches: list[Batch], replaced: dict[str, str]) -> dict[str, Any]:
    """`train_batch` of the engine of verl's worker, with its `ppo_loss`: FSDP 2, padding removed, micro-batches by
    tokens."""
    without_ray(replaced)
    from verl.plugin.platform import set_platform

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    if not CUDA:
        replaced["CUDA"] = "verl's engine on a platform of our own, gloo"
        os.environ["VERL_DISABLE_FLASH_ATTN_CE"] = "1"  # a Triton kernel
        set_platform(cpu_platform())
    from tensordict import TensorDict
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    monkey_patch.is_trl_available = lambda: False  # it looks for a class that TRL no longer has
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl" if CUDA else "gloo", store=store, rank=0, world_size=1)
    types = {"param_dtype": {"float32": "fp32", "bfloat16": "bf16"}[job["dtype"]], "reduce_dtype": "fp32"}
    kernels = {"attn_implementation": attention(replaced)}
    model = HFModelConfig(
        path=job["model"], load_tokenizer=False, enable_gradient_checkpointing=False, override_config=kernels
    )
    adam = FSDPOptimizerConfig(
        **{name: job[name] for name in ("lr", "weight_decay", "betas", "clip_grad")},
        override_optimizer_config={"eps": job["eps"]},
        total_training_steps=len(batches),
    )
    shards = FSDPEngineConfig(strategy="fsdp2", mixed_precision=types, use_torch_compile=CUDA)
    engine = FSDPEngineWithLMHead(model, shards, adam, CheckpointConfig())
    engine.initialize()
    clip = dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), job["clip_ratio"])
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, clip_ratio_c=1e12, **clip)  # no dual clip
    found: dict[str, Any] = {"loss": [], "gradient norm": [], "seconds": []}
    for batch in batches:
        rows = dict(batch, response_mask=[torch.ones_like(r) for r in batch["responses"]])
        rows["input_ids"] = [torch.cat(pair) for pair in zip(batch["prompts"], batch["responses"], strict=True)]
        rows["position_ids"] = [torch.arange(len(ids)) for ids in rows["input_ids"]]
        rows["loss_mask"] = rows["response_mask"]
        nested = {name: torch.nested.as_nested_tensor(of, layout=torch.jagged) for name, of in rows.items()}
        data = TensorDict(nested, batch_size=[len(batch["responses"])])
        words = {"temperature": 1.0, "use_remove_padding": True, "use_dynamic_bsz": True}
        words |= {"max_token_len_per_gpu": job["micro_batch_tokens"], "global_batch_size": len(batch["responses"])}
        tensordict_utils.assign_non_tensor(data, **words)
        begin = now()
        with engine.train_mode():
            output = engine.train_batch(data, loss_function=functools.partial(ppo_loss, actor))
        found["seconds"].append(now() - begin)
        found["loss"].append(sum(output["loss"]))
        found["gradient norm"].append(output["metrics"]["grad_norm"])
    torch.distributed.destroy_process_group()
    return found


def main(peer: str, folder: str, out: str) -> None:
    job, replaced = json.loads((Path(folder) / "job.json").read_text(encoding="utf-8")), {}
    found = {"trl": trl, "verl": verl}[peer](job, batches_of(Path(folder)), replaced)
    versions = {package: VERSIONS.get(package) for package in PACKAGES}
    found |= {"peak bytes": torch.cuda.max_memory_allocated() if CUDA else None, "replaced": replaced}
    Path(out).write_text(json.dumps({**found, "versions": versions}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
