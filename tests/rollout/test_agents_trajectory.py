"""An episode written out in OpenAI's format is complete: a supervised run reads it, and trains what was sampled."""

import asyncio
import json

import yaml
from agents_scripted import QUESTION, TOKENIZER, TOOLS, Scripted, endpoint

from dynamo_megatron.config import Config, DataConfig
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.jobs.sft import examples_of
from dynamo_megatron.reports.samples import Choice, read_samples
from dynamo_megatron.rollout.agents.worker import Session as AgentSession
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.types import EpisodeRecord, Rollout

SYSTEM = {"role": "system", "content": "Use the tool. größer"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


async def tool_loop(scripted):
    async with endpoint(scripted) as url:
        session, messages = AgentSession(url), [SYSTEM, *QUESTION]
        messages.append(await session.chat(messages, tools=TOOLS))
        (call,) = messages[-1]["tool_calls"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "7"})
        await session.chat(messages, tools=TOOLS)


def written(folder, *texts) -> tuple[dict, list[int], list[int]]:
    """The line of `samples --json` of such an episode, its token ids, and which of them were sampled."""
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
    return json.loads(line), ids, trained.mask


def test_a_trajectory_is_read_back_token_by_token(tmp_path):
    row, ids, sampled = written(tmp_path, "use it\n" + CALL, "it is 7")
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [m["role"] for m in row["messages"]] == roles and row["messages"][0] == SYSTEM
    (call,) = row["messages"][2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 3, "b": 4}'} and row["tools"] == TOOLS
    assert row["messages"][3]["tool_call_id"] == call["id"]
    (tmp_path / "good.jsonl").write_text(json.dumps(row) + "\n")
    data = DataConfig(source=str(tmp_path / "good.jsonl"), prompt_key="messages")
    (example,) = load_prompts(data)
    (found,) = examples_of(example, TOKENIZER, data)
    assert found.tokens == ids and found.trained == [bool(token) for token in sampled]
