"""The planner's memory against tensors, on two real ranks: what a policy holds after an update, and what autograd keeps
of a forward pass."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
CASES = [  # name, family, dtype, parallel, tied, recompute
    ("DP2", "qwen2", "bfloat16", {}, False, "none"),
    ("TP2", "qwen2", "bfloat16", {"tp": 2}, False, "none"),
    ("TP2-tied", "qwen2", "bfloat16", {"tp": 2, "sequence_parallel": True}, True, "none"),
    ("PP2-tied", "qwen3", "bfloat16", {"pp": 2}, True, "none"),
    ("VPP2", "qwen3", "bfloat16", {"pp": 2, "vpp": 2}, False, "none"),
    ("CP2", "qwen3", "bfloat16", {"cp": 2}, False, "none"),
    ("DP2-float32", "qwen3", "float32", {}, False, "none"),
    ("selective", "qwen3", "bfloat16", {"tp": 2}, False, "selective"),
    ("full", "qwen2", "bfloat16", {"tp": 2, "sequence_parallel": True}, False, "full"),
    ("EP2", "qwen3_moe", "bfloat16", {"ep": 2}, False, "none"),
    ("EP2-TP2", "qwen3_moe", "bfloat16", {"tp": 2, "ep": 2, "sequence_parallel": True}, False, "none"),
    ("experts-DP2", "qwen3_moe", "bfloat16", {}, False, "none"),
    ("TP2-fused-swiglu", "qwen3", "bfloat16", {"tp": 2}, False, "none"),
    ("experts-fused-swiglu", "qwen3_moe", "bfloat16", {}, False, "none"),
]
SHAPE = {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "ffn": 256, "expert_ffn": 64, "vocab": 1000}


@pytest.fixture(scope="module")
def ranks(make_tiny_model, run_script, tmp_path_factory) -> dict[str, dict]:
    """One launch of two ranks: name-rank -> what it counted and what was planned."""
    folder = tmp_path_factory.mktemp("memory")
    cases = []
    for name, family, dtype, parallel, tied, recompute in CASES:
        model = make_tiny_model(folder / name, family=family, dtype=dtype, tied=tied, **SHAPE)
        config = {
            "model": {"path": str(model), "dtype": dtype},
            "data": {"source": "none"},
            "output_dir": "none",
            "parallel": parallel,
            "trainer": {"micro_batch_tokens": 64, "recompute": recompute},
        }
        fused = name.endswith("fused-swiglu")
        cases.append({"name": name, "config": config, "out": str(folder), "fused_swiglu": fused})
    run_script(Path(__file__).with_name("memory_job.py"), cases, folder, 500)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*-[01].json")}


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_what_a_rank_holds(name, ranks):
    rows = [ranks[f"{name}-{rank}"] for rank in (0, 1)]
    for row in rows:
        counted, planned = row["counted"], row["planned"]
        print(name, counted, planned, row["live"])
        assert row["exact parameters"]
        assert counted["parameters"] == planned["parameters"]
        assert counted["gradients"] == planned["gradients"]
        # The share of a rank may end in padding, which has no state.
        assert planned["optimizer"] * 0.97 <= counted["optimizer"] <= planned["optimizer"]
        assert row["live"] == pytest.approx(sum(planned.values()), rel=0.03)
    assert max(r["counted"]["optimizer"] for r in rows) == pytest.approx(rows[0]["planned"]["optimizer"], rel=1e-3)


@pytest.mark.parametrize("name", [case[0] for case in CASES if "pp" not in case[3] and case[2] == "bfloat16"])
def test_what_autograd_keeps(name, ranks):
    """Rows of an expert differ from rank to rank: the two together are what is planned for two."""
    rows = [ranks[f"{name}-{rank}"] for rank in (0, 1)]
    saved, planned = (sum(row[key] for row in rows) for key in ("saved", "planned saved"))
    print(name, saved, planned, saved / planned)
    assert saved == pytest.approx(planned, rel=0.03)
