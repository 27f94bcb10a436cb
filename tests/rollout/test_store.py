import dataclasses
import errno
import os
import re
import secrets
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from stand_ins import rollout

from dynamo_megatron.errors import ConfigError
from dynamo_megatron.rollout import store as store_module
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.store import RolloutStore, read_rollouts, step_file
from dynamo_megatron.runtime.line_files import compressed
from dynamo_megatron.types import EpisodeRecord


def test_a_file_is_read_once_for_its_end_and_old_ones_are_closed(tmp_path, monkeypatch):
    looked, look = [], store_module.whole_frames
    monkeypatch.setattr(store_module, "whole_frames", lambda d, path: looked.append(path) or look(d, path))
    store, before = RolloutStore(tmp_path), len(os.listdir("/proc/self/fd"))
    for step in range(1, 200):
        for name in ("0000-000", "0000-001"):
            store.append(rollout(f"{step:06d}-{name}"))
            assert list(store.lines(step + 1)) == []
        store.reject(step, [f"{step:06d}-0000-001"])
    assert looked == [step_file(tmp_path, step) for step in range(1, 200)]
    assert len(os.listdir("/proc/self/fd")) - before <= store_module.MOST_OPEN
    store.close()


def test_threads_that_compress_at_once_damage_nothing():
    """An asynchronous run appends rollouts while it writes the token rows of another step."""
    lines = [secrets.token_hex(2_000).encode() for _ in range(4_000)]
    with ThreadPoolExecutor(2) as pool:
        frames = list(pool.map(compressed, lines))
    assert [zstandard.decompress(frame) for frame in frames] == lines


@pytest.mark.parametrize("whole", [0, 2])
def test_a_torn_last_frame_is_left_out_and_cut_off_wherever_it_ends(tmp_path, whole):
    names = [f"000003-0000-{k:03d}" for k in range(whole)]
    path = step_file(tmp_path, 3)
    frames = [compressed(rollout(name).to_json().encode() + b"\n") for name in names]
    long = dataclasses.replace(rollout("000003-0000-007"), response=secrets.token_hex(200_000))  # of several blocks
    torn = compressed(long.to_json().encode() + b"\n")
    for cut in (*range(1, 40), len(torn) // 2, *range(len(torn) - 9, len(torn))):  # its checksum is cut, too
        RolloutStore(tmp_path)
        path.write_bytes(b"".join(frames) + torn[:cut])
        assert [r.rollout_id for r in read_rollouts(path)] == names
        RolloutStore(tmp_path).append(rollout("000003-0000-009"))
        assert [r.rollout_id for r in read_rollouts(path)] == [*names, "000003-0000-009"]


def test_damage_within_the_file_is_named_and_never_read_as_a_rollout(tmp_path):
    store = RolloutStore(tmp_path)
    for k in range(3):
        store.append(rollout(f"000003-0000-{k:03d}"))
    path = step_file(tmp_path, 3)
    content = path.read_bytes()
    size = len(content) // 3
    written = read_rollouts(path)
    for place in range(0, len(content), 7):  # a flipped bit
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            found = read_rollouts(path)
        except ValueError as error:
            assert re.match(rf"{re.escape(str(path))}: damaged (at|between) byte \d+", str(error))
        else:  # such as a length that ends beyond the file: the rest is torn
            assert found == written[: len(found)] and len(found) >= place // size


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": "abc"}, "not a rollout: tokens: Input should be a valid array, not 'abc'"),
        ({"group_id": "000003-0001"}, "rollout_id '000003-0000-001' in group '000003-0001'"),
        ({"rollout_id": "000003-0000-x"}, "rollout_id '000003-0000-x' in group '000003-0000'"),
        ({"response_mask": [0, 0, 1, 2]}, "mask, tokens, logprobs and weight_versions disagree in length"),
        ({"engine_logprobs": [-0.5]}, "mask, tokens, logprobs and weight_versions disagree in length"),
        ({"weight_versions": [(2, 0, 3)]}, "mask, tokens, logprobs and weight_versions disagree in length"),
        ({"episode": EpisodeRecord([0], {"turns": "3"})}, "not a rollout: episode.counts.turns: Input should be"),
    ],
)
def test_a_line_that_is_no_rollout_of_a_step_is_named(tmp_path, changes, why):
    store = RolloutStore(tmp_path)
    store.append(rollout("000003-0000-000"))
    store.append(dataclasses.replace(rollout("000003-0000-001"), **changes))
    path = step_file(tmp_path, 3)
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{path}:2: {why}')}"):  # a resume ends with exit code 2
        read_rollouts(path)
    store.discard(3, ["000003-0000-001", "000003-0000-x"])
    assert read_rollouts(path) == [rollout("000003-0000-000")]


def test_a_full_disk_is_one_clear_line(tmp_path, monkeypatch):
    store = RolloutStore(tmp_path)
    store.append(rollout("000003-0000-000"))

    def full(descriptor, line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RolloutError, match=r"3.jsonl.zst: cannot write rollouts: No space left on device$"):
            store.append(rollout("000003-0000-001"))
    write = os.write
    with monkeypatch.context() as patch:  # the last blocks take a part of the line
        patch.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:20]))
        with pytest.raises(RolloutError, match="disk is full"):
            store.append(rollout("000003-0000-001"))
    store.append(rollout("000003-0000-002"))
    assert [r.rollout_id for r in read_rollouts(step_file(tmp_path, 3))] == ["000003-0000-000", "000003-0000-002"]
