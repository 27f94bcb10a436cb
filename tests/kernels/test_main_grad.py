"""The head's gradient through Megatron's data parallelism: a tied weight, main_grad, several micro-batches."""

import os
import subprocess
import sys
from pathlib import Path

import ddp_worker
import pytest
import torch

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("interpreter")]

SIZE = 2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    worker, processes = Path(__file__).with_name("ddp_worker.py"), []
    log = folder / "output.txt"
    with log.open("w") as output:
        for rank in range(SIZE):
            command = [sys.executable, "-W", "ignore", worker, str(rank), str(SIZE), folder]
            environment = {**os.environ, "TRITON_INTERPRET": "1"}
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))
        try:
            codes = [process.wait(timeout=300) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert codes == [0] * SIZE, log.read_text()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(SIZE)]


@pytest.fixture(scope="module")
def wanted():
    """Autograd's gradients of the loss over every rank's micro-batches, written plainly in float64."""
    model, config = ddp_worker.Tied().double(), ddp_worker.CONFIG
    for rank in range(SIZE):
        for index in range(ddp_worker.MICRO_BATCHES):
            tokens, labels, advantages, old, weights = ddp_worker.micro_batch(rank, SIZE, index)
            if (labels < 0).all():
                continue
            lp = (model(tokens) @ model.embedding[: ddp_worker.VOCAB].t()).log_softmax(-1)
            ratio = (lp.gather(1, labels[:, None])[:, 0] - old).exp()
            bounded = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
            loss = torch.maximum(-advantages * ratio, -advantages * bounded)
            entropy = -(lp.exp() * lp).sum(-1)
            (weights * (loss - config.entropy_coef * entropy)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", ddp_worker.CASES)
def test_equals_autograd(ranks, wanted, name):
    for rank in ranks:
        for parameter, want in wanted.items():
            torch.testing.assert_close(rank[name][parameter].double(), want, rtol=1e-5, atol=1e-5)
