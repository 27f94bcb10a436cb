import json
from collections import Counter

import pytest

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.data import PromptStream, load_prompts, open_stream
from dynamo_megatron.evaluation.problems import UNLIMITED, load_problems
from dynamo_megatron.types import Prompt


def prompts(n, long=()):
    return [Prompt(f"p{i}", text="x" * (50 if i in long else 5)) for i in range(n)]


def stream(items, limit=10, **settings):
    return PromptStream(
        items, DataConfig(source="a.jsonl", **{"shuffle_seed": 0, **settings}), lambda p: [1] * len(p.text), limit
    )


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


def check_resume(make, before: int, after: int) -> None:
    """make(state) -> a stream, for a resume from `state` or None: resumed after some batches it goes on as it would."""
    straight = make(None)
    for _ in range(before):
        straight.next(3)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = make(state)
    resumed.load_state_dict(state)
    for _ in range(after):
        assert ids(resumed.next(3)) == ids(straight.next(3))
        assert resumed.skipped == straight.skipped and resumed.epoch == straight.epoch
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("before", [0, 1, 5, 7, 8])
def test_resume_goes_on_as_the_straight_stream(before):
    check_resume(lambda state: stream(prompts(16, long=[2, 9])), before, 20)


@pytest.mark.parametrize("other", [prompts(5), prompts(4)[::-1], [*prompts(3), Prompt("q", text="x")]])
def test_resume_refuses_other_data(other):
    state = stream(prompts(4)).state_dict()
    with pytest.raises(ValueError, match=r"has changed: the checkpoint's run has drawn from other problems"):
        stream(other).load_state_dict(state)


def test_long_prompts_are_skipped_and_counted_once_or_an_error():
    s = stream(prompts(6, long=[1, 4]))
    drawn = ids(s.next(12))
    assert set(Counter(drawn).values()) == {3} and not {"p1", "p4"} & set(drawn) and s.skipped == 2
    assert ids(stream(prompts(6, long=[1, 4]), limit=None).next(6)) != drawn
    with pytest.raises(ValueError, match=r"prompt 'p3' has 50 tokens, above the limit of 10"):
        stream(prompts(6, long=[3]), on_long_prompt="error")
    with pytest.raises(ValueError, match="all 3 prompts have more than 10 tokens"):
        stream(prompts(3, long=[0, 1, 2]))


def test_a_prompt_that_cannot_be_encoded_is_found_before_the_run():
    def encode(prompt):
        if prompt.prompt_id == "p7":
            raise ValueError("prompt 'p7': the chat template fails on it")
        return [1]

    with pytest.raises(ValueError, match="p7"):
        PromptStream(prompts(9), DataConfig(source="a.jsonl"), encode, 10)


# Functions that are read as the run goes on

READ_WITHIN = 60.0  # seconds for an item that is there, on a machine that holds the reading thread up
FUNCTIONS = """
import itertools, random, threading
taken = []
def row(number):
    return {"id": number, "problem": f"{number}+1?", "answer": str(number + 1)}
def endless():
    for number in itertools.count():
        taken.append(number)
        yield row(number)
def five():
    return (row(number) for number in range(5))
def cycle():
    return itertools.cycle([row(number) for number in range(3)])
def unseeded():
    while True:
        yield row(random.randrange(10**9))
def clash():
    yield from five()
    yield {"id": 2, "problem": "another one", "answer": "3"}
changed = []
def changes():
    yield from five()
    yield from changed or [row(5), row(6), row(7)]
def long_ones():
    for number in itertools.count():
        yield {"problem": f"{number} " + "x" * (40 if number % 3 else 0), "answer": "1"}
def too_long():
    for number in itertools.count():
        yield {"problem": f"{number} " + "x" * 40, "answer": "1"}
def bad_ones():
    for number in itertools.count():
        yield row(number) if number % 3 else {"problem": None, "answer": "1"}
def all_bad():
    yield {"problem": None, "answer": "1"}
def endless_bad():
    yield row(0)
    while True:
        yield {"problem": None, "answer": "1"}
def fails():
    yield row(0)
    yield {"problem": {}["absent"]}
def nothing():
    return iter(())
once = iter([row(0), row(1)])
def exhausted():
    return once
gate = threading.Event()
def stalls():
    yield from five()
    gate.wait()
    yield row(5)
    yield {}["absent"]
"""


@pytest.fixture
def functions(tmp_path, monkeypatch, request):
    name = f"streamed_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    return name


def streamed(name, function, before=None, **settings):
    config = DataConfig(source=f"{name}:{function}", **{"batch_prompts": 4, **settings})
    return open_stream(config, lambda p: [1] * len(p.text), 20, before)


def test_an_endless_iterator_is_read_as_far_as_the_first_batch_and_then_as_it_is_needed(functions):
    s = streamed(functions, "endless")
    taken = __import__(functions).taken
    assert taken == [0, 1, 2, 3]
    assert ids(s.next(3)) == ["0", "1", "2"] and taken == [0, 1, 2, 3]
    (first, *_) = s.next(3)
    assert taken == [0, 1, 2, 3, 4, 5] and first.where.endswith(":endless row 4") and first.tokens == [1] * 4
    counts = []
    config = DataConfig(source=f"{functions}:endless", batch_prompts=4)
    open_stream(config, lambda p: [1] * len(p.text), 20, s.state_dict(), counts.append)
    assert counts == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6]  # the first batch, then what the checkpoint's run had taken


class Asked(Exception):
    pass


