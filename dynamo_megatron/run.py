"""A training run from a config: what is checked before it, what each rank sets up, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import torch
import torch.distributed as dist

from dynamo_megatron.config import Config
from dynamo_megatron.config_files import ConfigError
from dynamo_megatron.coordination import Coordinator, RemoteFailure, SignalFlag, StopRequested, connect_store
from dynamo_megatron.data.sources import load_prompts
from dynamo_megatron.data.stream import PromptStream
from dynamo_megatron.data.templates import encode_prompt, end_token_ids, load_tokenizer
from dynamo_megatron.models import ModelSpec, SafetensorsFolder, load_model_config
from dynamo_megatron.output_dir import OutputDir
from dynamo_megatron.policy import backend
from dynamo_megatron.rollout.recorded import RecordedRollouts
from dynamo_megatron.rollout.worker import RolloutWorker


def _check_world_size(config: Config, world_size: int) -> None:
    """Raises ValueError where the ranks can't be cut into tp x pp."""
    model_parallel = config.parallel.tp * config.parallel.pp
    if world_size % model_parallel:
        raise ValueError(
            f"parallel: {world_size} ranks can't be cut into tp {config.parallel.tp} x pp {config.parallel.pp} = "
            f"{model_parallel}; start a multiple of that"
        )


def default_ranks(config: Config) -> int:
    return torch.cuda.device_count() or config.parallel.tp * config.parallel.pp


def check(config: Config, ranks: int) -> dict[str, Any]:
    """What can be checked in a moment and without writing anything; returns the derived values.

    Raises ConfigError.
    """
    try:
        _check_world_size(config, ranks)
        spec = load_model_config(config.model.path, config.model.family)
        spec.check_parallel(config.parallel.tp, config.parallel.pp)
        prompt_limit = max_prompt_length(config, spec)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    p = config.parallel
    return {
        "layout": f"{ranks} ranks = tp {p.tp} x pp {p.pp} x dp {ranks // (p.tp * p.pp)}",
        "device": "CUDA" if torch.cuda.is_available() else "CPU",
        "model": f"{spec.family}, {spec.num_layers} layers, vocabulary {spec.vocab_size} "
        f"(padded to {spec.padded_vocab(p.tp)}), {'tied' if spec.tied else 'untied'} head",
        "prompt limit": f"{prompt_limit} tokens, response limit {config.rollout.max_new_tokens}",
        "rollouts a step": f"{config.rollout_budget} for {config.data.batch_prompts} prompts, "
        f"{config.algorithm.loss.mini_batches} updates",
    }


def max_prompt_length(config: Config, spec: ModelSpec) -> int:
    """Tokens a prompt may have. Raises ValueError where prompt and response do not fit the model."""
    limit = config.model.max_length or spec.max_positions
    if limit > spec.max_positions:
        raise ValueError(f"model.max_length: {limit} tokens is above the model's {spec.max_positions}")
    room = limit - config.rollout.max_new_tokens
    asked = config.data.max_prompt_length or room
    if room < 1 or asked > room:
        raise ValueError(
            f"rollout.max_new_tokens: {config.rollout.max_new_tokens} tokens leave {max(0, room)} of {limit} for the "
            f"prompt{f', data.max_prompt_length asks for {asked}' if config.data.max_prompt_length else ''}"
        )
    return asked


def _lead(config: Config, spec: ModelSpec, output: OutputDir) -> tuple[PromptStream, RolloutWorker | RecordedRollouts]:
    """Rank 0's own part: the prompt stream and the rollout engine, started. Raises ValueError for bad input."""
    with SafetensorsFolder(config.model.path, spec):
        pass  # opening checks every header
    tokenizer = load_tokenizer(config.model.path)
    stream = PromptStream(
        load_prompts(config.data),
        config.data,
        lambda prompt: encode_prompt(prompt, tokenizer, config.data),
        max_prompt_length(config, spec),
    )
    if config.rollout.engine == "recorded":
        rollout = RecordedRollouts(config.rollout.recorded)
    else:
        rollout = RolloutWorker(config, end_token_ids(config.model.path, tokenizer))
    output.claim()
    rollout.start()
    return stream, rollout


