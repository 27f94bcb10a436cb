"""The ranks of the weight sync tests: policies of several layouts, whose weights running servers get over transports.

    python -P sync_job.py JOB.json

It imports Megatron once and forks the ranks of one layout after the other. The job's results are files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.models.fp8 import dequantize, is_quantized, quantize  # noqa: E402
from dynamo_megatron.models.mapping import OUTPUT_LAYER, global_name, huggingface_names, to_megatron  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.rollout.servers.server_api import Endpoint, ServerError, call, rest  # noqa: E402
from dynamo_megatron.runtime.coordination import Coordinator, StopFlag, connect_store  # noqa: E402
from dynamo_megatron.runtime.seeds import derived_seed  # noqa: E402
from dynamo_megatron.weight_sync.folder import write_huggingface  # noqa: E402
from dynamo_megatron.weight_sync.proof import ExpectedChecksums, mismatch  # noqa: E402
from dynamo_megatron.weight_sync.sync import WeightSync  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))
from forked_ranks import fork_ranks, wait_for  # noqa: E402

BUCKET_BYTES = 40000


class Fleet:
    """In place of the rollout process: its servers are given, and it keeps the outcomes."""

    def __init__(self, endpoints: list[Endpoint]):
        self.endpoints, self.outcomes = endpoints, {}

    def begin_sync(self, version, on_poll):
        for endpoint in self.endpoints:
            with contextlib.suppress(ServerError):  # one that was killed
                rest(endpoint)
        return self.endpoints

    def end_sync(self, version, outcomes, on_poll):
        self.outcomes = {e.name: why for e, why in outcomes.items()}


def changed(name: str, tensor: torch.Tensor, version: int) -> torch.Tensor:
    """A tensor of the model's folder at `version`, random and the same whoever computes it; 0: as it was."""
    if version == 0:
        return tensor
    seed = int.from_bytes(hashlib.sha256(f"{name} {version}".encode()).digest()[:6], "big")
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return (tensor.float() * (1 + 0.3 * noise)).to(tensor.dtype)


def change_adapters(policy: Policy, version: int) -> None:
    """Every tensor-parallel rank's b gets the same values; 0 at version 0."""
    for chunk in policy.chunks:
        for local, adapter in chunk.adapters.items():
            name = f"{global_name(local, chunk.layer_offset)} {version}"
            generator = torch.Generator().manual_seed(derived_seed(0, name))
            adapter.b.data.copy_(torch.randn(adapter.b.shape, generator=generator) * bool(version))


def change(policy: Policy, base: dict[str, torch.Tensor], version: int) -> None:
    if policy.config.model.lora is not None:
        change_adapters(policy, version)
        return
    layout, spec = policy.layout, policy.spec
    experts = spec.experts_of(layout.ep.rank(), layout.ep.size()).start
    with torch.no_grad():
        for chunk in policy.chunks:
            for local, parameter in chunk.named_parameters():
                name = global_name(local, chunk.layer_offset, experts)
                whole = [changed(part, base[part], version) for part in huggingface_names(spec, name)]
                parameter.copy_(to_megatron(spec, name, whole, layout.tp.rank(), layout.tp.size()))
                assert name == OUTPUT_LAYER or not torch.isnan(parameter).any()


