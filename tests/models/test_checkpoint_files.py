import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.safetensors_folder import SafetensorsFolder
from dynamo_megatron.models import load_model_config

Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


@pytest.fixture
def single(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("qwen2"), tmp_path / "single")


@pytest.fixture
def sharded(single, tmp_path):
    AutoModelForCausalLM.from_pretrained(single).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def open_folder(folder):
    return SafetensorsFolder(folder, load_model_config(folder))


def refusal(folder):
    with pytest.raises(ValueError) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sharded_and_single_read_the_same(single, sharded):
    source = load_file(single / "model.safetensors")
    with open_folder(single) as one, open_folder(sharded) as many:
        assert set(one.names) == set(many.names) == set(source)
        assert all(torch.equal(one.get(n), t) and torch.equal(many.get(n), t) for n, t in source.items())
        with pytest.raises(ValueError, match=r"tensor nothing is missing"):
            one.get("nothing")


def test_rotary_buffers_do_not_matter(single):
    rewrite(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    open_folder(single)


def test_a_tied_model_may_carry_its_head(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("qwen2", tied=True), tmp_path / "tied")
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_folder(folder)
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    message = refusal(folder)
    assert "lm_head.weight differs" in message and "tie_word_embeddings" in message


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(Q_BIAS), [Q_BIAS, "missing"]),
        (lambda t: t.pop("lm_head.weight"), ["lm_head.weight", "missing"]),
        (lambda t: t.update(extra=torch.ones(1)), ["model.safetensors", "extra"]),
        (lambda t: t.update({Q_BIAS: torch.ones(63)}), ["model.safetensors", Q_BIAS, "[63]", "[64]"]),
        (lambda t: t.update({Q_BIAS: torch.ones(64, dtype=torch.int8)}), [Q_BIAS, "I8"]),
    ],
    ids=["missing", "no head", "extra", "shape", "quantised"],
)
def test_a_wrong_tensor_is_named(single, change, named):
    rewrite(single, change)
    message = refusal(single)
    assert all(word in message for word in named), message


def test_a_truncated_file_is_named(single):
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert str(file) in refusal(single)


def test_a_corrupt_file_is_named(single):
    (single / "model.safetensors").write_bytes(b"<html>not found</html>")
    assert "model.safetensors: corrupt" in refusal(single)


def test_no_weights(single):
    (single / "model.safetensors").unlink()
    assert "neither model.safetensors nor" in refusal(single)


def test_a_missing_shard_is_named(sharded):
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    assert str(file) in refusal(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../a.safetensors"}}'])
def test_a_malformed_index_is_named(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert re.search(r"index.json: (malformed|not JSON|not a JSON object)", refusal(sharded))


def test_an_index_that_promises_too_much(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["ghost"] = next(iter(content["weight_map"].values()))
    index.write_text(json.dumps(content))
    assert "tensor ghost is not in it" in refusal(sharded)
