import random

import pytest

from dynamo_megatron.evaluation.problems import LENGTH, SHORT, overlaps
from dynamo_megatron.types import Prompt

WORDS = [f"w{i}" for i in range(5000)]


def prompt(name: str, text: str) -> Prompt:
    return Prompt(name, text=text, answer="1")


def some_words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def found(problem: str, *training: str, **options) -> list[tuple[float, str]]:
    training = [prompt(str(i), text) for i, text in enumerate(training)]
    return [(o.share, o.training_id) for o in overlaps([prompt("p", problem)], training, **options)]


INSTRUCTION = some_words(99, 45)


def test_an_instruction_in_the_prompts_is_no_overlap():
    """It is most of each problem; 5 % of the training prompts have it."""
    problems = [prompt(f"p{i}", f"{INSTRUCTION} {some_words(i, 8)}") for i in range(20)]
    training = [prompt(f"t{i}", f"{INSTRUCTION} {some_words(1000 + i, 8)}") for i in range(50)]
    training += [prompt(f"u{i}", some_words(2000 + i, 50)) for i in range(950)]
    assert overlaps(problems, training) == []
    assert [o[1:] for o in overlaps(problems, [*training, prompt("same", problems[3].text)])] == [(1.0, "same")]


def test_a_problem_that_many_training_prompts_have_is_found():
    """All of its n-grams are common: none of them is an instruction's."""
    problem = some_words(0, 40)
    assert found(problem, *[problem] * 30, *(some_words(i, 40) for i in range(1, 31))) == [(1.0, "0")]
    assert found(problem, *[problem] * 1500) == [(1.0, "0")]


@pytest.mark.parametrize("length", [1, 5, 13])
def test_no_ngram_is_missed(length):
    """Against all n-grams of all texts, of few words so that many are shared."""
    choose = random.Random(length)
    texts = [" ".join(choose.choices("abc" if length < 13 else "ab", k=choose.randrange(1, 40))) for _ in range(60)]
    training = texts[:10]  # too few for common ones
    problems = texts[10:] + [" ".join(text.split()[choose.randrange(9) :]) for text in training]

    def ngrams(text):
        words = text.split()
        return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}

    for problem in problems:
        if 5 <= len(problem.split()) < length:  # a single n-gram, of its own length
            shares = [float(f" {problem} " in f" {text} ") for text in training]
        else:
            shares = [len(ngrams(problem) & ngrams(text)) / len(ngrams(problem)) for text in training]
        best = max(shares)
        expected = [(best, str(shares.index(best)))] if best >= 0.2 else []
        assert found(problem, *training, length=length, share=0.2) == expected


@pytest.mark.parametrize("words", [1, SHORT - 1, SHORT, LENGTH - 1, LENGTH])
def test_a_short_problem_is_compared_as_a_whole_and_from_5_words_on_found_inside_a_longer_prompt(words):
    problem = some_words(0, words)
    assert found(problem, f" {problem.title()} ?") == [(1.0, "0")]
    inside = f"Solve this step by step. {problem.upper()}?\n\nPut the answer into a box."
    for longer in (f"{problem} and more", inside):
        assert found(problem, longer) == ([(1.0, "0")] if words >= SHORT else [])
    assert found(problem, problem.rpartition(" ")[0] + " other words follow and some more of them here") == []


def test_messages_count_without_the_system_prompt():
    system, said = some_words(1, 60), some_words(0, 30)
    chat = Prompt("c", messages=[{"role": "system", "content": system}, {"role": "user", "content": said}], answer="1")
    assert [o.problem for o in overlaps([chat], [prompt("t", said)])] == [chat]
    assert overlaps([prompt("p", system)], [chat]) == []
