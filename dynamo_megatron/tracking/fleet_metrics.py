"""Metrics of the servers during a step's generation: the keys of metrics.jsonl under `fleet/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type hints only: tracking does not depend on the packages whose metrics it reports
    from dynamo_megatron.rollout.result import RolloutResult


def fleet_metrics(result: RolloutResult) -> dict[str, float]:
    """The metrics of one step. For each server SERVER: `fleet/SERVER/tokens_per_second`, `busy_share` (the share of the
    generation time with a request under way; both are of the time since the step before if rollouts are generated
    ahead), `kv_cache` (the largest share in use that was seen; absent where it was not measured) and `rollouts` (how
    many it answered). For all servers together: `fleet/retries` (requests that were lost with a server and sent again),
    `fleet/restarts`, and `time/generate_tail` (seconds from the point where 90 % of the responses had arrived).
    """
    seconds = max(1e-9, result.times.get("generate", 0.0) if result.ahead is None else result.ahead.seconds)
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
