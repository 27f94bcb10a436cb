"""The configuration: one typed tree, without torch. config/files.py composes it from YAML files and `key=value`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from dynamo_megatron.config.contradictions import (
    bridge_faults,
    critic_faults,
    quantization_faults,
    sequential_faults,
    staleness_faults,
)
from dynamo_megatron.config.data import DataConfig
from dynamo_megatron.config.method import (
    AdvantageConfig,
    AllocationConfig,
    DynamicSamplingConfig,
    KLConfig,
    LossConfig,
    ModulationConfig,
    PolicyLossConfig,
    Positive,
    RolloutCorrectionConfig,
    Seconds,
    Section,
    SequentialConfig,
    TeacherConfig,
    built_in,
    loss_faults,
)
from dynamo_megatron.config.reward import COMPARING, RewardConfig
from dynamo_megatron.config.rollout import RolloutConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[int, Field(ge=0)]


class LoraConfig(Section):
    """Low-rank adapters, which alone are trained (arXiv 2106.09685): W x + alpha / rank b a x beside the linears."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0  # an adapter's output is multiplied by alpha / rank
    # linears with an adapter: q, k, v and o; gate, up and down. A mixture of experts: attention alone
    targets: Annotated[list[Literal["attention", "mlp"]], Field(min_length=1)] = ["attention", "mlp"]


class ModelConfig(Section):
    path: str  # Hugging Face folder: config.json, safetensors, tokenizer
    # own: the families of docs/checkpoints.md. bridge: those of Megatron-Bridge, in an environment of its own
    source: Literal["own", "bridge"] = "own"
    family: str | None = None  # None: from config.json's model_type, which it cannot contradict
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # float16 needs loss scaling, which the policy head lacks
    max_length: Positive | None = None  # tokens, prompt + response; None: the model's own limit
    # by which an update moves the bias of each expert towards equal loads, where routers have such (docs/rollouts.md);
    # DeepSeek-V3: 0.001
    expert_bias_update_rate: Annotated[float, Field(ge=0)] = 0.0
    lora: LoraConfig | None = None  # low-rank adapters, which alone are trained; None: all parameters are


