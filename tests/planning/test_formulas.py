"""The planner's figures of two large models, by hand: every number below is arithmetic written out."""

import dataclasses

import pytest
from config_files import published_spec

from dynamo_megatron.config import Config, LoraConfig, ParallelConfig
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning import formulas
from dynamo_megatron.planning.formulas import decode_seconds, forward_flops
from dynamo_megatron.planning.hardware import GIB, GPUS, Cluster
from dynamo_megatron.planning.plan import RESERVED, host_memory, make_plan, workload
from dynamo_megatron.planning.rates import RATES


def test_72b_by_hand():
    """Qwen2.5-72B, tp 8 x pp 4 x dp 2 on 64 H100."""
    spec = published_spec("Qwen2.5-72B")
    qkv = 8192 * (64 + 8 + 8) * 128 + (64 + 8 + 8) * 128  # 64 heads and 8 key/value heads of 128, with biases
    layer = qkv + 64 * 128 * 8192 + 3 * 8192 * 29568 + 2 * 8192
    assert formulas.model_elements(spec) == 80 * layer + 2 * 152064 * 8192 + 8192 == 72_706_203_648
    p = ParallelConfig(tp=8, pp=4, sequence_parallel=True)
    on_rank = (layer - 2 * 8192) // 8 + 2 * 8192  # norms are whole on every rank
    vocabulary = 152064 // 8 * 8192
    ranks = [20 * on_rank + extra for extra in (vocabulary, 0, 0, vocabulary + 8192)]
    states = [formulas.stage_state(spec, p, "bfloat16", 64, stage) for stage in range(4)]
    assert [state.dense for state in states] == ranks == [2_350_212_096, 2_194_498_560, 2_194_498_560, 2_350_220_288]
    assert (states[1].parameters, states[1].gradients) == (2 * 2_194_498_560, 4 * 2_194_498_560)
    assert states[1].optimizer == 12 * 2_194_498_560 // 2
    # 16384 tokens; norms 8h; 8 heads and 1 key/value head of 128 a rank; 6 bytes of SwiGLU's width
    a_token = (8 * 8192 + 8) / 8 + 2 * (2 * 1024 + 2 * 128) + 4 * 8 + 6 * 3696
    assert a_token == 35_009
    assert formulas.layer_activations(spec, p, "bfloat16") == pytest.approx(a_token)
    full = formulas.saved_activations(spec, p, "bfloat16", "full", 16384, 4 * 20, 4)
    assert full == pytest.approx(16384 * (80 * 2 * 1024 + a_token + 4 * 2 * 1024))
    assert formulas.in_flight(p, 80, 0, 30) == (80, 4) and formulas.in_flight(p, 80, 3, 30) == (20, 1)
    # 2 x 80 layers x 1 of 8 key/value heads of 128 x 2 bytes on each of 8 ranks
    assert formulas.kv_bytes_a_token(spec, 8, "bfloat16") == 2 * 80 * 1 * 128 * 2 == 40_960
    assert formulas.server_bytes(spec, 8, "bfloat16", None) == 2 * (80 * on_rank + 2 * 152064 * 1024 + 8192)
    assert formulas.checkpoint_bytes(spec, "bfloat16") == 14 * 72_706_203_648
    # 2 FLOPs a parameter that multiplies; 4 x 80 x 8192 x L / 2 for each token's attention to those before it
    multiply = 80 * (layer - 2 * 8192 - 80 * 128) + 152064 * 8192
    assert forward_flops(spec, [(1, 4096)]) == 2 * multiply * 4096 + 4 * 80 * 8192 * 4096**2 / 2


def test_adapters_by_hand():
    """Of rank 16 beside Qwen2.5-72B, tp 8 x pp 1 on 8 H100."""
    spec, p, lora = published_spec("Qwen2.5-72B"), ParallelConfig(tp=8, sequence_parallel=True), LoraConfig(rank=16)
    # whole a of h, rows of q, k, v and of gate and up a rank; columns of the others a rank, whole b of h
    layer = 16 * (8192 + 1280) + 16 * (1024 + 8192) + 16 * (8192 + 2 * 3696) + 16 * (3696 + 8192)
    state = formulas.stage_state(spec, p, "bfloat16", 8, 0, lora)
    assert state.trained == (80 * layer, 0) == (59_084_800, 0)
    whole = 16 * ((8192 + 10240) + 2 * 8192 + (8192 + 2 * 29568) + (29568 + 8192))
    assert formulas.checkpoint_bytes(spec, "bfloat16", lora) == 14 * 80 * whole


