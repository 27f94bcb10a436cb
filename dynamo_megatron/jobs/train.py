"""`dynamo-megatron train`: what is checked before a run, and what rank 0 opens for it."""

from __future__ import annotations

import gc
import os
import socket
from typing import TYPE_CHECKING, Any

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.algorithm.allocators import load_allocator
from dynamo_megatron.algorithm.user_functions import check_loss, load_advantage, load_loss
from dynamo_megatron.config import Config
from dynamo_megatron.data.selection import PromptSelection
from dynamo_megatron.data.stream import fingerprint, open_stream
from dynamo_megatron.data.templates import (
    decoder_of,
    encode_prompt,
    end_token_ids,
    load_tokenizer,
    longest_sequence,
    max_prompt_length,
    rendered_warning,
    template_variables,
)
from dynamo_megatron.evaluation.periodic import PeriodicEvaluation
from dynamo_megatron.evaluation.problems import load_problems
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.jobs.run import Job
from dynamo_megatron.jobs.start_checks import check_node, check_vocabulary
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.server_layout import check_served, check_server_parallel
from dynamo_megatron.reward.functions import check_answers
from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.servers.fleet import training_nodes
from dynamo_megatron.rollout.servers.serve import NodeServers
from dynamo_megatron.rollout.servers.server import check_reachable, cpu_threads, cuda_available, shares_memory
from dynamo_megatron.rollout.teacher import check_teacher
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.rounds import check_savable
from dynamo_megatron.runtime.coordination import Coordinator, StopRequested
from dynamo_megatron.tracking.journal import Journal

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout


def check_functions(config: Config) -> None:
    """Loads the user's code that a step will call. Raises UserCodeError for a function that is none, or a loss that
    breaks its contract on made-up tokens."""
    algorithm = config.algorithm
    load_allocator(algorithm.allocation.kind)
    if algorithm.advantage.of_the_user:
        load_advantage(algorithm.advantage.kind)  # not tried: it may know the data's prompts alone
    if algorithm.loss.function is not None:
        check_loss(
            load_loss(algorithm.loss.function),
            reference=algorithm.kl.coef > 0,
            kl_coef=algorithm.kl.coef if algorithm.kl.where == "function" else 0.0,
            context_parallel=config.parallel.cp > 1,
        )


