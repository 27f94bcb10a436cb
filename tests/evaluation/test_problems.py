from dynamo_megatron.evaluation.problems import overlap_warnings
from dynamo_megatron.types import Prompt


def test_problems_with_the_words_of_a_training_prompt_are_counted():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    problems = [Prompt("a", messages=chat), Prompt("b", text="What is 1 - 1?"), Prompt("c", text="And what is 1 + 1?")]
    training = [Prompt("s", text="Be brief."), Prompt("t", text="what is  1+1")]
    (line,) = overlap_warnings(problems, training, "d.jsonl")
    assert line.startswith("eval.data: 1 of 3 problems are prompts of d.jsonl too (the first, 'a': 't'); ")
    assert overlap_warnings(problems[1:], training, "d.jsonl") == []
