"""Run by test_spikes.py: updates of which one has a gradient that is larger than those before it."""

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
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402
from dynamo_megatron.policy.spikes import GradientSpike  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import Sequences  # noqa: E402

SCALES = (1.0, 1.0, 1.0, 50.0, 1.0, 1.0)  # of the examples' weights, and so of the gradient


def examples() -> Sequences:
    lengths = np.array([9, 12, 7])
    tokens = np.random.default_rng(0).integers(5, 90, lengths.sum())
    return Sequences(["a", "b", "c"], tokens, np.concatenate([[0], np.cumsum(lengths)]), np.array([3, 3, 3]))


def weights_of(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]


def steps_of(policy: Policy) -> int:
    """Adam's step count; the same for all of this rank's parameters."""
    states = [s for o in policy.optimizer.chained_optimizers for s in o.optimizer.state.values()]
    (steps,) = {int(s["step"]) for s in states} or {0}
    return steps


def run(case: dict, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    layout, spec, batch = join_ranks(config, store), load_model_config(config.model.path), examples()
    policy, rows = Policy(spec, config, layout), []
    for scale in SCALES:
        before = weights_of(policy)
        result = policy.fit(batch, np.full(3, 0.01 * scale), 1e-3)
        moved = any(not torch.equal(a, b) for a, b in zip(before, weights_of(policy), strict=True))
        rows.append((result["grad_norm"], "spike" in result, moved, steps_of(policy)))
    plain = Policy(spec, config, layout)
    for scale in SCALES:
        if scale == 1:
            plain.fit(batch, np.full(3, 0.01), 1e-3)
    names = ("norms", "spikes", "moved", "optimizer steps")
    found = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    both = zip(weights_of(policy), weights_of(plain), strict=True)
    found["equal to a run without it"] = all(torch.equal(a, b) for a, b in both)
    case["config"]["optimizer"]["spike"]["action"] = "stop"
    stops = Policy(spec, Config.model_validate(case["config"]), layout)
    try:
        for scale in SCALES:
            stops.fit(batch, np.full(3, 0.01 * scale), 1e-3)
    except GradientSpike as spike:
        found["stopped"] = str(spike)
    (Path(case["out"]) / f"rank{layout.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])

        def body(case=case) -> None:
            torch.set_num_threads(1)
            run(case, connect_store(60))

        wait_for(fork_ranks(case["ranks"], body, out), out)


if __name__ == "__main__":
    main(sys.argv[1])