class TrainJob(Job):
    def __init__(self, config: Config):
        super().__init__(config, OutputDir(config))
        self._stream = self._allocator = self._rollout = self._sampler = self._evaluation = self._memory = None

    def check(self, ranks: int) -> dict[str, Any]:
        config = self.config
        derived = super().check(ranks)
        spec = load_model_config(config.model.path, config.model.family, config.model.source)
        limit = max_prompt_length(config, spec)
        check_served(spec, config.model.max_length or spec.max_positions)
        rollout = config.rollout
        if rollout.engine == "sglang" and rollout.placement != "external" and rollout.proof.checksums:
            check_server_parallel(spec, rollout.tp, "cuda" if cuda_available() else "cpu")
        transport = check_node(config, ranks, training_nodes())
        rollouts = " to ".join(map(str, dict.fromkeys(config.rollout_range)))
        return {
            **derived,
            "prompt limit": f"{limit} tokens, response limit {config.rollout.max_new_tokens}",
            "weights to servers": f"{transport}, buckets of {config.rollout.sync.bucket_bytes / 2**20:g} MiB",
            **self._servers(),
            **self._router_replay(spec),
            "rollouts a step": f"{rollouts} for {config.data.batch_prompts} prompts, "
            f"{config.algorithm.loss.mini_batches} updates",
        }

    def _servers(self) -> dict[str, str]:
        rollout = self.config.rollout
        if rollout.engine != "sglang" or rollout.placement == "external":
            return {}
        weights = f", {rollout.quantization} weights" if rollout.quantization else ""
        here = max(1, rollout.servers // training_nodes())
        threads = "" if cuda_available() else f", threads of each rank: {cpu_threads(rollout, here)}"
        return {"servers": f"{rollout.servers} of {rollout.tp} ranks, {rollout.placement}{weights}{threads}"}

    def _router_replay(self, spec: ModelSpec) -> dict[str, str]:
        if not spec.num_experts:
            return {}
        routes = spec.replayed(self.config.rollout)
        where = " that has them" if self.config.rollout.engine == "recorded" else ""
        return {"router replay": "off" if routes is None else f"on, {routes.token_bytes} bytes a token{where}"}

    def prepare(self, spec: ModelSpec) -> None:
        config = self.config
        evaluates = config.eval.every is not None
        self.output.claim()
        routes = spec.replayed(config.rollout)
        serves = config.rollout.engine == "sglang" or evaluates
        # `serve` on other nodes ends with a start that is refused, so that it hears of the run once all is checked.
        elsewhere = config.rollout.placement == "split"
        if serves and not elsewhere:
            # First of all: servers take longest to start, and need nothing of what follows.
            self._rollout = self._sampler = RolloutWorker(config, None, spec.vocab_size, routes=routes)
            self._rollout.start()
        self.journal = Journal(config)
        progress = self.journal.progress
        progress.phase("loading tokenizer")
        from dynamo_megatron.checkpoint.weights import open_weights  # imports torch

        check_functions(config)
        open_weights(config.model.path, spec)  # checks every header
        tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
        check_vocabulary(config.model.path, spec, tokenizer)
        ends, decoder = end_token_ids(config.model.path, tokenizer) if serves else (), decoder_of(tokenizer)
        if self._rollout is not None:
            self._rollout.read_with(ends, decoder)
        elif serves:
            self._rollout = self._sampler = RolloutWorker(config, ends, spec.vocab_size, decoder, routes)
        if (teacher := config.algorithm.teacher) is not None:
            warning = check_teacher(teacher, tokenizer, spec.vocab_size, longest_sequence(config, spec))
            if warning is not None:
                self.journal.say(f"warning: {warning}")

        def encode(prompt):
            return encode_prompt(prompt, tokenizer, config.data)

        def encode_savable(prompt):
            check_savable(prompt, config)
            return encode(prompt)

        limit = max_prompt_length(config, spec)
        progress.phase("loading data", unit="problems")
        gc.enable()  # the user's data source may leave cycles
        before = self.output.stream_state()
        self._stream = open_stream(
            config.prompt_stream, encode_savable, limit, before, progress.count, needs_answer=config.needs_answers
        )
        prompts = self._stream.prompts
        if config.rollout.engine == "sglang":  # recorded rollouts have their rewards
            check_answers(prompts, config)
        chat = ChatTokens(tokenizer, ends, template_variables(config.data))
        stops, chats = config.rollout.stop, config.data.template == "chat"
        if serves and chats and (note := chat.other_end) and not any(f"with {text} (" in note for text in stops):
            names_it = f"eos_token_id in {config.model.path}/generation_config.json has it"
            self.journal.say(f"warning: {note}: responses go on after it unless {names_it}")
        for warning in rendered_warning(prompts[0], tokenizer, config.data):
            self.journal.say(f"warning: {warning}")
        self._allocator = RolloutAllocator(config.algorithm.allocation)
        self._selection = PromptSelection(config.prompt_stream, self._stream, self._allocator.history)
        if config.rollout.engine == "recorded":
            self._sampler = RecordedRollouts(config.rollout.recorded, spec.vocab_size)
        if evaluates:
            longest = max_prompt_length(config, spec, evaluation=True)
            progress.phase("loading evaluation data")
            held_out = load_problems(config, encode, longest, training=prompts)
            check_answers(held_out, config)
            self.journal.evaluates(fingerprint(held_out, held_out[0].tokens))
            self._evaluation = PeriodicEvaluation(config, held_out, self._rollout)
        if config.data.chat_template is not None:
            self.output.keep_chat_template(tokenizer.chat_template)
        if serves and elsewhere:
            self._rollout.start()

    def prepare_node(self) -> None:
        rollout = self.config.rollout
        if rollout.engine == "sglang" and rollout.placement == "colocated":
            ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
            self._rollout = NodeServers(self.config, ranks // local, int(os.environ["RANK"]) // local)

    def wait_ready(self, coordinator: Coordinator, layout: Layout) -> None:
        check_reachable(self.config.rollout, layout.gather(socket.gethostname()))
        self.show("starting server")
        coordinator.on_rank_0(
            "the rollout server to start",
            lambda: self._rollout and self._rollout.wait_ready(coordinator.check_stop),
            layout,
            timeout=self.config.rollout.start_timeout + self.config.trainer.timeout,
        )

    def set_up(self, policy: Any, coordinator: Coordinator) -> None:
        # These need Megatron, which may only be imported once the backend is set up.
        from dynamo_megatron.controller import Controller
        from dynamo_megatron.jobs.training_run import TrainingRun
        from dynamo_megatron.policy.backend import Fusions
        from dynamo_megatron.policy.critic import Critic
        from dynamo_megatron.serving import Serving
        from dynamo_megatron.train import Trainer
        from dynamo_megatron.weight_sync.memory import DeviceMemory
        from dynamo_megatron.weight_sync.sync import WeightSync

        config, journal, leads = self.config, self.journal, policy.layout.rank == 0
        rollout, controller, state = self._rollout if leads else None, None, {}
        if leads:
            plain = "; with model.lora Megatron's own layers" if config.model.lora is not None else ""
            journal.say(f"optional packages: {Fusions.detect()}{plain}")
            state = {"stream": self._stream, "allocator": self._allocator.history}
            controller = Controller(
                config, self._selection, self._allocator, self._sampler, self._evaluation, journal, coordinator
            )
            if config.rollout.max_staleness:
                state["ahead"] = controller.ahead
        own = config.of_critic
        critic = Critic(policy.spec, own, policy.layout) if own is not None else None
        self._memory = DeviceMemory(policy, rollout, critic) if shares_memory(config.rollout) else None
        self._training = TrainingRun(self, policy, coordinator, state, self._memory, self._free_memory, critic)
        if self._memory is not None:
            self._memory.allocate_ahead()
        weight_sync, phases = WeightSync(policy, rollout, coordinator), self._training.phases
        self._serving = Serving(weight_sync, coordinator, policy.layout, phases, journal.say if leads else None)
        self._trainer = Trainer(self._training, self._serving, controller, critic)

    def run(self) -> None:
        try:
            self._training.carry_out(self._trainer.train)
        except StopRequested:
            self._serving.close()
            raise
        self._serving.close()  # not after a failure: the ranks may be out of step, and it is what is to be told

    def close(self) -> None:
        try:
            self._end_servers()  # first: they hold GPUs, and trackers may take their time
        finally:
            if self._memory is not None:
                self._memory.close()
            super().close()

    def _end_servers(self) -> None:
        if self._rollout is not None:
            self._rollout.close()

    def _free_memory(self) -> None:
        """Ends servers that hold device memory, which a save needs."""
        if self._memory is not None:
            self._end_servers()
            self._memory.set_servers([])