class ParallelConfig(Section):
    """Sizes; the data-parallel one is what is left of the ranks. docs/clusters.md says what fits together."""

    tp: Positive = 1  # tensor
    pp: Positive = 1  # pipeline
    vpp: Positive = 1  # chunks of layers a pipeline stage holds (interleaved schedule)
    last_stage_layers: Positive | None = None  # layers of the last pipeline stage; None: as many as the others
    cp: Positive = 1  # context: number of ranks that a sequence's tokens are spread over
    ep: Positive = 1  # experts, over the ranks of a pipeline stage
    # activations between the tensor-parallel parts are cut along the sequence; without effect where tp is 1
    sequence_parallel: bool = True

    @property
    def cuts_sequences(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica of the model and work on the same sequences."""
        return self.tp * self.pp * self.cp

    def misfit(self, ranks: int) -> str | None:
        """Why this number of ranks does not fit the layout; None where it does."""
        if ranks % self.model_ranks:
            cut = f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {self.model_ranks}"
            return f"parallel: {ranks} ranks can't be cut into {cut}; change the layout or the number of ranks"
        if (of_stage := ranks // self.pp) % self.ep:
            why = f"does not divide the {of_stage} ranks of a pipeline stage ({ranks} ranks, pp {self.pp})"
            return f"parallel.ep: {self.ep} {why}"
        return None

    def stage_layers(self, num_layers: int) -> list[int]:
        """The number of layers of each pipeline stage."""
        if self.last_stage_layers is None:
            return [num_layers // self.pp] * self.pp
        return [(num_layers - self.last_stage_layers) // (self.pp - 1)] * (self.pp - 1) + [self.last_stage_layers]

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.vpp > 1 and self.pp == 1:
            yield f"vpp: {self.vpp} chunks a stage need pp above 1"
        if self.last_stage_layers is not None and self.pp == 1:
            yield "last_stage_layers: needs pp above 1"


class AlgorithmConfig(Section):
    allocation: AllocationConfig = AllocationConfig()
    dynamic_sampling: DynamicSamplingConfig | None = None
    sequential: SequentialConfig | None = None
    advantage: AdvantageConfig = AdvantageConfig()
    modulation: ModulationConfig | None = ModulationConfig()
    loss: LossConfig = LossConfig()
    kl: KLConfig = KLConfig()
    rollout_correction: RolloutCorrectionConfig | None = None
    teacher: TeacherConfig | None = None
    # What gives the logprobs of the policy that a step begins with: a pass before the update, or the update's own
    # forward pass. auto: update, unless the method needs them before
    old_logprobs: Literal["auto", "pass", "update"] = "auto"

    @property
    def needs_pass(self) -> str | None:
        """The first key of the method that needs the statistics of the tokens before the update; None: none does."""
        loss, modulation = self.loss, self.modulation
        needs = {
            "loss.mini_batches": loss.mini_batches > 1,  # the ratio of the later ones is to the step's first policy
            "dynamic_sampling": self.dynamic_sampling is not None,
            "sequential": self.sequential is not None,
            "modulation.scope": modulation is not None and modulation.scope == "mini_batch",
            "advantage.kind": self.advantage.kind == "otb",
            "advantage.entropy_shaping": self.advantage.entropy_shaping is not None,
            "loss.entropy_top_ratio": loss.entropy_top_ratio is not None,
            "loss.clip_cov": loss.clip_cov is not None,
            "loss.kl_cov": loss.kl_cov is not None,
            "loss.kind": loss.function is not None,
            "teacher": self.teacher is not None,
        }
        return next((key for key, needed in needs.items() if needed), None)

    @property
    def measures_first(self) -> bool:
        """A pass before the update gives the statistics of the tokens."""
        return self.old_logprobs == "pass" or self.needs_pass is not None

    @property
    def needs_baseline(self) -> bool:
        """Advantages are made with more than the rewards of the rollouts that are trained on (`Baseline`)."""
        return self.advantage.kind == "history" or (
            self.sequential is not None and self.sequential.kind == "reinforce_ada"
        )

    def faults(self, *, training: bool) -> Iterator[str]:
        if training:
            yield from loss_faults(self.loss, self.modulation, self.kl)
            if self.old_logprobs == "update" and (key := self.needs_pass) is not None:
                yield f"old_logprobs: update does not go with {key}, which needs them before the update; set it to auto"


class AdamConfig(Section):
    lr: Annotated[float, Field(ge=0, le=1)] = 1e-6
    warmup_steps: NonNegative = 10
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip_grad: Annotated[float, Field(gt=0)] = 1.0


class OptimizerConfig(AdamConfig):
    cpu_offload: bool = False  # float32 weights and moments are in host memory, where the update is computed


class CriticOptimizerConfig(AdamConfig):
    lr: Annotated[float, Field(ge=0, le=1)] = 1e-5


class CriticConfig(Section):
    """Of algorithm.advantage.kind gae (PPO): a model of the policy's shape that predicts rewards, a value a token."""

    path: str | None = None  # folder of the weights that it starts from, as model.path; None: model.path
    # a value moves at most this far in a step before the loss clips it (arXiv 2005.12729); null: no clip
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    warmup_steps: NonNegative = 0  # first steps of the run, in which the critic alone is trained
    optimizer: CriticOptimizerConfig = CriticOptimizerConfig()


class StopConfig(Section):
    """When a run ends before `trainer.steps`."""

    wall_time: Annotated[float, Field(gt=0)] | None = None  # seconds of this process; then save and exit 75, resumable


class TrainerConfig(Section):
    steps: Positive = 100
    stop_when: StopConfig | None = None
    resume: Literal["auto", "never"] = "auto"
    micro_batch_tokens: Positive = 16384  # of whole sequences, before context parallelism spreads them
    recompute: Literal["none", "selective", "full"] = "none"  # activations: of attention, or of every layer
    deterministic: bool = False  # GPU: deterministic kernels and sampling; a CPU run always is
    timeout: Seconds = 1800.0  # seconds a rank waits for another one
    # Seconds a step may take, evaluation and saving included; then all ranks exit 75, unsaved. None: any number.
    step_timeout: Seconds | None = None


class KernelsConfig(Section):
    backend: Literal["auto", "torch", "triton"] = "auto"  # auto: triton on a GPU, torch on a CPU
    gradient: Literal["eager", "recompute"] = "eager"
    chunk_tokens: Positive | None = None  # None: what the workspace bound allows


class CheckpointConfig(Section):
    every: Positive | None = 10  # steps; the last step always saves; None: a stop alone does
    keep_last: Positive = 2
    # Files are written while the training goes on, from a copy in host memory of what this rank saves.
    async_save: Annotated[bool, Field(alias="async")] = False
    # A Hugging Face folder: output_dir/hf at the end or at the best eval/pass@K; output_dir/hf-step-N with each save.
    export_hf: Literal["final", "best", "every", "never"] = "final"


class EvalConfig(Section):
    data: str | None = None  # as data.source, read with the keys and the template of `data`
    limit: Positive | None = None  # the first N problems; None: all
    samples: Positive = 1  # responses a problem
    k: Annotated[list[Positive], Field(min_length=1)] = [1]  # pass@k; the first is what checkpoint.export_hf: best uses
    temperature: Annotated[float, Field(ge=0)] | None = None  # None: rollout.temperature; 0: greedy
    max_new_tokens: Positive | None = None  # None: rollout.max_new_tokens
    every: Positive | None = None  # steps of training between evaluations, with one before and after; None: none

    def faults(self, *, training: bool) -> Iterator[str]:
        if max(self.k) > self.samples:
            yield f"k: pass@{max(self.k)} needs that many samples a problem, samples is {self.samples}"
        if self.every and self.data is None:
            yield "data: name the problems to evaluate on"


TRACKERS = ("jsonl", "tensorboard", "wandb", "mlflow")


class TrackingConfig(Section):
    """metrics.jsonl is always written."""

    # jsonl, tensorboard, wandb, mlflow, or module:Class of yours
    backends: list[Annotated[str, built_in(TRACKERS)]] = ["jsonl"]
    project: str = "dynamo-megatron"  # of wandb; mlflow's experiment
    name: str | None = None  # of the run there; None: the name of output_dir
    # Steps that torch's profiler records, on the ranks of one replica of the model: Chrome traces in output_dir/profile
    profile_steps: list[Positive] = []
    token_rollouts: Annotated[int, Field(ge=0)] = 0  # rollouts of a step whose tokens' statistics are kept, in tokens/


class DPOConfig(Section):
    """Of `dynamo-megatron dpo`, preference training (arXiv 2305.18290)."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # ipo: arXiv 2310.12036
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # sigmoid: share of pairs in the wrong order
    reference: str | None = None  # folder of the reference policy, as model.path; None: model.path
    rejected_key: str = "rejected"  # dotted; of the completion that is not preferred; the other is data.answer_key

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.loss == "ipo":
            yield from self.unused(["label_smoothing"], "is of loss sigmoid")


class Config(Section):
    model: ModelConfig
    data: DataConfig
    output_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of every random draw (docs/concepts.md)
    parallel: ParallelConfig = ParallelConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    dpo: DPOConfig | None = None  # the command `dpo` sets it

    @property
    def prompt_stream(self) -> DataConfig:
        """`data` with the seed of its order."""
        seed = self.seed if self.data.shuffle_seed is None else self.data.shuffle_seed
        return self.data.model_copy(update={"shuffle_seed": seed})

    @property
    def needs_answers(self) -> bool:
        """Whether a reward compares each response with the answer of its row."""
        return self.rollout.agent is None and not COMPARING.isdisjoint(self.reward.functions)

    @property
    def rollout_budget(self) -> int:
        """Rollouts a step."""
        return self.rollout_bounds[0]

    @property
    def rollout_range(self) -> tuple[int, int]:
        """The fewest and the most rollouts of a step: with `algorithm.sequential` their rewards decide. Not counted:
        further rounds of dynamic sampling."""
        budget, _, high = self.rollout_bounds
        if (sequential := self.algorithm.sequential) is None:
            return budget, budget
        most = high * self.data.batch_prompts if sequential.kind == "reinforce_ada" else budget
        return sequential.round_n * self.data.batch_prompts, most

    @property
    def rollout_bounds(self) -> tuple[int, int, int]:
        """Rollouts of a step, and the fewest and the most of a prompt. Raises ValueError where they contradict."""
        allocation, prompts = self.algorithm.allocation, self.data.batch_prompts
        return allocation.fit(prompts, 8 * prompts if allocation.budget is None else allocation.budget)

    def _groups_of_one(self, budget: int, low: int, high: int) -> Iterator[str]:
        """`low`, `high`: rollouts of a prompt that the budget leaves."""
        advantage, prompts = self.algorithm.advantage, self.data.batch_prompts
        uniform = self.algorithm.allocation.kind == "uniform"
        if low == 1 and advantage.needs_company and (not uniform or budget < 2 * prompts):
            yield (
                "algorithm.allocation.rollout_n_min: 1 rollout has no other to be compared with, and advantage.kind "
                f"{advantage.kind} compares with the group alone; set it to 2 or more, or advantage.kind to history"
            )
        if self.algorithm.dynamic_sampling is not None and (high == 1 or (uniform and budget <= prompts)):
            yield (
                "algorithm.dynamic_sampling: goes by groups of equal rewards, and one rollout a prompt makes none; ask "
                "for 2 or more"
            )

    def faults(self, *, training: bool) -> Iterator[str]:
        if self.rollout.agent is not None and self.data.template != "chat":
            yield "rollout.agent: an agent sends messages, so each problem must be a chat; set data.template to chat"
        yield from bridge_faults(self, training)
        if not training:
            return
        yield from staleness_faults(self)
        yield from quantization_faults(self)
        yield from critic_faults(self)
        prompts = self.data.batch_prompts
        try:
            yield from self._groups_of_one(*self.rollout_bounds)
            yield from sequential_faults(self, *self.rollout_bounds)
        except ValueError as error:
            yield f"algorithm.allocation.{error}"
        if self.algorithm.loss.mini_batches > prompts:
            yield (
                f"algorithm.loss.mini_batches: {self.algorithm.loss.mini_batches} mini-batches from {prompts} prompts; "
                "a mini-batch needs a prompt"
            )
        teacher = self.algorithm.teacher
        if teacher is not None and teacher.is_url and self.rollout.temperature != 1:
            yield (
                "algorithm.teacher.path: a server gives the teacher's logprobs at temperature 1, and "
                f"rollout.temperature is {self.rollout.temperature:g}; set it to 1"
            )
        if teacher is not None and teacher.reward_weight == 0:
            for key in ("dynamic_sampling", "sequential"):
                if getattr(self.algorithm, key) is not None:
                    yield f"algorithm.{key}: goes by rewards, and algorithm.teacher.reward_weight is 0; set it to null"
        modulation = self.algorithm.modulation
        if modulation and modulation.scope == "micro_batch" and self.kernels.gradient == "eager":
            yield "kernels.gradient: modulation scope micro_batch needs 'recompute'"
        if modulation and self.parallel.cp > 1:
            for key, value in (("scope", "micro_batch"), ("expectation", "sequence_mean")):
                if getattr(modulation, key) == value:
                    yield (
                        f"algorithm.modulation.{key}: {value} needs whole sequences on a rank, and parallel.cp is "
                        f"{self.parallel.cp}; use cp 1 or the default {key}"
                    )
        if self.checkpoint.export_hf == "best" and not self.eval.every:
            yield "checkpoint.export_hf: 'best' is chosen by the periodic evaluation; set eval.every"
        if self.checkpoint.export_hf == "every" and not self.checkpoint.every:
            yield "checkpoint.export_hf: 'every' exports each checkpoint, and checkpoint.every is null; set it"

    @property
    def other_models(self) -> dict[str, str]:
        """key -> folder of each model of the policy's shape with a folder of its own, which the ranks load too."""
        critic = {} if self.critic.path is None else {"critic.path": self.critic.path}
        return {key: path for key, path in (self.frozen_models | critic).items() if path != self.model.path}

    @property
    def frozen_models(self) -> dict[str, str]:
        """key -> folder of each model beside the policy: the reference of the KL term or of DPO, the teacher, and the
        two of the reward `prime`."""
        found = {}
        if self.algorithm.kl.coef:
            found["algorithm.kl.reference"] = self.algorithm.kl.reference or self.model.path
        if (teacher := self.algorithm.teacher) is not None and not teacher.is_url:
            found["algorithm.teacher.path"] = teacher.path
        if self.dpo is not None:
            found = {"dpo.reference": self.dpo.reference or self.model.path}
        if (prime := self.reward.prime).model is not None:
            found["reward.prime.model"] = prime.model
            found["reward.prime.reference"] = prime.reference or self.model.path
        return found

    @property
    def copied_models(self) -> set[str]:
        """The folders of frozen models whose weights wait in host memory. With adapters the policy's own is none: it is
        the policy without them."""
        return set(self.frozen_models.values()) - ({self.model.path} if self.model.lora is not None else set())

    @property
    def of_critic(self) -> Config | None:
        """The run as its critic sees it, a model with an optimizer of its own; None: the method has no critic."""
        if self.algorithm.advantage.kind != "gae":
            return None
        model = self.model.model_copy(update={"path": self.critic.path or self.model.path})
        own = {"model": model, "optimizer": self.optimizer.model_copy(update=dict(self.critic.optimizer))}
        own |= {"algorithm": AlgorithmConfig(), "reward": RewardConfig()}
        return self.model_copy(update=own)

    def rank_variables(self) -> dict[str, str]:
        """Environment variables that CUDA and NCCL read as they start; what the user has set takes precedence."""
        # SGLang's ranks have this value; an NCCL group of ranks with different values fails.
        variables = {"NCCL_CUMEM_ENABLE": "0"}
        if self.parallel.tp > 1 or self.parallel.cp > 1:
            # One queue: Megatron issues an exchange before the GEMM that hides it, and relies on that order.
            variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        return variables

    def with_servers(self, ranks: int, nodes: int) -> Config:
        """Of a run with a GPU for each of its ranks: colocated servers, where their number is unset, are as many as the
        GPUs of the ranks have room for, an equal number on each node and at least one."""
        rollout = self.rollout
        if "servers" in rollout.model_fields_set or rollout.placement != "colocated":
            return self
        rollout = rollout.model_copy(update={"servers": nodes * max(1, ranks // nodes // rollout.tp)})
        rollout.model_fields_set.remove("servers")
        return self.model_copy(update={"rollout": rollout})

    def policy_loss(self) -> PolicyLossConfig:
        """Of the built-in losses; `kind` says nothing where the loss is a function of the user's."""
        a = self.algorithm
        return PolicyLossConfig(
            clip_ratio_low=a.loss.clip_ratio_low,
            clip_ratio_high=a.loss.clip_ratio_high,
            clip_ratio_c=a.loss.clip_ratio_c,
            modulation=a.modulation,
            kl_coef=a.kl.coef,
            kl_kind=a.kl.kind,
            entropy_coef=a.loss.entropy_coef,
            kind="cispo" if a.loss.kind == "cispo" else "clip",
        )

    @property
    def trained_models(self) -> int:
        """The policy and, with one, its critic, of the same size."""
        return 1 if self.of_critic is None else 2

    def policy_weight(self, step: int) -> float:
        """What the policy's loss of training step `step` (from 1) is multiplied by: 0 while only the critic learns."""
        return 0.0 if step <= self.critic.warmup_steps else 1.0

    def learning_rate(self, step: int) -> float:
        """Of training step `step` (from 1): linear warm-up, then the schedule, which would reach 0 after the last step.
        The policy's begin after the steps in which its critic alone is trained."""
        o, alone = self.optimizer, 0 if self.of_critic is None else self.critic.warmup_steps
        step, steps = max(1, step - alone), self.trainer.steps - alone
        if step <= o.warmup_steps:
            return o.lr * step / o.warmup_steps
        if o.schedule == "constant":
            return o.lr
        done = (step - 1 - o.warmup_steps) / max(1, steps - o.warmup_steps)
        return o.lr * (1 - done if o.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
