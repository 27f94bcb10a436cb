"""`dynamo-megatron eval`: models' answers to held-out problems, scored: pass@k with intervals."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import yaml

from dynamo_megatron.checkpoint.torch_dist import is_torch_dist
from dynamo_megatron.checkpoint.weights import open_weights
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, to_plain
from dynamo_megatron.convert import mcore2hf
from dynamo_megatron.data.limits import max_prompt_length
from dynamo_megatron.data.templates import decoder_of, encode_prompt, end_token_ids, load_tokenizer
from dynamo_megatron.evaluation.overlap import overlap_warning, overlaps
from dynamo_megatron.evaluation.problems import read_problems, tokenized, training_prompts
from dynamo_megatron.evaluation.results import markdown_table, write_results
from dynamo_megatron.evaluation.subjects import Subject, find_subjects, with_model
from dynamo_megatron.evaluation.suite import SetScores, set_scores, suite_sets, suite_summary, suite_table
from dynamo_megatron.models import load_model_config
from dynamo_megatron.models.rope import check_served_rope
from dynamo_megatron.reward import RewardError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.worker import RolloutWorker
from dynamo_megatron.run_folder import NewFolder, model_file
from dynamo_megatron.runtime.coordination import StopFlag, StopRequested
from dynamo_megatron.runtime.plain_text import show
from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.types import ProblemResult, Prompt

log = logging.getLogger(__name__)


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
    scores: dict[str, dict[str, SetScores]] = {}
    try:
        with contextlib.closing(Progress()) as progress:
            problems = _problems(config, suite)
            warnings = _overlap_warnings(subjects.values(), problems, progress)
            stop = StopFlag()
            for name, subject in subjects.items():
                scores[name] = {}
                with contextlib.closing(_answers(subject, problems, out, stop, progress)) as answers:
                    for set_name, results in answers:
                        folder = subject.folder
                        write_results(
                            out / "problems.jsonl" if folder is None else folder / f"{set_name}.jsonl", results
                        )
                        scores[name][set_name] = set_scores(results, config.eval.k)
        show(_write(scores, subjects, warnings, out), sys.stdout)
    except ValueError as error:
        results_folder.discard(str(error))
        raise ConfigError(str(error)) from None
    except (RolloutError, OSError) as error:
        show(str(error))
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {_kept(scores, out)}", file=sys.stderr)
        return 130
    except StopRequested as stopped:
        print(f"stopped by {stopped}; {_kept(scores, out)}", file=sys.stderr)
        return 1
    return 0


def _kept(scores: Mapping[str, Mapping[str, SetScores]], out: Path) -> str:
    finished = sum(map(len, scores.values()))
    return (
        f"the responses of {finished} finished sets are in {out}" if finished else "nothing of the evaluation was kept"
    )


def _problems(config: Config, suite: str | None) -> dict[str, list[Prompt]]:
    """Set -> its problems. Raises ValueError."""
    source = config.eval.data or config.data.source
    if suite is None:
        return {Path(source).stem: read_problems(config)}
    sets = suite_sets(suite, source)
    return {
        name: read_problems(config.model_copy(update={"eval": config.eval.model_copy(update={"data": file})}))
        for name, file in sets.items()
    }


def _overlap_warnings(
    subjects: Iterable[Subject], problems: Mapping[str, Sequence[Prompt]], progress: Progress
) -> list[str]:
    """Of problems that are in the training data (`data.source`), a line a set; logged, too."""
    trained = {s.config.data.source: s.config for s in subjects if s.config.data.source and s.config.eval.data}
    warnings = []
    for source, config in trained.items():
        if config.data.streamed:
            continue
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
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


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


def _write(
    scores: Mapping[str, Mapping[str, SetScores]], subjects: Mapping[str, Subject], warnings: Sequence[str], out: Path
) -> str:
    """Writes the figures, config.yaml as the mark that they are complete; returns what the user reads."""
    (first, subject), *_ = subjects.items()
    config, k = subject.config, subject.config.eval.k
    text = config.eval.data or config.data.source
    if subject.folder is None:
        (scored,) = scores[first].values()
        summary, table, responses = scored.summary, markdown_table([(first, scored.summary)], k), out / "problems.jsonl"
    else:
        summary = suite_summary(scores, k)
        table, responses = suite_table(summary, k), out / "MODEL" / "SET.jsonl"
        text = f"{text}: {_sampling(config)}"
    text = "\n\n".join([text, table, *(f"warning: {warning}" for warning in warnings)])
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    (out / "config.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
    return f"{text}\n\n{responses} has every response"


def _sampling(config: Config) -> str:
    """How the responses of an evaluation are made, for its table."""
    temperature = config.rollout.temperature if config.eval.temperature is None else config.eval.temperature
    return (
        f"{config.eval.samples} a problem, {f'temperature {temperature:g}' if temperature else 'greedy'}, at most "
        f"{config.eval.max_new_tokens or config.rollout.max_new_tokens} tokens"
    )


def _answers(
    subject: Subject, problems: Mapping[str, Sequence[Prompt]], out: Path, stop: StopFlag, progress: Progress
) -> Iterator[tuple[str, list[ProblemResult]]]:
    """(set, results) of each set, from servers that run until the last one. Raises ValueError, RolloutError."""
    with tempfile.TemporaryDirectory(prefix=".model-", dir=out) as folder:
        config = subject.config
        if subject.url is None and is_torch_dist(config.model.path):
            progress.phase("converting checkpoint")
            mcore2hf(config.model.path, Path(folder) / "hf")
            config = with_model(config, Path(folder) / "hf")
        spec = load_model_config(config.model.path, config.model.family)
        progress.phase("loading tokenizer")
        if subject.url is None:
            from dynamo_megatron.policy.config_check import check_config  # seconds: it brings Megatron

            check_config(Path(config.model.path), spec)
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
        stop.catch_signals()
        ends = end_token_ids(config.model.path, tokenizer)
        worker = RolloutWorker(_with_servers(config, subject.url), ends, spec.vocab_size, decoder_of(tokenizer))
        try:
            worker.start()
            progress.phase("starting server")
            worker.wait_ready(stop.check)
            for name, each in prompts.items():
                progress.phase(f"evaluate {name}" if len(prompts) > 1 else "evaluate", len(each) * config.eval.samples)
                yield name, worker.evaluate(each, stop.check, progress.count)
        except RewardError as error:
            raise RolloutError(str(error)) from None
        finally:
            worker.close()
