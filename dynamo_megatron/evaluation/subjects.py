"""The models that `dynamo-megatron eval` evaluates, each with its config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_megatron.config import Config
from dynamo_megatron.config.files import ConfigError, compose, to_plain
from dynamo_megatron.config.reward import PrimeConfig
from dynamo_megatron.convert import find_checkpoint, run_config
from dynamo_megatron.runtime import plain_json

LONGEST_NAME = 60  # characters of a file's name: file systems take 255 bytes


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated."""

    config: Config
    url: str | None = None  # of a server that has the model; config.model.path has its tokenizer
    folder: Path | None = None  # where its responses go, a set a file; None: OUT/problems.jsonl


def find_subjects(
    files: Sequence[str], overrides: Sequence[str], models: Sequence[str], out: Path, single: bool
) -> dict[str, Subject]:
    """By the names that tables have. `models`: as `evaluate`; `single`: the responses of one go into `out` itself.

    Raises ConfigError, also where what scores depend on besides the model is not the same for all.
    """
    if not models:
        config = _config(files, overrides, None, None, out)
        path = config.model.path
        return {path: Subject(config, folder=None if single else out / file_name(_last_part(path)))}
    short = list(map(_last_part, models))
    names = models if len(models) == 1 or len(set(short)) < len(short) else short
    _check_folders(names, models, out)
    subjects = {}
    for name, model in zip(names, models, strict=True):
        url = model if model.startswith(("http://", "https://")) else None
        checkpoint = None
        if url is None and not (Path(model) / "config.json").is_file():
            _, checkpoint = find_checkpoint(model)
        config = _config(files, overrides, model, checkpoint, out)
        if checkpoint is not None:
            config = with_model(config, checkpoint)
        folder = None if single and len(models) == 1 else out / file_name(short[0] if len(models) == 1 else name)
        subjects[name] = Subject(config, url, folder)
    _check_comparable({name: subject.config for name, subject in subjects.items()})
    return subjects


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def file_name(text: str) -> str:
    """Of a model or a set: the last LONGEST_NAME characters, all of them letters, digits, _, . and -."""
    return re.sub(r"[^\w.-]+", "-", text)[-LONGEST_NAME:].strip("-.") or "unnamed"


def _check_folders(names: Sequence[str], models: Sequence[str], out: Path) -> None:
    """Raises ConfigError where two of `models` would write to one folder."""
    taken: dict[str, str] = {}
    for name, model in zip(names, models, strict=True):
        folder = file_name(name)
        if folder in taken:
            raise ConfigError(
                f"--model: the responses of {taken[folder]} and of {model} would both go to {out / folder}; name each "
                "model once, and one of the two by a link of another name if they are different models"
            )
        taken[folder] = model


def _check_comparable(configs: Mapping[str, Config]) -> None:
    """Raises ConfigError where responses or scores differ by more than the model."""
    first, *others = configs
    settings = {name: _settings(config) for name, config in configs.items()}
    for name in others:
        for key, value in settings[first].items():
            if settings[name][key] != value:
                raise ConfigError(
                    f"{key}: {value!r} for {first}, {settings[name][key]!r} for {name}; give one for all: {key}=VALUE"
                )


def _settings(config: Config) -> dict[str, Any]:
    """What responses and their scores depend on besides the model, by key."""
    plain = to_plain(config)
    keys = {
        "data": ("prompt_key", "answer_key", "id_key", "template", "chat_template", "system_prompt", "few_shot"),
        "rollout": ("temperature", "max_new_tokens", "stop", "agent", "agent_turns"),
        "eval": ("data", "limit", "samples", "k", "temperature", "max_new_tokens"),
        "reward": [name for name in plain["reward"] if name != "workers"],
    }
    found = {f"{section}.{name}": plain[section][name] for section, names in keys.items() for name in names}
    return {**found, "seed": plain["seed"]}


def _config(
    files: Sequence[str], overrides: Sequence[str], model: str | None, checkpoint: Path | None, out: Path
) -> Config:
    """A checkpoint brings its run's config; what a model alone does not need to say has a default."""
    defaults: dict[str, Any] = {"data": {"source": ""}, "output_dir": str(out)}
    if checkpoint is not None:
        defaults = to_plain(_without_prime(run_config(checkpoint)))
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
        config = with_model(config, model)
    # The server's and the rollout process's logs go where the evaluation goes.
    return _without_prime(config.model_copy(update={"output_dir": str(out)}))


def _without_prime(config: Config) -> Config:
    """`config` without the rewards of tokens, which no evaluation has: runs with and without them are comparable."""
    reward = config.reward.model_copy(update={"functions": config.reward.outcomes, "prime": PrimeConfig()})
    return config.model_copy(update={"reward": reward})


def _dtype(folder: Path) -> str:
    """What the folder's weights are used in, unless the config says otherwise."""
    config = plain_json.read_object(folder / "config.json")
    return "float32" if "float32" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def with_model(config: Config, path: str | Path) -> Config:
    """`config` with another `model.path`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
