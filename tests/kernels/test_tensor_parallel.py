"""The head of a tensor-parallel group over gloo. Run as a script, this file is one rank, which leaves
FOLDER/rank-RANK.pt: `RANK FOLDER BACKEND CASE ...`; with backend triton in Triton's interpreter."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import plain_head as plain
import pytest
import torch
import torch.distributed as dist
from plain_head import FULL, RANGES

# name: (case, gradient, chunk_tokens). Of two shards with 20 rows, a vocabulary of 18 leaves one all padding.
WORKER_CASES = {
    "eager": ({}, "eager", 7),
    "recompute": ({}, "recompute", 7),
    "empty_shard": ({"vocab": 18}, "eager", None),
    "blocked_shard": ({"dtype": torch.float32, "blocked": range(20)}, "eager", None),
    "bfloat16": ({"dtype": torch.bfloat16}, "recompute", 5),
    "no_rows": ({"tokens": 0}, "eager", 7),
    "no_labels": ({}, "recompute", 7),
    "one_row": ({"tokens": 1}, "eager", 7),
}

SIZE = 2
CASES = {"torch": tuple(WORKER_CASES), "triton": ("eager", "empty_shard", "bfloat16")}


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.full)])
def test_shards_agree_and_match_the_whole(tmp_path, backend, request):
    if backend == "triton":
        request.getfixturevalue("interpreter")

    def start(rank: int) -> subprocess.CompletedProcess:
        command = [sys.executable, __file__, str(rank), str(tmp_path), backend, *CASES[backend]]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)

    with ThreadPoolExecutor(SIZE) as pool:
        runs = list(pool.map(start, range(SIZE)))
    assert [run.returncode for run in runs] == [0] * SIZE, [run.stderr[-3000:] for run in runs]
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(SIZE)]
    for name in CASES[backend]:
        check([rank[name] for rank in ranks], backend, name)


def check(results: list[dict], backend: str, name: str) -> None:
    """The ranks' results of a case are the same, and those of the whole vocabulary."""
    for other in results[1:]:
        for mine, its in zip(results[0]["same"], other["same"], strict=True):
            assert torch.equal(mine, its)
    arguments, gradient, _ = WORKER_CASES[name]
    c = plain.case(**arguments)
    loss, logprobs, entropy = results[0]["same"][:3]
    hidden_grad, weight_grad = results[0]["same"][-1], torch.cat([r["weight_grad"] for r in results])
    assert (weight_grad[c.vocab :] == 0).all()
    if name in ("no_rows", "no_labels"):
        assert loss == 0 and (hidden_grad == 0).all() and (weight_grad == 0).all() and (logprobs == 0).all()
        return
    want = plain.policy(c, FULL, ranges=RANGES if gradient == "eager" else None)
    keep = c.labels != plain.IGNORE
    tol = 1e-11 if c.hidden.dtype == torch.float64 else 1e-5
    grad_tol = tol
    if c.hidden.dtype == torch.bfloat16:  # the interpreter cuts off where a GPU rounds
        grad_tol = 2**-8 if backend == "torch" else 2**-6
    for got, expected, limit in (
        (loss, want.loss, tol),
        (logprobs[keep], want.logprobs, tol),
        (entropy[keep], want.entropy, tol),
        (hidden_grad, want.hidden_grad, grad_tol),
        (weight_grad, want.weight_grad, grad_tol),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=limit, atol=max(tol, 1e-4) if limit > tol else tol)


def main(rank: int, folder: str, backend: str, *names: str) -> None:
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE, timeout=timeout)
    results = {}
    for name in names:
        arguments, gradient, chunk_tokens = WORKER_CASES[name]
        c = plain.case(**arguments)
        if name == "no_labels":
            c.labels[:] = plain.IGNORE
        weight = c.weight.chunk(SIZE)[rank].clone().requires_grad_()
        options = {"ranges": RANGES if gradient == "eager" else None, "gradient": gradient, "backend": backend}
        options |= {"chunk_tokens": chunk_tokens, "tp_group": dist.group.WORLD}
        out, hidden_grad, weight_grad = plain.run(c, FULL, weight=weight, **options)
        results[name] = {
            "same": [out.loss.detach(), *out.stats, out.advantages, *out.metrics.values(), hidden_grad],
            "weight_grad": weight_grad,
        }
    torch.save(results, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
