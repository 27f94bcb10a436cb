"""A step's sampling by the training loop, with one rank and without a model."""

from pathlib import Path
from types import SimpleNamespace

import torch
from stand_ins import rollout

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import Config
from dynamo_megatron.controller import Controller
from dynamo_megatron.data.selection import PromptSelection
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.rollout.result import RolloutResult, group_id, rollout_id
from dynamo_megatron.rollout.store import RolloutStore
from dynamo_megatron.runtime.coordination import StopRequested
from dynamo_megatron.tracking.journal import Journal
from dynamo_megatron.train import Sampled, Trainer
from dynamo_megatron.types import Prompt

BATCH = 4


class Alone:
    """The coordinator of one rank, `asked` to stop from the start, and servers that are never lost."""

    def __init__(self, asked=False):
        self.asked = asked

    def check(self):
        pass

    def check_stop(self):
        if self.asked:
            raise StopRequested("SIGTERM")

    def on_rank_0(self, what, make, layout):
        return make()

    def ask(self, phase, what, make, version):
        return make()


class Policy:
    """Packs nothing; its logprobs of rollouts are what `logprobs` says."""

    layout = SimpleNamespace(gather=None)

    def __init__(self, logprobs):
        self.logprobs, self.packed = logprobs, 0

    def pack(self, rollouts, mini_batches):
        self.packed += 1
        return list(mini_batches)

    def implicit_rewards(self, rollouts, mini_batches):
        return None

    def token_stats(self, rollouts, mini_batches):
        logprobs = torch.from_numpy(self.logprobs(rollouts))
        return SimpleNamespace(logprobs=logprobs, collision=torch.exp(2 * logprobs), rollouts=rollouts)


def trainer(controller: Controller, policy: Policy) -> Trainer:
    phases = SimpleNamespace(begin=lambda phase: None)
    run = SimpleNamespace(config=controller.config, policy=policy, phases=phases, on_rank_0=lambda what, make: make())
    return Trainer(run, Alone(), controller)


def sample(controller: Controller, step: int, policy: Policy) -> Sampled:
    return trainer(controller, policy).sample(step)


def batch_of(controller: Controller, step: int, logprobs=lambda rollouts: rollouts.engine_logprobs):
    """(batch, StepRecord) of a step, where the policy gives `logprobs` of rollouts."""
    policy = Policy(logprobs)
    sampled = sample(controller, step, policy)
    rollouts = sampled.rollouts
    left_out = len(sampled.rounds) > 1 or len(rollouts.rollout_ids) < sampled.rounds[0].sampled
    assert policy.packed == len(sampled.rounds) + left_out
    assert sampled.stats.rollouts is rollouts and sum(map(len, sampled.mini_batches)) == len(rollouts.rollout_ids)
    return trainer(controller, policy).advantages(step, sampled), controller.record(step, sampled.rounds)


class Answering:
    """Answers as a server would: prompt "p<i>" is always solved (i % 3 == 0), never (1), or every other time (2)."""

    def __init__(self, store: RolloutStore):
        self.store, self.rejected, self._asked = store, [], {}

    def reject(self, step, rollout_ids, on_poll):
        self.rejected += rollout_ids

    def dispatch(self, step, prompts, counts, on_poll, first=0):
        self._asked[step, first] = prompts, counts

    def collect(self, step, on_poll, on_count, first):
        return self.generate(step, *self._asked[step, first], on_poll, on_count, first)

    def generate(self, step, prompts, counts, on_poll, on_count, first):
        rollouts = []
        for position, (prompt, n) in enumerate(zip(prompts, counts, strict=True), first):
            group, kind = group_id(step, position), int(prompt.prompt_id[1:]) % 3
            for k in range(n):
                right = kind == 0 or (kind == 2 and k % 2 == 0)
                made = {"prompt_id": prompt.prompt_id, "tokens": [*prompt.tokens, k], "engine_logprobs": [-1.0]}
                made |= {"reward": float(right), "success": right}
                rollouts.append(rollout(rollout_id(group, k), [k], **made))
                self.store.append(rollouts[-1])
        return RolloutResult.from_rollouts(rollouts, seconds=1.0, notes=[])


def make_controller(output: Path, prompts: int, rollout, algorithm, data=None, sampling=None) -> Controller:
    """Of a pool of `prompts`: p0, p1, ... `algorithm`, `data`, `sampling`: keys of the configuration's sections."""
    config = Config(
        model={"path": "none"},
        data={"source": "none", "batch_prompts": BATCH, **(data or {})},
        rollout={"max_new_tokens": 4, **(sampling or {})},
        algorithm=algorithm,
        output_dir=str(output),
    )
    items = [Prompt(f"p{i}", text=f"p{i}") for i in range(prompts)]
    stream = PromptStream(items, config.data, lambda p: [1, int(p.prompt_id[1:])], None)
    allocator = RolloutAllocator(config.algorithm.allocation)
    drawing = PromptSelection(config.prompt_stream, stream, allocator.history)
    return Controller(config, drawing, allocator, rollout, None, Journal(config), Alone())
