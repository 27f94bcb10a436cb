"""The line that is printed for each step, and the legend that explains it."""

from __future__ import annotations

from collections.abc import Mapping

# Label -> meaning, and the text of a step's metrics. The most important first: a narrow terminal shows only these.
FIELDS = {
    "reward": ("mean of rollouts", "{reward/mean:>6.3f}"),
    "loss": ("policy", "{policy/loss:+.4f}"),
    "grad": ("norm before clipping", "{policy/grad_norm:>6.3f}"),
    "time": ("s per step", "{time/step:>6.2f}"),
    "gap": ("mean |policy - server| logprob, nats", "{rollout/logprob_gap_mean:.0e}"),
    "stale": ("mean steps from sampling a token to training on it", "{rollout/staleness_mean:.2f}"),
    "entropy": ("nats per token", "{policy/entropy:.3f}"),
    "len": ("mean response tokens", "{rollout/response_length_mean:>7.1f}"),
    "solved": ("share of rollouts", "{reward/success:.3f}"),
    "n": ("rollouts per prompt", "{allocation/n_min:>2.0f}..{allocation/n_max:<3.0f}"),
    "gen": ("parts of time, s: generate", "{time/generate:>6.2f}"),
    "upd": ("update", "{time/update:>6.2f}"),
    "sync": ("weights to servers", "{time/weight_sync:>6.2f}"),
    "logp": ("logprobs", "{time/logprobs:>6.2f}"),
    "eval": ("evaluation", "{time/evaluate:>6.2f}"),
    "save": ("checkpoint", "{time/save:>6.2f}"),
    "other": ("the rest", "{time/other:>6.2f}"),
}
LEGEND = f"legend: {'; '.join(f'{label}: {meaning}' for label, (meaning, _) in FIELDS.items())}"


def step_line(metrics: Mapping[str, float], steps: int, width: int | None = None) -> str:
    """The line of a step: of the fields whose metrics it has as many as fit into `width` columns (None: all)."""
    line = f"step {metrics['step']:>{len(str(steps))}}/{steps}"
    for label, (_, text) in FIELDS.items():
        try:
            field = f"  {label} {text.format_map(metrics)}"
        except KeyError:  # a metric of an option that is off
            continue
        if width is not None and len(f"{line}{field}".rstrip()) > width:
            break
        line += field
    return line.rstrip()
