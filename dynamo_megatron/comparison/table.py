"""A comparison's findings as plain data and as Markdown tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynamo_megatron.comparison.curves import Outcome, finished
from dynamo_megatron.comparison.spec import Run, Spec
from dynamo_megatron.comparison.statistics import SHARES, UNITS, Arm, Estimate, Findings, cost_to
from dynamo_megatron.evaluation.results import markdown_row, summary_k

LEAST_SEEDS = 5  # for a ratio and its interval
ABSENT = "-"
SHARE_NAMES = {0.5: "half", 0.9: "90 %"}
UNIT_NAMES = {"rollouts": "rollouts", "tokens": "response tokens", "seconds": "seconds"}


@dataclass(frozen=True)
class Measured:
    """The data of the tables. `seeds`: the seeds whose runs have all ended, at least one."""

    spec: Spec
    seeds: list[int]
    outcomes: dict[Run, Outcome | None]  # None: the run has not ended
    curves: dict[Run, list[dict[str, Any]]]
    arms: dict[str, Arm]  # only with the runs of `seeds`
    findings: Findings

    def runs(self, arm: str, rate: float | None = None) -> list[Run]:
        """The arm's runs of `seeds`, ordered by rate and seed; `rate`: only the runs of this rate."""
        own = [r for r in self.outcomes if r.arm == arm and r.seed in self.seeds and rate in (None, r.rate)]
        return sorted(own, key=lambda run: (run.rate, self.seeds.index(run.seed)))

    def final_rate(self, arm: str) -> float:
        index = list(self.spec.arms).index(arm)
        return self.spec.rates(arm)[self.findings.summary.final_rate[index]]


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def as_plain(measured: Measured) -> dict[str, Any]:
    """All content of the tables as plain data that survives JSON. None stands for infinity or a missing value."""
    spec, summary = measured.spec, measured.findings.summary
    enough = len(measured.seeds) >= LEAST_SEEDS
    arms = {name: _arm(measured, a, enough) for a, name in enumerate(spec.arms)}
    targets = {SHARE_NAMES[s]: finite(t) for s, t in zip(SHARES, summary.targets, strict=True)}
    reference = list(spec.arms).index(spec.control)
    return {
        "metric": spec.metric,
        "control": spec.control,
        "seeds": measured.seeds,
        "seeds left out": [seed for seed in spec.seeds if seed not in measured.seeds],
        "start": finite(summary.start),
        "gain": finite(summary.final[reference] - summary.start),
        "targets": targets,
        "ratios": enough,
        "arms": arms,
    }


def _arm(measured: Measured, a: int, enough: bool) -> dict[str, Any]:
    spec, summary, findings = measured.spec, measured.findings.summary, measured.findings
    name = list(spec.arms)[a]
    rates, arm = spec.rates(name), measured.arms[name]
    best = measured.final_rate(name)
    failed = {f"{rate:g}": int(arm.failed[r].sum()) for r, rate in enumerate(rates) if arm.failed[r].any()}
    diverged = sum(o is not None and o.diverged for o in (measured.outcomes[r] for r in measured.runs(name)))
    final = {"learning_rate": best, "score": finite(summary.final[a]), "pass": _passes(measured, name, best)}
    if enough and name != spec.control:
        final["difference"] = _plain(findings.difference[name])
    costs: dict[str, Any] = {}
    for q, (share, target) in enumerate(zip(SHARES, summary.targets, strict=True)):
        reached = cost_to(arm, target)
        costs[SHARE_NAMES[share]] = {}
        for u, unit in enumerate(UNITS):
            rate = summary.cost_rate[a, q, u]
            cost = {
                "learning_rate": rates[rate],
                "median": finite(summary.cost[a, q, u]),
                "never reached": int(np.isinf(reached[rate, :, u]).sum()),
                "runs": len(measured.seeds),
            }
            if enough and name != spec.control:
                cost["ratio"] = _plain(findings.ratio[name][q][u])
            costs[SHARE_NAMES[share]][unit] = cost
    runs = {"ended": int(arm.failed.size), "failed": int(arm.failed.sum()), "failed by rate": failed}
    return {**runs, "diverged": diverged, "final": final, "cost": costs}


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: finite(value) for name, value in estimate._asdict().items()}


def _passes(measured: Measured, arm: str, rate: float) -> dict[str, float | None]:
    """The mean final pass@k over the seeds, by name; empty where a run has failed."""
    runs = measured.runs(arm, rate)
    if not all(finished(measured.outcomes[run]) for run in runs):
        return {}
    finals = [measured.curves[run][-1] for run in runs]
    return {f"pass@{k}": float(np.mean([f[f"eval/pass@{k}"] for f in finals])) for k in summary_k(finals[0])}


