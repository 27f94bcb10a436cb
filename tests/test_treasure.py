"""The treasure game: its rules, and what its small model reads and writes."""

import random
import runpy
from pathlib import Path

import pytest

from dynamo_megatron.data.templates import load_tokenizer

ROOT = Path(__file__).parents[1]
GAME = runpy.run_path(str(ROOT / "configs" / "treasure" / "agent.py"))
TASK = runpy.run_path(str(ROOT / "tools" / "treasure_task.py"))


def play(start, treasure, moves):
    """What the player is told after each of them, and how the game stands: (reward, won, lost)."""
    game, told = GAME["Treasure"](), []
    assert game.reset(seed=0, options={"start": start, "treasure": treasure}) == ("", {})
    for move in moves:
        text, reward, won, lost, _ = game.step(move)
        told.append(text)
    return told, (reward, won, lost)


@pytest.mark.parametrize(
    ("moves", "told", "end"),
    [
        ("nne", ["a2", "a3", "b3"], (1.0, True, False)),
        ("nne?", ["a2", "a3", "b3", "b3"], (1.0, True, False)),
        ("wsnne", ["a1", "a1", "a2", "a3", "b3"], (1.0, True, True)),
        ("wsxnn", ["a1", "a1", "a1", "a2", "a3"], (0.0, False, True)),
        ("eeeee", ["b1", "c1", "d1", "e1", "f1"], (0.0, False, True)),
    ],
)
def test_the_rules(moves, told, end):
    assert play("a1", "b3", moves) == (told, end)


def test_the_edges_of_the_map():
    assert play("f5", "a6", "nne")[0] == ["f6", "f6", "f6"]


def test_the_parts_have_no_task_in_common():
    parts = TASK["tasks"](0)
    pairs = [pair for part in parts.values() for pair in part]
    assert len(pairs) == len(set(pairs)) and {TASK["distance"](*pair) for pair in pairs} == {3, 4, 5}
    assert [len(parts[part]) for part in ("pool", "held_out")] == [320, 128] and len(parts["warmup"]) > 200
    rows = [TASK["row"](*pair) for pair in pairs]
    assert len({row["id"] for row in rows}) == len(pairs)
    start, treasure = pairs[0]
    assert GAME["place"](rows[0]["options"]["start"]) == start
    assert GAME["place"](rows[0]["options"]["treasure"]) == treasure


def test_warm_up_examples_are_what_the_template_makes_of_a_game(tmp_path):
    """Of one that the rules allow, up to a move of which most go towards the treasure."""
    TASK["make_model"](TASK["make_tokenizer"](), tmp_path, 0)
    tokenizer, generator = load_tokenizer(tmp_path), random.Random(0)
    start, treasure = GAME["place"]("b2"), GAME["place"]("d5")
    lengths, nearer = [], 0
    for number in range(300):
        example = TASK["example"](number, start, treasure, generator)
        game = GAME["Treasure"]()
        game.reset(options={"start": "b2", "treasure": "d5"})
        messages = [{"role": "user", "content": "b2 d5"}]
        for move in [part[0] for part in example["problem"].split("\n>")[1:-1]]:
            told, _, won, lost, _ = game.step(move)
            assert not won and not lost
            messages += [{"role": "assistant", "content": move}, {"role": "user", "content": told}]
        assert example["problem"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer.encode(example["problem"])
        assert tokenizer.decode(ids) == example["problem"]
        lengths.append(len(ids))
        before, after = (TASK["distance"](at, treasure) for at in (game.at, TASK["moved"](game.at, example["answer"])))
        nearer += after < before
    assert max(lengths) == 8 + 8 * 6 and len(set(lengths)) == 7
    assert 150 < nearer < 240
