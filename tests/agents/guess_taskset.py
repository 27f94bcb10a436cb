"""A number to guess, in verifiers' own interface: tasks, their reward, a harness without a program, and an environment
with two turns. It is imported by verifiers, under its interpreter."""

import httpx
import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def odd_lengths(self, task, trace) -> float:
        return sum(len(message.content or "") % 2 for message in trace.assistant_messages) / 2


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self):
        return [GuessTask(GuessData(prompt=f"Guess {n}.", number=n), self.config.task) for n in range(6)]


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        said = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        request = {
            "model": ctx.model,
            "messages": [{"role": message.role, "content": message.content or ""} for message in said],
            "max_tokens": 8,
        }
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json=request, headers=headers)
        return vf.ProgramResult(0 if reply.status_code == 200 else 1, "", reply.text)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            if not (await interaction.turn()).terminated:
                await interaction.turn(f"It is not {task.data.number}.")
