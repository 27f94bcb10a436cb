"""One rank of the preflight's all-reduces: over gloo, and over NCCL where there are GPUs.

    python -P -m dynamo_megatron.preflight.all_reduce

runs as a rank (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) and prints one JSON object. It is a separate
process, because a collective that hangs can only be killed. It imports little besides torch, because each node starts
several.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from dynamo_megatron.runtime.coordination import connect_store
from dynamo_megatron.runtime.listening import gloo_listens_on, ranks_address

MEETING_TIMEOUT = 60.0  # seconds until all ranks must have joined
NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}  # float32 values in the tensor that is reduced


def main() -> None:
    """Runs the all-reduces. Exceptions are not caught: the parent reports the last line on stderr."""
    cuda = torch.cuda.is_available()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    report: dict[str, Any] = {"world_size": world_size, "device": "CPU"}
    if cuda:
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info()
        report |= {"device": torch.cuda.get_device_name(), "taken": 1 - free / total}
        if torch.cuda.get_device_capability() < (8, 0):
            raise RuntimeError(f"{report['device']} has no bfloat16; Ampere (sm_80) or later is needed")
        ones = torch.ones(1024, 1024, dtype=torch.bfloat16, device=device)
        assert float((ones @ ones)[0, 0]) == 1024, "a matrix product is wrong on this GPU"
    with gloo_listens_on(ranks_address()):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=connect_store(MEETING_TIMEOUT),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=MEETING_TIMEOUT),
        )
    report["sums"] = {"nccl": add(rank, device)} if cuda else {}
    report["sums"]["gloo"] = add(rank, torch.device("cpu"))  # the ranks coordinate and save over gloo
    report["expected"] = world_size * (world_size + 1) / 2
    dist.destroy_process_group()
    print(json.dumps(report), flush=True)


def add(rank: int, device: torch.device) -> dict[str, float]:
    """Sums a tensor over all ranks twice and times the second sum; the first one also builds the connections."""
    tensor = torch.full((NUMBERS[device.type],), float(rank + 1), device=device)
    dist.all_reduce(tensor)
    total = float(tensor[-1])
    start = time.monotonic()
    dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {"sum": total, "seconds": time.monotonic() - start, "bytes": tensor.nbytes}


if __name__ == "__main__":
    main()
