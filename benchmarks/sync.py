"""What a push of the weights costs: training layouts x transports x servers, against a plain copy of the same bytes.

    python -P benchmarks/sync.py [--out benchmarks/results] [--pushes 5] [--layouts tp2-pp2 ...] [--small]

Real ranks (Megatron) push real weights to real SGLang servers on a CPU: `tensor`, `gloo` and `disk` to a server of one
rank and to one of two. The live parts of `make gpu-check` time a GPU's. Writes sync.json (figures, machine, versions)
and prints the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from measure import machine, run_logged
from tiny_model import make_tiny_model

from dynamo_megatron.config import Config, ModelConfig
from dynamo_megatron.config.rollout import RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer
from dynamo_megatron.rollout.servers.server_api import Endpoint
from dynamo_megatron.runtime.process_signals import die_with_parent

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout
    from dynamo_megatron.weight_sync.sync import SyncReport, WeightSync

LAYOUTS = {
    "1 rank": (1, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2}),
}
MODEL = {"hidden": 768, "heads": 12, "kv_heads": 4, "ffn": 2048, "layers": 8, "vocab": 8192}  # 129 MB of bfloat16
SMALL = {"layers": 4}
BUCKET_BYTES = 32 << 20
SERVER_TP = (1, 2)
TRANSPORTS = ("tensor", "gloo", "disk")
TIMEOUT = 900.0  # seconds for the ranks of one layout
PACKAGES = ("torch", "megatron-core", "sglang", "safetensors")


def run_rank(job_file: Path) -> None:
    """One training rank: every transport's pushes to every server in turns with the plain copy."""
    from dynamo_megatron.policy import backend

    backend.enable_cpu()
    import torch.distributed as dist

    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.policy.layout import join_ranks
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, connect_store
    from dynamo_megatron.weight_sync.sync import WeightSync

    job = json.loads(job_file.read_text())
    rank, out = int(os.environ["RANK"]), Path(job["out"])
    config = Config(
        model={"path": job["model"], "dtype": "bfloat16"},
        data={"source": "unused"},
        parallel=job["parallel"],
        output_dir=job["out"],
    )
    store = connect_store(TIMEOUT)
    coordinator = Coordinator(store, rank, StopFlag())
    layout = join_ranks(config, dist.PrefixStore("groups", store))
    policy = Policy(load_model_config(job["model"]), config, layout)
    found, version = [], 1
    for case in job["cases"]:
        endpoint = Endpoint(**case["endpoint"])
        fleet = _Fleet([endpoint]) if rank == 0 else None
        sync = {"transport": case["transport"], "bucket_bytes": BUCKET_BYTES}
        rollout = RolloutConfig(sync=sync, tp=endpoint.tp)
        policy.config = config.model_copy(update={"rollout": rollout})
        weight_sync = WeightSync(policy, fleet, coordinator)
        reports, copies = _pushes(weight_sync, range(version, version + job["pushes"] + 1), layout)
        version += job["pushes"] + 1
        weight_sync.close()
        if rank == 0:
            assert fleet.outcomes == {endpoint.name: None}, fleet.outcomes
            shape = {"layout": job["layout"], "transport": case["transport"], "server tp": endpoint.tp}
            found.append({**shape, "bytes of the model": weight_sync.schedule.nbytes, **_figures(reports, copies)})
    if rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    coordinator.close()
    store.set(f"done{rank}", "")
    if rank == 0:  # it serves the store
        store.wait([f"done{r}" for r in range(layout.world_size)])


def _pushes(weight_sync: WeightSync, versions: range, layout: Layout) -> tuple[list[SyncReport], list[float]]:
    """Returns each push's report and the seconds of the plain copy after it. The first push makes the links and is not
    counted."""
    source = torch.zeros(weight_sync.schedule.nbytes, dtype=torch.uint8, device=layout.device)
    target = torch.empty_like(source)
    reports, copies = [], []
    for version in versions:
        reports.append(weight_sync.sync(version))
        start = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - start)
        torch.distributed.barrier(group=layout.host)
    return reports[1:], copies[1:]


