"""LoRA in every layout against autograd through transformers in float64, and what of the policy it leaves frozen."""

import json
import os
import subprocess
from pathlib import Path

import checkpoint_cases
import numpy as np
import pytest
import torch
from checkpoint_cases import case, difference, random_sequences
from layout_cases import LAYOUTS, gather_gradients, make_models, tensors_of
from rank_cases import run_cases, settings
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.convert import mcore2hf, mcore2peft
from dynamo_megatron.checkpoint.inspection import inspect
from dynamo_megatron.config import LoraConfig
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.adapters import adapted_weights
from dynamo_megatron.models.mapping import global_name, huggingface_names, layout_of, to_huggingface
from dynamo_megatron.runtime.seeds import derived_seed

PEERS_PYTHON = os.environ.get("PEERS_PYTHON", str(Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"))
LORA = {"rank": 4, "alpha": 6.0}
SCALE = LORA["alpha"] / LORA["rank"]
ATTENTION = {**LORA, "targets": ["attention"]}
ROWS = [  # family, layout, adapters, recompute
    ("qwen2", "1", LORA, "none"),
    ("qwen2", "DP2", LORA, "none"),
    ("qwen2", "TP2", LORA, "none"),
    ("qwen2", "TP2+SP", LORA, "none"),
    ("llama", "PP2", LORA, "full"),  # a tied head on another stage
    ("qwen2", "CP2", LORA, "none"),
    ("qwen3", "VPP2xPP2", LORA, "none"),
    ("glm4", "TP2+SP", LORA, "none"),
    ("qwen3_moe", "EP2", ATTENTION, "none"),
    ("qwen3_moe", "EP2xTP2+SP", ATTENTION, "full"),
]


def begin(policy, layout) -> None:
    """Gives every b values, of which each layout's ranks have their part."""
    tp, rank = layout.tp.size(), layout.tp.rank()
    for chunk in policy.chunks:
        for local, adapter in chunk.adapters.items():
            name = global_name(local, chunk.layer_offset)
            rows = adapter.b.shape[0] * (tp if adapter.column else 1)
            generator = torch.Generator().manual_seed(derived_seed(0, name))
            whole = 0.1 * torch.randn(rows, LORA["rank"], generator=generator)
            if adapter.column:
                parts = whole.chunk(2) if "fc1" in name else [whole]  # gate and up
                whole = torch.cat([part.chunk(tp)[rank] for part in parts])
            adapter.b.data.copy_(whole)
    for optimizer in getattr(policy.optimizer, "chained_optimizers", [policy.optimizer]):
        optimizer.reload_model_params()


def on_rank(case: dict, config, layout) -> dict:
    """The gradients of a mini-batch's cross-entropy, the merged weights, and logprobs with adapters and without."""
    from dynamo_megatron.policy.policy import Policy
    from dynamo_megatron.weight_sync.folder import write_huggingface

    spec, out = load_model_config(config.model.path), Path(case["out"])
    policy = Policy(spec, config, layout)
    source = random_sequences(spec.vocab_size, np.random.default_rng(5))
    packed = policy.pack(source, [np.arange(12)])
    start = policy.token_stats(source, packed, temperature=1.0).logprobs
    begin(policy, layout)
    reference = policy.reference_logprobs(source, packed)
    write_huggingface(policy, out / "merged")
    prepare = policy.optimizer.prepare_grads
    own: dict[str, torch.Tensor] = {}

    def prepare_grads():
        gather_gradients(policy)
        for chunk in policy.chunks:
            for local, adapter in chunk.adapters.items():
                name = global_name(local, chunk.layer_offset)
                found = {"a": adapter.a, "a grad": adapter.a.main_grad, "b": adapter.b, "b grad": adapter.b.main_grad}
                own.update({f"{name} {key}": value.detach().clone() for key, value in found.items()})
        return prepare()

    policy.optimizer.prepare_grads = prepare_grads
    update = policy.fit(source, np.full(12, 1 / source.response_lengths.sum()), 1e-3)
    torch.save((layout.tp.rank(), own), out / f"rank{layout.rank}.pt")
    buffers = [b.grad_data.numel() for ddp in policy.ddp for b in ddp.buffers + ddp.expert_parallel_buffers]
    return {
        "update": update,
        "off": float((start - reference).abs().max()),  # b was 0 at the start
        "gradients": sum(buffers),
        "adapters": sum(a.a.numel() + a.b.numel() for chunk in policy.chunks for a in chunk.adapters.values()),
    }


def whole(out: Path, ranks: int, spec) -> dict[str, torch.Tensor]:
    """ "NAME a" and "NAME a grad" of each Megatron weight, "LINEAR b" and "LINEAR b grad" of each Hugging Face one."""
    shards: dict[str, dict[int, torch.Tensor]] = {}
    for rank in range(ranks):
        tp_rank, own = torch.load(out / f"rank{rank}.pt")
        for key, value in own.items():  # data- and context-parallel ranks have the same
            assert torch.equal(shards.setdefault(key, {}).setdefault(tp_rank, value), value), key
    found = {}
    for key, by_rank in shards.items():
        name, part = key.split(" ", 1)
        parts = [by_rank[rank] for rank in sorted(by_rank)]
        if (layout_of(name) == "row") != part.startswith("a"):  # not cut
            assert all(torch.equal(parts[0], other) for other in parts), key
        if part.startswith("a"):
            found[key] = parts[0] if layout_of(name) != "row" else torch.cat(parts, 1)
        elif layout_of(name) == "row":
            found[f"{huggingface_names(spec, name)[0]} {part}"] = parts[0]
        else:
            found |= {f"{linear} {part}": value for linear, value in to_huggingface(spec, name, parts).items()}
    return found


def reference(folder: Path, spec, targets: list[str], found: dict[str, torch.Tensor]) -> tuple[float, dict, dict]:
    """(cross-entropy, gradients by the keys of `found`, merged weights) of transformers' model in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    leaves = {key: value.double().requires_grad_() for key, value in found.items() if not key.endswith("grad")}
    for name in adapted_weights(spec, LoraConfig(rank=4, targets=targets)):
        for linear in huggingface_names(spec, name):
            weights[linear] = weights[linear] + SCALE * leaves[f"{linear} b"] @ leaves[f"{name} a"]
    source, losses = random_sequences(spec.vocab_size, np.random.default_rng(5)), []
    for number, start in enumerate(source.prompt_lengths):
        tokens = torch.from_numpy(source.tokens[source.offsets[number] : source.offsets[number + 1]])
        output = torch.func.functional_call(model, weights, (tokens[None],), tie_weights=False)
        logits = output.logits[0, start - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[start:], reduction="sum"))
    loss = torch.stack(losses).sum() / source.response_lengths.sum()
    loss.backward()
    return loss.item(), {f"{key} grad": leaf.grad for key, leaf in leaves.items()}, weights


def test_gradients_are_those_of_transformers_in_float64_under_every_layout(tmp_path):
    models, cases = make_models(tmp_path / "models"), []
    for number, (family, layout, lora, recompute) in enumerate(ROWS):
        ranks, parallel = LAYOUTS[layout]
        config = settings(models[family], parallel, trainer={"micro_batch_tokens": 100, "recompute": recompute})
        config["model"]["lora"] = lora
        config["algorithm"] = {"kl": {"coef": 0.1}}  # its reference is the model without adapters
        cases.append({"config": config, "ranks": ranks, "out": str(tmp_path / f"{number}-{layout}")})
    said = run_cases(__file__, cases, tmp_path)
    first: dict[str, torch.Tensor] = {}
    for (family, layout, lora, _), one, ranks in zip(ROWS, cases, said, strict=True):
        out, spec = Path(one["out"]), load_model_config(models[family])
        found = whole(out, one["ranks"], spec)
        loss, gradients, weights = reference(models[family], spec, lora.get("targets", ["attention", "mlp"]), found)
        assert len(gradients) == len([key for key in found if key.endswith("grad")]) > 0
        for key, gradient in gradients.items():
            assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), (layout, key)
        norm = torch.stack([g.norm() for key, g in gradients.items()]).norm().item()
        for own in ranks:
            assert own["update"]["loss"] == pytest.approx(loss, rel=1e-5)
            assert own["update"]["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert own["off"] == 0.0
            assert own["adapters"] <= own["gradients"] < own["adapters"] + 1000  # padding
        merged = tensors_of(out / "merged")
        both = merged.keys() & weights.keys()  # transformers stacks experts
        assert all((merged[name] - weights[name]).norm() <= 1e-6 * weights[name].norm() for name in both)
        if family == "qwen2":
            first = first or found
            assert all(torch.equal(value, found[key]) for key, value in first.items() if key.endswith((" a", " b")))


@pytest.fixture(scope="module")
def saved(make_tiny_model, tmp_path_factory) -> tuple[Path, Path, list]:
    """(model, folder, what the ranks say): saved by TP2 x PP2, loaded by the same and by others, and refused."""
    folder, shape = tmp_path_factory.mktemp("adapters"), {"layers": 4, "kv_heads": 4, "vocab": 104}
    model, other = (make_tiny_model(folder / f"model{seed}", seed=seed, **shape) for seed in (0, 1))
    layout, run = {"tp": 2, "pp": 2, "sequence_parallel": True}, folder / "straight"
    steps = {kind: str(run / kind / "step-000003") for kind in ("sync", "async")}
    cases = [
        case(model, layout, run, lora=LORA),
        case(model, layout, folder / "same", lora=LORA, load=steps["async"]),
        case(model, {"cp": 2, "pp": 2, "vpp": 2}, folder / "context", lora=LORA, load=steps["sync"]),
        case(model, {"tp": 4}, folder / "tp4", lora=LORA, load=steps["sync"]),
        case(other, {}, folder / "other", ranks=1, lora=LORA, load=steps["sync"]),
    ]
    return model, folder, run_cases(checkpoint_cases.FILE, cases, folder)


def test_a_run_goes_on_from_its_adapters_bit_for_bit_and_in_another_layout(saved):
    _, folder, said = saved
    assert said[1] == said[2] == said[3] == ["loaded"] * 4
    assert difference(folder / "straight", folder / "same") == 0
    assert max(difference(folder / "straight", folder / other) for other in ("context", "tp4")) <= 1e-5
    names = inspect(folder / "straight" / "sync" / "step-000003").tensors.names
    assert len(names) == 32 and all(".adapter." in name for name in names)


def test_a_base_with_other_weights_is_refused(saved):
    _, folder, said = saved
    checkpoint = folder / "straight" / "sync" / "step-000003"
    (line,) = said[4]
    assert line.startswith(f"{checkpoint}: its adapters were trained beside other weights than those in {folder}")
    with pytest.raises(ValueError, match="beside other weights than those in"):
        mcore2hf(checkpoint, folder / "never", model=folder / "model1")


def test_a_checkpoint_converts_to_the_merged_model(saved):
    model, folder, _ = saved
    mcore2hf(folder / "straight" / "sync" / "step-000003", folder / "converted" / "hf", model=model)
    assert difference(folder / "straight" / "saved", folder / "converted") < 1e-7
    assert difference(folder / "straight" / "saved", folder / "straight") > 1e-4


LOAD = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapters, merged = sys.argv[1:]
load = lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
tokens = torch.arange(90)[None]
peft = PeftModel.from_pretrained(load(base), adapters)
one, other, start = (model(tokens).logits for model in (peft, load(merged), load(base)))
print(json.dumps([(one - other).abs().max().item(), (one - start).abs().max().item()]))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path(PEERS_PYTHON).is_file(), reason=f"no {PEERS_PYTHON} (make peers)")
def test_peft_loads_the_adapters(saved):
    model, folder, _ = saved
    checkpoint = folder / "straight" / "sync" / "step-000003"
    mcore2peft(checkpoint, folder / "peft", model=model)
    mcore2hf(checkpoint, folder / "merged", model=model)
    words = [PEERS_PYTHON, "-P", "-c", LOAD, *map(str, (model, folder / "peft", folder / "merged"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    apart, changed = json.loads(done.stdout)
    assert apart < 1e-5 and changed > 1e-3  # the merged weights are rounded to float32
