"""The layout guard: the same rollouts through every layout of Megatron, against one process. The gate for upgrading
megatron-core:

    python -P tests/policy/layout_guard.py            # all of it; rewrites the table in docs/layouts.md
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "layouts.md"
RANKS = 4
BAR = {"float32": 1e-5, "bfloat16": 1e-1}
# `after`: logprobs after the updates, where Adam has divided rounding by small gradients. In bfloat16 neither they, nor
# gradient norms after the first update, nor counts of tokens beyond a bound say anything.
OTHER_BARS = {"float32": {"after": 1e-4}, "bfloat16": dict.fromkeys(("after", "grad_norm", "metrics"), float("inf"))}

SP = {"sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1": (1, {}),  # packed otherwise and in another order than what all are compared with
    "TP2": (2, {"tp": 2}),
    "TP4": (4, {"tp": 4}),
    "TP2+SP": (2, {"tp": 2, **SP}),
    "PP2": (2, {"pp": 2}),
    "PP4": (4, {"pp": 4}),
    "TP2xPP2": (4, {"tp": 2, "pp": 2}),
    "TP2xPP2+SP": (4, {"tp": 2, "pp": 2, **SP}),
    "VPP2xPP2": (2, {"pp": 2, "vpp": 2}),
    "VPP2xPP2xDP2": (4, {"pp": 2, "vpp": 2}),
    "DP2": (2, {}),
    "DP4": (4, {}),
    "CP2": (2, {"cp": 2}),
    "CP4": (4, {"cp": 4}),
    "CP2xTP2": (4, {"cp": 2, "tp": 2}),
    "CP2xTP2+SP": (4, {"cp": 2, "tp": 2, **SP}),
    "CP2xPP2": (4, {"cp": 2, "pp": 2}),
    "EP2": (2, {"ep": 2}),
    "EP2xPP2": (4, {"ep": 2, "pp": 2}),
    "EP2xTP2+SP": (2, {"ep": 2, "tp": 2, **SP}),
    "EP2xCP2": (4, {"ep": 2, "cp": 2}),
    "EP4": (4, {"ep": 4}),
}
# What every family is put through: its shape, and a method that makes all terms of the loss count.
FAMILIES: dict[str, dict] = {
    "qwen2": {"model": {}, "algorithm": {"loss": {"mini_batches": 2, "clip_ratio_high": 0.28}}},
    "qwen3": {
        "model": {},
        "algorithm": {
            "loss": {"entropy_coef": 0.01, "clip_ratio_c": 3.0, "aggregation": "token_mean"},
            "kl": {"coef": 0.1, "reference": "other"},
            "modulation": {"tau": 0.5},
            "advantage": {"kind": "grpo"},
        },
    },
    "llama": {
        "model": {"tied": True},
        # All that selects or weighs tokens, at once; test_method_layouts.py has each method by itself.
        "algorithm": {
            "advantage": {"entropy_shaping": {}, "overlong_buffer": 0.5},
            "loss": {
                "mini_batches": 2,
                "entropy_top_ratio": 0.5,
                "clip_cov": {"ratio": 0.05, "low": 0.0},
                "kl_cov": {"ratio": 0.05, "coef": 0.1},
            },
            "modulation": {"stabiliser": "quantile", "quantile": 0.9, "gamma": 10.0},
            "rollout_correction": {"kind": "mask", "low": 0.2, "high": 1.5},
        },
    },
    "qwen3_moe": {"model": {"experts": 4, "experts_per_token": 2}, "algorithm": {"kl": {"coef": 0.1}}},
}
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Row:
    """One line of the guard's table."""

    family: str
    layout: str
    dtype: str = "float32"
    recompute: str = "none"

    @property
    def name(self) -> str:
        extra = [x for x, usual in ((self.dtype, "float32"), (self.recompute, "none")) if x != usual]
        return " ".join([self.family, self.layout, *extra])


def applies(family: str, layout: str) -> bool:
    parallel = LAYOUTS[layout][1]
    if family == "qwen3_moe":  # Megatron wants sequence parallelism with experts under tensor parallelism
        return parallel.get("tp", 1) == 1 or "sequence_parallel" in parallel
    return "ep" not in parallel


