"""Run by test_inputs.py: what the policy says to token ids that the model does not have, to folders with a value that
is not finite or a flipped bit, to weights that became NaN, and to updates that ruin them or have no weighted token."""

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
from dynamo_megatron.policy.policy import NonFiniteError, Policy  # noqa: E402
from dynamo_megatron.runtime.coordination import connect_store  # noqa: E402
from dynamo_megatron.types import Rollout, RolloutBatch  # noqa: E402

LENGTHS = [(3, 5), (2, 4), (4, 0)]  # prompt and response, tokens


def rollouts(change: tuple[int, int, int] | None = None) -> RolloutBatch:
    """`change`: (rollout, position, token id)."""
    made = []
    for i, (prompt, response) in enumerate(LENGTHS):
        tokens = list(range(5 + i, 5 + i + prompt + response))
        if change is not None and change[0] == i:
            tokens[change[1]] = change[2]
        spans = [(0, 0, response)]
        mask, logprobs = [0] * prompt + [1] * response, [-1.0] * response
        record = Rollout(f"g{i}-0", f"g{i}", f"p{i}", 1, tokens, mask, logprobs, spans, "stop", 0.0, False, {})
        made.append(record)
    return RolloutBatch.from_rollouts(made)


def said(call) -> str:
    try:
        call()
    except (ValueError, NonFiniteError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def run(case: dict, out: Path, store: dist.Store) -> None:
    config = Config.model_validate(case["config"])
    layout = join_ranks(config, store)
    spec = load_model_config(config.model.path)
    found = {name: said(lambda path=path: build(config, spec, layout, path)) for name, path in case["folders"].items()}
    for name in ("flipped", "nan"):
        kl = with_reference(config, case["folders"][name])
        found[f"reference {name}"] = said(lambda kl=kl: Policy(spec, kl, layout))
    policy = build(config, spec, layout, config.model.path)
    for change in [None, *map(tuple, case["changes"])]:
        batch, everyone = rollouts(change), [np.arange(len(LENGTHS))]
        weights = np.full(len(LENGTHS), 0.1)
        found[f"stats {change}"] = said(lambda b=batch, e=everyone: policy.token_stats(b, policy.pack(b, e)))
        found[f"fit {change}"] = said(lambda b=batch, w=weights: policy.fit(b, w, 1e-3))
    with torch.no_grad():
        if layout.rank == layout.world_size - 1:
            policy.chunks[-1].head_weight[0, 0] = torch.nan
    batch = rollouts()
    everyone = policy.pack(batch, [np.arange(len(LENGTHS))])
    found["NaN"] = said(lambda: policy.token_stats(batch, everyone))
    with torch.no_grad():
        policy.chunks[-1].head_weight[0, 0] = torch.nan
    found["NaN on all"] = said(lambda: policy.token_stats(batch, everyone))
    for rate in case["rates"]:
        for mini_batches in (1, 2):
            policy = build(config, spec, layout, config.model.path)
            found[f"{mini_batches} updates at {rate}"] = said(lambda p=policy, m=mini_batches, r=rate: update(p, m, r))
        policy = build(config, spec, layout, config.model.path)
        found[f"sft at {rate}"] = said(lambda p=policy, r=rate: (p.fit(batch, weights, r), p.check_weights(r)))
    for name, change in case["every token counts"].items():
        policy = Policy(spec, changed(config, change), layout)
        found[name] = update(policy, 1, 1e-3, weight=0.0)
    policy = Policy(spec, with_reference(config, case["folders"]["huge"]), layout)
    found["reference NaN"] = said(lambda: policy.reference_logprobs(batch, everyone))
    (out / f"rank{layout.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(config: Config, spec, layout, path: str) -> Policy:
    model = config.model.model_copy(update={"path": path})
    return Policy(spec, config.model_copy(update={"model": model}), layout)


def update(policy: Policy, mini_batches: int, rate: float, weight: float = 0.1) -> list[dict]:
    """Makes a step's updates, each with a response, as `Trainer` does."""
    source, of_update = rollouts(), np.array([0, mini_batches - 1, 0])
    batch = TrainBatch(source, np.array([1.0, -1.0, 0.0]), of_update, np.full(len(LENGTHS), weight))
    packed = policy.pack(source, batch.mini_batches)
    stats, reference = policy.token_stats(source, packed), policy.reference_logprobs(source, packed)
    results = [policy.update(batch, mini, stats, reference, rate) for mini in packed]
    policy.check_weights(rate)
    return results


def changed(config: Config, algorithm: dict) -> Config:
    plain = config.model_dump()
    for section, change in algorithm.items():
        plain["algorithm"][section] |= change
    return Config.model_validate(plain)


def with_reference(config: Config, path: str) -> Config:
    return changed(config, {"kl": {"coef": 0.1, "reference": path}})


def main(cases_file: str) -> None:
    for case in json.loads(Path(cases_file).read_text()):
        out = Path(case["out"])

        def body(case=case, out=out) -> None:
            torch.set_num_threads(1)
            run(case, out, connect_store(60))

        wait_for(fork_ranks(case["ranks"], body, out), out)


if __name__ == "__main__":
    main(sys.argv[1])
