"""`dynamo-megatron preflight`: its checks, and the command, which prints one line or more for each. Those of what the
whole job has in common: layout, model folder, tokenizer, data, reward. Those of this node: GPUs, ports and network,
disk, host memory, and a server of two layers of random weights."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from dynamo_megatron.bridge import environment
from dynamo_megatron.config import Config, RewardConfig
from dynamo_megatron.config.reward import COMPARING
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.templates import (
    encode_prompt,
    end_token_ids,
    load_tokenizer,
    longest_sequence,
    max_prompt_length,
    rendered_warning,
)
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.problems import load_problems, overlap_warnings
from dynamo_megatron.jobs import start_checks
from dynamo_megatron.jobs.output_dir import OutputDir
from dynamo_megatron.jobs.start_checks import check_layout, size_text
from dynamo_megatron.models import ModelSpec, load_model_config
from dynamo_megatron.models.server_layout import check_served
from dynamo_megatron.planning.hardware import Cluster, gpu_named
from dynamo_megatron.reward import RewardError, RewardPool, Score
from dynamo_megatron.reward.functions import check_answers
from dynamo_megatron.reward.http import key_of
from dynamo_megatron.reward.pool import processes
from dynamo_megatron.rollout.agents.pool import check_agent
from dynamo_megatron.rollout.client import ServerLost, SGLangClient, open_session
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.fleet import training_nodes
from dynamo_megatron.rollout.servers.server import ASK_TIMEOUT, SGLangServer, check_reachable, gpu_count
from dynamo_megatron.rollout.teacher import check_teacher
from dynamo_megatron.rounds import check_savable
from dynamo_megatron.runtime.cores import memory_room
from dynamo_megatron.runtime.late import torch
from dynamo_megatron.runtime.listening import address_towards, store_address
from dynamo_megatron.runtime.plain_text import error_line, on_one_line, show
from dynamo_megatron.runtime.run_folder import has_results
from dynamo_megatron.tracking.trackers import check_trackers
from dynamo_megatron.types import Prompt, is_empty

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MEASURED = 1000  # prompts whose length is measured
SAMPLES, WRONG = 3, "I do not know."  # prompts that are scored, and what is no answer
SHARED_MEMORY = 1 << 30  # bytes of /dev/shm that NCCL and SGLang's ranks may want
LAYERS, TOKENS, LONGEST = 2, 8, 1024  # of the server that is tried; generated; tokens of a sequence there
# Random weights and no CUDA graphs: this tests the interpreter, the kernels, the server's ranks and the protocol.
SLICE = ("--load-format", "dummy", "--max-total-tokens", "4096", "--disable-cuda-graph")
MODULES = """
import importlib.util, json
print(json.dumps([importlib.util.find_spec(name) is not None for name in ("cutlass", "flashinfer")]))
"""


@dataclass(frozen=True)
class Finding:
    """One line of output. The text of a failure says what is wrong, where, and how to correct it; a note is worth
    knowing but does not keep the run from starting."""

    level: Literal["ok", "note", "FAILED", "skipped"]
    text: str


ok, note, failed, skipped = (partial(Finding, level) for level in ("ok", "note", "FAILED", "skipped"))


class Subject:
    """A configuration and the number of its ranks, in all and on this node. Reads model config, tokenizer and prompts,
    and starts a server, once each, at the first access. Raises InputError for bad input."""

    def __init__(self, config: Config, ranks: int, ranks_here: int):
        self.config, self.ranks, self.ranks_here = config, ranks, ranks_here
        self.memory = min(psutil.virtual_memory().available, memory_room())  # bytes, before anything is started
        self.data_notes: list[str] = []  # lines about rows that were left out of `prompts`

    @cached_property
    def spec(self) -> ModelSpec:
        return load_model_config(self.config.model.path, self.config.model.family, self.config.model.source)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model.path, self.config.data.chat_template)

    @cached_property
    def prompts(self) -> list[Prompt]:
        return load_prompts(self.config.data, needs_answer=self.config.needs_answers, say=self.data_notes.append)

    @cached_property
    def server(self) -> SGLangServer | None:
        """Of two layers of random weights; None where the run starts no servers of its own."""
        rollout = self.config.rollout
        if rollout.engine != "sglang" or rollout.placement == "external":
            return None
        longest, layers = min(LONGEST, self.spec.max_positions), min(LAYERS, self.spec.num_layers)
        changed = ["--context-length", str(longest)]
        changed += ["--json-model-override-args", json.dumps({"num_hidden_layers": layers})]
        changes = {"server_args": [*rollout.server_args, *SLICE, *changed], "host": "127.0.0.1", "port": None}
        log = Path(tempfile.mkdtemp(prefix="preflight-"), "sglang.log")
        started = SGLangServer(rollout.model_copy(update=changes), self.config.model, log)
        started.start()
        return started

    def encode(self, prompt: Prompt) -> list[int]:
        return encode_prompt(prompt, self.tokenizer, self.config.data)


def layout(subject: Subject) -> Iterator[Finding]:
    """Checks model, layout and the number of ranks as `train` does."""
    spec = check_layout(subject.config, subject.ranks)
    for what, text in start_checks.describe_layout(subject.config, spec, subject.ranks).items():
        yield ok(f"{what}: {text}")


def plan(subject: Subject) -> Iterator[Finding]:
    """Plans memory, servers and times of the whole run, on the assumption that all its nodes are like this one."""
    if not torch.cuda.is_available():
        yield skipped("no GPU here to reckon with: dynamo-megatron plan takes --gpu and --gpus")
        return
    if subject.config.model.source == "bridge":
        yield skipped("models of Megatron-Bridge are not planned")
        return
    from dynamo_megatron.planning import plan as planning

    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
    if (gpu := gpu_named(name, memory)) is None:
        yield skipped(f"{name} with {memory / 1e9:.0f} GB is not in the planner's table (planning/hardware.py)")
        return
    spec = check_layout(subject.config, subject.ranks)
    cluster = Cluster(gpu, subject.ranks, min(subject.ranks, torch.cuda.device_count()))
    made = planning.make_plan(subject.config, spec, cluster, planning.workload(subject.config, spec))
    told = f"{cluster.gpus} x {gpu.name} in {cluster.nodes} node{'s' * (cluster.nodes > 1)}: {made.fault or 'fits'}"
    yield failed(f"{told}; `dynamo-megatron plan` has all") if made.fault else ok(told)


def model_config(subject: Subject) -> Iterator[Finding]:
    """What the ranks will build from config.json, which has been read, and with which optional packages; whether SGLang
    will serve the same model. Of a model of Bridge's also the proof."""
    if subject.config.model.source == "bridge":
        yield ok(environment.prove_folder(subject.config.model.path))
    from dynamo_megatron.policy.backend import Fusions  # takes seconds: it imports Megatron

    check_served(subject.spec, subject.config.model.max_length or subject.spec.max_positions)
    fusions = Fusions.detect()  # raises where Megatron would fail on a package that is only half there
    yield ok(f"{subject.spec.family}, {subject.spec.num_layers} layers; optional packages: {fusions}")