def all_rows() -> list[Row]:
    rows = [Row(family, layout) for family in FAMILIES for layout in LAYOUTS if applies(family, layout)]
    for recompute in ("selective", "full"):
        rows += [Row("qwen3", "TP2xPP2+SP", recompute=recompute), Row("qwen3", "VPP2xPP2", recompute=recompute)]
        rows += [Row("qwen3_moe", "EP2", recompute=recompute), Row("llama", "CP2", recompute=recompute)]
    for layout in ("TP2xPP2+SP", "VPP2xPP2", "CP2xTP2", "DP4"):
        rows.append(Row("qwen2", layout, "bfloat16"))
    # Not llama: its method selects tokens by entropy, which rounding in bfloat16 does differently.
    rows += [Row("qwen3", "CP2xPP2", "bfloat16"), Row("qwen3_moe", "EP2xPP2", "bfloat16")]
    return rows


def make_models(folder: Path) -> dict[str, Path]:
    """A model of every family, with weights that no swap would leave alike; "other" is a second qwen3."""
    make = runpy.run_path(str(ROOT / "tools" / "tiny_model.py"))["make_tiny_model"]
    shape = {"layers": 4, "hidden": 64, "heads": 8, "kv_heads": 4, "dtype": "float32"}
    models = {f: make(folder / f, family=f, **shape, **FAMILIES[f]["model"]) for f in FAMILIES}
    models["other"] = make(folder / "other", family="qwen3", **shape, seed=1)
    file = models["llama"] / "config.json"
    config = json.loads(file.read_text())
    config.pop("rope_parameters", None)
    file.write_text(json.dumps(config | {"rope_theta": 10000.0, "rope_scaling": ROPE_SCALING}))
    return models


def case(models: dict[str, Path], folder: Path, row: Row, *, budget: int = 200, seed: int = 7, **extra) -> dict:
    """What layout_runs.py takes; `extra`: out (its folder), fault, order_seed, algorithm."""
    ranks, parallel = LAYOUTS[row.layout]
    algorithm = json.loads(json.dumps(extra.pop("algorithm", FAMILIES[row.family]["algorithm"])))
    if algorithm.get("kl", {}).get("reference"):
        algorithm["kl"]["reference"] = str(models["other"])
    config = {
        "model": {"path": str(models[row.family]), "dtype": row.dtype},
        "data": {"source": "none", "batch_prompts": 4},
        "output_dir": "none",
        "parallel": parallel,
        "rollout": {"max_new_tokens": 32},
        "algorithm": algorithm,
        "optimizer": {"eps": 1e-6, "warmup_steps": 0},
        "trainer": {"micro_batch_tokens": budget, "recompute": row.recompute},
    }
    out = folder / extra.pop("out", row.name.replace(" ", "-"))
    return {"config": config, "ranks": ranks, "out": str(out), "seed": seed, **extra}


def reference_case(models: dict[str, Path], folder: Path, family: str, dtype: str = "float32", **extra) -> dict:
    out = extra.pop("out", f"reference-{family}-{dtype}")
    return case(models, folder, Row(family, "1", dtype), budget=500, out=out, **extra)


def rounds(cases: list[dict]) -> list[list[dict]]:
    """Which cases run at the same time, on RANKS ranks at most: the small ones first."""
    planned: list[list[dict]] = []
    for c in sorted(cases, key=lambda c: c["ranks"]):
        if not planned or sum(other["ranks"] for other in planned[-1]) + c["ranks"] > RANKS:
            planned.append([])
        planned[-1].append(c)
    return planned


