import dataclasses
import json
from collections import Counter

import pytest

from dynamo_megatron.config import DataConfig
from dynamo_megatron.data.stream import PromptStream, open_stream
from dynamo_megatron.types import Prompt


def prompts(n, long=(), **meta):
    return [Prompt(f"p{i}", text="x" * (50 if i in long else 5), meta=meta) for i in range(n)]


def stream(items, limit=10):
    return PromptStream(items, DataConfig(source="a.jsonl", shuffle_seed=0), lambda p: [1] * len(p.text), limit)


def ids(batch):
    return [p.prompt_id for p in batch]


def test_every_epoch_has_every_prompt_once_in_a_new_order():
    s = stream(prompts(10))
    drawn = [ids(s.next(4)) for _ in range(10)]  # batches of 4 span the epochs of 10
    flat = [i for batch in drawn for i in batch]
    epochs = [flat[k : k + 10] for k in range(0, 40, 10)]
    assert all(sorted(e) == sorted(ids(prompts(10))) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4 and s.epoch == 3


def test_a_batch_larger_than_the_data_repeats_prompts(tmp_path, caplog):
    assert set(Counter(ids(stream(prompts(3)).next(9))).values()) == {3}
    rows = [{"problem": "x" * length, "answer": 1} for length in (1, 2, 3, 99)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for batch, lines in [(3, 0), (4, 1)]:
        config = DataConfig(source=str(tmp_path / "a.jsonl"), batch_prompts=batch)
        open_stream(config, lambda p: [1] * len(p.text), 10)
        assert caplog.text.count("data.batch_prompts: 4 is more than the 3 problems") == lines
    assert "data.source: 1 of 4 prompts have more than 10 tokens and are skipped" in caplog.text


@pytest.mark.parametrize("before", [0, 1, 5, 7, 8])
def test_resume_goes_on_as_the_straight_stream(before):
    straight, resumed = (stream(prompts(16, long=[2, 9])) for _ in range(2))
    for _ in range(before):
        straight.next(3)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(20):
        assert ids(resumed.next(3)) == ids(straight.next(3))
        assert resumed.skipped == straight.skipped and resumed.epoch == straight.epoch
    assert resumed.state_dict() == straight.state_dict()


def test_tokens_that_a_prompt_brings_are_not_those_of_the_template():
    assert stream([Prompt("a", text="x", tokens=[7, 7])]).next(1)[0].tokens == [1]


@pytest.mark.parametrize(
    "other", [prompts(5), prompts(4)[::-1], prompts(4, level=2), [*prompts(3), Prompt("q", text="x")]]
)
def test_resume_refuses_other_data(other):
    state = stream(prompts(4)).state_dict()
    with pytest.raises(ValueError, match=r"has changed: the checkpoint's run has drawn from other problems"):
        stream(other).load_state_dict(state)


def test_an_object_of_the_users_is_the_same_data_in_the_next_process():
    state = stream(prompts(4, image=object())).state_dict()
    stream(prompts(4, image=object())).load_state_dict(state)
    several = [[dataclasses.replace(p, answer={str(n), "x"}) for p in prompts(4)] for n in range(2)]
    stream(several[0]).load_state_dict(stream(several[1]).state_dict())  # in another order in each process


def test_long_prompts_are_skipped_and_counted_once():
    s = stream(prompts(6, long=[1, 4]))
    drawn = ids(s.next(12))
    assert set(Counter(drawn).values()) == {3} and not {"p1", "p4"} & set(drawn) and s.skipped == 2
    assert ids(stream(prompts(6, long=[1, 4]), limit=None).next(6)) != drawn
    with pytest.raises(ValueError, match="all 3 prompts have more than 10 tokens; raise model"):
        stream(prompts(3, long=[0, 1, 2]))
