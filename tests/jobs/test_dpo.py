"""`dynamo-megatron dpo`: an update of tensor-parallel ranks beside autograd through transformers in float64."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.full
PAIRS = [("2+3=", "5", "6"), ("Say it.", "Abracadabra", "No"), ("x", "yz", "zzzz"), ("Name?", "Ada", "Bob, or so")]
BETA = 0.7


def log_ratios(models: list, tokenizer, prompt: str, completion: str) -> torch.Tensor:
    """The sum over the completion's tokens of log p_policy - log p_reference."""
    before, after = (tokenizer.encode(t, add_special_tokens=False) for t in (prompt, completion))
    ids = torch.tensor([*before, *after, tokenizer.eos_token_id])
    policy, reference = (
        m(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]] for m in models
    )
    return (policy - reference.detach())[len(before) - 1 :].sum()


def test_an_update_is_that_of_the_loss_over_the_pairs(tiny_model, make_tiny_model, tmp_path, command_line):
    other = make_tiny_model(tmp_path / "other", family="qwen2", dtype="float32", seed=5)
    with (tmp_path / "pairs.jsonl").open("w") as file:
        for number, (prompt, chosen, rejected) in enumerate(PAIRS):
            row = {"id": str(number), "prompt": prompt, "chosen": chosen}
            file.write(json.dumps({**row, "rejected": [{"role": "assistant", "content": rejected}]}) + "\n")
    keys = {
        "model.path": tiny_model,
        "model.dtype": "float32",
        "data.source": "pairs.jsonl",
        "data.template": "'{prompt}'",
        "data.batch_prompts": len(PAIRS),
        "dpo.beta": BETA,
        "dpo.reference": other,
        "parallel.tp": 2,
        "trainer.steps": 1,
        "trainer.micro_batch_tokens": 16,  # the completions of a pair are in different micro-batches
        "output_dir": "run",
    }
    code, text = command_line(tmp_path, "dpo", *(f"{k}={v}" for k, v in keys.items()), "--ranks", 2)
    assert code == 0, text[-3000:]
    found = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    models = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64) for m in (tiny_model, other)]
    gaps = [[log_ratios(models, tokenizer, p, text) for text in both] for p, *both in PAIRS]
    margins = BETA * torch.stack([chosen - rejected for chosen, rejected in gaps])
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in models[0].parameters()]).norm()
    assert found["dpo/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert found["dpo/margin"] == pytest.approx(margins.mean().item(), abs=1e-5)
    assert found["dpo/accuracy"] == (margins > 0).double().mean().item()
    assert found["policy/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
