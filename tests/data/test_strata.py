import pytest

from dynamo_megatron.data.strata import prompt_strata
from dynamo_megatron.types import Prompt


def prompt(name, source="file", **meta):
    return Prompt(name, text="?", source=source, meta=meta)


def test_a_column_a_path_or_the_source():
    prompts = [prompt("a", extra={"level": 3}, source="x"), prompt("b", extra={"level": 5}, source="y")]
    assert prompt_strata(prompts, None) is None
    assert prompt_strata(prompts, "extra.level") == {"a": 3, "b": 5}
    assert prompt_strata(prompts, "source") == {"a": "x", "b": "y"}
    prompts = [Prompt("a", text="?", source="file", meta={"source": "olympiads"})]
    assert prompt_strata(prompts, "source") == {"a": "olympiads"}, "the data's own column comes first"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (prompt("bad", difficulty=1), "prompt 'bad' has no column 'level'; it has difficulty"),
        (prompt("bad", level=[1]), r"prompt 'bad' has \[1\] in 'level'"),
        (prompt("bad", level=float("nan")), "prompt 'bad' has nan in 'level'"),
    ],
)
def test_a_prompt_without_a_stratum_is_named(bad, says):
    with pytest.raises(ValueError, match=says):
        prompt_strata([prompt("fine", level=1), bad], "level")
