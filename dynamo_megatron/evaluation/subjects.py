"""The models that `dynamo-megatron eval` evaluates, each with its config."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_megatron.checkpoint.convert import find_checkpoint, run_config
from dynamo_megatron.checkpoint.safetensors_folder import EXPORT_FILE
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import OF_MACHINE, ConfigError, compose, differing, scored_by, to_plain
from dynamo_megatron.config.method import EVALUATION
from dynamo_megatron.config.reward import PrimeConfig
from dynamo_megatron.runtime import plain_json

log = logging.getLogger(__name__)
LONGEST_NAME = 60  # characters of a file's name; file systems allow 255 bytes


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated."""

    config: Config
    url: str | None = None  # of a server that has the model; the tokenizer is in config.model.path


def find_subjects(
    files: Sequence[str], overrides: Sequence[str], models: Sequence[str], out: Path
) -> dict[str, Subject]:
    """The subjects by their names in tables, which are also names of folders. `models`: model folders, runs,
    checkpoints and server URLs; none: `model.path`.

    Raises ConfigError for a bad configuration, and where settings that scores depend on differ between the models.
    """
    if not models:
        config = _config(files, overrides, None, None, out)
        return {file_name(Path(config.model.path).name): Subject(config)}
    names = [file_name(Path(model).name) for model in models]
    if len(set(names)) < len(names):
        names = list(map(file_name, models))
    subjects: dict[str, Subject] = {}
    for name, model in zip(names, models, strict=True):
        if name in subjects:
            raise ConfigError(
                f"--model: {model}: the responses of two models would both go to {out / name}; name each model once, "
                "and one of the two by a link of another name if they are different models"
            )
        url = model if model.startswith(("http://", "https://")) else None
        checkpoint = None
        run = Path(model).parent / "config.yaml"
        if not files and run.is_file() and (Path(model) / EXPORT_FILE).is_file():
            log.warning("%s: evaluated with default settings; give %s for those of its run", model, run)
        if url is None and not (Path(model) / "config.json").is_file():
            _, checkpoint = find_checkpoint(model)
        subjects[name] = Subject(_config(files, overrides, model, checkpoint, out), url)
    _check_comparable({name: subject.config for name, subject in subjects.items()})
    return subjects


def file_name(text: str) -> str:
    """A file name for a model or set named `text`: its last LONGEST_NAME characters. Runs of characters other than
    letters, digits, _, . and - become one -."""
    return re.sub(r"[^\w.-]+", "-", text)[-LONGEST_NAME:].strip("-.") or "unnamed"


def _check_comparable(configs: Mapping[str, Config]) -> None:
    """Raises ConfigError where the configs differ in settings that responses or scores depend on."""
    asked = {name: scored_by(c) | {"eval.k": c.eval.k, "seed": c.seed} for name, c in configs.items()}
    (first, base), *others = asked.items()
    for name, settings in others:
        differ = ((key, base.get(key), settings.get(key)) for key in differing(base, settings))
        lines = [f"{key}: {a!r} for {first}, {b!r} for {name}; give one for all: {key}=VALUE" for key, a, b in differ]
        if lines:
            raise ConfigError("\n".join(lines))


def _config(
    files: Sequence[str], overrides: Sequence[str], model: str | None, checkpoint: Path | None, out: Path
) -> Config:
    """The config of one subject. A checkpoint has its run's config as the default; a model alone has defaults for the
    keys that an evaluation does not need."""
    defaults: dict[str, Any] = {"data": {"source": ""}, "output_dir": str(out)}
    if checkpoint is not None:
        defaults = to_plain(_without_prime(run_config(checkpoint.parents[1])))
        for key in OF_MACHINE:  # the run's
            defaults["rollout"].pop(key, None)
    elif model is not None and "://" in model:
        defaults["model"] = {"path": ""}
    elif model is not None:
        folder = plain_json.read_object(Path(model) / "config.json")
        dtype = "float32" if "float32" in (folder.get("dtype"), folder.get("torch_dtype")) else "bfloat16"
        defaults["model"] = {"path": model, "dtype": dtype}
    config, _ = compose(files, overrides, defaults, context=EVALUATION)
    if not (config.eval.data or config.data.source):
        raise ConfigError("eval.data: missing; name the problems with eval.data=...")
    if not config.model.path:
        raise ConfigError("model.path: missing; name the folder with the tokenizer of the server's model")
    if model is not None and "://" not in model:
        config = with_model(config, checkpoint or model)
    if checkpoint is not None and config.eval.data is None and config.data.source == defaults["data"]["source"]:
        log.warning("eval.data: not set, so %s is evaluated on what it was trained on", model)
    # The logs of the servers and the rollout process go to the evaluation's folder.
    return _without_prime(config.model_copy(update={"output_dir": str(out)}))


def _without_prime(config: Config) -> Config:
    """`config` without PRIME's token rewards, which an evaluation does not compute: so runs with and without them can
    be compared."""
    reward = config.reward.model_copy(update={"functions": config.reward.outcomes, "prime": PrimeConfig()})
    return config.model_copy(update={"reward": reward})


def with_model(config: Config, path: str | Path) -> Config:
    """`config` with another `model.path`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(path)})})
