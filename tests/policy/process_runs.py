"""Run by test_implicit_rewards.py: PRIME's implicit rewards of a few responses, and an update with them."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from forked_ranks import fork_ranks, wait_for

from dynamo_megatron.policy import backend

backend.enable_cpu()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch, cut_mini_batches  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import Rollout, RolloutBatch  # noqa: E402


def run(case: dict, out: Path, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    layout = join_ranks(config, store)
    policy = Policy(load_model_config(config.model.path), config, layout)
    batch = RolloutBatch.from_rollouts([Rollout(**rollout) for rollout in case["rollouts"]])
    minis = policy.pack(batch, cut_mini_batches(batch.group_ids, 1))
    before = policy.token_stats(batch, minis)
    implicit = policy.implicit_rewards(batch, minis)
    reference = policy.reference_logprobs(batch, minis)
    after = policy.token_stats(batch, minis)
    assert torch.equal(before.logprobs, after.logprobs), "the policy's weights are not back in their place"
    train = TrainBatch.build(batch, config, layout.gather, implicit_rewards=implicit)
    updates = [policy.update(train, mini, before, reference, 1e-3) for mini in minis]
    if layout.rank == 0:
        found = {"implicit": implicit.tolist(), "reference": reference.tolist(), "updates": updates}
        (out / "result.json").write_text(json.dumps({**found, "held": len(policy._frozen._held)}))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])

        def body(case=case, out=out) -> None:
            torch.set_num_threads(1)
            run(case, out, connect_store(60))

        wait_for(fork_ranks(case["ranks"], body, out), out)


if __name__ == "__main__":
    main(sys.argv[1])
