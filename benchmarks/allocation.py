"""How long allocation takes, and what it is worth under its own premise.

    python -P benchmarks/allocation.py [--out benchmarks/results]

Writes allocation.json (figures, machine, versions), allocation.md and allocation.png, and prints the tables. "Variance"
is sum p(1-p)/n throughout, the premise's; docs/estimators.md is about the gradient's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from measure import machine

from dynamo_megatron.algorithm.allocation import RolloutAllocator, neyman, waterfill
from dynamo_megatron.algorithm.allocators.waterfill import published_priority
from dynamo_megatron.algorithm.history import COLUMNS
from dynamo_megatron.evaluation.results import markdown_row

DISTRIBUTIONS = ((0.3, 0.3), (0.5, 1.0), (1.0, 1.0), (0.1, 1.0))  # Beta(a, b) of the success rates
BOUNDS = ((8, 24), (2, 64))
MEAN = 16  # rollouts a prompt
PROMPTS = 5000
SEEDS = 5
SIZES = (512, 10**4, 10**6)
WHOLE = {  # timed from history to counts
    "uniform": {"kind": "uniform"},
    "waterfill": {"kind": "waterfill"},
    "neyman": {"kind": "neyman"},
    "neyman energy": {"kind": "neyman", "variance": "energy"},
    "neyman tokens": {"kind": "neyman", "cost": "tokens"},
    "knapsack": {"kind": "knapsack"},
    "cero": {"kind": "cero"},
    "gvm": {"kind": "gvm"},
    "cures": {"kind": "cures"},
}
HISTORY = 16  # rollouts of each prompt before, where p is estimated; 48 with `neyman, 48 seen`
SHOWN = {  # in the picture; colours that the colour-blind tell apart
    "waterfill sigma^2, p known": ("#d55e00", "^"),
    "waterfill sigma^2, 16 seen": ("#d55e00", "o"),
    "waterfill sigma, 16 seen": ("#e69f00", "o"),
    "neyman, 16 seen": ("#0072b2", "o"),
    "neyman, 48 seen": ("#56b4e9", "o"),
    "neyman, p known": ("#0072b2", "^"),
}


def published_loop(seen: Sequence[int], priority: Sequence[float], budget: int, low: int, high: int, first: int):
    """The published procedure as its description reads, prompt by prompt; kept within the bounds as ours is."""
    prompts = range(len(seen))
    budget = min(max(budget, len(seen) * low), len(seen) * high)
    first = max(low, first)
    need = [min(max(0, first - seen[i]), high) for i in prompts]
    if sum(need) <= budget:
        n = need
    else:
        total = sum(need)
        n = [max(need[i] * budget // total, low) for i in prompts]
        over = sum(n) - budget
        while over > 0:
            largest = max((i for i in prompts if n[i] > low), key=lambda i: n[i])
            n[largest] -= 1
            over -= 1
    short = [max(0, low - n[i]) for i in prompts]
    rest = budget - sum(n)
    if sum(short) <= rest:
        n = [n[i] + short[i] for i in prompts]
    else:
        total = sum(short)
        n = [n[i] + short[i] * rest // total for i in prompts]
    rest = budget - sum(n)
    while rest > 0:
        open_ = [i for i in prompts if n[i] < high and priority[i] > 1e-8]
        if not open_:
            break
        total = sum(priority[i] for i in open_)
        exact = [rest * (priority[i] / total) for i in open_]
        share = [int(x) for x in exact]
        by_fraction = sorted(range(len(open_)), key=lambda j: share[j] - exact[j])
        for j in by_fraction[: rest - sum(share)]:
            share[j] += 1
        for i, more in zip(open_, share, strict=True):
            n[i] = min(n[i] + more, high)
        rest = budget - sum(n)
    n = [min(max(x, low), high) for x in n]
    rest = budget - sum(n)
    while rest > 0:
        for i in prompts:
            if rest > 0 and n[i] < high:
                n[i] += 1
                rest -= 1
    while rest < 0:
        for i in prompts:
            if rest < 0 and n[i] > low:
                n[i] -= 1
                rest += 1
    return n


def seconds(call: Callable[[], Any]) -> float:
    """CPU time of this one thread, which other jobs on the machine stretch little: median of at least 3 calls."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 2 and len(times) < 50):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def timings() -> list[dict[str, Any]]:
    """CPU seconds of one allocation; every prompt was seen before."""
    rows = []
    for size in SIZES:
        rng = np.random.default_rng(0)
        p = rng.beta(0.3, 0.3, size)
        won = rng.binomial(HISTORY, p)
        priority = published_priority(won / HISTORY, won * (HISTORY - won) / (HISTORY * (HISTORY - 1)))
        seen, budget, bounds = np.full(size, HISTORY), MEAN * size, BOUNDS[0]
        plain = (seen.tolist(), priority.tolist(), budget, *bounds, 8)
        assert published_loop(*plain) == waterfill(seen, priority, budget, *bounds, 8).tolist()
        others = {name: seen_by(config, won, HISTORY, bounds) for name, config in WHOLE.items()}
        rows.append(
            {
                "prompts": size,
                "published loop": seconds(lambda plain=plain: published_loop(*plain)),
                "waterfill": seconds(lambda s=seen, p=priority, b=budget: waterfill(s, p, b, *BOUNDS[0], 8)),
                "neyman": seconds(lambda p=p, b=budget: neyman(p * (1 - p), b, *BOUNDS[0])),
                "neyman 2..64": seconds(lambda p=p, b=budget: neyman(p * (1 - p), b, *BOUNDS[1])),
                **{
                    f"RolloutAllocator, {name}": seconds(lambda a=a, i=ids, b=budget: a.allocate(i, b, step=1))
                    for name, (a, ids) in others.items()
                },
            }
        )
    return rows


