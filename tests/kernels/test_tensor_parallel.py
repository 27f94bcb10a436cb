import os
import subprocess
import sys
from pathlib import Path

import plain_head as plain
import pytest
import torch
import tp_worker

SIZE = 2
CASES = {"torch": tuple(tp_worker.CASES), "triton": ("eager", "empty_shard", "bfloat16")}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each rank left, by backend."""
    return {backend: run(tmp_path_factory.mktemp(backend), backend, cases) for backend, cases in CASES.items()}


def run(folder, backend, cases, size=SIZE):
    worker = Path(__file__).with_name("tp_worker.py")  # run as a script, it finds plain_head beside it
    log = folder / "output.txt"
    with log.open("w") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, worker, str(rank), str(size), folder, backend, *cases],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TRITON_INTERPRET": "1"},
            )
            for rank in range(size)
        ]
        try:
            codes = [process.wait(timeout=400) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * size, log.read_text()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize(("backend", "name"), [(backend, name) for backend, names in CASES.items() for name in names])
def test_shards_agree_and_match_the_whole(launched, backend, name, request):
    if backend == "triton":
        request.getfixturevalue("interpreter")
    results = [rank[name] for rank in launched[backend]]
    for other in results[1:]:
        for mine, its in zip(results[0]["same"], other["same"], strict=True):
            assert torch.equal(mine, its)
    arguments, gradient, _ = tp_worker.CASES[name]
    c = plain.case(**arguments)
    loss, logprobs, entropy = results[0]["same"][:3]
    hidden_grad, weight_grad = results[0]["same"][-1], torch.cat([r["weight_grad"] for r in results])
    assert (weight_grad[c.vocab :] == 0).all()
    if name in ("no_rows", "no_labels"):
        assert loss == 0 and (hidden_grad == 0).all() and (weight_grad == 0).all() and (logprobs == 0).all()
        return
    want = plain.policy(c, tp_worker.CONFIG, ranges=tp_worker.RANGES if gradient == "eager" else None)
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
