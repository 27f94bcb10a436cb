import subprocess
import sys
from pathlib import Path

import plain_head as plain
import pytest
import torch
import tp_worker

SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tp")
    worker = Path(__file__).with_name("tp_worker.py")  # run as a script, it finds plain_head beside it
    log = folder / "output.txt"
    with log.open("w") as output:
        processes = [
            subprocess.Popen(
                [sys.executable, worker, str(rank), str(SIZE), folder],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(SIZE)
        ]
        try:
            codes = [process.wait(timeout=180) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * SIZE, log.read_text()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(SIZE)]


@pytest.mark.parametrize("name", tp_worker.CASES)
def test_shards_agree_and_match_the_whole(ranks, name):
    results = [rank[name] for rank in ranks]
    for first, second in zip(results[0]["same"], results[1]["same"], strict=True):
        assert torch.equal(first, second)
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
    grad_tol = 2**-8 if c.hidden.dtype == torch.bfloat16 else tol
    for got, expected, limit in (
        (loss, want.loss, tol),
        (logprobs[keep], want.logprobs, tol),
        (entropy[keep], want.entropy, tol),
        (hidden_grad, want.hidden_grad, grad_tol),
        (weight_grad, want.weight_grad, grad_tol),
    ):
        torch.testing.assert_close(got.double(), expected, rtol=limit, atol=max(tol, 1e-5) if limit > tol else tol)