def seen_by(
    config: Mapping[str, Any], won: np.ndarray, trials: int, bounds: tuple[int, int]
) -> tuple[RolloutAllocator, list[str]]:
    """An allocator that has observed `won` of `trials` 0/1 rewards of every prompt in one visit, and the prompts.

    Energies and lengths are drawn, from prompt to prompt very different ones.
    """
    allocator = RolloutAllocator({**config, "rollout_n_min": bounds[0], "rollout_n_max": bounds[1]})
    ids = [f"p{i}" for i in range(len(won))]
    rates = won / trials
    scale = np.random.default_rng(0).lognormal(5, 0.7, len(won))
    right, all_, wrong = won.astype(float), np.full(len(won), float(trials)), trials - won.astype(float)
    columns = (
        all_,
        right,
        rates,
        won * (1 - rates),
        right,
        scale * right,
        wrong,
        2 * scale * wrong,
        all_,
        scale * all_,
    )
    allocator.load_state_dict({"prompt_ids": ids, **{n: c.tolist() for n, c in zip(COLUMNS, columns, strict=True)}})
    return allocator, ids


def continuous_oracle(variance: np.ndarray, budget: int, low: int, high: int) -> np.ndarray:
    """n ~ sigma clipped to the bounds, not whole: the lower limit of any allocation."""
    sigma, below, above = np.sqrt(variance), 0.0, 1e9
    for _ in range(200):
        scale = (below + above) / 2
        below, above = (below, scale) if np.clip(scale * sigma, low, high).sum() > budget else (scale, above)
    return np.clip(below * sigma, low, high)