def weights(subject: Subject) -> Iterator[Finding]:
    """Checks every file of the index, and every tensor's name and shape by the files' headers: of the model and of the
    others that the ranks load."""
    from dynamo_megatron.checkpoint.weights import open_weights  # imports torch, in seconds: the server starts before

    config, spec = subject.config, subject.spec
    folder = open_weights(config.model.path, spec)
    yield ok(f"{len(folder.names)} tensors, every name and shape as Megatron needs it")
    for key, path in config.other_models.items():
        try:
            open_weights(path, spec)
        except ValueError as error:
            raise InputError(f"{key}: {error}") from None
        yield ok(f"{key}: {path} has the same names and shapes")


def vocabulary(subject: Subject) -> Iterator[Finding]:
    """Checks the tokenizer's size against the embedding, and a teacher's tokenizer against it."""
    spec, path, tokenizer = subject.spec, subject.config.model.path, subject.tokenizer
    start_checks.check_vocabulary(path, spec, tokenizer)
    size = len(tokenizer.get_vocab())
    ends = [f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in end_token_ids(path, tokenizer)]
    yield ok(f"{size:,} tokens for {spec.vocab_size:,} rows; a response ends with {', '.join(ends)}")
    if (teacher := subject.config.algorithm.teacher) is not None:
        warning = check_teacher(teacher, tokenizer, spec.vocab_size, longest_sequence(subject.config, spec))
        yield ok(f"the teacher {teacher.path} has the same tokenizer")
        if warning is not None:
            yield note(warning)


