"""A run of PPO with an agent: real ranks, a real SGLang server, and a client that knows nothing of either."""

import pytest
from background_run import engine_gap, step_lines
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.safetensors_folder import every_export
from dynamo_megatron.rollout.store import read_rollouts, step_file

pytestmark = pytest.mark.full
AGENT = """
import asyncio
from openai import AsyncOpenAI

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]

async def agent(prompt, session):
    async with AsyncOpenAI(base_url=session.base_url, api_key="any") as client:
        async def ask(messages, **options):
            reply = await client.chat.completions.create(model="policy", messages=messages, **options)
            if options.get("stream"):
                return [event async for event in reply]
            return reply.choices[0].message

        messages = list(prompt.messages)
        messages += [await ask(messages, tools=TOOLS, max_tokens=8), {"role": "tool", "content": prompt.answer}]
        messages += [await ask(messages, tools=TOOLS, max_tokens=8), {"role": "user", "content": "Sure?"}]
        await asyncio.gather(*(ask(messages, max_tokens=6, stream=True) for _ in range(2)))
        messages[1] = {"role": "assistant", "content": "edited"}
        last = await ask(messages, max_tokens=6)
        await client.completions.create(model="policy", prompt=[20, 21, 22], max_tokens=4)
    return None if len(prompt.answer) > 3 else float(len(last.content) % 2)
"""
STEPS = 3


@pytest.fixture(scope="module")
def ran(workspace, command_line, tiny_model):
    """(rollouts of all steps, metrics, the model of each version)."""
    (workspace / "live_agents.py").write_text(AGENT)
    output = workspace / "agents"
    settings = ["rollout.agent=live_agents:agent", "rollout.max_new_tokens=64", "model.max_length=512"]
    settings += ["data.template=chat", "trainer.micro_batch_tokens=1024", f"trainer.steps={STEPS}"]
    settings += ["rollout.max_staleness=1", "algorithm.rollout_correction.kind=truncate", "checkpoint.every=1"]
    settings += ["checkpoint.export_hf=every", "algorithm.advantage={kind: gae, gamma: 0.9, lambda: 0.8}"]
    settings += ["algorithm.modulation=null", "critic.optimizer={lr: 1.0e-2, warmup_steps: 0}", f"output_dir={output}"]
    code, said = command_line(workspace, "train", workspace / "config.yaml", *settings)
    assert code == 0, said[-4000:]
    rollouts = [r for step in range(1, STEPS + 1) for r in read_rollouts(step_file(output, step))]
    models = {step: AutoModelForCausalLM.from_pretrained(every_export(output, step)) for step in range(1, STEPS)}
    models[0] = AutoModelForCausalLM.from_pretrained(tiny_model)
    return rollouts, step_lines(output), models


def test_every_trained_token_was_sampled_there_with_that_logprob(ran):
    rollouts, rows, models = ran
    assert len(rollouts) == 24 * STEPS and {r.status for r in rollouts} == {"ok"}
    gaps = [engine_gap(rollout, models) for rollout in rollouts]
    print(f"{len(rollouts)} episodes, largest gap {max(gaps):.2g}")
    assert max(gaps) <= 1e-4
    assert all(r.step - 2 <= version <= r.step - 1 for r in rollouts for version, _, _ in r.weight_versions)
    measured = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert 0 < max(measured) <= 1e-4  # the policy's own pass, over packed segments


def test_an_episode_counts_once(ran):
    rollouts, rows, _ = ran
    for row in rows:
        assert row["rollout/requested"] == 24 and row["agent/turns"] == 6 and row["agent/segments"] >= 4
        assert row["rollout/failed"] == row["rollout/rejected"] == row.get("rollout/dropped", 0) == 0
        own = [r for r in rollouts if r.step == row["step"]]
        assert row["rollout/response_tokens"] == sum(len(r.response_tokens) for r in own)
        assert row["reward/mean"] == pytest.approx(sum(r.reward for r in own) / 24)
    assert any(row["policy/grad_norm"] > 0 for row in rows)