def launch(cases: list[dict], folder: Path, timeout: float = 3600) -> None:
    """Runs the cases. Raises AssertionError with the end of the log where one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for c in cases:
        Path(c["out"]).mkdir(parents=True)
    (folder / "rounds.json").write_text(json.dumps(rounds(cases)))
    command = [sys.executable, "-P", str(Path(__file__).with_name("layout_runs.py")), str(folder / "rounds.json")]
    with open(folder / "log", "w") as log:
        code = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT, timeout=timeout
        ).returncode
    assert code == 0, (folder / "log").read_text()[-6000:]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name).float() for name in f.keys()})  # noqa: SIM118
    return found


def gaps(reference: Path, other: Path) -> dict[str, float]:
    """How far `other` is from `reference`, the largest of each kind: loss, logprobs (before the updates, after them, of
    the reference policy) and entropy absolute (nats), gradients of the first update and weights after all of them by
    tensor (norm of the difference over norm); the gradient norm, of the first update and of all, and the metrics' sums
    relative."""
    a, b = (json.loads((p / "result.json").read_text()) for p in (reference, other))
    assert a["tokens"].keys() == b["tokens"].keys() and len(a["updates"]) == len(b["updates"])

    def widest(name: str, passes: slice) -> float:
        x, y = (
            torch.tensor([x for key in a["tokens"] for one in r["tokens"][key][name][passes] for x in one])
            for r in (a, b)
        )
        return float((x - y).abs().max())

    first, after = slice(0, 1), slice(1, None)
    found = {name: widest(name, first) for name in ("logprobs", "entropy")}
    if all(tokens["reference"] for tokens in a["tokens"].values()):
        found["reference"] = widest("reference", slice(None))
    found["after"] = widest("logprobs", after)
    assert [u["skipped"] for u in a["updates"]] == [u["skipped"] for u in b["updates"]]
    pairs = [pair for pair in zip(a["updates"], b["updates"], strict=True) if not pair[0]["skipped"]]
    found["loss"] = max(abs(x["loss"] - y["loss"]) for x, y in pairs)
    norms = [abs(x["grad_norm"] / y["grad_norm"] - 1) for x, y in pairs]
    found["first_norm"], found["grad_norm"] = norms[0], max(norms)
    for kind in ("gradients", "hf"):
        x, y = tensors_of(reference / kind), tensors_of(other / kind)
        assert x.keys() == y.keys(), sorted(x.keys() ^ y.keys())
        name = "weights" if kind == "hf" else kind
        found[name] = max(float((t - y[n]).norm() / t.norm().clamp(min=1e-12)) for n, t in x.items())
    sums = ("kl", "clipped", "clipped_dual", "damped", "boosted", "selected")
    found["metrics"] = max(abs(x[n] - y[n]) / max(1.0, abs(x[n])) for x, y in pairs for n in sums)
    return found


def beyond(row: Row, found: dict[str, float]) -> dict[str, float]:
    """The gaps above the bar."""
    bars = dict.fromkeys(found, BAR[row.dtype]) | OTHER_BARS[row.dtype]
    return {name: gap for name, gap in found.items() if not gap <= bars[name]}


def rerouted(reference: Path, other: Path) -> int:
    """In how many places (layer and response token) a mixture of experts chose other experts."""
    a, b = (json.loads((p / "result.json").read_text())["tokens"] for p in (reference, other))
    return sum(
        x != y
        for key in a
        for one, two in zip(a[key]["experts"][0], b[key]["experts"][0], strict=True)
        for x, y in zip(one, two, strict=True)
    )


def table(found: dict[Row, dict[str, float]]) -> str:
    columns = ("loss", "logprobs", "entropy", "gradients", "grad_norm", "weights", "after", "metrics")
    lines = [
        f"| family | layout | {' | '.join(c.replace('_', ' ') for c in columns)} |",
        "|---|---|" + "---|" * len(columns),
    ]
    for row, gap in found.items():
        layout = " ".join(row.name.split()[1:])
        lines.append(f"| {row.family} | {layout} | {' | '.join(f'{gap[c]:.0e}' for c in columns)} |")
    return "\n".join(lines)


def run(rows: list[Row], folder: Path, *, seed: int = 7, more: tuple[dict, ...] = ()) -> dict[Row, dict[str, float]]:
    """The gaps of all rows, and `more` cases in the same launch, their results left in `folder`."""
    models = make_models(folder / "models")
    wanted = dict.fromkeys((row.family, row.dtype) for row in rows)
    cases = [reference_case(models, folder, *which, seed=seed) for which in wanted]
    for row in rows:
        # llama's method selects by entropy, where equal ones go to the lower slot: there the order counts.
        other_order = {"order_seed": 3} if row.layout == "1" and row.family != "llama" else {}
        cases.append(case(models, folder, row, seed=seed, **other_order))
    cases += [(case if "row" in extra else reference_case)(models, folder, **extra) for extra in more]
    launch(cases, folder / "launch")
    return {
        row: gaps(folder / f"reference-{row.family}-{row.dtype}", folder / row.name.replace(" ", "-")) for row in rows
    }


def write_table(found: dict[Row, dict[str, float]]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- guard -->\n).*(<!-- /guard -->)", re.DOTALL)
    assert marked.search(text), f"{DOCUMENT}: no place for the table"
    DOCUMENT.write_text(marked.sub(lambda m: f"{m[1]}{table(found)}\n{m[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        result = run(all_rows(), Path(place))
    print(table(result))
    write_table(result)
    failed = {row.name: worse for row, found in result.items() if (worse := beyond(row, found))}
    sys.exit(f"beyond the bar: {failed}" if failed else 0)
