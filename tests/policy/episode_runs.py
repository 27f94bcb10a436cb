"""Run by test_episodes.py: an update on episodes, and on the same tokens as rollouts of one turn each."""

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
from megatron.core import parallel_state  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import EpisodeRecord, Rollout, RolloutBatch  # noqa: E402


def run(case: dict, out: Path, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    layout = join_ranks(config, store)
    policy = Policy(load_model_config(config.model.path), config, layout)
    made = [{**r, "episode": r["episode"] and EpisodeRecord(**r["episode"])} for r in case["rollouts"]]
    batch = RolloutBatch.from_rollouts([Rollout(**rollout) for rollout in made])
    one = np.zeros(len(made), np.int64)
    train = TrainBatch(batch, np.array(case["advantages"]), one, np.array(case["weights"]))
    (mini,) = policy.pack(batch, [np.arange(len(made))])
    stats = policy.token_stats(batch, [mini])
    gradient = []
    prepare = policy.optimizer.prepare_grads

    def keeping():
        gradient.extend(p.main_grad.flatten().tolist() for c in policy.chunks for p in c.parameters())
        return prepare()

    policy.optimizer.prepare_grads = keeping
    update = policy.update(train, mini, stats, None, 1e-2)
    after = policy.token_stats(batch, [mini])
    if layout.rank == 0:
        found = {"before": stats.logprobs.tolist(), "after": after.logprobs.tolist(), "norm": update["grad_norm"]}
        (out / "result.json").write_text(json.dumps({**found, "gradient": [g for p in gradient for g in p]}))
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
