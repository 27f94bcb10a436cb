"""The files of a run that grow with every step, and what a resume reads of them."""

import json
from pathlib import Path

import pytest

from dynamo_megatron.tracking.metrics import StepLog, read_rows


def write(path: Path, steps: int, lines: int = 1) -> list[str]:
    rows = [json.dumps({"step": s, "prompt_id": f"p{i}"}) for s in range(1, steps + 1) for i in range(lines)]
    path.write_text("".join(row + "\n" for row in rows))
    return rows


@pytest.mark.parametrize("torn", ["", '{"step": 7, "prom'])
def test_lines_of_later_steps_and_a_torn_one_are_cut_off(tmp_path, torn):
    path = tmp_path / "allocation.jsonl"
    for keep_to in range(9):
        rows = write(path, 6, 3)
        with path.open("a") as file:
            file.write(torn)
        StepLog(path, keep_to=keep_to)
        assert path.read_text() == "".join(row + "\n" for row in rows[: 3 * keep_to])
    log = StepLog(path, keep_to=6)
    log.write([{"step": 7}])
    assert path.read_text().endswith('}\n{"step": 7}\n')


def test_rows_come_one_at_a_time_and_a_broken_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 2)
    with path.open("a") as file:
        file.write('{"reward": 1}\n{"step": 4}\n')
    rows = read_rows(path, "step")
    assert [next(rows)["step"], next(rows)["step"]] == [1, 2]
    with pytest.raises(ValueError, match=r"metrics\.jsonl:3: no 'step'; restore the file"):
        next(rows)
    assert len(list(read_rows(path))) == 4
