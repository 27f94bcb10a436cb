"""What rank 0 shares with the other ranks of its node and of others: all of it, through one memory of a node."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_megatron.runtime.arena import APART, Arena
from dynamo_megatron.runtime.array_sharing import _Address, share

CASES = {  # the local rank of every rank, and the ranks that cannot open the memory of others
    "one node": ([0, 1], []),
    "two nodes": ([0, 1, 0, 1], []),
    "nodes of two and of one": ([0, 1, 0], []),
    "rank 3 refused": ([0, 1, 0, 1], [3]),
    "rank 0 killed": ([0, 1], []),
}
RUNNING = [name for name in CASES if name != "rank 0 killed"]
LARGE = 60 * 5000 * 16 + sum(8 * (2 + i % 3) for i in range(60))  # bytes of tokens, logprobs and weight versions
MESSAGE = 30_000  # bytes: names, small arrays


@pytest.fixture(scope="module")
def found(run_script, tmp_path_factory) -> dict[str, list[dict | None]]:
    """What every rank saw, by case; None of a rank that was killed."""
    out = tmp_path_factory.mktemp("shared")
    cases = [
        {"local_ranks": local, "refused": refused, "killed": "killed" in name, "out": str(out / name)}
        for name, (local, refused) in CASES.items()
    ]
    run_script(Path(__file__).with_name("array_sharing_runs.py"), cases, out, 240)
    return {
        name: [
            json.loads(file.read_text()) if (file := out / name / f"rank{rank}.json").exists() else None
            for rank in range(len(local))
        ]
        for name, (local, _) in CASES.items()
    }


def test_ranks_know_their_node_and_its_first_rank_the_others(found):
    assert [(r["node"], r["leaders"]) for r in found["one node"]] == [([0, 1], None)] * 2
    two = [([0, 1], [0, 2]), ([0, 1], None), ([2, 3], [0, 2]), ([2, 3], None)]
    assert [(r["node"], r["leaders"]) for r in found["two nodes"]] == two
    uneven = [([0, 1], [0, 2]), ([0, 1], None), ([2], [0, 2])]
    assert [(r["node"], r["leaders"]) for r in found["nodes of two and of one"]] == uneven


@pytest.mark.parametrize("case", RUNNING)
def test_every_rank_gets_the_value_and_may_write_to_it_alone(found, case):
    for rank in found[case]:
        wrong = {name: tuple(rank[name]["wrong"]) for name in ("large", "small", "empty", "others", "coordinator")}
        assert set(wrong.values()) == {()}
        assert rank["after a write"] == []
        assert rank["left open"] == []


@pytest.mark.parametrize("case", RUNNING)
def test_large_arrays_are_in_no_message(found, case):
    for rank in found[case]:
        assert all(rank[name]["message"] < MESSAGE for name in ("large", "small", "empty"))
        assert rank["small"]["tensors"] == rank["empty"]["tensors"] == 0


@pytest.mark.parametrize("case", RUNNING)
def test_a_node_has_one_copy_and_rank_0s_node_that_of_the_rollout_process(found, case):
    ranks, refused = found[case], CASES[case][1]
    for rank in ranks:
        first = ranks[rank["node"][0]]
        if set(rank["node"]) & set(refused) and rank is not first:
            assert not any("memfd" in memory for memory in rank["memory"])
            continue
        assert rank["memory"] == first["memory"]
        assert all(memory.startswith("p ") and "memfd:dynamo-megatron-" in memory for memory in rank["memory"])
    original = ranks[0]["memory of the value"]
    assert [memory.partition(" ")[2] for memory in ranks[0]["memory"]] == [m.partition(" ")[2] for m in original]
    assert len({tuple(ranks[rank["node"][0]]["memory"]) for rank in ranks}) == len({tuple(r["node"]) for r in ranks})


def test_tensors_go_between_nodes_and_to_a_node_where_a_rank_cannot_open_memory(found):
    sent = {case: [rank["large"]["tensors"] for rank in found[case]] for case in RUNNING}
    assert sent == {
        "one node": [0, 0],
        "two nodes": [LARGE, 0, LARGE, 0],
        "nodes of two and of one": [LARGE, 0, LARGE],
        "rank 3 refused": [LARGE, 0, 2 * LARGE, LARGE],
    }


@pytest.mark.parametrize("case", RUNNING)
def test_a_stop_on_rank_0_reaches_every_rank(found, case):
    assert [rank["coordinator"]["said"] for rank in found[case]] == ["stopped by SIGTERM"] * len(found[case])


def test_the_memory_outlives_rank_0_and_ends_with_the_last_rank(found):
    killed, rank = found["rank 0 killed"]
    assert killed is None and rank["wrong"] == []
    _, _, name, deleted = rank["memory"].split()
    assert name.startswith("/memfd:") and deleted == "(deleted)", "in no file system"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
        except OSError:  # it has ended meanwhile
            continue
        assert name not in maps


def test_memory_of_another_name_is_not_opened():
    piece = Arena().take(APART)
    piece.map()[:5] = b"bytes"
    address = _Address.of(piece)
    assert address.open()[:5] == b"bytes"
    other = Arena().take(APART)
    others = _Address.of(other)
    assert others.name != address.name
    for wrong in (
        address._replace(path=others.path),
        address._replace(path="/proc/self/fd/0"),
        others._replace(path=""),
    ):
        with pytest.raises(OSError):
            wrong.open()


def test_one_rank_keeps_its_value():
    value = object()
    assert share(value, SimpleNamespace(world_size=1)) is value