def data(subject: Subject) -> Iterator[Finding]:
    """Reads all prompts; encodes the first MEASURED."""
    config, prompts = subject.config, subject.prompts
    limit = max_prompt_length(config, subject.spec)
    for prompt in prompts[:MEASURED]:
        check_savable(prompt, config)
    encoded = [subject.encode(prompt) for prompt in prompts[:MEASURED]]
    longest = max(map(len, encoded))
    long = sum(len(tokens) > limit for tokens in encoded)
    if long == len(encoded):
        raise InputError(
            f"data.max_prompt_length: all of the first {long} prompts of {config.data.source} have more than {limit} "
            f"tokens (the longest {longest}); raise it, or lower rollout.max_new_tokens"
        )
    shown = subject.tokenizer.decode(encoded[0])
    shown = shown if len(shown) <= 160 else f"{shown[:80]} ... {shown[-80:]}"
    yield ok(
        f"{len(prompts):,} prompts from {config.data.source}, the longest of {len(encoded)} {longest} tokens, at most "
        f"{limit}; the first: {shown!r}"
    )
    yield from map(note, [*subject.data_notes, *rendered_warning(prompts[0], subject.tokenizer, config.data)])
    if long:
        yield note(f"{long} of {len(encoded)} prompts have more than {limit} tokens and will be skipped")
    if len(prompts) < config.data.batch_prompts:
        yield note(f"data.batch_prompts {config.data.batch_prompts}: a step has the same prompt more than once")


def reward(subject: Subject) -> Iterator[Finding]:
    """Runs the reward functions on the right answer and on a wrong answer of three prompts, in reward workers and under
    the deadline."""
    config, prompts = subject.config.reward, subject.prompts
    if not COMPARING.isdisjoint(config.functions):  # rows of an agent that gives the reward itself may have no answer
        prompts = [prompt for prompt in prompts if not is_empty(prompt.answer)]
    if not prompts:
        yield skipped("no row has an answer, so the agent must give the reward")
        return
    check_answers(prompts, subject.config)
    prompts = prompts[:SAMPLES]
    try:
        scores = asyncio.run(_score(config, prompts))
    except RewardError as error:
        line = str(error).splitlines()[-1]
        raise InputError(f"{line}; reward.functions must give a finite number for any response: mend it") from None
    functions = ", ".join(config.outcomes)
    for prompt, pair in zip(prompts, scores, strict=True):
        if "reward_timeout" in [score.status for score in pair]:
            raise InputError(
                f"reward.functions: {functions} on prompt {prompt.prompt_id!r}: no score within reward.deadline "
                f"({config.deadline:g} s), which gives reward 0; make the function faster or raise the deadline"
            )
    shown = "; ".join(f"{right.reward:g} and {wrong.reward:g}" for right, wrong in scores)
    yield ok(f"{functions} on the answer and on {WRONG!r}: {shown}")
    if all(right.reward == wrong.reward for right, wrong in scores):
        yield note(
            "the answer itself scores as the wrong one does: if the reward does not ask for a form of its own (tags, "
            "\\boxed{}), data.answer_key names the wrong column"
        )
    elif not any(right.success for right, _ in scores):
        yield note(f"no answer reaches reward.success_threshold {config.success_threshold:g}: nothing counts as solved")


async def _score(config: RewardConfig, prompts: list[Prompt]) -> list[list[Score]]:
    pool = RewardPool(config.model_copy(update={"workers": min(processes(config), 2 * SAMPLES), "on_error": "raise"}))
    try:
        pool.start()
        pairs = (asyncio.gather(*(pool.score(p, text) for text in (str(p.answer), WRONG))) for p in prompts)
        return await asyncio.gather(*pairs)
    finally:
        pool.close()


def evaluation(subject: Subject) -> Iterator[Finding]:
    """Checks the evaluation's problems and their lengths, and notes those that are also in the training data."""
    config = subject.config
    if config.eval.data is None:
        yield skipped("eval.data is not set")
        return
    problems = load_problems(config, subject.encode, max_prompt_length(config, subject.spec, evaluation=True))
    check_answers(problems, config)
    yield ok(f"{len(problems):,} problems from {config.eval.data}")
    for warning in overlap_warnings(problems, subject.prompts, config.data.source):
        yield note(f"{warning}: take them out of data.source or eval.data")


def results(subject: Subject) -> Iterator[Finding]:
    """What `train` asks of the results in output_dir, of trackers, of recorded rollouts, and of the user's code."""
    from dynamo_megatron.jobs.train import check_functions  # imports torch

    config, rollout = subject.config, subject.config.rollout
    OutputDir(config).check()
    check_trackers(config)
    check_functions(config)
    key_of(rollout.api_key_env, "rollout.api_key_env")
    if rollout.recorded is not None:
        RecordedRollouts(rollout.recorded, subject.spec.vocab_size)
    if rollout.agent is not None:
        asyncio.run(check_agent(rollout.agent, rollout.agent_python))
    held = "holds this run, which would go on" if has_results(Path(config.output_dir)) else "holds no results"
    yield ok(f"{config.output_dir} {held}")


