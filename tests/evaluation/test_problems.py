from dynamo_megatron.evaluation.problems import overlap_warnings
from dynamo_megatron.types import Prompt


def test_problems_with_the_words_of_a_training_prompt_are_counted():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    problems = [Prompt("a", messages=chat), Prompt("b", text="What is 1 - 1?"), Prompt("c", text="And what is 1 + 1?")]
    training = [Prompt("s", text="Be brief."), Prompt("t", text="what is  1+1")]
    (line,) = overlap_warnings(problems, training, "d.jsonl")
    assert line.startswith("eval.data: 1 of 3 problems are in prompts of d.jsonl too (the first, 'a': in 't'); ")
    assert overlap_warnings(problems[1:], training, "d.jsonl") == []


def test_problems_of_eight_words_are_found_in_an_instruction_and_shorter_ones_are_not():
    eight, seven = (Prompt(text, text=text) for text in ("If x + 1 = 2, find x.", "If x + 1 = 2, x?"))
    training = [Prompt(f"t{i}", text=f"Solve:\n{p.text}\nSay Answer: x.") for i, p in enumerate([seven, eight])]
    (line,) = overlap_warnings([seven, eight], training, "d.jsonl")
    assert line.startswith(
        f"eval.data: 1 of 2 problems are in prompts of d.jsonl too (the first, {eight.text!r}: in 't1')"
    )
    gap = Prompt("t", text="Solve: if x + 1 = 2, then find x.")
    assert overlap_warnings([seven, eight], [gap], "d.jsonl") == []
