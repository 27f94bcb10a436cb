"""What rollouts of older weights would save on 8 to 512 GPUs, by the simulator of asynchrony_simulated.py.

    python -P benchmarks/asynchrony_curve.py

No GPU has been asked: a 7B model on H100s, from the makers' rates and the shares of them that EFFICIENCY and MFU
assume. Each GPU has 16 rollouts a step. Lengths are log-normal with a median of 2,000 tokens, cut off at 32,768; where
TAIL is 1 the 99th percentile is ten times the median. Compared are GPUs that generate and train in turn, all of them
(colocated, no bound), and GPUs divided between servers and ranks, by the best of the divisions in SERVING, at bounds of
1, 2 and 4 steps. Writes results/asynchrony_curve.json and asynchrony_curve.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from asynchrony_simulated import Service, Shape, Simulation

from dynamo_megatron.models import FAMILIES
from dynamo_megatron.models.published import published_config
from dynamo_megatron.planning import formulas, time_formulas
from dynamo_megatron.planning.hardware import GPUS

RESULTS = Path(__file__).parent / "results"
MODEL, GPU = "Qwen2.5-Math-7B", GPUS["h100-80"]
EFFICIENCY, MFU = 0.5, 0.3  # of the stated rates, of a server and of the ranks
PUSH = 1.0  # seconds
ROLLOUTS, STEPS, PROMPT, CONCURRENCY = 16, 12, 200, 128
MEDIAN, LONGEST, TAIL = 2000, 32768, (0.5, 1.0, 1.5)
SIZES, SERVING, BOUNDS = (8, 32, 128, 512), (0.25, 0.375, 0.5, 0.625, 0.75), (1, 2, 4)


def service_and_token() -> tuple[Service, float]:
    """Of a server with one GPU; GPU-seconds of the ranks for one token (log-probs and update)."""
    config = published_config(MODEL)
    spec = FAMILIES[config["model_type"]](config)
    bandwidth, flops = EFFICIENCY * GPU.memory_bandwidth, EFFICIENCY * GPU.flops
    forward = time_formulas.forward_flops(spec, [(1, MEDIAN)]) / MEDIAN
    service = Service(
        base=formulas.weight_bytes(spec, "bfloat16") / bandwidth,
        each=forward / flops,
        context=formulas.kv_bytes_a_token(spec, 1, "bfloat16") / bandwidth,
        prefill=forward / flops,
        request=0.0,
    )
    passes = time_formulas.pass_factor("logprobs", "none") + time_formulas.pass_factor("update", "none")
    return service, passes * forward / (MFU * GPU.flops)


def seconds(gpus: int, lengths: list[list[int]], bound: int, servers: int, ranks: int) -> float:
    """Of a step."""
    service, token = service_and_token()
    tokens = sum(sum(of_step) + PROMPT * len(of_step) for of_step in lengths) / len(lengths)
    shape = Shape(servers, CONCURRENCY, PROMPT, token * tokens / ranks, PUSH)
    return Simulation(shape, service, lengths, bound).run().seconds / len(lengths)


def curve(tail: float, gpus: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    drawn = MEDIAN * np.exp(tail * rng.standard_normal((STEPS, ROLLOUTS * gpus)))
    lengths = [[int(min(LONGEST, max(1.0, n))) for n in of_step] for of_step in drawn]
    in_turn = seconds(gpus, lengths, 0, gpus, gpus)
    row = {"tail": tail, "gpus": gpus, "colocated, bound 0": in_turn}
    for bound in BOUNDS:
        divided = {s: seconds(gpus, lengths, bound, s, gpus - s) for s in (round(share * gpus) for share in SERVING)}
        servers = min(divided, key=divided.get)
        row |= {f"bound {bound}": divided[servers] / in_turn, f"servers at bound {bound}": servers}
    print(json.dumps(row), flush=True)
    return row


def table(rows: list[dict[str, float]]) -> str:
    head = ["tail", "GPUs", "colocated, s a step", *(f"bound {b} (GPUs of servers)" for b in BOUNDS)]
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * len(head)}"]
    for row in rows:
        cells = [f"{row['tail']:g}", f"{row['gpus']}", f"{row['colocated, bound 0']:.0f}"]
        cells += [f"{row[f'bound {b}']:.2f} ({row[f'servers at bound {b}']})" for b in BOUNDS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [curve(tail, gpus) for tail in TAIL for gpus in SIZES]
    (RESULTS / "asynchrony_curve.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "asynchrony_curve.md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
