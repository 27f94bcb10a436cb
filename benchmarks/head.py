"""The policy head against bare GEMMs, the naive Megatron path and other people's kernels: time, memory, accuracy.

    python -P benchmarks/head.py [--only '14B/8192/*'] [--out benchmarks/results]
    python -P benchmarks/head.py --tiny                   # without a GPU: that it works, no figures about speed

Writes head.json (figures, machine, versions) and head.md, anew after each contender that is not ours, and prints a line
for each and the table. A call is a forward and backward pass from hidden states, weight and labels to loss and both
gradients, or to statistics where the name says so.
One GPU: a tensor-parallel shard is a vocabulary of the shard's size, and communication is in no figure. "of floor": the
time of three bare GEMMs of the same shapes (one for statistics) through the contender's, both measured in turns in one
process. Memory: what a call takes beyond hidden states, weight and our heads' float32 main_grad. Accuracy: against the
plain formula in float64 from the same inputs, at 512 tokens; exits 1 where one of our heads is off by more than BARS or
is left out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
from head_cases import MODELS, Case, Inputs, accuracy_inputs, all_cases, errors, in_float64, make_inputs, tiny_cases
from head_contenders import PACKAGES, Contender, contenders
from measure import clocks, installed, interleaved, machine, peak_bytes

from dynamo_megatron.evaluation.results import markdown_row

HERE = Path(__file__).parent
TINY = {"warm_up": 0, "rounds": (2, 2)}
QUICK = {"warm_up": 2, "rounds": (3, 12), "seconds": 1.5}
# On a GPU more than ten times slower than the others: --quick leaves it out, and our torch heads.
SLOW = ("liger GRPO",)
# Of our own heads against float64: nats, and relative ones of which a rounding to bfloat16 is 2^-9 of an element.
BARS = {"logprobs": 2e-4, "entropy": 2e-4, "loss": 1e-3, "hidden_grad": 4e-3, "weight_grad": 4e-3}

LONGEST = {"248k columns, TP 8": 31040, "248k columns": 248320}  # Qwen3.5's vocabulary
LONGEST_TOKENS = 1 << 17
COLUMNS = ("ms", "p10", "p90", "of floor", "GB", "logprob", "entropy", "dX", "dW")


def our_backends(device: torch.device, quick: bool) -> list[str]:
    """Triton needs a GPU, or its interpreter."""
    triton = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return ["triton"] if quick and device.type == "cuda" else ["torch", "triton"] if triton else ["torch"]


def attempt(contender: Contender, inputs: Inputs, device: torch.device, *, accuracy: bool = True) -> dict[str, Any]:
    """Accuracy and peak memory of one contender, or why there is none. Our own heads may not fail."""
    if contender.package is not None and installed(contender.package) is None:
        return {"skipped": "not installed"}
    peers = () if contender.ours else Exception  # on a machine or shape that it was not made for it may raise anything
    try:
        result: dict[str, Any] = {}
        if accuracy:
            if contender.target is not None:
                few = accuracy_inputs(inputs.case, device)
                few.main_weight.main_grad.zero_()
                few.forget_gradients()
                result["errors"] = errors(contender.run(few), in_float64(few, contender.target), few.labels)
                few.forget_gradients()
            contender.run(inputs)  # compiles what it compiles
            inputs.forget_gradients()
        result["peak bytes"] = peak_bytes(lambda: contender.run(inputs), device)
        return result
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    except peers as error:
        return {"skipped": f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        inputs.forget_gradients()


def run_case(
    case: Case, field: Sequence[Contender], device: torch.device, rounds: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The figures of one case, those so far: first of our own heads and the floors in turns, then of one after the
    other of the rest, in turns with its floor."""
    inputs, before, found = make_inputs(case, device), clocks(), {}
    own = [contender for contender in field if contender.package is None]
    for group in (own, *([contender] for contender in field if contender.package is not None)):
        for contender in group:
            result = attempt(contender, inputs, device)
            result |= {"gemms": contender.gemms, "target": contender.target, "ours": contender.ours}
            found[contender.name] = result
        fit = {contender.name: contender for contender in group if "skipped" not in found[contender.name]}
        floors = {contender.floor for contender in fit.values()}
        timed = [contender for contender in own if contender.name in floors and contender.name not in fit]
        calls = {contender.name: (lambda run=contender.run: run(inputs)) for contender in [*timed, *fit.values()]}
        times = interleaved(calls, device, before=inputs.forget_gradients, **rounds)
        for name, contender in fit.items():
            if contender.floor in times:
                found[name]["seconds"] = times[name]
                found[name]["of floor"] = times[contender.floor]["median"] / times[name]["median"]
        for contender in group:
            print(f"{case.name}: {', '.join(filter(None, _row(contender.name, found[contender.name])))}", flush=True)
        shape = {name: getattr(case, name) for name in ("tokens", "hidden", "columns", "temperature", "trained")}
        yield {
            "case": case.name,
            **shape,
            "entropy bonus": case.entropy_coef,
            "entropy": inputs.entropy,
            "clocks": [before, clocks()],
            "contenders": found,
        }