def test_30b_a3b_by_hand():
    """Qwen3-30B-A3B: 128 experts of width 768, 8 a token; ep 8 x dp 8 on 8 H200."""
    spec = published_spec("Qwen3-30B-A3B")
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048 + 2 * 128  # with norms of q and k
    expert = 3 * 2048 * 768
    layer = attention + 128 * expert + 128 * 2048 + 2 * 2048
    outside = 2 * 151936 * 2048 + 2048
    assert formulas.model_elements(spec) == 48 * layer + outside == 30_532_122_624
    assert formulas.active_elements(spec) == 48 * (layer - 120 * expert) + outside == 3_353_032_704
    p = ParallelConfig(ep=8)
    state = formulas.stage_state(spec, p, "bfloat16", 8, 0)
    dense = 48 * (attention + 128 * 2048 + 2 * 2048) + outside
    assert state.dense == dense == 1_541_093_376
    assert state.experts == 48 * 16 * expert == 3_623_878_656
    assert state.parameters == 2 * (1_541_093_376 + 3_623_878_656)
    assert state.optimizer == 12 * (1_541_093_376 / 8 + 3_623_878_656)  # an expert is on one rank alone
    # 8 experts a token: its row, 3 widths; norms and q/k norms
    attention_bytes = 8 * 2048 + 8 + 2 * (2 * 4096 + 2 * 512) + 4 * 32 + 2 * (4096 + 512) + 4 * 36
    experts_bytes = 8 * (2 * 2048 + 6 * 768 + 24) + 5 * 128
    assert formulas.layer_activations(spec, p, "bfloat16") == pytest.approx(attention_bytes + experts_bytes)
    assert formulas.kv_bytes_a_token(spec, 1, "bfloat16") == 2 * 48 * 4 * 128 * 2 == 98_304
    assert formulas.kv_bytes_a_token(spec, 8, "bfloat16") == 2 * 48 * 1 * 128 * 2  # a rank has a head at least
    assert formulas.server_bytes(spec, 1, "bfloat16", None) == 2 * 30_532_122_624
    linear = 48 * (attention - 2 * 128 + 128 * expert)  # a byte each, and 4 for a block of 128 x 128
    in_fp8 = linear + linear // 128**2 * 4 + 2 * (30_532_122_624 - linear)
    assert formulas.server_bytes(spec, 1, "bfloat16", "fp8") == in_fp8


def test_every_rank_of_a_gemma_server_has_the_whole_embedding():
    spec = published_spec("gemma-3-270m")
    embedding, keys_and_values = 2 * 262_144 * 640, 2 * 18 * 2 * 640 * 256  # one key/value head, on both ranks
    one, two = (formulas.server_bytes(spec, tp, "bfloat16", None) for tp in (1, 2))
    whole = embedding + keys_and_values
    assert two == pytest.approx(whole + (one - whole) / 2, rel=1e-3)  # norms are whole, too


def test_the_interleaved_schedule_holds_more():
    """Korthikanti et al., section 4.2.3: L (1 + (pp - 1) / (pp vpp)) layers on the first stage."""
    p = ParallelConfig(pp=4, vpp=5)
    layers, batches = formulas.in_flight(p, 80, 0, 40)
    assert layers == pytest.approx(80 * (1 + 3 / 20)) and batches == pytest.approx(layers / 20)
    assert formulas.in_flight(p, 80, 3, 40)[0] == pytest.approx((4 * 4 + 1) * 4)
    assert formulas.in_flight(p, 80, 0, 1) == (20, 1)  # no more than there are


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("layout", [{}, {"tp": 4}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "ep": 2}], ids=str)
def test_the_shards_are_the_model(name, layout):
    """Summed over the ranks of a replica, every parameter once, but for norms, routers, biases and padding."""
    spec, p = published_spec(name), ParallelConfig(**layout, sequence_parallel="tp" in layout)
    assert formulas.model_elements(spec) / 1e9 == pytest.approx(PUBLISHED[name]["billion_parameters"], rel=0.01)
    copies = spec.vocab_size * spec.hidden_size if spec.tied and p.pp > 1 else 0  # of a tied head
    total = 0
    for stage in range(p.pp):
        dense, experts = formulas.stage_parameters(spec, p, stage)
        total += sum(dense) * p.tp + sum(experts) * p.ep
    assert total == pytest.approx(formulas.model_elements(spec) + copies, rel=2e-3)


