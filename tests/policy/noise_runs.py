"""Run by test_gradient_noise.py: an update whose gradient's noise is measured, on each rank of some layouts, and one
that is not. What rank 0 has found goes to found.json; on one rank the products of all rollouts' gradients, too."""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from forked_ranks import fork_ranks, wait_for

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layout_runs import rollouts  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy import gradients  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import NonFiniteError, Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402


def products(policy: Policy, batch: TrainBatch) -> list[list[float]]:
    """[S, S], of what each rollout adds to the gradient."""
    rows = []
    for s in range(len(batch.advantages)):
        (mini,) = policy.pack(batch.rollouts, [np.array([s])])
        gradient = torch.cat([g.flatten().double() for g in policy.score(batch.rollouts, mini)])
        rows.append(gradient * float(batch.advantages[s] * batch.weights[s]))
    rows = torch.stack(rows)
    return (rows @ rows.T).tolist()


def run(config: dict, overlap: bool, out: Path) -> None:
    torch.set_num_threads(1)
    if overlap:  # as on GPUs: gradients are reduced during the last micro-batch's backward pass
        gradients.overlaps = lambda layout: True
    config = Config.model_validate(config)
    layout = join_ranks(config, connect_store(60))
    found = {}
    for measured in (False, True):
        policy = Policy(load_model_config(config.model.path), config, layout)
        source = rollouts(policy.spec.vocab_size, 7, None)
        # A special token may have the embedding 0, whose norm makes one gradient larger than all others.
        tokens = np.where(source.tokens < 5, source.tokens + 5, source.tokens)
        source = dataclasses.replace(source, prompt_ids=source.group_ids, tokens=tokens)
        batch = TrainBatch.build(source, config)
        (mini,) = policy.pack(source, [np.arange(len(batch.advantages))], measured)
        if not measured and layout.world_size == 1:
            found["products"] = products(policy, batch)
        stats = policy.token_stats(source, [mini])
        found["measured" if measured else "plain"] = policy.update(batch, mini, stats, None, 1e-3)
        for again in (False, measured):  # an update after a measured one, and one before
            (later,) = policy.pack(source, [np.arange(len(batch.advantages))], again)
            policy.update(batch, later, stats, None, 1e-4)
        after = policy.token_stats(source, [mini])
        found[f"after {measured}"] = after.logprobs.tolist()
        with torch.no_grad():
            next(policy.chunks[0].parameters()).fill_(torch.nan)
        try:
            policy.token_stats(source, [mini])
        except NonFiniteError as error:
            found[f"inputs {measured}"] = error.inputs.measured
    found["split"] = {field.name: getattr(mini.split, field.name) for field in dataclasses.fields(mini.split)}
    found["split"] = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found["split"].items()}
    if layout.rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])
        out.mkdir()
        wait_for(
            fork_ranks(case["ranks"], lambda case=case, out=out: run(case["config"], case["overlap"], out), out), out
        )


if __name__ == "__main__":
    main(sys.argv[1])