def counts_of(p: np.ndarray, bounds: tuple[int, int], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What each way of allocating gives prompts of success rates `p`."""
    budget, variance = MEAN * len(p), p * (1 - p)
    won = {trials: rng.binomial(trials, p) for trials in (HISTORY, 3 * HISTORY)}
    priority = published_priority(p, variance)

    def estimated(config: Mapping[str, Any], trials: int = HISTORY) -> np.ndarray:
        allocator, ids = seen_by(config, won[trials], trials, bounds)
        return allocator.allocate(ids, budget, step=1)

    return {
        "uniform": np.full(len(p), MEAN),
        "waterfill sigma^2, p known": waterfill(np.full(len(p), HISTORY), priority, budget, *bounds, 8),
        "neyman, p known": neyman(variance, budget, *bounds),
        "waterfill sigma^2, 16 seen": estimated({"kind": "waterfill", "power": "sigma2"}),
        "waterfill sigma, 16 seen": estimated({"kind": "waterfill", "power": "sigma"}),
        "neyman, 16 seen": estimated({"kind": "neyman", "variance_floor": 0.0}),
        "neyman with floor .2, 16 seen": estimated({"kind": "neyman"}),
        "neyman, 48 seen": estimated({"kind": "neyman", "variance_floor": 0.0}, 3 * HISTORY),
    }


def variances() -> list[dict[str, Any]]:
    """Means over SEEDS draws of PROMPTS prompts."""
    rows = []
    for a, b in DISTRIBUTIONS:
        for bounds in BOUNDS:
            ratios: dict[str, list[tuple[float, float, float]]] = {}
            for seed in range(SEEDS):
                rng = np.random.default_rng(seed)
                p = rng.beta(a, b, PROMPTS)
                variance = p * (1 - p)
                uniform = variance.sum() / MEAN
                oracle = (variance / continuous_oracle(variance, MEAN * PROMPTS, *bounds)).sum()
                for name, n in counts_of(p, bounds, rng).items():
                    assert n.sum() == MEAN * PROMPTS
                    reached = (variance / n).sum()
                    degenerate = (p**n + (1 - p) ** n).mean()
                    ratios.setdefault(name, []).append((reached / uniform, reached / oracle, degenerate))
            for name, values in ratios.items():
                keys = ("to uniform", "to oracle", "degenerate")
                means = dict(zip(keys, np.mean(values, axis=0).tolist(), strict=True))
                rows.append({"beta": [a, b], "bounds": list(bounds), "allocation": name, **means})
    return rows


def markdown(result: Mapping[str, Any]) -> str:
    lines = ["# Allocation", "", "CPU seconds of one allocation, every prompt seen before, bounds 8..24, mean 16.", ""]
    names = [name for name in result["timings"][0] if name != "prompts"]
    lines += [markdown_row(["prompts", *names]), markdown_row(["---:"] * (1 + len(names)))]
    for row in result["timings"]:
        lines.append(markdown_row([f"{row['prompts']:,}", *(f"{row[name]:.2g}" for name in names)]))
    lines += [
        "",
        f"Variance, sum p(1-p)/n: to uniform's / to the continuous optimum's with p known. {SEEDS} draws of "
        f"{PROMPTS:,} prompts, {MEAN} rollouts each in the mean.",
        "",
    ]
    columns = [(tuple(beta), bounds) for beta in DISTRIBUTIONS for bounds in BOUNDS]
    table = {(tuple(r["beta"]), tuple(r["bounds"]), r["allocation"]): r for r in result["variances"]}
    allocations = list(dict.fromkeys(r["allocation"] for r in result["variances"]))
    head = markdown_row(["allocation", *(f"Beta({a:g}, {b:g}), {low}..{high}" for (a, b), (low, high) in columns)])
    rule = markdown_row(["---"] + ["---:"] * len(columns))
    lines += [head, rule]
    for name in allocations:
        cells = (table[(*column, name)] for column in columns)
        lines.append(markdown_row([name, *(f"{c['to uniform']:.3f} / {c['to oracle']:.3f}" for c in cells)]))
    lines += ["", "Groups expected to be all right or all wrong, percent.", "", head, rule]
    for name in allocations:
        cells = (table[(*column, name)] for column in columns)
        lines.append(markdown_row([name, *(f"{100 * c['degenerate']:.1f}" for c in cells)]))
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    return "\n".join([*lines, "", f"Measured on: {machine}.", "", "![variance and time](allocation.png)"])


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG, readable at a width of 1000 pixels."""
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    figure.suptitle(f"Allocation of {MEAN} rollouts a prompt in the mean", weight="bold")
    *panels, times = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    for axes, bounds in zip(panels, BOUNDS, strict=True):
        rows = [r for r in result["variances"] if r["bounds"] == list(bounds)]
        for k, (name, (colour, marker)) in enumerate(SHOWN.items()):
            ratios = [r["to uniform"] for r in rows if r["allocation"] == name]
            places = np.arange(len(ratios)) + 0.12 * (k - (len(SHOWN) - 1) / 2)
            axes.plot(places, ratios, marker, color=colour, label=name, markersize=7)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xticks(range(len(DISTRIBUTIONS)), [f"({a:g}, {b:g})" for a, b in DISTRIBUTIONS])
        axes.set(title=f"bounds {bounds[0]}..{bounds[1]}", xlabel="success rates, Beta(a, b)")
    panels[0].set(ylabel="sum p(1-p)/n, uniform = 1")
    panels[0].legend(fontsize=8, loc="upper right")
    for name, colour in (("published loop", "#999999"), ("waterfill", "#d55e00"), ("neyman", "#0072b2")):
        times.plot(SIZES, [r[name] for r in result["timings"]], "o-", label=name, color=colour)
    times.set(xscale="log", yscale="log", xlabel="prompts", ylabel="CPU seconds", title="time, bounds 8..24")
    times.legend(fontsize=8)
    for axes in (*panels, times):
        axes.grid(alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")
    options = parser.parse_args()
    result = {"machine": machine(["numpy"]), "timings": timings(), "variances": variances()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "allocation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.out / "allocation.md").write_text(markdown(result) + "\n", encoding="utf-8")
    draw(result, options.out / "allocation.png")
    print(markdown(result))


if __name__ == "__main__":
    main()
