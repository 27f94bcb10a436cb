"""Run by test_custom_functions.py: updates by built-in losses and advantages, and by functions that are to be equal to
them or wrong, on each rank of some layouts. What each rank has found goes to rankN.json."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for own_functions, too

from forked_ranks import fork_ranks, wait_for

from dynamo_megatron.policy import backend

backend.enable_cpu()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layout_runs import rollouts  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from dynamo_megatron.algorithm.user_functions import load_loss  # noqa: E402
from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.batch import TrainBatch  # noqa: E402
from dynamo_megatron.policy.layout import Layout, join_ranks  # noqa: E402
from dynamo_megatron.policy.policy import NonFiniteError, Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402


def parameters(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in policy.chunks for p in chunk.parameters()]


def build(config: dict, algorithm: dict, layout: Layout) -> tuple[Policy, TrainBatch]:
    whole = Config.model_validate({**config, "algorithm": algorithm})
    spec = load_model_config(whole.model.path)
    return Policy(spec, whole, layout), TrainBatch.build(rollouts(spec.vocab_size, 7, None), whole, layout.gather)


def trained(config: dict, algorithm: dict, layout: Layout) -> tuple[list[dict], list[torch.Tensor], float]:
    """(what the updates of two steps return, the weights after them, how far those have moved)."""
    policy, batch = build(config, algorithm, layout)
    before, updates = parameters(policy), []
    mini_batches = policy.pack(batch.rollouts, batch.mini_batches)
    for _ in range(2):
        stats = policy.token_stats(batch.rollouts, mini_batches)
        reference = policy.reference_logprobs(batch.rollouts, mini_batches)
        updates += [policy.update(batch, mini, stats, reference, 1e-3) for mini in mini_batches]
    after = parameters(policy)
    return updates, after, gap(before, after)


def gap(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of a parameter, by its norm."""
    return max(float((a - b).norm() / a.norm().clamp(min=1e-12)) for a, b in zip(ones, others, strict=True))


def compared(config: dict, pair: list[dict], layout: Layout) -> dict:
    (updates, weights, moved), (custom_updates, custom_weights, _) = (trained(config, a, layout) for a in pair)
    both = list(zip(updates, custom_updates, strict=True))
    return {
        "updates": len(both),
        "moved": moved,
        "weights": gap(weights, custom_weights),
        "equal": all(torch.equal(a, b) for a, b in zip(weights, custom_weights, strict=True)),
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in both),
        "grad_norm": max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in both),
        "kl": max(abs(a["kl"] - b["kl"]) / max(1.0, abs(a["kl"])) for a, b in both),
    }


def said_of_wrong_functions(config: dict, algorithm: dict, wrong: list[str], layout: Layout) -> dict[str, str]:
    policy, batch = build(config, algorithm, layout)
    (mini,) = policy.pack(batch.rollouts, batch.mini_batches)
    stats = policy.token_stats(batch.rollouts, [mini])
    before, found = parameters(policy), {}
    for name in wrong:
        policy.loss_function = load_loss(f"own_functions:{name}")
        found[name] = "nothing"
        try:
            policy.update(batch, mini, stats, None, 1e-3)
        except (ValueError, NonFiniteError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    policy.loss_function = load_loss("own_functions:grpo")
    nothing = TrainBatch(batch.rollouts, np.zeros_like(batch.advantages), batch.mini_batch, batch.weights)
    found["no advantage"] = str(policy.update(nothing, mini, stats, None, 1e-3)["skipped"])
    advantages = batch.advantages.copy()
    advantages[batch.rollouts.rollout_ids.index("1-1")] = np.nan
    broken = TrainBatch(batch.rollouts, advantages, batch.mini_batch, batch.weights)
    for name in ("function", "no function"):
        try:
            policy.update(broken, mini, stats, None, 1e-3)
        except NonFiniteError as error:
            found[f"nan advantage, {name}"] = str(error)
        policy.loss_function = None
    found["moved"] = str(gap(before, parameters(policy)))
    try:
        build(config, {**algorithm, "advantage": {"kind": "own_functions:by_rank"}}, layout)
        found["by_rank"] = "nothing"
    except ValueError as error:
        found["by_rank"] = str(error)
    return found


def run(case: dict, out: Path) -> None:
    torch.set_num_threads(1)
    layout = join_ranks(Config.model_validate(case["config"]), connect_store(60))
    found = {name: compared(case["config"], pair, layout) for name, pair in case["pairs"].items()}
    found["wrong"] = said_of_wrong_functions(case["config"], case["algorithm"], case["wrong"], layout)
    (out / f"rank{layout.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])
        out.mkdir()
        wait_for(fork_ranks(case["ranks"], lambda case=case, out=out: run(case, out), out), out)


if __name__ == "__main__":
    main(sys.argv[1])