def as_markdown(found: dict[str, Any], notes: Sequence[str]) -> str:
    """The text of comparison.md without its picture."""
    names, control, seeds = list(found["arms"]), found["control"], found["seeds"]
    many = f"{len(seeds)} seed{'s' * (len(seeds) != 1)}"
    parts = [f"# Comparison of {', '.join(names)}: {found['metric']}, {many}", _failures(found), _finals(found)]
    if found["targets"]["half"] is None:
        parts.append(f"{control} has gained nothing over its start: there is no target, and no cost to reach it.")
    else:
        parts += [_costs(found, share) for share in found["targets"]]
    if not found["ratios"]:
        parts.append(
            f"No differences and no ratios: {many} of the {LEAST_SEEDS} that an interval over seeds needs at least. "
            "The medians above are of these runs alone."
        )
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(part for part in parts if part)


def _failures(found: dict[str, Any]) -> str:
    lines = []
    for name, arm in found["arms"].items():
        if arm["failed"]:
            at = ", ".join(f"{count} at {rate}" for rate, count in arm["failed by rate"].items())
            nans = f"; {arm['diverged']} of them by a NaN or infinity" if arm["diverged"] else ""
            lines.append(f"- **{name}: {arm['failed']} of {arm['ended']} runs failed** (by learning rate: {at}{nans})")
    return "\n".join(lines)


def _finals(found: dict[str, Any]) -> str:
    control, passes = found["control"], dict.fromkeys(k for arm in found["arms"].values() for k in arm["final"]["pass"])
    head = ["arm", "runs failed", "learning rate", f"{found['metric']}, %", f"minus {control}, points (95 %)"]
    head += [f"{k}, %" for k in passes if f"eval/{k}" != found["metric"]]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for name, arm in found["arms"].items():
        final = arm["final"]
        cells = [name, f"{arm['failed']} of {arm['ended']}", f"{final['learning_rate']:g}"]
        cells += [_percent(final["score"]), _interval(final.get("difference"), "+.1f", 100, without=ABSENT)]
        cells += [_percent(final["pass"].get(k)) for k in passes if f"eval/{k}" != found["metric"]]
        lines.append(markdown_row(cells))
    note = (
        f"Mean over the seeds at the learning rate of the highest {found['metric']}. {control} starts at "
        f"{_percent(found['start'])} %."
    )
    return f"## Final scores\n\n{note}\n\n" + "\n".join(lines)


def _costs(found: dict[str, Any], share: str) -> str:
    control = found["control"]
    head = ["arm", "never reached it"]
    for unit in UNITS:
        head += [UNIT_NAMES[unit], f"to {control}'s (95 %)"]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for name, arm in found["arms"].items():
        costs = arm["cost"][share]
        first = costs[UNITS[0]]
        cells = [name, f"{first['never reached']} of {first['runs']}"]
        for unit in UNITS:
            cost = costs[unit]
            median = "never" if cost["median"] is None else f"{_amount(cost['median'])} at {cost['learning_rate']:g}"
            cells += [median, _interval(cost.get("ratio"), ".2f")]
        lines.append(markdown_row(cells))
    note = (
        f"To a score of {_percent(found['targets'][share])} %: the median over the seeds, at the learning rate where "
        "it is least."
    )
    return f"## Cost of {share} of {control}'s gain\n\n{note}\n\n" + "\n".join(lines)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}"


def _interval(estimate: dict[str, float | None] | None, form: str, factor: float = 1.0, without: str = "never") -> str:
    """The text "value (low to high)", also with infinite ends. `without`: the text for an estimate without a value."""
    if estimate is None:
        return ABSENT
    if estimate["value"] is None:
        return without
    value, low, high = (None if x is None else f"{factor * x:{form}}" for x in estimate.values())
    return f"{value} ({low or '-inf'} to {high or 'inf'})"


def notes(measured: Measured, found: dict[str, Any]) -> list[str]:
    """Remarks on the runs: wide steps between rates, missing seeds, best rates at an end, reasons of failures."""
    spec, said = measured.spec, list(measured.spec.wide())
    if left := found["seeds left out"]:
        ended = sum(outcome is not None for outcome in measured.outcomes.values())
        said.append(
            f"{ended} of {len(measured.outcomes)} runs have ended; seeds {', '.join(map(str, left))} lack some and are "
            "left out"
        )
    for name, arm in found["arms"].items():
        rates = spec.rates(name)
        best = arm["final"]["learning_rate"]
        if len(rates) > 1 and best in (rates[0], rates[-1]) and arm["final"]["score"] is not None:
            end = "smallest" if best == rates[0] else "largest"
            said.append(
                f"{name}: its best final score is at the {end} learning rate, {best:g}; one beyond it may be better"
            )
    why = Counter(o.said for o in measured.outcomes.values() if o is not None and not o.finished)
    said += [f"{count} run{'s' * (count > 1)} ended with: {line}" for line, count in why.most_common(5)]
    return said
