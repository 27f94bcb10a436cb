"""`dynamo-megatron eval`: models' answers to held-out problems, scored: pass@k with intervals."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import torch
import yaml

from dynamo_megatron.checkpoint.convert import mcore2hf
from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, to_plain
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.data.templates import decoder_of, encode_prompt, end_token_ids, load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.evaluation.overlap import overlap_warning, overlaps
from dynamo_megatron.evaluation.problems import greedy_warnings, is_local, read_problems, tokenized, training_prompts
from dynamo_megatron.evaluation.results import markdown_table, write_results
from dynamo_megatron.evaluation.subjects import Subject, file_name, find_subjects, with_model
from dynamo_megatron.evaluation.suite import SetScores, set_scores, suite_sets, suite_summary, suite_table
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.rope import check_served_rope
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.runtime.coordination import StopFlag, StopRequested
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.runtime.run_folder import NewFolder, model_file
from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.types import ProblemResult, Prompt

log = logging.getLogger(__name__)
CONNECT_TIMEOUT, CONNECT_EVERY = 5.0, 0.5  # seconds
LISTENS_WITHIN = 60.0  # seconds for a server that is there already, where rollout.start_timeout is not set


def evaluate(
    files: Sequence[str], overrides: Sequence[str], models: Sequence[str], suite: str | None, out: Path
) -> int:
    """Evaluates and returns the exit code.

    `models`: each a Hugging Face folder, a run (its newest checkpoint), a checkpoint, or the URL of an SGLang server;
    none: `model.path`. `suite`: as `suite_sets`, of the folder `eval.data`; None: the problems of `eval.data`.
    `out` gets `summary.json`, `table.md`, logs and ProblemResults, one a line: `problems.jsonl` of one model without a
    suite, else MODEL/SET.jsonl. Raises ConfigError.
    """
    subjects = find_subjects(files, overrides, models, out, single=suite is None)
    config = next(iter(subjects.values())).config
    if (out / "config.yaml").exists():
        raise ConfigError(f"--out: {out} holds a run or an evaluation; name another folder")
    if (found := model_file(out)) is not None:
        raise ConfigError(f"--out: {out} is a model's folder ({found}); name another folder")
    try:
        results_folder = NewFolder(out)
        (out / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out}: {error.strerror}") from None
    done = _Done()
    try:
        _sample(subjects, suite, out, done)
        text = _write(done, subjects, out)
        # The mark that the evaluation is complete.
        (out / "config.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
        show(text, sys.stdout)
        return 0
    except ValueError as error:
        if not done.files:
            results_folder.discard(str(error))
            raise ConfigError(str(error)) from None
        why, code = str(error), 1
    except (RolloutError, OSError) as error:
        why, code = str(error), 1
    except KeyboardInterrupt:
        why, code = "interrupted", 130
    except StopRequested as stopped:
        why, code = f"stopped by {stopped}", 1
    show(f"{why}; {_kept(done, subjects, out)}")
    return code


@dataclass
class _Done:
    """As far as an evaluation has come."""

    warnings: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)  # of the finished sets, with their responses
    scores: dict[str, dict[str, SetScores]] = field(default_factory=dict)  # of the models with all sets finished


def _sample(subjects: Mapping[str, Subject], suite: str | None, out: Path, done: _Done) -> None:
    """Writes the responses of all subjects. What can be checked is checked before the first server starts. Raises
    ValueError, RolloutError, OSError; `done` is then what came before."""
    config = next(iter(subjects.values())).config
    with contextlib.closing(Progress()) as progress, tempfile.TemporaryDirectory(prefix=".model-", dir=out) as folder:
        problems = _problems(config, suite)
        done.warnings += [*greedy_warnings(config.eval), *_overlap_warnings(subjects.values(), problems, progress)]
        for warning in done.warnings:
            log.warning("%s", warning)
        prepared = [
            _prepared(subject, problems, Path(folder) / str(number), progress)
            for number, subject in enumerate(subjects.values())
        ]
        stop = StopFlag()
        stop.catch_signals()
        for subject in subjects.values():
            if subject.url is not None:
                progress.phase(f"waiting for {subject.url}")
                _wait_for(subject.url, subject.config, stop)
        for (name, subject), (worker, prompts) in zip(subjects.items(), prepared, strict=True):
            scores: dict[str, SetScores] = {}
            with contextlib.closing(_answers(worker, prompts, config.eval.samples, stop, progress)) as answers:
                for set_name, results in answers:
                    place = subject.folder
                    file = out / "problems.jsonl" if place is None else place / f"{set_name}.jsonl"
                    write_results(file, results)
                    done.files.append(file)
                    scores[set_name] = set_scores(results, config.eval.k)
            done.scores[name] = scores


def _kept(done: _Done, subjects: Mapping[str, Subject], out: Path) -> str:
    """Of an evaluation that has not ended: writes the figures of the models that have; says in a line what there is."""
    if not done.files:
        return "nothing of the evaluation was kept"
    kept = f"the responses of {len(done.files)} finished sets are in {out}"
    if not done.scores:
        return kept
    try:
        _write(done, subjects, out)
    except OSError as error:
        return f"{kept}, their table cannot be written: {error.strerror}"
    return f"{kept}, and the table of {', '.join(done.scores)}"


def _problems(config: Config, suite: str | None) -> dict[str, list[Prompt]]:
    """Set -> its problems. Raises ValueError."""
    if suite is None:
        return {file_name(Path(config.eval.data or config.data.source).stem): read_problems(config)}
    if config.eval.data is None:
        raise InputError("eval.data: missing; --suite takes its sets from this folder")
    sets = suite_sets(suite, config.eval.data)
    return {
        name: read_problems(config.model_copy(update={"eval": config.eval.model_copy(update={"data": file})}))
        for name, file in sets.items()
    }


def _overlap_warnings(
    subjects: Iterable[Subject], problems: Mapping[str, Sequence[Prompt]], progress: Progress
) -> list[str]:
    """Of problems that are in the training data (`data.source`, if it is local), a line a set."""
    trained = {
        s.config.data.source: s.config for s in subjects if is_local(s.config.data.source) and s.config.eval.data
    }
    warnings = []
    for source, config in trained.items():
        progress.phase("comparing with the training data")
        try:
            found = overlaps([p for each in problems.values() for p in each], training_prompts(config))
        except (ValueError, OSError) as error:
            warnings.append(f"the evaluation was not compared with the training data: {error}")
            continue
        for name, prompts in problems.items():
            ours = {id(prompt) for prompt in prompts}
            if own := [overlap for overlap in found if id(overlap.problem) in ours]:
                warnings.append(overlap_warning(name, len(prompts), own, source))
    return warnings


def _wait_for(url: str, config: Config, stop: StopFlag) -> None:
    """Returns once something listens at `url`. Raises RolloutError."""
    place = urlsplit(url)
    address = place.hostname, place.port or (443 if place.scheme == "https" else 80)
    rollout = config.rollout
    limit = rollout.start_timeout if "start_timeout" in rollout.model_fields_set else LISTENS_WITHIN
    deadline, said = time.monotonic() + limit, False
    while True:
        try:
            socket.create_connection(address, timeout=CONNECT_TIMEOUT).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise RolloutError(
                f"--model: nothing answers at {url} ({why}) for {limit:g} s; start the server, or give it longer with "
                "rollout.start_timeout"
            )
        if not said:
            log.warning("nothing answers at %s yet (%s); waiting for up to %g s", url, why, limit)
            said = True
        stop.check()
        time.sleep(CONNECT_EVERY)


def _with_servers(config: Config, url: str | None) -> Config:
    """The server at `url`, else as many as this machine has GPUs for, of a number that is given no more than that."""
    rollout, gpus = config.rollout, torch.cuda.device_count()
    if url is not None:
        rollout = rollout.model_copy(update={"placement": "external", "urls": [url]})
    else:
        # There are no ranks to take turns with, and none that push: the servers have the folder's own weights.
        own = {"placement": "colocated", "urls": [], "offload": False, "quantization": None}
        rollout = rollout.model_copy(update=own)
        rollout = rollout.with_servers(gpus, 1)
        rollout = rollout.model_copy(update={"servers": max(1, min(rollout.servers, gpus // rollout.tp))})
    return config.model_copy(update={"rollout": rollout})


def _write(done: _Done, subjects: Mapping[str, Subject], out: Path) -> str:
    """Writes the figures; returns what the user reads. Raises OSError."""
    (first, subject), *_ = subjects.items()
    config, k = subject.config, subject.config.eval.k
    text = config.eval.data or config.data.source
    if subject.folder is None:
        (scored,) = done.scores[first].values()
        summary, table, responses = scored.summary, markdown_table([(first, scored.summary)], k), out / "problems.jsonl"
    else:
        summary = suite_summary(done.scores, k)
        table, responses = suite_table(summary, k), out / "MODEL" / "SET.jsonl"
        text = f"{text}: {_sampling(config)}"
    text = "\n\n".join([text, table, *(f"warning: {warning}" for warning in done.warnings)])
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    return f"{text}\n\n{responses} has every response"


def _sampling(config: Config) -> str:
    """How the responses of an evaluation are made, for its table."""
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    return (
        f"{config.eval.samples} a problem, {f'temperature {temperature:g}' if temperature else 'greedy'}, at most "
        f"{config.eval.max_new_tokens or config.rollout.max_new_tokens} tokens"
    )


def _prepared(
    subject: Subject, problems: Mapping[str, Sequence[Prompt]], converted: Path, progress: Progress
) -> tuple[RolloutWorker, dict[str, list[Prompt]]]:
    """What answers, not yet started, and the problems in tokens, a set each. A checkpoint becomes the Hugging Face
    folder `converted`. Raises ValueError."""
    config = subject.config
    if subject.url is None and is_torch_dist(config.model.path):
        progress.phase("converting checkpoint")
        mcore2hf(config.model.path, converted)
        config = with_model(config, converted)
    spec = load_model_config(config.model.path, config.model.family)
    progress.phase("loading tokenizer")
    if subject.url is None:
        check_served_rope(spec)
        with open_weights(config.model.path, spec):
            pass  # opening checks every header
    tokenizer = load_tokenizer(config.model.path, config.data.chat_template)
    progress.phase("loading data")
    longest = max_prompt_length(config, spec, evaluation=True)
    prompts = {
        name: tokenized(each, lambda prompt: encode_prompt(prompt, tokenizer, config.data), longest)
        for name, each in problems.items()
    }
    ends = end_token_ids(config.model.path, tokenizer)
    return RolloutWorker(_with_servers(config, subject.url), ends, spec.vocab_size, decoder_of(tokenizer)), prompts


def _answers(
    worker: RolloutWorker, prompts: Mapping[str, Sequence[Prompt]], samples: int, stop: StopFlag, progress: Progress
) -> Iterator[tuple[str, list[ProblemResult]]]:
    """(set, results) of each set, from servers that run until the last one. Raises ValueError, RolloutError."""
    try:
        worker.start()
        progress.phase("starting server")
        worker.wait_ready(stop.check)
        for name, each in prompts.items():
            progress.phase(f"evaluate {name}" if len(prompts) > 1 else "evaluate", len(each) * samples)
            yield name, worker.evaluate(each, stop.check, progress.count)
    except RewardError as error:
        raise RolloutError(str(error)) from None
    finally:
        worker.close()
