"""One rank of gpu-check's all-reduces between two nodes, over gloo and, on GPUs, NCCL: `preflight`'s own, timed several
times. Runs with the variables of a rank, and prints one JSON object.

Bus bandwidth is what a rank's link carries of a ring's all-reduce: 2 (n - 1) / n of the bytes a sum takes, a second.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics

import torch
import torch.distributed as dist

from dynamo_megatron.preflight.all_reduce import add
from dynamo_megatron.runtime.coordination import connect_store
from dynamo_megatron.runtime.listening import GLOO_INTERFACE, gloo_listens_on, interface_of, ranks_address

TIMEOUT = 60.0  # seconds to meet, and for a sum
ROUNDS = 5


def sums(device: torch.device, rank: int, ranks: int) -> dict[str, float | bool]:
    """The median of several sums' seconds, and the bus bandwidth in bytes a second."""
    found = [add(rank, device) for _ in range(ROUNDS)]
    seconds = statistics.median(one["seconds"] for one in found)
    size = found[0]["bytes"]
    return {
        "right": all(one["sum"] == ranks * (ranks + 1) / 2 for one in found),
        "bytes": size,
        "seconds": seconds,
        "bus bytes a second": 2 * (ranks - 1) / ranks * size / seconds,
    }


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    address = ranks_address()
    with gloo_listens_on(address):
        interface = os.environ.get(GLOO_INTERFACE)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=connect_store(TIMEOUT),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=TIMEOUT),
        )
    report = {
        "host": socket.gethostname(),
        "address": address,
        "interface": interface or (interface_of(address) if address else None),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME"),
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "nccl": sums(device, rank, ranks) if cuda else None,
        "gloo": sums(torch.device("cpu"), rank, ranks),
    }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