def devices(subject: Subject) -> Iterator[Finding]:
    """Whether torch sees a GPU for each rank, where this process seems to be meant to have some."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    given = visible not in ("", "-1", "NoDevFiles") if visible is not None else glob.glob("/dev/nvidia[0-9]*")
    if count < subject.ranks_here and (count or given or os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"):
        raise InputError(
            f"devices: {subject.ranks_here} ranks on this node, and torch {torch.__version__} sees {count} GPUs "
            f"(CUDA_VISIBLE_DEVICES={'not set' if visible is None else visible}); ask for a GPU a rank, install "
            "torch's CUDA build, see that the container gets the GPUs, or set CUDA_VISIBLE_DEVICES= for a run on CPUs"
        )
    yield ok(f"{count} x {torch.cuda.get_device_name()}" if count else "no GPU: the ranks run on CPUs")


def network(subject: Subject) -> Iterator[Finding]:
    """The ports and addresses that the configuration or the launcher has fixed, and what brings the servers weights."""
    config, ranks = subject.config, subject.ranks
    nodes = max(training_nodes(), -(-ranks // (gpu_count() or ranks)))  # without a launcher: of machines like this one
    transport = start_checks.check_node(config, ranks, nodes)
    check_reachable(config.rollout, [f"node {i}" for i in range(nodes)])
    try:
        if "RANK" in os.environ and (address := store_address()):
            address_towards(address)
    except OSError as error:
        raise InputError(
            f"MASTER_ADDR: this node does not reach {os.environ['MASTER_ADDR']} ({error.strerror}); set it to an "
            "address of rank 0's host that all nodes know"
        ) from None
    where = f"rollout.port {config.rollout.port}" if config.rollout.port else "free ones are taken"
    rendezvous = os.environ.get("MASTER_PORT", "a free one is taken")
    yield ok(f"ports of servers: {where}; rendezvous: {rendezvous}; weights go by {transport}")


def disk(subject: Subject) -> Iterator[Finding]:
    """Room for the run's files in a folder that can be written."""
    output = Path(subject.config.output_dir)
    told = start_checks.check_room(subject.config, subject.spec)
    folder = start_checks.existing_folder(output)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-"):
            yield ok(told)
    except OSError as error:
        raise InputError(f"output_dir: {folder} cannot be written ({error.strerror}); name another folder") from None


def host_memory(subject: Subject) -> Iterator[Finding]:
    """What the ranks here keep in host memory against what is available, the job's own limit included."""
    config, spec = subject.config, subject.spec
    check_layout(config, subject.ranks)
    if config.model.source == "bridge":
        yield skipped("of models of Megatron-Bridge, not planned")
        return
    from dynamo_megatron.planning import plan as planning  # imports torch

    tokens, cuda = planning.workload(config, spec).mean, torch.cuda.is_available()
    parts = planning.host_memory(config, spec, subject.ranks, subject.ranks_here, tokens, cuda=cuda)
    needed, available = sum(parts.values()), subject.memory
    told = ", ".join(f"{what} {size_text(value)}" for what, value in parts.items())
    if needed > available:
        raise InputError(
            f"host memory: {size_text(available)} available on this node, the run needs about {size_text(needed)} at "
            f"its peak ({told}); ask for more memory (sbatch --mem), fewer ranks a node, or set checkpoint.async, "
            "rollout.offload or optimizer.cpu_offload to false"
        )
    shared = os.statvfs("/dev/shm")
    if (room := shared.f_bavail * shared.f_frsize) < SHARED_MEMORY:
        raise InputError(
            f"/dev/shm has {size_text(room)} free, NCCL and the servers may want {size_text(SHARED_MEMORY)}; start the "
            "container with --shm-size or --ipc=host, or empty it"
        )
    yield ok(f"{size_text(available)} available for {told}")


def gpu_server(subject: Subject) -> Iterator[Finding]:
    """What SGLang 0.5.23 refuses, or lacks in its interpreter, on a machine with CUDA alone."""
    rollout = subject.config.rollout
    if not torch.cuda.is_available() or rollout.engine != "sglang" or rollout.placement == "external":
        yield skipped("this run starts no servers on GPUs here")
        return
    given = {argument.partition("=")[0] for argument in rollout.server_args}
    if "--cuda-graph-max-bs" in given:
        yield failed("rollout.server_args: SGLang has no option --cuda-graph-max-bs; add -decode or -prefill")
    python = rollout.python or sys.executable
    asked = [python, "-P", "-c", MODULES]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=True)
    cutlass, flashinfer = json.loads(done.stdout)
    if not cutlass and not subject.spec.num_experts:
        yield failed(
            f"{python} has no module cutlass, which SGLang imports for this model: pip install nvidia-cutlass-dsl there"
        )
    if not flashinfer and "--attention-backend" not in given:
        yield failed(
            f"{python} has no flashinfer, with which SGLang computes attention by default on most GPUs: install "
            "flashinfer_python there, or give an --attention-backend in rollout.server_args, such as triton"
        )
    if cutlass and flashinfer:
        yield ok(f"{python} has cutlass and flashinfer")


