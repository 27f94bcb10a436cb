"""Episodes that are generated while the ranks train: a step trains on what was dispatched for it, however long its
episodes are, and every token is of the weights that it names."""

import numpy as np
import pytest
from engine_stand_in import FIRST, Engine, run_steps

from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.types import Prompt

END = 1  # a token id of tools/tiny_model.py that ends an answer
AGENT = """
async def agent(prompt, session):
    messages = list(prompt.messages)
    for _ in range(prompt.meta["turns"]):
        messages += [await session.chat(messages), {"role": "user", "content": "on"}]
    if prompt.meta["edits"]:
        messages[1]["content"] = "edited"
        messages.append(await session.chat(messages))
    return 1.0
"""
PROMPTS = [Prompt(f"q{i}", text="?", tokens=[20, 21], meta={"turns": 1 + i % 3, "edits": i > 3}) for i in range(6)]
COUNTS = [2] * len(PROMPTS)


def turns(i: int) -> int:
    return PROMPTS[i].meta["turns"] + PROMPTS[i].meta["edits"]


def turn_tokens(i: int, turn: int) -> int:
    """Of an answer to prompt i, with the token that ends it."""
    return 4 + 5 * i + 3 * turn


class Turns(Engine):
    """An answer's length follows from its place in the step and in the episode."""

    def __init__(self, seconds: float, asked_with: dict[tuple, int]):
        """`asked_with`: tokens of each turn's request when it was asked first; the engines share it."""
        super().__init__(None, seconds, end=END)
        self.asked_with = asked_with

    def progress(self, name: str, tokens: list[int]) -> tuple[int, int]:
        rollout, attempt, turn = name.split(".")
        turn = turn.partition("-")[0]  # what follows counts how often it was sent
        begun = len(tokens) - self.asked_with.setdefault((rollout, attempt, turn), len(tokens))
        return begun, turn_tokens(int(rollout.split("-")[1]), int(turn))


@pytest.mark.parametrize("at_sync", ["partial", "drain"])
def test_steps_train_on_the_episodes_dispatched_for_them(with_generator, tmp_path, at_sync):
    (tmp_path / "ahead_agents.py").write_text(AGENT)
    asked_with: dict[tuple, int] = {}
    engines = [Turns(0.002, asked_with), Turns(0.005, asked_with)]
    work = run_steps(engines, 4, 1, prompts=PROMPTS)
    options = {"agent": "ahead_agents:agent", "agent_workers": 1, "max_new_tokens": 200, "concurrency": 5}
    options["health_timeout"] = 20.0  # a busy machine
    results = with_generator(work, *engines, end=(END,), max_staleness=1, at_sync=at_sync, **options)
    oldest = within_turns = within_episodes = 0
    for step, result in results.items():
        batch = result.batch
        result.check_accounts(sum(COUNTS))
        assert batch.rollout_ids == [f"{step:06d}-{i:04d}-{k:03d}" for i, n in enumerate(COUNTS) for k in range(n)]
        whole = [sum(turn_tokens(i, turn) for turn in range(turns(i))) for i in range(len(PROMPTS)) for _ in range(2)]
        assert batch.response_lengths.tolist() == whole
        assert len(batch.segment_starts) == sum(COUNTS) + 2 * sum(prompt.meta["edits"] for prompt in PROMPTS)
        assert result.episodes == {"turns": 2 * sum(map(turns, range(6))), "segments": len(batch.segment_starts)} | {
            "history": 2 * sum(prompt.meta["edits"] for prompt in PROMPTS)
        }
        sampled, versions = batch.tokens[batch.trained], batch.weight_versions
        assert (sampled == END).sum() == result.episodes["turns"]
        np.testing.assert_array_equal(sampled[sampled != END] - FIRST, versions[sampled != END])
        assert (versions < step).all() and (versions >= step - 2).all()
        oldest = max(oldest, step - 1 - versions.min())
        for rollout in read_rollouts(step_file(tmp_path, step)):
            within_episodes += len(rollout.weight_versions) > 1
            spans = [set(rollout.tokens[turn.start : turn.end - 1]) for turn in rollout.episode.turns]
            within_turns += sum(len(tokens) > 1 for tokens in spans)
    assert oldest > 0, "nothing was sampled ahead"
    assert within_episodes, "no episode was under way at a push"
    assert (within_turns > 0) == (at_sync == "partial")