class Ranks:
    """One rank of a layout, with its policy and what its syncs were seen to do."""

    def __init__(self, job: dict, case: dict):
        torch.set_num_threads(1)
        self.job, self.case, self.model, self.out = job, case, Path(job["model"]), Path(job["out"])
        self.rank, self.version = int(os.environ["RANK"]), case["first_version"]
        self.base = load_file(self.model / "model.safetensors")
        self.quantization = job.get("quantization")
        config = Config(
            model={"path": str(self.model), "dtype": job["dtype"], "lora": job.get("lora")},
            data={"source": "unused"},
            parallel=case["parallel"],
            rollout={"quantization": self.quantization},
            algorithm={"rollout_correction": {}},
            output_dir=str(self.out / case["name"]),
        )
        self.store = connect_store(300)
        self.coordinator = Coordinator(self.store, self.rank, StopFlag())
        layout = join_ranks(config, dist.PrefixStore("groups", self.store))
        self.policy = Policy(load_model_config(self.model), config, layout)
        self.config, self.layout, self.spec = config, layout, self.policy.spec
        self.fleet = Fleet([Endpoint(**e) for e in job["endpoints"]])
        self.seen: list[dict] = []

    def weight_sync(self, transport: str) -> WeightSync:
        sync = self.config.rollout.sync.model_copy(update={"transport": transport, "bucket_bytes": BUCKET_BYTES})
        rollout = self.config.rollout.model_copy(update={"sync": sync})
        self.policy.config = self.config.model_copy(update={"rollout": rollout})
        return WeightSync(self.policy, self.fleet if self.rank == 0 else None, self.coordinator)

    def sync(self, weight_sync: WeightSync, transport: str) -> None:
        """One sync of new random weights, and what every server then is found to have."""
        self.version += 1
        version, endpoints = self.version, self.fleet.endpoints
        change(self.policy, self.base, version)
        report = weight_sync.sync(version, self.coordinator.check)
        expected = {tp: ExpectedChecksums(self.spec, tp, "cpu") for tp in {e.tp for e in endpoints}}
        weights = {name: changed(name, tensor, version) for name, tensor in self.base.items()} if self.rank == 0 else {}
        if self.job.get("lora"):  # tests/policy/test_lora.py has the export beside transformers
            write_huggingface(self.policy, self.out / "merged")
            files = self.out.glob("merged/*.safetensors") if self.rank == 0 else ()
            weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        if self.quantization is not None:
            weights = {n: dequantize(*quantize(t)) if is_quantized(n) else t for n, t in weights.items()}
        for checksums in expected.values():
            checksums.add(weights.items())
        sums = {tp: checksums.gather(self.layout.host) for tp, checksums in expected.items()}
        if self.rank:
            return
        seen = {"transport": transport, "version": version, **vars(report), "outcomes": self.fleet.outcomes}
        seen |= {"buckets": sum(1 for _ in weight_sync.schedule.buckets), "servers": {}}
        for endpoint in endpoints:
            if self.fleet.outcomes[endpoint.name] is None:
                seen["servers"][endpoint.name] = {
                    "checksum": mismatch(endpoint, sums[endpoint.tp], 120),
                    "version": call(endpoint, "/model_info", None, 60)["weight_version"],
                }
        self.seen.append(seen)

    def put_back(self, weight_sync: WeightSync) -> None:
        """Leaves the servers as they were when they started."""
        change(self.policy, self.base, 0)
        weight_sync.sync(0, self.coordinator.check)

    def finish(self) -> None:
        if self.rank == 0:
            (self.out / f"{self.case['name']}.json").write_text(json.dumps(self.seen, indent=1))
        dist.barrier()
        self.coordinator.close()
        self.store.set(f"done{self.rank}", "")
        if self.rank == 0:  # it serves the store
            self.store.wait([f"done{r}" for r in range(self.layout.world_size)])


def run_layout(job: dict, case: dict) -> None:
    ranks = Ranks(job, case)
    for transport in job["transports"]:
        weight_sync = ranks.weight_sync(transport)
        for _ in range(job["syncs"]):
            ranks.sync(weight_sync, transport)
        if transport == job["transports"][-1]:
            ranks.put_back(weight_sync)
        weight_sync.close()
    ranks.finish()


def run_kill(job: dict, case: dict) -> None:
    """In the second sync server-1 (processes job["kill"]) dies after the first bucket; in the fourth it is back."""
    ranks = Ranks(job, case)
    (transport,) = job["transports"]
    weight_sync = ranks.weight_sync(transport)
    send_round = weight_sync._round

    def kill_first(number, *arguments):
        if number == 1 and ranks.rank == 0 and len(ranks.seen) == 1:
            for pid in job["kill"]:
                os.kill(pid, signal.SIGKILL)
        send_round(number, *arguments)

    with mock.patch.object(weight_sync, "_round", kill_first):
        ranks.sync(weight_sync, transport)
        ranks.sync(weight_sync, transport)
    ranks.fleet.endpoints = ranks.fleet.endpoints[:1]  # as the fleet does with a server that failed
    ranks.sync(weight_sync, transport)
    back = ranks.out / "back.json"
    if ranks.rank == 0:
        (ranks.out / "killed").touch()
        while not back.exists():
            time.sleep(0.2)
    dist.barrier()
    ranks.fleet.endpoints = [*ranks.fleet.endpoints, Endpoint(**json.loads(back.read_text()))]
    ranks.sync(weight_sync, transport)
    weight_sync.close()
    ranks.finish()


def run_withheld(job: dict, case: dict) -> None:
    """One tensor is not sent, unnoticed by the sender."""
    ranks = Ranks(job, case)
    (transport,) = job["transports"]
    weight_sync = ranks.weight_sync(transport)
    stage = weight_sync._transport.stage

    def stage_less(number, tensors):
        return stage(number, {name: tensor for name, tensor in tensors.items() if name != job["withheld"]})

    with mock.patch.object(weight_sync._transport, "stage", stage_less):
        ranks.sync(weight_sync, transport)
    ranks.sync(weight_sync, transport)
    weight_sync.close()
    ranks.finish()


RUNS = {"layout": run_layout, "kill": run_kill, "withheld": run_withheld}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    for case in job["layouts"]:
        start = time.monotonic()
        logs = Path(job["out"]) / f"logs-{case['name']}"
        logs.mkdir()
        wait_for(fork_ranks(case["ranks"], lambda case=case: RUNS[job.get("run", "layout")](job, case), logs), logs)
        print(f"{case['name']}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