def test_a_stop_ends_the_wait_for_a_stalled_iterator_and_loses_no_item(functions, monkeypatch):
    polls = []

    def stop():
        polls.append(1)
        if len(polls) == 2:
            raise Asked

    s = streamed(functions, "stalls")
    with monkeypatch.context() as patched:
        patched.setattr("dynamo_megatron.data.stream.POLL_EVERY", READ_WITHIN)
        assert ids(s.next(5, stop)) == ["0", "1", "2", "3", "4"] and not polls
    state = s.state_dict()
    with pytest.raises(Asked):
        s.next(1, stop)
    assert len(polls) == 2 and s.state_dict() == state
    __import__(functions).gate.set()
    assert ids(s.next(1)) == ["5"]
    with pytest.raises(ValueError, match=r"^data\.source: .*:stalls after row 6: KeyError: 'absent' \("):
        s.next(1)


def test_rows_that_are_no_problem_are_skipped_and_counted(functions, caplog):
    s = streamed(functions, "bad_ones")
    assert ids(s.next(5)) == ["1", "2", "4", "5", "7"] and s.skipped == 3
    assert caplog.text.count("counted in data/skipped_prompts: ") == 1
    with pytest.raises(ValueError, match="row 1: 'problem' must be text"):
        streamed(functions, "bad_ones", on_bad_row="error")


def test_an_iterator_that_ends_starts_anew_in_its_order(functions):
    s = streamed(functions, "five")
    assert ids(s.next(7)) == ["0", "1", "2", "3", "4", "0", "1"] and s.epoch == 1
    s = streamed(functions, "cycle")
    assert ids(s.next(7)) == ["0", "1", "2", "0", "1", "2", "0"] and s.epoch == 0


@pytest.mark.parametrize("function", ["endless", "five", "long_ones", "bad_ones"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_resume_of_a_function_goes_on_as_the_straight_stream(functions, function, before):
    check_resume(lambda state: streamed(functions, function, before=state), before, 5)


def test_resume_refuses_other_items_and_another_template(functions):
    s = streamed(functions, "unseeded")
    s.next(2)
    state = s.state_dict()
    with pytest.raises(ValueError, match=r"has changed: .* give its random numbers a seed"):
        streamed(functions, "unseeded").load_state_dict(state)
    config = DataConfig(source=f"{functions}:five", batch_prompts=4)
    other = open_stream(config, lambda p: [2] * len(p.text), None)
    with pytest.raises(ValueError, match=r"has changed: .* the tokens of the first one"):
        other.load_state_dict(streamed(functions, "five").state_dict())


@pytest.mark.parametrize("to", [lambda row: [row(8), row(6), row(7)], lambda row: [row(5)]])
def test_resume_refuses_another_or_a_missing_item_after_the_first_batch(functions, to):
    s = streamed(functions, "changes")
    s.next(7)
    __import__(functions).changed[:] = to(__import__(functions).row)
    with pytest.raises(ValueError, match="has changed: "):
        streamed(functions, "changes", before=s.state_dict())


def test_tokens_that_a_prompt_brings_are_not_those_of_the_template(tmp_path, monkeypatch):
    text = "from dynamo_megatron.types import Prompt\ndef five():\n    return [Prompt('a', text='x', tokens=[7, 7])]\n"
    (tmp_path / "brings_tokens.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for limit in (None, 1):
        (prompt,) = streamed("brings_tokens", "five", batch_prompts=1, limit=limit).next(1)
        assert prompt.tokens == [1]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("clash", "row 6: the id '2' is taken by an earlier problem with other content"),
        ("too_long", "10,000 rows of .* in a row are no problems or have more than 20 tokens$"),
        ("all_bad", "^.*:all_bad row 1: 'problem' must be text or a list of messages, not null$"),
        ("endless_bad", "10,000 rows .* the first that is none: .*:endless_bad row 2: 'problem' must be text"),
        ("nothing", "has no prompts"),
        ("fails", r"^data\.source: .*:fails after row 1: KeyError: 'absent' \(.*\.py, line \d+\)$"),
        ("exhausted", "has no prompts .it has to return a new iterator each time it is called"),
    ],
)
def test_refusals_are_one_line(functions, function, words):
    with pytest.raises(ValueError, match=words) as error:
        streamed(functions, function, batch_prompts=10)
    assert "\n" not in str(error.value)


def test_a_limit_reads_so_many_at_the_start_of_any_source(functions, tmp_path):
    s = streamed(functions, "endless", limit=6)
    assert sorted(ids(s.next(6))) == ["0", "1", "2", "3", "4", "5"] and len(s.prompts) == 6
    rows = [{"id": i, "problem": "q", "answer": "1"} for i in (0, 0, 1, 2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ids(load_prompts(DataConfig(source="a.jsonl", limit=2))) == ["0", "1"]
    with pytest.raises(ValueError, match=r"has 3 different problems, no more"):
        load_prompts(DataConfig(source=f"{functions}:cycle", limit=4))


def test_an_evaluation_on_an_endless_iterator_needs_a_limit(functions):
    def problems(**settings):
        config = {"model": {"path": "m"}, "data": {"source": "a.jsonl"}, "output_dir": "run"}
        config = Config.model_validate({**config, "eval": {"data": f"{functions}:endless", **settings}})
        return load_problems(config, lambda p: [1], 10)

    assert len(problems(limit=7)) == 7
    with pytest.raises(ValueError, match=rf"^eval\.limit: .* yields more than {UNLIMITED:,} problems"):
        problems()
