"""Run by the layout guard (layout_guard.py): cases, each on ranks of its own, results as files."""

import contextlib
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType
from unittest import mock

sys.path.append(str(Path(__file__).parent))

from forked_ranks import fork_ranks, wait_for

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed.param_and_grad_buffer import shard_buffer  # noqa: E402

from dynamo_megatron.algorithm.baseline import Baseline  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy import optimizer as optimizer_module  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import NonFiniteError, Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import RolloutBatch  # noqa: E402
from dynamo_megatron.weight_sync.folder import write_huggingface  # noqa: E402


def rollouts(vocabulary: int, seed: int, order_seed: int | None) -> RolloutBatch:
    """Four groups of random sizes, one prompt twice, responses of random lengths; optionally in another
    order."""
    generator = np.random.default_rng(seed)
    rows = []
    for group, prompt in enumerate("abca"):
        start = generator.integers(0, vocabulary, int(generator.integers(3, 12)))
        for k in range(int(generator.integers(2, 14))):
            response = generator.integers(0, vocabulary, int(generator.integers(1, 30)))
            logprobs = generator.normal(-np.log(vocabulary), 0.3, len(response)).astype(np.float32)
            rows.append(
                (f"{group}-{k}", f"g{group}", prompt, start, response, float(generator.random() < 0.5), logprobs)
            )
    if order_seed is not None:  # the groups' order is kept: mini-batches are cut by it
        rows = [rows[i] for i in np.random.default_rng(order_seed).permutation(len(rows))]
        firsts = {row[1]: i for i, row in reversed(list(enumerate(rows)))}
        leading = [firsts[group] for group in sorted(firsts)]
        rows = [rows[i] for i in leading] + [row for i, row in enumerate(rows) if i not in leading]
    ids, groups, prompts, starts, responses, rewards, logprobs = zip(*rows, strict=True)
    return RolloutBatch(
        rollout_ids=list(ids),
        group_ids=list(groups),
        prompt_ids=list(prompts),
        tokens=np.concatenate([np.concatenate(pair) for pair in zip(starts, responses, strict=True)]),
        offsets=np.concatenate([[0], np.cumsum([len(s) + len(r) for s, r in zip(starts, responses, strict=True)])]),
        prompt_lengths=np.asarray([len(s) for s in starts]),
        engine_logprobs=np.concatenate(logprobs),
        rewards=np.asarray(rewards),
        successes=np.asarray(rewards) > 0,
        weight_versions=np.zeros(sum(map(len, responses)), np.int32),
        finish_reasons=["stop"] * len(rows),
        servers=[""] * len(rows),
    )


class Routing:
    """Which experts the routers chose for each response token: a set's bits by layer and slot."""

    def __init__(self, policy: Policy, slots: int):
        self._layout, self._now = policy.layout, None
        self._sequence_parallel = policy.config.parallel.sequence_parallel
        self.chosen = torch.zeros(policy.spec.num_layers, slots, dtype=torch.int64)
        self._handles = []
        for chunk in policy.chunks:
            for layer in chunk.decoder.layers:
                self._handles.append(layer.mlp.router.register_forward_hook(self._record))
            chunk.forward_packed = self._watch(chunk.forward_packed)

    def _watch(self, forward):
        def watched(micro_batch):
            self._now = micro_batch
            return forward(micro_batch)

        return watched

    def _record(self, router, _inputs, outputs) -> None:
        bits = (outputs[1].long() << torch.arange(outputs[1].shape[1])).sum(1)
        first = self._layout.tp.rank() * len(bits) if self._sequence_parallel else 0
        rows, slots = self._now.rows, self._now.slots
        here = (rows >= first) & (rows < first + len(bits))
        self.chosen[router.layer_number - 1, slots[here]] = bits[rows[here] - first]

    def finish(self) -> torch.Tensor:
        for handle in self._handles:
            handle.remove()
        dist.all_reduce(self.chosen, op=dist.ReduceOp.MAX)
        return self.chosen


def write_gradients(policy: Policy, folder: Path) -> None:
    """The finished gradients as a Hugging Face folder, through the same mapping as the weights."""
    for ddp in policy.ddp:
        for bucket_group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
            group = bucket_group.intra_distributed_optimizer_instance_group
            for bucket in bucket_group.buckets:
                mine = shard_buffer(bucket.grad_data, group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=group)
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    for p in parameters:
        if not getattr(p, "tensor_model_parallel", False):  # every rank has its own of these, and only one is written
            bounds = torch.stack([-p.main_grad, p.main_grad])
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=policy.layout.tp)
            assert torch.equal(-bounds[0], bounds[1]), f"{tuple(p.shape)}: tensor-parallel copies differ in gradient"
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.main_grad)
        write_huggingface(policy, folder)
        for p, value in zip(parameters, values, strict=True):
            p.copy_(value)


def before_the_step(policy: Policy, act) -> None:
    """Has `act` called once the gradients of an update are complete."""
    prepare = policy.optimizer.prepare_grads

    def prepare_grads():
        act()
        return prepare()

    policy.optimizer.prepare_grads = prepare_grads


