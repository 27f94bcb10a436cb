"""What a step's generation took of the servers: keys of metrics.jsonl under `fleet/`, by server and in all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # names only: tracking does not depend on what it reports of
    from dynamo_megatron.rollout.result import RolloutResult


def fleet_metrics(result: RolloutResult) -> dict[str, float]:
    """Of each server SERVER: `fleet/SERVER/tokens_per_second`, `busy_share` (of the time of generation, with a request
    under way), `kv_cache` (the largest share in use that was seen; absent where it was not measured) and `rollouts`
    (that it answered); of all together `fleet/retries` (requests lost with a server and asked again), `fleet/restarts`
    and `time/generate_tail` (seconds after 90 % of the responses were there).
    """
    seconds = max(1e-9, result.times.get("generate", 0.0))
    metrics = {
        "fleet/retries": sum(use.retries for use in result.uses.values()),
        "fleet/restarts": sum(use.restarts for use in result.uses.values()),
        "time/generate_tail": result.times.get("tail", 0.0),
    }
    answered = result.counts_by_server
    for name, use in sorted(result.uses.items()):
        if name:
            metrics[f"fleet/{name}/tokens_per_second"] = use.tokens / seconds
            metrics[f"fleet/{name}/busy_share"] = use.busy / seconds
            if use.kv_cache is not None:
                metrics[f"fleet/{name}/kv_cache"] = use.kv_cache
            metrics[f"fleet/{name}/rollouts"] = sum(answered.get(name, {}).values())
    return metrics
