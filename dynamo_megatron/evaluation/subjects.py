"""The models that `dynamo-megatron eval` evaluates, each with its config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_megatron.checkpoint.convert import find_checkpoint, run_config
from dynamo_megatron.config import EVALUATION, Config
from dynamo_megatron.config.files import ConfigError, compose, to_plain
from dynamo_megatron.config.reward import PrimeConfig
from dynamo_megatron.runtime import plain_json

LONGEST_NAME = 60  # characters of a file's name; file systems allow 255 bytes


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated."""

    config: Config
    url: str | None = None  # of a server that has the model; the tokenizer is in config.model.path
    folder: Path | None = None  # of the responses, one file per set; None: they go to OUT/problems.jsonl


def find_subjects(
    files: Sequence[str], overrides: Sequence[str], models: Sequence[str], out: Path, single: bool
) -> dict[str, Subject]:
    """The subjects by their names in tables. `models`: model folders, checkpoints and server URLs. `single`: where
    there is only one model, its responses go into `out` itself.

    Raises ConfigError for a bad configuration, and where settings that scores depend on differ between the models.
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
    """A file name for a model or set named `text`: its last LONGEST_NAME characters. Runs of characters other than
    letters, digits, _, . and - become one -."""
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
    """Raises ConfigError where the configs differ in settings that responses or scores depend on."""
    first, *others = configs
    settings = {name: _settings(config) for name, config in configs.items()}
    for name in others:
        for key, value in settings[first].items():
            if settings[name].get(key, value) != value:  # a key that one of them lacks: eval's differs
                raise ConfigError(
                    f"{key}: {value!r} for {first}, {settings[name][key]!r} for {name}; give one for all: {key}=VALUE"
                )


def _settings(config: Config) -> dict[str, Any]:
    """The settings that responses and scores depend on, apart from the model: dotted key -> value."""
    plain = to_plain(config)
    keys = {
        "data": (
            *("prompt_key", "answer_key", "id_key"),
            *("template", "chat_template", "template_args", "system_prompt", "few_shot"),
        ),
        "rollout": ("temperature", "max_new_tokens", "stop", "agent", "agent_turns"),
        "eval": ("data", "limit", "samples", "k", "temperature", "max_new_tokens"),
        "reward": [name for name in plain["reward"] if name != "workers"],
    }
    found = {f"{section}.{name}": plain[section][name] for section, names in keys.items() for name in names}
    for name in ("temperature", "max_new_tokens"):
        if found[f"eval.{name}"] is not None:  # an evaluation uses this one and not the rollouts'
            del found[f"rollout.{name}"]
    return {**found, "seed": plain["seed"]}


def _config(
    files: Sequence[str], overrides: Sequence[str], model: str | None, checkpoint: Path | None, out: Path
) -> Config:
    """The config of one subject. A checkpoint has its run's config as the default; a model alone has defaults for the
    keys that an evaluation does not need."""
    defaults: dict[str, Any] = {"data": {"source": ""}, "output_dir": str(out)}
    if checkpoint is not None:
        defaults = to_plain(_without_prime(run_config(checkpoint)))
        del defaults["rollout"]["servers"]  # they belong to the run's machine
    elif model is not None and "://" in model:
        defaults["model"] = {"path": ""}
    elif model is not None:
        defaults["model"] = {"path": model, "dtype": _dtype(Path(model))}
    config, _ = compose(files, overrides, defaults, context=EVALUATION)
    if not (config.eval.data or config.data.source):
        raise ConfigError("eval.data: missing; name the problems with eval.data=...")
    if not config.model.path:
        raise ConfigError("model.path: missing; name the folder with the tokenizer of the server's model")
    if checkpoint is None and model is not None and "://" not in model:
        config = with_model(config, model)
    # The logs of the servers and the rollout process go to the evaluation's folder.
    return _without_prime(config.model_copy(update={"output_dir": str(out)}))


def _without_prime(config: Config) -> Config:
    """`config` without PRIME's token rewards, which an evaluation does not compute: so runs with and without them can
    be compared."""
    reward = config.reward.model_copy(update={"functions": config.reward.outcomes, "prime": PrimeConfig()})
    return config.model_copy(update={"reward": reward})


def _dtype(folder: Path) -> str:
    """The default dtype for the model in `folder`: "float32" where its config.json says so, else "bfloat16"."""
    config = plain_json.read_object(folder / "config.json")
    return "float32" if "float32" in (config.get("dtype"), config.get("torch_dtype")) else "bfloat16"


def with_model(config: Config, path: str | Path) -> Config:
    """`config` with another `model.path`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
