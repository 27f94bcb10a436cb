"""An episode written out in OpenAI's format is complete: a supervised run reads it, and gets the tokens back."""

import asyncio
import json

import pytest
import yaml
from agents_scripted import QUESTION, TOKENIZER, TOOLS, Scripted, endpoint

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.errors import InputError
from dynamo_megatron.reports.samples import Choice, read_samples
from dynamo_megatron.rollout.agents.worker import Session as AgentSession
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.sft import completion_tokens, example_tokens
from dynamo_megatron.types import EpisodeRecord, Prompt, Rollout

SYSTEM = {"role": "system", "content": "Use the tool. größer"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


async def tool_loop(scripted):
    async with endpoint(scripted) as url:
        session, messages = AgentSession(url), [SYSTEM, *QUESTION]
        messages.append(await session.chat(messages, tools=TOOLS))
        (call,) = messages[-1]["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
        await session.chat(messages, tools=TOOLS)


def written(folder, *texts) -> tuple[dict, list[int]]:
    """The line of `samples --json` of such an episode, and its token ids."""
    scripted = Scripted(*texts)
    asyncio.run(tool_loop(scripted))
    turn, ids = scripted.session.episode.turns[-1], scripted.session.episode.turns[-1].ids
    record = EpisodeRecord([0], scripted.session.counts, turn.messages, turn.place.tools)
    trained = scripted.session.episode.trained
    logprobs = [-1.0] * sum(trained.mask)
    identity = ("000001-0000-000", "000001-0000", "p", 1)
    rollout = Rollout(*identity, ids, trained.mask, logprobs, [], "stop", 1.0, True, {}, prompt="x", answer="7")
    rollout.response, rollout.episode = scripted.session.texts[-1], record
    RolloutStore(folder).append(rollout)
    config = Config(model={"path": "m"}, data={"source": "d"}, output_dir="o")
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    (line,) = read_samples(folder, Choice(), as_json=True)
    return json.loads(line), ids


def test_a_trajectory_is_read_back_token_by_token(tmp_path):
    row, ids = written(tmp_path, "use it\n" + CALL, "it is 7")
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [m["role"] for m in row["messages"]] == roles and row["messages"][0] == SYSTEM
    (call,) = row["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}} and row["tools"] == TOOLS
    assert row["messages"][3]["tool_call_id"] == call["id"]
    (tmp_path / "good.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(source=str(tmp_path / "good.jsonl"), prompt_key="messages")
    (example,) = load_prompts(data)
    assert example_tokens(example, TOKENIZER, data) == ids
    assert TOKENIZER.decode(completion_tokens(example, TOKENIZER)) == "it is 7<|im_end|>"


def test_what_ends_with_a_call_has_no_completion():
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]
    with pytest.raises(InputError, match="'p' ends with a call of a tool"):
        completion_tokens(Prompt("p", messages), TOKENIZER)


def test_a_question_with_its_answer_beside_it_is_as_before():
    example, data = Prompt("p", QUESTION, answer="7", meta={"tools": TOOLS}), DataConfig(source="x")
    assert TOKENIZER.decode(completion_tokens(example, TOKENIZER)) == "7<|im_end|>"
    assert "Tools:" not in TOKENIZER.decode(example_tokens(example, TOKENIZER, data))
    with pytest.raises(InputError, match="the completion of 'p' is 7, not a text"):
        completion_tokens(Prompt("p", QUESTION, answer=7), TOKENIZER)
