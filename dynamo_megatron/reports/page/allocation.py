"""Who got the rollouts: difficulty against rollouts over time, and what an even split would have given."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dynamo_megatron.reports.page.curves import binned, bins, plain
from dynamo_megatron.reports.picture import rate_bins
from dynamo_megatron.reports.report import price_rows, rate_classes
from dynamo_megatron.reports.run_record import Revisits
from dynamo_megatron.tracking.metrics import read_rows

TIMES = 40  # columns of the map
THIRDS = ("first third", "middle third", "last third")


def allocation_view(folder: Path, revisits: Revisits | None) -> dict[str, Any]:
    """`expected` and `prices` (as `price_rows`): from the lines of allocation.jsonl; `visits`: from what prompts showed
    before, None where rollouts of a step are missing (`why` says so). Raises ValueError (path:line) for a broken line.
    """
    visits, why = None, ""
    if revisits is None:
        why = "The folder lacks the rollouts of a step, and with them what problems have shown before."
    elif not len(revisits.rollouts):
        why = "No problem has been visited a second time yet."
    else:
        visits = _visits(revisits)
    return {"expected": _expected(folder), "visits": visits, "why": why, "prices": price_rows(folder)}


def _visits(revisits: Revisits) -> dict[str, Any]:
    rate, given, steps = revisits.success_rates, revisits.rollouts.astype(float), revisits.steps
    classes = rate_classes(rate)
    first, last = int(steps[0]), int(steps[-1])
    of_step = bins(last - first + 1, TIMES)
    column, columns = of_step[steps - first], int(of_step[-1]) + 1
    edges = (first + np.flatnonzero(np.append(np.diff(of_step) > 0, True))).tolist()
    mean, count = [], []
    for members in classes.values():
        held = np.append(np.where(members, given, np.nan), np.nan)
        mean.append(plain(binned(held, np.append(column, columns - 1)), 4))
        count.append(np.bincount(column[members], minlength=columns).tolist())
    third = np.minimum(3 * (steps - first) // max(1, last - first + 1), 2)
    return {
        "uniform": revisits.uniform,
        "first_visits": revisits.first_visits,
        "steps": edges,
        "classes": list(classes),
        "mean": mean,
        "count": count,
        "table": [_class_row(name, its, given) for name, its in classes.items()],
        "thirds": {name: _by_rate(rate[third == i], given[third == i]) for i, name in enumerate(THIRDS)},
    }


def _class_row(name: str, members: np.ndarray, given: np.ndarray) -> dict[str, Any]:
    """Shares are of the rollouts of all visits; an even split gives a class the share of its visits."""
    return {
        "class": name,
        "visits": int(members.sum()),
        "mean": float(given[members].mean()) if members.any() else None,
        "share": float(given[members].sum() / given.sum()),
        "even_share": float(members.mean()),
    }


def _by_rate(rate: np.ndarray, given: np.ndarray) -> list[list[float | None]]:
    """Of each bin of success rates: its mean rate, mean rollouts, visits."""
    of = rate_bins(rate)
    return [plain([rate[of == b].mean(), given[of == b].mean(), (of == b).sum()], 4) for b in np.unique(of)]


def _expected(folder: Path) -> dict[str, Any]:
    """The sum of v / n over the prompts of a step, v the variance that the allocator went by, relative to the same sum
    with equal n; binned over the steps."""
    steps, ratio = [], []
    for step, rows in groupby(read_rows(folder / "allocation.jsonl", "step", "n", "variance"), key=lambda r: r["step"]):
        n, variance = np.array([[row["n"], row["variance"]] for row in rows], float).T
        served = n > 0
        even = variance.sum() / n.mean() if n.sum() else 0.0
        steps.append(step)
        ratio.append((variance[served] / n[served]).sum() / even if even > 0 and served.all() else np.nan)
    if not steps:
        return {"steps": [], "ratio": []}
    bin_of = bins(len(steps))
    last = np.flatnonzero(np.append(np.diff(bin_of) > 0, True))
    return {"steps": [steps[i] for i in last], "ratio": plain(binned(np.array(ratio), bin_of), 4)}


def by_source(folder: Path, last_step: int) -> list[dict[str, Any]]:
    """`source`, `visits` and `rollouts` of each stratum (`algorithm.allocation.prior_by`) in the last quarter of the
    run; none where allocation.jsonl has no strata."""
    visits: dict[str, int] = defaultdict(int)
    rollouts: dict[str, int] = defaultdict(int)
    for row in read_rows(folder / "allocation.jsonl", "step", "n"):
        if "stratum" not in row:
            return []
        if row["step"] > 0.75 * last_step:
            visits[str(row["stratum"])] += 1
            rollouts[str(row["stratum"])] += row["n"]
    return [{"source": name, "visits": visits[name], "rollouts": rollouts[name]} for name in sorted(visits)]
