"""`dynamo-megatron eval`: models' answers to held-out problems, scored: pass@k with intervals."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import torch
import yaml

from dynamo_megatron.checkpoint.convert import mcore2hf
from dynamo_megatron.checkpoint.folder import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, scored_by, to_plain
from dynamo_megatron.config.rollout import ALONE
from dynamo_megatron.data.templates import decoder_of, encode_prompt, end_token_ids, load_tokenizer, max_prompt_length
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.problems import greedy_warnings, read_problems, tokenized
from dynamo_megatron.evaluation.results import SetScores, suite_sets, suite_summary, suite_table, write_results
from dynamo_megatron.evaluation.subjects import Subject, file_name, find_subjects, with_model
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.server_layout import check_served
from dynamo_megatron.reward import RewardError
from dynamo_megatron.reward.functions import check_answers
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.runtime.run_folder import model_file
from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.types import Prompt

log = logging.getLogger(__name__)
CONNECT_TIMEOUT = 5.0  # seconds


def evaluate(
    files: Sequence[str], overrides: Sequence[str], models: Sequence[str], suite: str | None, out: Path
) -> int:
    """Evaluates and returns the exit code.

    `models`: each a Hugging Face folder, a run (its newest checkpoint), a checkpoint, or the URL of an SGLang server;
    none: `model.path`. `suite`: as `suite_sets`, of the folder `eval.data`; None: the problems of `eval.data`.
    `out` gets `summary.json`, `table.md`, logs and ProblemResults, one a line, in MODEL/SET.jsonl. Raises ConfigError.
    """
    subjects = find_subjects(files, overrides, models, out)
    config = next(iter(subjects.values())).config
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out: {out} holds a run or an evaluation; name another folder")
    if (found := model_file(out)) is not None:
        raise ConfigError(f"--out: {out} is a model's folder ({found}); name another folder")
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror}") from None
    finished = 0
    try:
        for _ in _sample(subjects, suite, out):
            finished += 1
        # The mark that the evaluation is complete.
        (out / "config.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
        show(f"{(out / 'table.md').read_text(encoding='utf-8')}\n{out}/MODEL/SET.jsonl has every response", sys.stdout)
        return 0
    except (ValueError, RolloutError, OSError) as error:
        if isinstance(error, ValueError) and not finished:
            raise ConfigError(str(error)) from None
        why, code = str(error), 1
    except KeyboardInterrupt as stopped:
        why, code = (str(stopped), 1) if stopped.args else ("interrupted", 130)
    show(f"{why}; {f'the responses of {finished} finished sets' if finished else 'nothing'} can be found in {out}")
    return code


def _stop(number: int, _frame: object) -> NoReturn:
    """As Ctrl-C: nothing is left behind."""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")


def _sample(subjects: Mapping[str, Subject], suite: str | None, out: Path) -> Iterator[str]:
    """Writes the responses of all subjects, and after each of them the table; yields the name of each finished set.
    What can be checked is checked before the first server starts. Raises ValueError, RolloutError, OSError."""
    config = next(iter(subjects.values())).config
    scores: dict[str, dict[str, SetScores]] = {}
    with contextlib.closing(Progress()) as progress, tempfile.TemporaryDirectory(prefix=".model-", dir=out) as folder:
        problems = _problems(config, suite)
        warnings = greedy_warnings(config.eval)
        for warning in warnings:
            log.warning("%s", warning)
        signal.signal(signal.SIGTERM, _stop)
        prepared = [
            _prepared(subject, problems, Path(folder) / str(number), progress)
            for number, subject in enumerate(subjects.values())
        ]
        for name, (worker, prompts) in zip(subjects, prepared, strict=True):
            own: dict[str, SetScores] = {}
            try:
                worker.start()
                progress.phase("starting server")
                worker.wait_ready()
                for set_name, each in prompts.items():
                    what = f"evaluate {set_name}" if len(prompts) > 1 else "evaluate"
                    progress.phase(what, len(each) * config.eval.samples)
                    results = worker.evaluate(each, on_count=progress.count)
                    write_results(out / name / f"{set_name}.jsonl", results)
                    own[set_name] = SetScores.of(results, config.eval.k)
                    yield set_name
            except RewardError as error:
                raise RolloutError(str(error)) from None
            finally:
                worker.close()
            scores[name] = own
            _write(config, scores, warnings, out)


def _write(config: Config, scores: Mapping[str, Mapping[str, SetScores]], warnings: Sequence[str], out: Path) -> None:
    """Writes the figures. Raises OSError."""
    summary, how = suite_summary(scores, config.eval.k), scored_by(config)
    temperature = f"temperature {how['eval.temperature']:g}" if how["eval.temperature"] else "greedy"
    limit = f"at most {how['eval.max_new_tokens']} tokens"
    text = f"{how['eval.data']}: {config.eval.samples} a problem, {temperature}, {limit}"
    text = "\n\n".join([text, suite_table(summary, config.eval.k), *(f"warning: {warning}" for warning in warnings)])
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")


def _problems(config: Config, suite: str | None) -> dict[str, list[Prompt]]:
    """Set -> its problems. Raises ValueError."""
    if suite is None:
        return {file_name(Path(config.eval.data or config.data.source).stem): read_problems(config)}
    if config.eval.data is None:
        raise InputError("eval.data: missing; --suite takes its sets from this folder")
    return {
        name: read_problems(config.model_copy(update={"eval": config.eval.model_copy(update={"data": file})}))
        for name, file in suite_sets(suite, config.eval.data).items()
    }


def _with_servers(config: Config, url: str | None) -> Config:
    """The server at `url`, else as many as this machine has GPUs for, of a number that is given no more than that."""
    rollout = config.rollout
    if url is not None:
        own = {"placement": "external", "urls": [url], "offload": False}
    else:
        room = torch.cuda.device_count() // rollout.tp
        servers = max(1, min(rollout.servers if "servers" in rollout.model_fields_set else room, room))
        # There are no ranks to take turns with, and no weight sync: the servers have the folder's own weights.
        own = {"placement": "colocated", "urls": [], "offload": False, "quantization": None, "servers": servers}
        own["memory_fraction"] = rollout.memory_fraction if "memory_fraction" in rollout.model_fields_set else ALONE
        if rollout.placement == "external":  # those of that run's servers
            own |= {"api_key_env": None, "port": None}
    return config.model_copy(update={"rollout": rollout.model_copy(update=own)})


def _prepared(
    subject: Subject, problems: Mapping[str, Sequence[Prompt]], converted: Path, progress: Progress
) -> tuple[RolloutWorker, dict[str, list[Prompt]]]:
    """What answers, not yet started, and the problems in tokens, a set each. A checkpoint becomes the Hugging Face
    folder `converted`. Raises ValueError."""
    config = subject.config
    if subject.url is not None:
        place = urlsplit(subject.url)
        try:
            port = place.port or (443 if place.scheme == "https" else 80)
            socket.create_connection((place.hostname, port), timeout=CONNECT_TIMEOUT).close()
        except OSError as error:
            raise InputError(f"--model: nothing answers at {subject.url} ({error}); start the server first") from None
    elif is_torch_dist(config.model.path):
        progress.phase("converting checkpoint")
        mcore2hf(config.model.path, converted)
        config = with_model(config, converted)
    spec = load_model_config(config.model.path, config.model.family, config.model.source)
    progress.phase("loading tokenizer")
    if subject.url is None:
        check_served(spec, config.model.max_length or spec.max_positions)
        open_weights(config.model.path, spec)  # checks every header
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    progress.phase("loading data")
    longest = max_prompt_length(config, spec, evaluation=True)
    prompts = {
        name: tokenized(each, lambda prompt: encode_prompt(prompt, tokenizer, config.data), longest)
        for name, each in problems.items()
    }
    check_answers(itertools.chain(*prompts.values()), config)
    ends = end_token_ids(config.model.path, tokenizer)
    return RolloutWorker(_with_servers(config, subject.url), ends, spec.vocab_size, decoder_of(tokenizer)), prompts
