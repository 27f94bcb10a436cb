import dataclasses
import errno
import os

import pytest

from dynamo_megatron.records import Rollout
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.store import RolloutStore, read_groups, read_rollouts, step_file


def rollout(name: str, step: int = 3, reward: float = 1.0) -> Rollout:
    return Rollout(
        rollout_id=name,
        group_id=name.rpartition("-")[0],
        prompt_id="é 1",
        step=step,
        tokens=[1, 2, 3],
        response_mask=[0, 1, 1],
        engine_logprobs=[-0.5, -1.25],
        weight_versions=[(2, 0, 2)],
        finish_reason="stop",
        reward=reward,
        success=True,
        reward_parts={"math": reward},
    )


def test_what_was_appended_is_read_back(tmp_path):
    store = RolloutStore(tmp_path)
    written = [rollout("000003-0000-000"), rollout("000003-0000-001")]
    for r in written:
        store.append(r)
        assert store.finished(3)[-1] == r  # on disk when append returns
    store.append(rollout("000004-0000-000", step=4))
    assert store.finished(3) == written
    assert len(store.finished(4)) == 1
    assert store.finished(5) == []


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path):
    RolloutStore(tmp_path).append(rollout("000003-0000-000"))
    path = step_file(tmp_path, 3)
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) - 1):  # a line that lacks its newline only is torn too
        path.write_bytes(whole + whole[:cut])
        store = RolloutStore(tmp_path)
        assert [r.rollout_id for r in store.finished(3)] == ["000003-0000-000"]
        store.append(rollout("000003-0000-001"))
        assert [r.rollout_id for r in read_rollouts(path)] == ["000003-0000-000", "000003-0000-001"]


def test_a_broken_line_within_the_file_is_named(tmp_path):
    RolloutStore(tmp_path).append(rollout("000003-0000-000"))
    path = step_file(tmp_path, 3)
    path.write_bytes(path.read_bytes() + b'{"rollout_id": 1}\n' + path.read_bytes())
    with pytest.raises(ValueError, match=r"step-000003.jsonl:2: not a rollout"):
        RolloutStore(tmp_path).finished(3)


def test_the_later_of_two_lines_of_a_rollout_counts(tmp_path):
    store = RolloutStore(tmp_path)
    for reward in (0.0, 1.0):
        store.append(rollout("000003-0000-000", reward=reward))
    assert [r.reward for r in store.finished(3)] == [1.0]


def test_groups_are_in_the_order_of_their_ids_whatever_came_first(tmp_path):
    store = RolloutStore(tmp_path)
    for name in ("000003-0002-001", "000003-0000-010", "000003-0002-000", "000003-0000-009"):
        store.append(rollout(name))
    store.append(dataclasses.replace(rollout("000003-0001-000"), prompt_id="another"))
    groups = read_groups(step_file(tmp_path, 3))
    assert {i: [[r.rollout_id[7:] for r in group] for group in its] for i, its in groups.items()} == {
        "é 1": [["0000-009", "0000-010"], ["0002-000", "0002-001"]],
        "another": [["0001-000"]],
    }


def test_discard_and_append(tmp_path):
    store = RolloutStore(tmp_path)
    rollouts = [rollout(f"000003-0000-{k:03d}") for k in range(3)]
    for r in rollouts:
        store.append(r)
    store.discard(3, ["000003-0000-001", "000003-0000-002"])
    store.append(rollouts[2])
    assert store.finished(3) == [rollouts[0], rollouts[2]]
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step-000003.jsonl"]


def test_reject_parses_no_other_line(tmp_path):
    store = RolloutStore(tmp_path)
    rollouts = [rollout(f"000003-0000-{k:03d}") for k in range(3)]
    for r in rollouts:
        store.append(r)
    path = step_file(tmp_path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = lines[0][:60] + b"\n"
    path.write_bytes(broken + b"".join(lines[1:]))
    store.reject(3, ["000003-0000-001"])
    now = path.read_bytes()
    assert now.startswith(broken + b"".join(lines[1:])) and now.count(b"\n") == 4
    path.write_bytes(now.removeprefix(broken))
    assert store.finished(3) == [dataclasses.replace(rollouts[1], status="rejected"), rollouts[2]]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    RolloutStore(tmp_path).append(rollout("000003-0000-000"))
    path = step_file(tmp_path, 3)
    whole = path.read_bytes()
    for torn in (whole + b"x" * 3_000_000, b"x" * 3_000_000):
        path.write_bytes(torn)
        RolloutStore(tmp_path).append(rollout("000003-0000-001"))
        assert len(path.read_bytes()) == len(whole) * (2 if torn.startswith(whole) else 1)


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path)
    store.append(rollout("000003-0000-000"))

    def full(descriptor, line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RolloutError, match=r"step-000003.jsonl: cannot write rollouts: No space left on device$"):
            store.append(rollout("000003-0000-001"))
    write = os.write
    with monkeypatch.context() as patch:  # the last blocks take a part of the line
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:20]))
        with pytest.raises(RolloutError, match="disk is full"):
            store.append(rollout("000003-0000-001"))
    store.append(rollout("000003-0000-002"))
    assert [r.rollout_id for r in store.finished(3)] == ["000003-0000-000", "000003-0000-002"]


def test_failed_rollouts_are_stored(tmp_path):
    failed = dataclasses.replace(
        rollout("000003-0000-000"), status="failed", finish_reason="error", tokens=[1], response_mask=[0]
    )
    RolloutStore(tmp_path).append(failed)
    assert RolloutStore(tmp_path).finished(3) == [failed]