def _figures(reports: list[SyncReport], copies: list[float]) -> dict[str, float]:
    """Of the pushes of one case; `copies`: seconds of the plain copy after each."""
    seconds = [r.seconds - r.proof_seconds for r in reports]
    return {
        "bytes sent": reports[-1].bytes,
        "floor bytes": reports[-1].floor_bytes,
        "bytes to floor": reports[-1].bytes / reports[-1].floor_bytes,
        "seconds": statistics.median(seconds),
        "seconds min": min(seconds),
        "seconds max": max(seconds),
        "proof seconds": statistics.median(r.proof_seconds for r in reports),
        "copy seconds": statistics.median(copies),
        "ratio to a copy": statistics.median(s / c for s, c in zip(seconds, copies, strict=True)),
    }


class _Fleet:
    """The fleet's interface, for servers that are given."""

    def __init__(self, endpoints: list[Endpoint]):
        self.endpoints, self.outcomes = endpoints, {}

    def begin_sync(self, version: int, on_poll: Any) -> list[Endpoint]:
        return self.endpoints

    def end_sync(self, version: int, outcomes: dict[Endpoint, str | None], on_poll: Any) -> None:
        self.outcomes = {e.name: why for e, why in outcomes.items()}


def run_layout(name: str, cases: list[dict[str, Any]], model: Path, folder: Path, pushes: int) -> list[dict[str, Any]]:
    ranks, parallel = LAYOUTS[name]
    folder.mkdir()
    job = {"layout": name, "parallel": parallel, "model": str(model), "out": str(folder), "pushes": pushes}
    (folder / "job.json").write_text(json.dumps(job | {"cases": cases}))
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, __file__, "--rank-of", str(folder / "job.json")]
    ended = run_logged(command, folder / "ranks.log", TIMEOUT, env={"OMP_NUM_THREADS": "1", **os.environ})
    assert ended["exit code"] == 0, f"{name}: {ended}"
    return json.loads((folder / "found.json").read_text())


def start_servers(model: Path, folder: Path) -> list[SGLangServer]:
    """A server of every size of SERVER_TP."""
    servers = []
    for number, tp in enumerate(SERVER_TP):
        config = RolloutConfig(tp=tp, memory_fraction=0.2, start_timeout=900)
        log = folder / f"server-{number}.log"
        place = {"name": f"server-{number}", "slot": number, "slots": len(SERVER_TP)}
        servers.append(SGLangServer(config, ModelConfig(path=str(model), dtype="bfloat16"), log, **place))
        servers[-1].start()

    async def ready() -> None:
        await asyncio.gather(*(server.wait_ready() for server in servers))

    asyncio.run(ready())
    return servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--pushes", type=int, default=5, help="counted ones; one more comes first")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--small", action="store_true", help="a model of 1 MB: does it run?")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of is not None:
        die_with_parent(signal.SIGKILL, os.getppid())  # torchrun's, which has a time limit
        run_rank(arguments.rank_of)
        os._exit(0)
    found: list[dict[str, Any]] = []
    described = machine(PACKAGES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny_model(folder / "model", dtype="bfloat16", **(SMALL if arguments.small else MODEL))
        servers = start_servers(model, folder)
        try:
            endpoints = [dataclasses.asdict(server.endpoint) for server in servers]
            cases = [{"transport": transport, "endpoint": each} for each in endpoints for transport in TRANSPORTS]
            for name in arguments.layouts:
                found += run_layout(name, cases, model, folder / name.replace(" ", ""), arguments.pushes)
        finally:
            for server in servers:
                server.stop()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": described, "bucket bytes": BUCKET_BYTES, "pushes": arguments.pushes, "found": found}
    (arguments.out / "sync.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