def config_of(**parts):
    needed = {"model": {"path": "none", "max_length": 10240}, "data": {"source": "none", "batch_prompts": 64}}
    return Config.model_validate({**needed, "output_dir": "none", **parts})


@pytest.fixture
def stated(monkeypatch):
    """An H100 that does what its maker states, all the time: what is left are the formulas."""
    rates = {"products": 989.4e12, "attention": 989.4e12, "copies": 3.35e12, "busy": 1.0}
    for name, rate in {**rates, **dict.fromkeys(("passing", "forward launches", "launches", "decode"), 0.0)}.items():
        monkeypatch.setitem(RATES, name, RATES[name]._replace(value=rate))


def test_a_decode_step_of_few_sequences_reads_few_experts(stated):
    spec, gpu = published_spec("Qwen3-30B-A3B"), dataclasses.replace(GPUS["h100-80"], flops=1e30, memory_bandwidth=1.0)
    one, many = (decode_seconds(config_of(), spec, gpu, n, 0) for n in (1, 10_000))
    assert one == pytest.approx(2 * 3_353_032_704) and many == pytest.approx(2 * 30_532_122_624)


def test_links_within_and_between_nodes():
    cluster = Cluster(GPUS["h100-80"], 16, 8)
    assert cluster.link(8) == 450e9 and cluster.link(4, apart=2) == 450e9
    assert cluster.link(16) == 8 * 50e9  # 8 members a node, each with its own share of the network
    assert cluster.link(4, apart=4) == 2 * 50e9 and cluster.link(2, apart=8) == 50e9


ROLLOUT = {"max_new_tokens": 8192, "servers": 8, "tp": 2, "memory_fraction": 0.5}


def planned(name, gpu, gpus, response, **parts):
    parts.setdefault("rollout", ROLLOUT)
    parts.setdefault("algorithm", {"allocation": {"budget": 512}, "loss": {"mini_batches": 4}})
    config, spec = config_of(**parts), published_spec(name)
    return make_plan(config, spec, Cluster(GPUS[gpu], gpus, 8), workload(config, spec, response))


def test_a_plan_adds_up():
    """What a stage needs is the sum that the verdict is about; a long sequence counts where it is above the budget."""
    trainer = {"recompute": "full", "micro_batch_tokens": 8192}
    parts = {"parallel": {"tp": 4, "sequence_parallel": True}, "trainer": trainer}
    rollout = {**ROLLOUT, "memory_fraction": 0.4}
    plan = planned("Qwen2.5-14B", "h100-80", 16, None, rollout=rollout, **parts)
    (stage,) = plan.stages
    saved = formulas.saved_activations(plan.spec, plan.config.parallel, "bfloat16", "full", 10240, 48, 1)
    assert stage.training["activations"] == saved and stage.training["reserved"] == RESERVED
    assert plan.peak == max(sum(stage.training.values()), *stage.others.values())
    weights, state, buckets = plan.servers.weights, stage.state.total, 5 * 512 * 2**20
    held = weights + plan.servers.pool + 10 * GIB
    assert held == pytest.approx(0.4 * 79.1 * GIB + 10 * GIB) and stage.training["server"] == 2 * GIB
    sync = stage.state.parameters + weights + buckets + 2 * GIB
    phases = {"generate": held, "weight sync": sync, "save": state + weights + 2 * GIB}
    assert stage.others == {name: size + RESERVED for name, size in phases.items()}
    (both,) = planned("Qwen2.5-14B", "h100-80", 16, None, rollout={**rollout, "offload": False}, **parts).stages
    assert both.training["server"] == held and both.others["weight sync"] == state + held + buckets + RESERVED
    assert plan.servers.tokens == plan.servers.pool / (196_608 / 2)
    disk = planned("Qwen2.5-14B", "h100-80", 16, None, rollout={**rollout, "sync": {"transport": "disk"}}, **parts)
    # without the two copies that the servers read
    assert disk.stages[0].others["weight sync"] == sync - 2 * 512 * 2**20 + RESERVED
    times = plan.times
    assert times.step == pytest.approx(times.generate + times.logprobs + times.update + times.weight_sync)
    ahead = dataclasses.replace(times, overlap=True)
    assert ahead.step == pytest.approx(max(times.generate, times.logprobs + times.update) + times.weight_sync)