def server(subject: Subject) -> Iterator[Finding]:
    """Checks that SGLang starts in its interpreter and answers a request with tokens and logprobs."""
    if subject.server is None:
        yield skipped("this run starts no servers")
        return
    try:
        yield ok(asyncio.run(_try(subject, subject.server)))
    except (RolloutError, ServerLost, TimeoutError) as error:
        # The folder is kept: the message names the log in it.
        raise InputError(
            f"{error}; if the cause is not the model's, name another rollout.python or correct rollout.server_args"
        ) from None
    shutil.rmtree(subject.server.log.parent, ignore_errors=True)


async def _try(subject: Subject, process: SGLangServer) -> str:
    try:
        await process.wait_ready()
        async with open_session() as session:
            ends = end_token_ids(subject.config.model.path, subject.tokenizer)
            rollout = subject.config.rollout.model_copy(update={"stop": []})
            client = SGLangClient(session, process.endpoint, rollout, ends)
            response = await client.generate("preflight", subject.tokenizer.encode("1 + 1 ="), max_new_tokens=TOKENS)
    finally:
        process.stop()
    if response.error or not response.tokens or len(response.logprobs) != len(response.tokens):
        fault = response.error or "no tokens"
        raise RolloutError(f"the server starts but does not generate: {fault}; see {process.log}")
    layers = min(LAYERS, subject.spec.num_layers)
    return f"SGLang started with {layers} layers and generated {len(response.tokens)} tokens with logprobs"


# Rank 0 runs the checks of the job, in the order of their dependencies; the first rank of each node those of the node.
OF_THE_JOB = (layout, plan, model_config, weights, vocabulary, data, reward, evaluation, results)
OF_A_NODE = (devices, network, disk, host_memory, gpu_server)
MOST_ON_A_CPU = 4  # ranks that are taken to be on this node


def preflight(config: Config, ranks: int, *, with_server: bool) -> int:
    """Prints the findings of each check. Returns the exit code, 1 where a check failed. Under a launcher (RANK set)
    the first rank of each node reports its own findings, with its node's name."""
    under_launcher, leads = "RANK" in os.environ, os.environ.get("RANK", "0") == "0"
    here = min(ranks, gpu_count() or MOST_ON_A_CPU)  # this node's part of a run that may have more nodes
    if under_launcher:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    subject, checks = Subject(config, ranks, here), [*OF_THE_JOB] if leads else []
    if os.environ.get("LOCAL_RANK", "0") == "0":
        checks += OF_A_NODE
        if with_server:
            checks.append(server)
            with contextlib.suppress(ValueError, OSError):  # the check raises it again
                _ = subject.server  # it starts beside the other checks
    prefix = f"{socket.gethostname()} rank {os.environ['RANK']}: " if under_launcher else ""
    bad: dict[str, None] = {}
    raised: set[str] = set()
    for check in checks:
        name, start = check.__name__.replace("_", " "), time.monotonic()
        for finding in findings(check, subject, raised):
            if finding.level == "FAILED":
                bad[name] = None
            if leads or finding.level != "ok":  # other ranks report only problems
                seconds = time.monotonic() - start
                show(f"{prefix}{finding.level:<7} {name}: {finding.text}  ({seconds:.1f} s)", sys.stdout)
    if bad:
        print(f"{prefix}{len(bad)} of {len(checks)} checks failed: {', '.join(bad)}", file=sys.stderr)
    elif leads:
        print(f"{prefix}all {len(checks)} checks passed")
    return 1 if bad else 0


def findings(check: Callable[[Subject], Iterator[Finding]], subject: Subject, raised: set[str]) -> Iterator[Finding]:
    """What a check finds. It fails if it raises an exception, and counts as skipped if that has `raised` before, since
    both need the same thing."""
    try:
        yield from check(subject)
    except (Exception, SystemExit) as error:  # the user's code, too: the other checks must still run
        text = on_one_line(str(error)) if isinstance(error, ValueError) else error_line(error)
        yield skipped("not checked: it needs what failed above") if text in raised else failed(text)
        raised.add(text)