def run_rank(config: Config) -> int:
    """Trains as the rank that RANK names; returns the exit code."""
    rank = int(os.environ["RANK"])
    stop = SignalFlag()
    stream = rollout = coordinator = None
    training = False
    output = OutputDir(config)
    try:
        if (step := output.finished()) is not None:
            if rank == 0:
                print(f"{config.output_dir}: already at step {step} of {config.trainer.steps}", flush=True)
            return 0
        spec = load_model_config(config.model.path, config.model.family)
        if rank == 0:
            check(config, int(os.environ["WORLD_SIZE"]))
            stream, rollout = _lead(config, spec, output)
        if config.trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses to be deterministic without
            torch.use_deterministic_algorithms(True)
        backend.enable_cpu()
        backend.fix_torch_adam_checkpoints()
        # Megatron may only be imported once the backend is set up.
        from dynamo_megatron.policy.layout import join_ranks
        from dynamo_megatron.policy.policy import Policy
        from dynamo_megatron.trainer import Trainer

        store = connect_store(config.trainer.timeout)
        coordinator = Coordinator(store, rank, stop)
        layout = join_ranks(config, store)
        if rank == 0:
            print(f"optional packages: {backend.Fusions.detect()}", flush=True)
        policy = Policy(spec, config, layout)
        _wait_for_rollouts(config, coordinator, rollout)
        trainer = Trainer(config, policy, coordinator, stream, rollout)
        if rank == 0:
            output.take_over(trainer.start)
        training = True
        trainer.run()
        dist.barrier(group=layout.host)
        coordinator.close()
        dist.destroy_process_group()
        return 0
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted; the same command goes on from the last checkpoint", file=sys.stderr, flush=True)
        return 130
    except StopRequested as stopped:
        if rank == 0:
            print(f"stopped by {stopped}; the same command goes on from here", file=sys.stderr, flush=True)
        return 75
    except Exception as error:  # the end of the process: whatever it was, the other ranks and the user are told
        return _report(error, rank, coordinator, training)
    finally:
        if coordinator is not None:
            coordinator.close()
        if rollout is not None:
            rollout.close()


def _wait_for_rollouts(
    config: Config, coordinator: Coordinator, rollout: RolloutWorker | RecordedRollouts | None
) -> None:
    """All ranks wait until rank 0's engine is up, outside of any collective. Raises StopRequested on all of them."""
    key, timeout = "rollouts-ready", config.rollout.start_timeout + config.trainer.timeout
    if rollout is None:
        said = coordinator.wait(key, "the rollout server to start", timeout)
        if said != "ready":
            raise StopRequested(int(said))
        return
    try:
        rollout.wait_ready(on_poll=coordinator.check_stop)
    except StopRequested as stopped:
        coordinator.announce(key, str(stopped.signal_number))
        raise
    coordinator.announce(key)


def _report(error: Exception, rank: int, coordinator: Coordinator | None, training: bool) -> int:
    """Tells the other ranks; on rank 0 the last line is the message of the first rank that failed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = frames[-1][0].f_globals["__name__"].startswith("dynamo_megatron")
    refused = isinstance(error, ValueError) and ours and not training
    message = str(error) if refused else f"{type(error).__name__}: {error}"
    if coordinator is not None and not refused:
        message = f"rank {rank}{f', step {coordinator.step}' if coordinator.step else ''}: {message}"
    first = message if coordinator is None else coordinator.fail(message)
    if isinstance(error, RemoteFailure):
        first = str(error)
    elif first == message and not refused:
        traceback.print_exception(error)
    if rank == 0 or coordinator is None:
        print(first, file=sys.stderr, flush=True)
    return 2 if refused else 1
