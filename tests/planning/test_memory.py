"""The planner's parameters and memory against tensors, on two real ranks: what a policy holds after an update, and what
autograd keeps of a forward pass."""

import gc

import pytest
import torch
from rank_cases import run_cases

pytestmark = pytest.mark.full
CASES = {  # name: family, dtype, parallel, tied, recompute
    "TP2-tied": ("qwen2", "bfloat16", {"tp": 2, "sequence_parallel": True}, True, "none"),
    "VPP2-tied": ("qwen3", "bfloat16", {"pp": 2, "vpp": 2}, True, "none"),
    "PP3+1": ("qwen2", "bfloat16", {"pp": 2, "last_stage_layers": 1}, False, "none"),
    "CP2-full": ("qwen3", "bfloat16", {"cp": 2}, False, "full"),
    "DP2-float32": ("qwen3", "float32", {}, False, "none"),
    "TP2-gemma3": ("gemma3_text", "bfloat16", {"tp": 2, "sequence_parallel": True}, True, "none"),
    "TP2-lora": ("qwen2", "bfloat16", {"tp": 2, "sequence_parallel": True}, False, "none"),
    "TP2-olmo2": ("olmo2", "bfloat16", {"tp": 2, "sequence_parallel": True}, False, "none"),
    "TP2-glm4": ("glm4", "bfloat16", {"tp": 2, "sequence_parallel": True}, False, "none"),
    "DP2-offload": ("qwen2", "bfloat16", {}, False, "none"),
    "EP2-TP2": ("qwen3_moe", "bfloat16", {"tp": 2, "ep": 2, "sequence_parallel": True}, False, "none"),
}
SHAPE = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 256, "vocab": 1000}


def live_bytes() -> int:
    """Of all tensors of this process, storages that they share once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def saved_bytes(policy, tokens: int = 256) -> int:
    """What autograd keeps of the layers (not of embedding and last norm) for `tokens` packed tokens of this rank, as
    much on every machine: a CPU without bfloat16 arithmetic multiplies in float32 here."""
    from dynamo_megatron.policy import backend
    from dynamo_megatron.policy.batch import MicroBatch

    (chunk,), cp = policy.chunks, policy.layout.cp.size()
    collecting, storages = [False], {}
    parameters = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    chunk.decoder.register_forward_pre_hook(lambda *_: collecting.__setitem__(0, True))
    chunk.decoder.final_layernorm.register_forward_pre_hook(lambda *_: collecting.__setitem__(0, False))

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if collecting[0] and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)  # alive, or its address could be another's
        return tensor

    places = torch.arange(tokens * cp // 4).view(2 * cp, -1).repeat(4, 1, 1)
    here = torch.cat([places[:, policy.layout.cp.rank()], places[:, -1 - policy.layout.cp.rank()]], 1).view(1, -1)
    none = torch.zeros(0, dtype=torch.int64)
    bounds = torch.arange(0, tokens * cp + 1, tokens * cp // 4, dtype=torch.int32)
    lengths, real = bounds.diff().numpy(), torch.ones_like(here[0], dtype=torch.bool)
    batch = MicroBatch(torch.zeros_like(here), here, bounds, none, none, none, 0 * bounds, lengths, real)
    backend._mode._slow_bfloat16 = False
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        chunk.forward_packed(batch)
    return sum(size for size, _ in storages.values())


def on_rank(case: dict, config, layout) -> dict:
    """The tensors of a policy after an update, beside the planner's."""
    from checkpoint_cases import train

    from dynamo_megatron.models import load_model_config
    from dynamo_megatron.planning import formulas
    from dynamo_megatron.policy.policy import Policy

    before = live_bytes()
    spec, p = load_model_config(config.model.path), config.parallel
    policy = Policy(spec, config, layout)
    train(policy, 1)
    options = {"lora": config.model.lora, "cpu_offload": config.optimizer.cpu_offload}
    planned = formulas.stage_state(spec, p, config.model.dtype, layout.world_size, layout.pp.rank(), **options)
    row = {
        "live": live_bytes() - before,
        "planned": planned.total + planned.host,
        "planned host": planned.host,
        "parameters": sum(q.numel() for chunk in policy.chunks for q in chunk.parameters()),
        "planned parameters": planned.dense + planned.experts,
    }
    if p.pp == 1:
        h, width = spec.hidden_size, 4 if spec.zero_centered_norms else formulas.WIDTH[config.model.dtype]
        spread, heads = p.tp if p.sequence_parallel else 1, spec.num_attention_heads + spec.num_query_groups
        norms = (spec.pre_norms + spec.post_norms) * 2 * h / spread + spec.qk_norm * heads * spec.kv_channels / p.tp
        # A CPU's norm saves two tensors in float32, a frozen one its input alone.
        wide = 4 if config.model.lora else 8
        kept = formulas.layer_activations(spec, p, config.model.dtype, config.model.lora) + (wide - width) * norms
        if config.trainer.recompute == "full":
            kept = width * h / spread
        angles = 4 * spec.kv_channels  # of RoPE, once for all layers: nothing beside a real model's
        first = (4 * h + 4) / spread if config.model.lora else 0  # the first norm: no gradient goes through it
        row["saved"], row["planned saved"] = saved_bytes(policy), (kept * spec.num_layers - first + angles) * 256
    return row


@pytest.fixture(scope="module")
def ranks(make_tiny_model, tmp_path_factory) -> dict[str, list[dict]]:
    """name -> what each of two ranks counts and what was planned."""
    folder = tmp_path_factory.mktemp("memory")
    cases = []
    for name, (family, dtype, parallel, tied, recompute) in CASES.items():
        model = make_tiny_model(folder / name, family=family, dtype=dtype, tied=tied, **SHAPE)
        config = {
            "model": {"path": str(model), "dtype": dtype, "lora": {"rank": 16} if "lora" in name else None},
            "data": {"source": "none"},
            "output_dir": "none",
            "optimizer": {"cpu_offload": "offload" in name},
            "parallel": parallel,
            "trainer": {"micro_batch_tokens": 64, "recompute": recompute},
        }
        cases.append({"config": config, "ranks": 2})
    return dict(zip(CASES, run_cases(__file__, cases, folder), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_a_rank_holds(name, ranks):
    for row in ranks[name]:
        print(name, row)
        assert row["parameters"] == row["planned parameters"]
        assert row["live"] == pytest.approx(row["planned"], rel=0.03)
        assert (row["planned host"] > 2 * row["parameters"]) == ("offload" in name)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "pp" not in case[2] and case[1] != "float32"])
def test_what_autograd_keeps(name, ranks):
    """Rows of an expert differ from rank to rank: the two together are what is planned for two."""
    saved, planned = (sum(row[key] for row in ranks[name]) for key in ("saved", "planned saved"))
    print(name, saved, planned, saved / planned)
    assert saved == pytest.approx(planned, rel=0.03)