def longest(field: Sequence[Contender], device: torch.device, tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The most tokens, by halving from LONGEST_TOKENS, whose loss and gradients fit the memory, with the hidden size of
    7B; those so far."""
    rows: list[dict[str, Any]] = []
    for name, columns in LONGEST.items():
        tokens, hidden, columns = (64, 16, 300) if tiny else (LONGEST_TOKENS, MODELS["7B"], columns)
        waiting = [contender for contender in field if contender.target not in (None, "statistics")]
        waiting.sort(key=lambda contender: not contender.ours)
        fits: dict[str, dict[str, Any]] = {}
        rows.append({"case": name, "hidden": hidden, "columns": columns, "contenders": fits})
        while waiting and tokens >= 16:
            inputs = make_inputs(
                Case(f"longest/{name}", tokens, hidden, columns), device, backend=our_backends(device, True)[-1]
            )
            for contender in list(waiting):
                found = fits.setdefault(contender.name, {"tokens": 0, "ours": contender.ours})
                result = attempt(contender, inputs, device, accuracy=False)
                if "skipped" in result:
                    found["ended"] = f"{result['skipped']} at {tokens} tokens"
                else:
                    found |= {"tokens": tokens, **result}
                if result.get("skipped") != "out of memory":
                    waiting.remove(contender)
                print(f"{name}, {tokens} tokens: {contender.name}: {result}", flush=True)
                yield rows
            tokens //= 2
            del inputs


def wrong(result: Mapping[str, Any]) -> list[str]:
    """What our own heads may not do: be left out, or miss float64 by more than BARS."""
    found = []
    for case in result["cases"]:
        for name, figures in case["contenders"].items():
            if not figures["ours"]:
                continue
            if "skipped" in figures:
                found.append(f"{case['case']}, {name}: {figures['skipped']}")
            for what, error in figures.get("errors", {}).items():
                if not error <= BARS[what]:
                    found.append(f"{case['case']}, {name}: {what} is off by {error:.2g}, more than {BARS[what]:g}")
    for case in result.get("longest", []):
        none = [name for name, fit in case["contenders"].items() if fit["ours"] and not fit["tokens"]]
        found += [f"{case['case']}, {name}: {case['contenders'][name]['ended']}" for name in none]
    return found


def markdown(result: Mapping[str, Any]) -> str:
    lines = ["# The policy head", ""]
    if result["tiny"]:
        lines += ["Tiny shapes: this shows that the benchmark runs. Its times and bytes say nothing.", ""]
    lines += [
        "Milliseconds (median, p10, p90); the floor's share of them; peak gigabytes (10^9) beyond the inputs; largest "
        "error of log-probabilities and entropy in nats, relative errors of the gradients, against float64.",
    ]
    for case in result["cases"]:
        lines += [
            "",
            f"## {case['case']}",
            "",
            f"{case['tokens']} tokens ({case['trained']:.0%} trained), hidden size {case['hidden']}, "
            f"{case['columns']} columns, temperature {case['temperature']:g}, mean entropy {case['entropy']:.2f} nats.",
            "",
            markdown_row(["contender", "GEMMs", "computes", *COLUMNS]),
            markdown_row(["---", "---:", "---", *["---:"] * len(COLUMNS)]),
        ]
        lines += [markdown_row(_row(name, figures)) for name, figures in case["contenders"].items()]
    for case in result.get("longest", []):
        head = f"## Longest context, {case['case']}, hidden size {case['hidden']}"
        lines += ["", head, "", markdown_row(["contender", "tokens", "GB", "ended by"]), "|---|---:|---:|---|"]
        for name, fit in case["contenders"].items():
            gigabytes = f"{fit['peak bytes'] / 1e9:.2f}" if "peak bytes" in fit else ""
            lines.append(markdown_row([name, str(fit["tokens"]), gigabytes, fit.get("ended", "")]))
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items() if value is not None)
    return "\n".join([*lines, "", f"Measured on: {machine}."])


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    start = [name, str(figures["gemms"]), figures["target"] or ""]
    if "skipped" in figures:
        return [*start, figures["skipped"], *[""] * (len(COLUMNS) - 1)]
    seconds, errors = figures["seconds"], figures.get("errors", {})
    accuracy = [errors.get(key) for key in ("logprobs", "entropy", "hidden_grad", "weight_grad")]
    return [
        *start,
        *(f"{1000 * seconds[key]:.2f}" for key in ("median", "p10", "p90")),
        f"{figures['of floor']:.2f}" if "of floor" in figures else "",
        f"{figures['peak bytes'] / 1e9:.2f}",
        *("" if value is None else f"{value:.1e}" for value in accuracy),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small shapes, a few rounds; runs on a CPU")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases by name, such as '14B/8192/tp1*'")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results; runs/head with --tiny")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; on a GPU without what is slow")
    parser.add_argument("--longest", action="store_true", help="instead: the longest context that each can hold")
    parser.add_argument("--without", action="append", default=[], metavar="NAME", help="a contender to leave out")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.exit(2, "benchmarks/head.py: needs a GPU; --tiny shows on a CPU that it works\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [c for c in (tiny_cases() if options.tiny else all_cases()) if fnmatch.fnmatch(c.name, options.only)]
    if not cases:
        parser.exit(2, f"--only: no case is named {options.only!r}; a name is such as {all_cases()[0].name}\n")
    out = options.out or (Path("runs/head") if options.tiny else HERE / "results")
    out.mkdir(parents=True, exist_ok=True)
    backends = our_backends(device, options.quick)
    field = [contender for contender in contenders(backends, device) if contender.name not in options.without]
    rounds = TINY if options.tiny else QUICK if options.quick else {}
    if options.quick and device.type == "cuda":
        field = [contender for contender in field if contender.name not in SLOW]
    result: dict[str, Any] = {
        "machine": machine(["torch", "triton", "megatron-core", "numpy", *PACKAGES]),
        "tiny": options.tiny,
        "cases": [],
    }
    if options.longest:
        cases = []
        for result["longest"] in longest(field, device, options.tiny):
            keep(result, out)
    for case in sorted(cases, key=lambda case: case.tokens * case.columns):
        result["cases"].append({})
        for result["cases"][-1] in run_case(case, field, device, rounds):
            keep(result, out)
        accuracy_inputs.cache_clear()
    keep(result, out)
    print(markdown(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    for line in (found := wrong(result)):
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if found else 0


def keep(result: Mapping[str, Any], out: Path) -> None:
    (out / "head.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "head.md").write_text(markdown(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