def test_a_critic_counts_as_a_second_policy():
    """Beside servers the two are offloaded in turn, but for a save; without offloading both are always there."""
    parts = {"parallel": {"tp": 4, "sequence_parallel": True}, "checkpoint": {"async": True}}
    parts["rollout"] = {**ROLLOUT, "servers": 4}
    loss = {"allocation": {"budget": 512}, "loss": {"mini_batches": 4}, "modulation": None}
    algorithms = [{**loss, "advantage": {"kind": kind}} for kind in ("grpo", "gae")]
    alone, both = (planned("Qwen2.5-14B", "h200-141", 8, 1000, algorithm=each, **parts) for each in algorithms)
    (one,), (two,) = alone.stages, both.stages
    assert two.training == one.training and two.others["save"] == one.others["save"] + one.state.total
    assert two.others["generate"] == one.others["generate"] and both.checkpoint == 2 * alone.checkpoint
    assert both.times.update == 2 * alone.times.update and both.times.logprobs == 2 * alone.times.logprobs
    for part in ("saving a checkpoint", "what waits while servers generate"):
        assert both.host[part] == 2 * alone.host[part]
    on_host = {"optimizer": {"cpu_offload": True}}
    moved = planned("Qwen2.5-14B", "h200-141", 8, 1000, algorithm=algorithms[1], **on_host, **parts)
    assert moved.host["the optimizer"] == 2 * 8 * moved.stages[0].state.host > 0
    parts["rollout"] |= {"offload": False}
    (resident,) = planned("Qwen2.5-14B", "h200-141", 8, 1000, algorithm=algorithms[1], **parts).stages
    assert resident.training["critic"] == one.state.total


