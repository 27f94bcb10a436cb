"""`dynamo-megatron eval`: a model's answers to held-out problems, scored: pass@k with intervals."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose, to_plain
from dynamo_megatron.convert import find_checkpoint, mcore2hf, run_config
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.data.templates import decoder_of, encode_prompt, end_token_ids, load_tokenizer
from dynamo_megatron.evaluation.problems import load_problems
from dynamo_megatron.evaluation.results import markdown_table, summarise, write_results
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.rope import check_served_rope
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.run_folder import NewFolder, model_file
from dynamo_megatron.runtime import plain_json
from dynamo_megatron.runtime.coordination import StopFlag, StopRequested
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.types import ProblemResult


def evaluate(files: Sequence[str], overrides: Sequence[str], model: str | None, out: Path) -> int:
    """Evaluates and returns the exit code.

    `model`: a Hugging Face folder, a run (its newest checkpoint), a checkpoint, or the URL of an SGLang server;
    None: `model.path`. `out` gets `problems.jsonl` (one ProblemResult a line), `summary.json`, `table.md` and logs.
    Raises ConfigError.
    """
    url = model if model is not None and model.startswith(("http://", "https://")) else None
    checkpoint = None
    if model is not None and url is None and not (Path(model) / "config.json").is_file():
        _, checkpoint = find_checkpoint(model)
    config = _config(files, overrides, model, checkpoint, out)
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out: {out} holds a run or an evaluation; name another folder")
    if (found := model_file(out)) is not None:
        raise ConfigError(f"--out: {out} is a model's folder ({found}); name another folder")
    try:
        results_folder = NewFolder(out)
        (out / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror}") from None
    try:
        with (
            contextlib.closing(Progress()) as progress,
            tempfile.TemporaryDirectory(prefix=".model-", dir=out) as folder,
        ):
            served = config
            if checkpoint is not None:
                config = _with_model(config, checkpoint)
            if url is None and is_torch_dist(config.model.path):
                progress.phase("converting checkpoint")
                whole = Path(folder) / "hf"
                mcore2hf(config.model.path, whole)
                served = _with_model(config, whole)
            results = _ask(served, url, progress)
        show(_write(results, config, model, out), sys.stdout)
    except ValueError as error:
        results_folder.discard(str(error))
        raise ConfigError(str(error)) from None
    except (RolloutError, OSError) as error:
        show(str(error))
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing of the evaluation was kept", file=sys.stderr)
        return 130
    except StopRequested as stopped:
        print(f"stopped by {stopped}; nothing of the evaluation was kept", file=sys.stderr)
        return 1
    return 0


def _with_model(config: Config, path: str | Path) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})


def _with_servers(config: Config, url: str | None) -> Config:
    """The server at `url`, else as many as this machine has GPUs for, of a number that is given no more than that."""
    rollout, gpus = config.rollout, torch.cuda.device_count()
    if url is not None:
        rollout = rollout.model_copy(update={"placement": "external", "urls": [url]})
    else:
        # There are no ranks to take turns with.
        rollout = rollout.model_copy(update={"placement": "colocated", "urls": [], "offload": False})
        rollout = rollout.with_servers(gpus, 1)
        rollout = rollout.model_copy(update={"servers": max(1, min(rollout.servers, gpus // rollout.tp))})
    return config.model_copy(update={"rollout": rollout})


def _write(results: list[ProblemResult], config: Config, model: str | None, out: Path) -> str:
    """Writes the evaluation, config.yaml as the mark that it is complete; returns what the user reads."""
    summary = summarise(results, config.eval.k)
    table = markdown_table([(model or config.model.path, summary)], config.eval.k)
    source = config.eval.data or config.data.source
    write_results(out / "problems.jsonl", results)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(f"{source}\n\n{table}\n", encoding="utf-8")
    (out / "config.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
    return f"{source}\n\n{table}\n\n{out}/problems.jsonl has every response"


def _config(
    files: Sequence[str], overrides: Sequence[str], model: str | None, checkpoint: Path | None, out: Path
) -> Config:
    """A checkpoint brings its run's config; what a model alone does not need to say has a default."""
    defaults: dict[str, Any] = {"data": {"source": ""}, "output_dir": str(out)}
    if checkpoint is not None:
        defaults = to_plain(run_config(checkpoint))
        del defaults["rollout"]["servers"]  # of the run's machine
    elif model is not None and "://" in model:
        defaults["model"] = {"path": ""}
    elif model is not None:
        defaults["model"] = {"path": model, "dtype": _dtype(Path(model))}
    config, _ = compose(files, overrides, defaults)
    if not (config.eval.data or config.data.source):
        raise ConfigError("eval.data: missing; name the problems with eval.data=...")
    if not config.model.path:
        raise ConfigError("model.path: missing; name the folder with the tokenizer of the server's model")
    if checkpoint is None and model is not None and "://" not in model:
        config = _with_model(config, model)
    # The server's and the rollout process's logs go where the evaluation goes.
    return config.model_copy(update={"output_dir": str(out)})


def _dtype(folder: Path) -> str:
    """What the folder's weights are used in, unless the config says otherwise."""
    config = plain_json.read_object(folder / "config.json")
    return "float32" if "float32" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def _ask(config: Config, url: str | None, progress: Progress) -> list[ProblemResult]:
    spec = load_model_config(config.model.path, config.model.family)
    progress.phase("loading tokenizer")
    if url is None:
        from dynamo_megatron.policy.config_check import check_config  # seconds: it brings Megatron

        check_config(Path(config.model.path), spec)
        check_served_rope(spec)
        with open_weights(config.model.path, spec):
            pass  # opening checks every header
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    progress.phase("loading data")
    problems = load_problems(
        config,
        lambda prompt: encode_prompt(prompt, tokenizer, config.data),
        max_prompt_length(config, spec, evaluation=True),
    )
    stop = StopFlag()
    stop.catch_signals()
    ends = end_token_ids(config.model.path, tokenizer)
    worker = RolloutWorker(_with_servers(config, url), ends, spec.vocab_size, decoder_of(tokenizer))
    try:
        worker.start()
        progress.phase("starting server")
        worker.wait_ready(stop.check)
        progress.phase("evaluate", len(problems) * config.eval.samples)
        return worker.evaluate(problems, stop.check, progress.count)
    except RewardError as error:
        raise RolloutError(str(error)) from None
    finally:
        progress.close()
        worker.close()
