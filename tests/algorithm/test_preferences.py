"""The losses of pairs and their derivatives, against autograd and against TRL's DPO trainer."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from dynamo_megatron.algorithm.preferences import preference_loss
from dynamo_megatron.config import DPOConfig

CONFIGS = ({"beta": 0.1}, {"beta": 2.0}, {"label_smoothing": 0.2}, {"loss": "ipo"}, {"loss": "ipo", "beta": 0.5})
PEERS = os.environ.get("PEERS_PYTHON") or Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
TRL = """
import json, sys
from collections import defaultdict
from types import SimpleNamespace
import torch
from accelerate import Accelerator
from trl.trainer.dpo_trainer import DPOTrainer

class Probe(DPOTrainer):
    def __init__(self, **fields):
        self.__dict__.update(fields)

accelerator, found = Accelerator(cpu=True), []
for case in json.load(sys.stdin):
    own, reference = (torch.tensor(case[k], dtype=torch.float64) for k in ("own", "reference"))
    mask = torch.tensor(case["mask"])
    own.requires_grad_()
    def model(log_probs):
        rest = {k: torch.zeros(log_probs.shape) for k in ("entropy", "mean_logits", "log_sum_sq_probs")}
        top = torch.zeros(log_probs.shape, dtype=torch.bool)
        return lambda **_: SimpleNamespace(log_probs=log_probs, is_top1=top, **rest)
    trainer = Probe(
        model=torch.nn.Identity().eval(), ref_model=model(reference), accelerator=accelerator, beta=case["beta"],
        loss_types=[case["loss"]], loss_weights=[1.0], f_divergence_type="reverse_kl", ld_alpha=None,
        precompute_ref_logps=False, aux_loss_enabled=False, use_weighting=False, label_smoothing=0.0,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), _metrics={"eval": defaultdict(list)}, _tp_size=1,
        _total_train_tokens=0,
    )
    whole = torch.cat([torch.zeros(len(mask), 1, dtype=torch.int64), mask], 1)
    inputs = {"completion_mask": whole, "input_ids": torch.zeros_like(whole), "attention_mask": torch.ones_like(whole)}
    trainer.model.gradient_checkpointing_disable = trainer.model.gradient_checkpointing_enable = lambda *_, **__: None
    trainer.model.is_gradient_checkpointing = False
    loss = trainer._compute_loss(model(own), inputs, False)
    loss.backward()
    found.append({"loss": loss.item(), "gradient": own.grad.tolist()})
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize("given", CONFIGS)
def test_the_derivatives_are_those_of_the_loss(given):
    rng, config = np.random.default_rng(0), DPOConfig(**given)
    (chosen, rejected), lengths = rng.normal(0, 4, (2, 50)), tuple(rng.integers(1, 20, (2, 50)))
    c, r = (torch.tensor(x, requires_grad=True) for x in (chosen, rejected))
    if config.loss == "ipo":
        n, m = map(torch.tensor, lengths)
        expected = (c / n - r / m - 1 / (2 * config.beta)) ** 2
    else:
        z, e = config.beta * (c - r), config.label_smoothing
        expected = -(1 - e) * logsigmoid(z) - e * logsigmoid(-z)
    slopes = torch.autograd.grad(expected.sum(), (c, r))
    for got, wanted in zip(preference_loss(chosen, rejected, lengths, config), (expected, *slopes), strict=True):
        np.testing.assert_allclose(got, wanted.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.full
@pytest.mark.skipif(not Path(PEERS).exists(), reason="make peers")
def test_they_are_those_of_trl():
    rng, cases, expected = np.random.default_rng(1), [], []
    for _ in range(400):
        given = {"loss": str(rng.choice(["sigmoid", "ipo"])), "beta": float(rng.uniform(0.05, 1))}
        lengths = rng.integers(1, 9, (2, 4))  # chosen, rejected
        mask = (np.arange(8) < lengths.reshape(-1, 1)).astype(int)
        own, reference = -rng.exponential(2, (2, *mask.shape)) * mask
        cases.append({**given, "own": own.tolist(), "reference": reference.tolist(), "mask": mask.tolist()})
        ratios = (own - reference).sum(1).reshape(2, -1)
        loss, *slopes = preference_loss(*ratios, tuple(lengths), DPOConfig(**given))
        expected.append((loss.mean(), np.concatenate(slopes)[:, None] * mask / len(loss), mask))
    run = subprocess.run([PEERS, "-P", "-c", TRL], input=json.dumps(cases), capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    apart = [0.0, 0.0]
    for got, (loss, gradient, mask) in zip(json.loads(run.stdout.splitlines()[-1]), expected, strict=True):
        gaps = got["loss"] - loss, np.asarray(got["gradient"]) * mask - gradient
        apart = [max(most, float(np.abs(gap).max())) for most, gap in zip(apart, gaps, strict=True)]
    print("largest difference of loss and gradient:", apart)
    assert max(apart) <= 1e-6
