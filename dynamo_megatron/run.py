"""A training run from a config: what is checked before it, what each rank sets up, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from dynamo_megatron.config import Config
from dynamo_megatron.config_files import ConfigError, identity, to_plain
from dynamo_megatron.coordination import Coordinator, RemoteFailure, StopRequested, connect_store
from dynamo_megatron.models import ModelSpec, SafetensorsFolder, load_model_config


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


def claim_output_dir(config: Config) -> None:
    """Writes config.yaml into the output folder. Raises ConfigError where another run has left results there."""
    file, plain = Path(config.output_dir) / "config.yaml", to_plain(config)
    results = [p for kept in ("metrics.jsonl", "rollouts/*", "checkpoints/*") for p in file.parent.glob(kept)]
    if file.is_file() and any(p.is_dir() or p.stat().st_size for p in results):
        if config.trainer.resume == "never":
            raise ConfigError(
                f"output_dir: {config.output_dir} holds a run; name another folder or set trainer.resume=auto"
            )
        before, now = identity(yaml.safe_load(file.read_text(encoding="utf-8"))), identity(plain)
        differ = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if differ:
            raise ConfigError(
                f"output_dir: {config.output_dir} holds a run with another {', '.join(differ)}; name another folder"
            )
        print(f"{config.output_dir}: the run there goes on", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    aside.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    aside.rename(file)


def _lead(config: Config, spec: ModelSpec):
    """Rank 0's own part: the prompt stream and the rollout engine, started. Raises ValueError for bad input."""
    from dynamo_megatron.data.sources import load_prompts
    from dynamo_megatron.data.stream import PromptStream
    from dynamo_megatron.data.templates import encode_prompt, end_token_ids, load_tokenizer
    from dynamo_megatron.rollout.recorded import RecordedRollouts
    from dynamo_megatron.rollout.worker import RolloutWorker

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
    claim_output_dir(config)
    rollout.start()
    return stream, rollout


def run_rank(config: Config) -> int:
    """Trains as the rank that RANK names; returns the exit code."""
    from dynamo_megatron.policy import backend

    rank = int(os.environ["RANK"])
    stream = rollout = coordinator = None
    training = False
    try:
        spec = load_model_config(config.model.path, config.model.family)
        if rank == 0:
            check(config, int(os.environ["WORLD_SIZE"]))
            stream, rollout = _lead(config, spec)
        backend.enable_cpu()
        backend.fix_torch_adam_checkpoints()
        # Megatron may only be imported once the backend is set up.
        from dynamo_megatron.policy.layout import join_ranks
        from dynamo_megatron.policy.policy import Policy
        from dynamo_megatron.trainer import Trainer

        store = connect_store(config.trainer.timeout)
        coordinator = Coordinator(store, rank)
        coordinator.handle_signals()
        layout = join_ranks(config, store)
        torch.use_deterministic_algorithms(config.trainer.deterministic)
        if rank == 0:
            print(f"optional packages: {backend.Fusions.detect()}", flush=True)
        policy = Policy(spec, config, layout)
        if rollout is not None:
            rollout.wait_ready(on_poll=coordinator.check)
        trainer = Trainer(config, policy, coordinator, stream, rollout)
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
    except StopRequested as stop:
        if rank == 0:
            print(f"stopped by {stop}; the same command goes on from here", file=sys.stderr, flush=True)
        return 75
    except Exception as error:  # the end of the process: whatever it was, the other ranks and the user are told
        return _report(error, rank, coordinator, training)
    finally:
        if rollout is not None:
            rollout.close()


def _report(error: Exception, rank: int, coordinator: Coordinator | None, training: bool) -> int:
    """Tells the other ranks; on rank 0 the last line is the message of the first rank that failed."""
    refused = isinstance(error, ValueError) and not training
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
