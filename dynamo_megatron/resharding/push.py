"""Weights from the training layout to the rollout server, through a Hugging Face folder on disk.

Each pipeline stage writes its own layers, gathered over its tensor-parallel ranks one parameter at a time, and of the
expert-parallel ranks each its own experts; rank 0 adds the index and what else the model's folder holds, so that the
folder loads in transformers as well.
"""

from __future__ import annotations

import http.client
import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from dynamo_megatron.models import named_huggingface_tensors
from dynamo_megatron.models.checkpoint_files import EXPORT_FILE, INDEX, companion_files
from dynamo_megatron.models.mapping import huggingface_shapes, is_expert
from dynamo_megatron.policy.policy import Policy
from dynamo_megatron.rollout.endpoint import Endpoint

FILE_BYTES = 1 << 30  # a file is written once it holds this much: host memory stays bounded


class TakesWeights(Protocol):
    def begin_push(self, version: int, on_poll: Callable[[], None] | None) -> list[Endpoint]: ...

    def end_push(self, version: int, outcomes: dict[str, str | None], on_poll: Callable[[], None] | None) -> None: ...


@dataclass(frozen=True)
class PushReport:
    seconds: float  # gathering, writing and loading
    pause_seconds: float  # while the server took no requests
    bytes: int


def push_weights(
    policy: Policy,
    engine: TakesWeights | None,
    version: int,
    folder: Path,
    on_poll: Callable[[], None] | None = None,
) -> PushReport:
    """Brings the server (`engine`, on rank 0; None elsewhere) to the policy's weights under `version`.

    Collective over all ranks. `folder` is rewritten. `on_poll` is called while the server loads. Raises OSError where
    the disk is full.
    """
    start = time.monotonic()
    written = write_huggingface(policy, folder)
    pause = 0.0
    if engine is not None:
        paused = time.monotonic()
        endpoints = engine.begin_push(version, on_poll)
        engine.end_push(version, {e.name: _load(e, folder, version) for e in endpoints}, on_poll)
        pause = time.monotonic() - paused
    return PushReport(time.monotonic() - start, pause, written)


def _load(endpoint: Endpoint, folder: Path, version: int) -> str | None:
    payload = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    url = f"{endpoint.url}/update_weights_from_disk"
    try:
        request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
        urllib.request.urlopen(request, timeout=600).close()
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    return None


def export_huggingface(policy: Policy, folder: Path, step: int) -> None:
    """The policy as a Hugging Face folder that appears, or takes the old one's place, when it is complete.

    `export.json` in it says {"step": step}. Collective over all ranks. Raises OSError where the disk is full.
    """
    aside, old = (folder.with_name(f".{folder.name}.{name}") for name in ("unfinished", "old"))
    try:
        write_huggingface(policy, aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)  # what is left of it would keep a full disk full
        raise
    if policy.layout.rank == 0:
        (aside / EXPORT_FILE).write_text(json.dumps({"step": step}) + "\n", encoding="utf-8")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def write_huggingface(policy: Policy, folder: Path) -> int:
    """Writes the policy as a Hugging Face folder and returns its bytes of parameters; collective over all ranks.

    What is not weights comes from the model's folder, but config.json's dtype, which is the policy's. Raises OSError.
    """
    layout, source = policy.layout, Path(policy.config.model.path)
    if layout.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier(group=layout.host)
    speaks, speaks_for_experts = layout.tp.rank() == 0 and layout.dp_cp.rank() == 0, layout.expert_dp.rank() == 0
    weight_map: dict[str, str] = {}
    bucket: dict[str, torch.Tensor] = {}
    written = held = files = 0

    def flush() -> None:
        nonlocal held, files
        if bucket:
            name = f"model-rank{layout.rank:05d}-{files:05d}.safetensors"
            try:
                save_file(bucket, str(folder / name), metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk comes as this
                raise OSError(f"{folder / name}: not written: {error}") from None
            (folder / name).chmod(0o644)  # safetensors ignores the umask; the server may be another user's
            weight_map.update(dict.fromkeys(bucket, name))
            bucket.clear()
            held, files = 0, files + 1

    for chunk in policy.chunks:
        tensors = named_huggingface_tensors(
            chunk,
            policy.spec,
            layer_offset=chunk.layer_offset,
            tp_group=layout.tp if layout.tp.size() > 1 else None,
            ep_rank=layout.ep.rank(),
            ep_size=layout.ep.size(),
        )
        for name, tensor in tensors:
            if speaks_for_experts if is_expert(name) else speaks:
                bucket[name] = tensor.cpu().contiguous()
                held += tensor.nbytes
                written += tensor.nbytes
                if held >= FILE_BYTES:
                    flush()
    flush()
    parts: list = [None] * layout.world_size
    dist.all_gather_object(parts, (weight_map, written), group=layout.host)
    total = sum(size for _, size in parts)
    if layout.rank == 0:
        weight_map = {k: v for names, _ in parts for k, v in names.items()}
        assert weight_map.keys() == huggingface_shapes(policy.spec).keys(), "not the model's tensors"
        assert len(weight_map) == sum(len(names) for names, _ in parts), "a tensor that two ranks wrote"
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
        for file in companion_files(source):
            shutil.copy(file, folder / file.name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = policy.config.model.dtype
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    dist.barrier(group=layout.host)
    return total