@pytest.mark.parametrize(
    ("offload", "checksums", "part"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_sync_with_adapters_sends_what_they_change(offload, checksums, part):
    """Beside q, k, v and o of Qwen2.5-14B, of which each of a server's two ranks has half, in bfloat16."""
    spec, lora = published_spec("Qwen2.5-14B"), {"targets": ["attention"]}
    rollout = {"tp": 2, "offload": offload, "proof": {"checksums": checksums}}
    config = config_of(model={"path": "none", "lora": lora}, rollout=rollout)
    sent = 48 * 5120 * (40 + 8 + 8 + 40) * 128 if part else 1e9
    assert formulas.sync_seconds(config, spec, 1e9) == sent / RATES["ipc"].value


def test_servers_with_fp8_weights_have_more_room_for_their_cache():
    parts = {"parallel": {"tp": 4, "sequence_parallel": True}, "trainer": {"recompute": "full"}}
    plain = planned("Qwen2.5-14B", "h100-80", 16, None, **parts)
    fp8 = {"rollout": {**ROLLOUT, "quantization": "fp8"}, "algorithm": {"rollout_correction": {}}}
    fp8["algorithm"] |= {"allocation": {"budget": 512}, "loss": {"mini_batches": 4}}
    quantised = planned("Qwen2.5-14B", "h100-80", 16, None, **parts, **fp8)
    # 48 layers of q, k, v, o and an MLP of 13824; a byte each, a scale of 4 for a block of 128 x 128
    linear = 48 * (5120 * (40 + 8 + 8 + 40) * 128 + 3 * 5120 * 13824) / 2
    saved = linear - linear / 128**2 * 4
    assert plain.servers.weights - quantised.servers.weights == pytest.approx(saved)
    assert quantised.servers.pool - plain.servers.pool == pytest.approx(saved)
    assert quantised.times.generate < plain.times.generate and quantised.times.update == plain.times.update


@pytest.mark.parametrize(("recompute", "passes", "times"), [("none", 3, 2.5), ("full", 4, 3.5)])
def test_training_of_14b_by_hand(recompute, passes, times, stated):
    """tp 4, sequence-parallel, dp 4 on 16 H100: 512 rollouts of 256 + 1000 tokens, four updates."""
    parts = {"parallel": {"tp": 4, "sequence_parallel": True}, "trainer": {"recompute": recompute}}
    plan = planned("Qwen2.5-14B", "h100-80", 16, 1000, **parts)
    compute = forward_flops(plan.spec, [(512, 1256)]) / (16 * 989.4e12)
    sent = 48 * 2 * 2 * (3 / 4) * 2 * 5120 * 512 * 1256 / 4 / 450e9  # two all-reduces a layer, each 2 (tp - 1) / tp
    dense = plan.stages[0].state.dense
    reduce = 3 / 4 * 6 * dense / (2 * 50e9)  # of 4 ranks, 2 in each node
    step = (8 * dense + 30 * dense / 4) / 3.35e12  # float32 gradients zeroed and read; Adam of a rank's share
    assert plan.times.logprobs == pytest.approx(compute + sent)
    # Backward gathers a third half, or without sequence parallelism as much as forward.
    assert plan.times.update == pytest.approx(passes * compute + times * sent + 4 * (reduce + step))


def test_training_of_experts_by_hand(stated):
    """Qwen3-30B-A3B on 16 H200. ep 8 x dp 16: an expert is on two ranks, 8 apart, what is dense on all 16. With tp 2
    one all-reduce a layer, and half of a token's copies from each rank."""
    plan = planned("Qwen3-30B-A3B", "h200-141", 16, 1000, parallel={"ep": 8}, trainer={"recompute": "none"})
    compute = forward_flops(plan.spec, [(512, 1256)]) / (16 * 989.4e12)
    sent = 48 * 2 * (7 / 8) * 8 * 512 * 1256 / 16 * 2048 * 2 / 450e9  # to 8 experts and back
    dense = 15 / 16 * 6 * 1_541_093_376 / (8 * 50e9)
    experts = 1 / 2 * 6 * 3_623_878_656 / 50e9
    step = (8 * (1_541_093_376 + 3_623_878_656) + 30 * (1_541_093_376 / 16 + 3_623_878_656 / 2)) / 4.8e12
    assert plan.times.update == pytest.approx(3 * compute + 2 * sent + 4 * (dense + experts + step))
    cut = planned("Qwen3-30B-A3B", "h200-141", 16, 1000, parallel={"ep": 8, "tp": 2, "sequence_parallel": True})
    hidden = 48 * 2 * (1 / 2) * 2 * 2048 * 512 * 1256 / 8 / 450e9
    assert cut.times.logprobs == pytest.approx(compute + hidden + sent)


def test_context_parallel_ranks_send_keys_and_values_and_a_pipeline_has_a_bubble(stated):
    """Qwen2.5-14B, cp 2 x pp 2 x dp 2 on 8 H100: 24 layers a stage, 8 key/value heads of 128."""
    parts = {"parallel": {"cp": 2, "pp": 2}, "rollout": {**ROLLOUT, "servers": 4}}
    plan = planned("Qwen2.5-14B", "h100-80", 8, 1000, **parts)
    compute = forward_flops(plan.spec, [(512, 1256)]) / (8 * 989.4e12)
    sent = 24 * 2 * 8 * 128 * 2 * 512 * 1256 / 4 / 450e9
    assert plan.micro_batches == 5  # 512 x 1256 / 4 tokens in two replicas by 16384
    assert plan.times.logprobs == pytest.approx((compute + sent) * (1 + 1 / 5 / 4))


def test_memory_is_for_responses_that_have_grown():
    """Where the mean response makes fewer micro-batches than stages, the longest make as many as are held at once."""
    parts = {"parallel": {"pp": 8}, "trainer": {"recompute": "full", "micro_batch_tokens": 10240}}
    short, long = (planned("Qwen2.5-14B", "h100-80", 16, response, **parts) for response in (100, 8192))
    assert short.micro_batches < 8 <= long.micro_batches
    assert short.stages[0].training["activations"] == long.stages[0].training["activations"]


def test_the_host_s_peak_by_hand():
    """Qwen2.5-14B, tp 4 x dp 2 with four servers of two ranks on one node, and saves in the background."""
    parts = {
        "parallel": {"tp": 4, "sequence_parallel": True},
        "rollout": {**ROLLOUT, "servers": 4},
        "algorithm": {"allocation": {"budget": 512}, "loss": {"mini_batches": 4}, "kl": {"coef": 0.1}},
    }
    plan = planned("Qwen2.5-14B", "h200-141", 8, 1000, checkpoint={"async": True}, **parts)
    state, host = plan.stages[0].state, plan.host
    # Each pinned tensor is rounded up to a power of two: the parameters' one buffer of 6.9 GiB; of the optimizer, for
    # half of the parameters on each rank, three float32 tensors, of the reference one tensor in bfloat16.
    layer = (64 + 32 + 256 + 128) * 2**20 + 8192 + 2 * 32768  # qkv, projection, fc1, fc2; bias; two norms
    tensors = 48 * layer + 2 * GIB + 32768  # embedding and head 0.7 GiB each; the last norm
    assert host == {
        "processes": (8 + 4 * 2) * 2 * GIB,
        "saving a checkpoint": 8 * (12 + 2) * state.owned,
        "what waits while servers generate": 8 * (8 * GIB + 3 * tensors / 2),
        "the reference policy": 8 * tensors / 2,
        "rollouts": 2 * 512 * (256 + 1000) * 76,
    }
    split = {**parts, "rollout": {"placement": "split", "servers": 4}, "algorithm": {}}
    alone = planned("Qwen2.5-14B", "h200-141", 8, 1000, **split).host
    assert alone == {"processes": 8 * 2 * GIB, "loading a checkpoint": 8 * 12 * state.dense}
    on_cpu = host_memory(plan.config, plan.spec, 8, 8, 1256, cuda=False)
    assert on_cpu["weights, gradients and optimizer"] == 8 * state.total
    assert on_cpu["the servers' weights"] == 4 * 2 * formulas.model_elements(plan.spec)
    one_a_node = host_memory(plan.config, plan.spec, 8, 1, 1256)
    assert one_a_node["processes"] == 3 * 2 * GIB and one_a_node["saving a checkpoint"] == 14 * state.owned
    routed = host_memory(plan.config, published_spec("Qwen3-30B-A3B"), 8, 8, 10**7)
    assert routed["rollouts"] == 2 * 512 * 10**7 * (76 + 384)  # 48 layers x 8 experts, a byte each
    algorithm = {"allocation": {"budget": 512}, "rollout_correction": {"level": "token"}}
    ahead = config_of(rollout={**split["rollout"], "max_staleness": 3}, algorithm=algorithm)
    assert host_memory(ahead, plan.spec, 8, 8, 10**7)["rollouts"] == 5 * 512 * 10**7 * 76


def test_an_optimizer_in_host_memory_by_hand():
    """Qwen2.5-14B, tp 4 x dp 2 on one node: 12 bytes of each element that a rank owns."""
    parts = {"parallel": {"tp": 4, "sequence_parallel": True}, "rollout": {**ROLLOUT, "servers": 4}}
    on_gpu, on_host = (
        planned("Qwen2.5-14B", "h100-80", 8, 1000, optimizer={"cpu_offload": on}, **parts) for on in (False, True)
    )
    state, moved = on_gpu.stages[0].state, on_host.stages[0].state
    assert (moved.optimizer, moved.total) == (0, state.parameters + state.gradients)
    assert on_host.host["the optimizer"] == 8 * 12 * state.owned == 8 * moved.host
    assert on_host.peak == max(on_gpu.peak - state.optimizer, on_host.stages[0].others["generate"])
    assert moved.pinned == 8 * GIB < state.pinned  # the parameters alone wait while servers generate
    slower = 4 * state.owned * (36 / RATES["host memory"].value - 30 / RATES["copies"].value) / RATES["busy"].value
    assert on_host.times.update - on_gpu.times.update == pytest.approx(slower, rel=1e-3)