def seed_fault(fault: str | None, policy: Policy, batch: TrainBatch) -> TrainBatch:
    """What the guard must notice."""
    if fault == "micro_batch_mean":
        micro = policy.pack(batch.rollouts, batch.mini_batches)[0].micro_batches
        weights = batch.weights.copy()
        for m in micro:
            weights[m.sequences] = 1 / len(micro) / max(1, len(m.slots))
        return dataclasses.replace(batch, weights=weights)
    if fault == "cp_factor":
        size = policy.layout.cp.size()
        before_the_step(policy, lambda: [ddp.scale_gradients(1 / size) for ddp in policy.ddp])
    if fault == "tied_head":
        policy._head_weight.zero_out_wgrad = False
    return batch


@contextlib.contextmanager
def built_with(fault: str | None, overlap: bool):
    """Policies built here are built wrong, or with gradients that are reduced during the backward pass."""
    with contextlib.ExitStack() as stack:

        def replaced(module: ModuleType, name: str, **arguments) -> None:
            stock = getattr(module, name)
            stack.enter_context(mock.patch.object(module, name, partial(stock, **arguments)))

        if overlap or fault == "stale_parameters":  # as on GPUs
            stack.enter_context(mock.patch.object(optimizer_module, "overlaps", lambda layout: True))
        if overlap:  # in several buckets, which only much larger models have
            replaced(optimizer_module, "DistributedDataParallelConfig", bucket_size=20_000)
        if fault == "stale_parameters":  # gathered in the next forward pass only
            replaced(optimizer_module, "DistributedDataParallelConfig", overlap_param_gather=True)
            replaced(optimizer_module, "MegatronConfig", overlap_param_gather=True)
        if fault == "experts_as_dense":  # as Megatron marks them where ep is 1
            stock_ddp = optimizer_module.DistributedDataParallel

            def dense(config, ddp_config, chunk, **arguments):
                for parameter in chunk.parameters():
                    parameter.allreduce = True
                return stock_ddp(config, ddp_config, chunk, **arguments)

            stack.enter_context(mock.patch.object(optimizer_module, "DistributedDataParallel", dense))
        yield


def run_case(case: dict, store: dist.Store) -> None:
    config, out = Config.model_validate(case["config"]), Path(case["out"])
    spec = load_model_config(config.model.path)
    layout = join_ranks(config, store)
    fault = case.get("fault")
    with built_with(fault, case.get("overlap", False)):
        policy = Policy(spec, config, layout)
    source = rollouts(spec.vocab_size, case["seed"], case.get("order_seed"))
    each = np.ones(len(source.rewards))
    batch = TrainBatch.build(source, config, baseline=Baseline(0.4 * each, 3 * each, score_ratio=2.0))
    if fault in ("nan", "no_signal"):
        (out / "fault.json").write_text(json.dumps(run_fault(fault, policy, batch)))
        return
    written = []

    def write_once() -> None:
        if not written:
            written.append(True)
            write_gradients(policy, out / "gradients")

    before_the_step(policy, write_once)
    batch = seed_fault(fault, policy, batch)  # what it does before a step comes before the gradients are written
    routing = Routing(policy, len(source.engine_logprobs)) if spec.num_experts else None
    updates, experts = [], None
    values: dict[str, list[torch.Tensor]] = {"logprobs": [], "entropy": [], "reference": []}
    mini_batches = policy.pack(batch.rollouts, batch.mini_batches)
    for _ in range(2):
        stats = policy.token_stats(batch.rollouts, mini_batches)
        if routing is not None and experts is None:
            experts = routing.finish()
        reference = policy.reference_logprobs(batch.rollouts, mini_batches)
        updates += [policy.update(batch, mini, stats, reference, 1e-3) for mini in mini_batches]
        for name, value in zip(values, (stats.logprobs, stats.entropy, reference), strict=True):
            if value is not None:
                values[name].append(value)
    if experts is not None:
        values["experts"] = [experts]
    offsets = source.response_offsets
    tokens = {
        rollout: {
            name: [t[..., offsets[s] : offsets[s + 1]].tolist() for t in passes] for name, passes in values.items()
        }
        for s, rollout in enumerate(source.rollout_ids)
    }
    write_huggingface(policy, out / "hf")
    if layout.rank == 0:
        (out / "result.json").write_text(json.dumps({"updates": updates, "tokens": tokens}))


def run_fault(fault: str, policy: Policy, batch: TrainBatch) -> dict:
    """What an update says to one rollout's NaN, or to advantages that are all 0; and whether a weight moved."""
    advantages = np.zeros_like(batch.advantages) if fault == "no_signal" else batch.advantages.copy()
    if fault == "nan":
        advantages[batch.rollouts.rollout_ids.index("1-1")] = np.nan
    (mini,) = policy.pack(batch.rollouts, [np.arange(len(advantages))])
    stats = policy.token_stats(batch.rollouts, [mini])
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    said = ""
    try:
        said = policy.update(dataclasses.replace(batch, advantages=advantages), mini, stats, None, 1e-3)
    except NonFiniteError as error:
        said = str(error)
    return {"said": said, "moved": any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))}


def as_a_rank(case: dict) -> None:
    torch.set_num_threads(1)
    run_case(case, connect_store(300))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(rounds_file: str) -> None:
    """A round is cases that run at the same time. Their ranks end with them: gloo's threads of groups that have ended
    would spin on."""
    for cases in json.loads(Path(rounds_file).read_text()):
        start = time.monotonic()
        teams = [(fork_ranks(case["ranks"], partial(as_a_rank, case), Path(case["out"])), case) for case in cases]
        for pids, case in teams:
            wait_for(pids, Path(case["out"]))
            print(f"{time.monotonic() - start:5.1f} s {case['out']}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
