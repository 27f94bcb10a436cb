"""What may be in the folder that a command writes its results to."""

from __future__ import annotations

import fcntl
import os
from fnmatch import fnmatch
from pathlib import Path

from dynamo_megatron.errors import ConfigError

LOCK_FILE = ".lock"  # flock'd by the process that trains in the folder, until it ends (output_dir.py)
ENDED_FILE = "ended.json"  # of a run that has nothing left to do (output_dir.py)
FAILED_STEPS, PASS_FILE = "nonfinite", "pass.pt"  # of steps that ended in NaN or infinity, and a pass's inputs there
# What a run, its launchers and the commands that report on it write; beside it what its shell may have logged.
_OF_A_RUN = (
    *("config.yaml", "*.tmp", "metrics.jsonl", "allocation.jsonl", "evaluations.jsonl", "eval", "tokens"),
    *("checkpoints", "rollouts", "logs", "hf", "hf-step-*", "tensorboard", "wandb", "wandb-id", "servers", "push"),
    *("mcore*", "scores", "chat_template.jinja", "report*", "replay*", "train.sbatch", "*.log", "*.out", "*.err", ".*"),
    *(FAILED_STEPS, ENDED_FILE, "profile", "mlflow-id", "mlflow.db*"),
)


def refuse_foreign(path: Path) -> None:
    """Raises ConfigError where an output_dir is a model's folder, or holds files that are not of a run. Beside the
    results of a run its user may keep anything."""
    if (model := model_file(path)) is not None:
        raise ConfigError(f"output_dir: {path} is a model's folder ({model}); name a new folder")
    if (path / "config.yaml").is_file() and has_results(path):
        return
    names = sorted(os.listdir(path)) if path.is_dir() else []
    if foreign := [name for name in names if not any(fnmatch(name, pattern) for pattern in _OF_A_RUN)]:
        raise ConfigError(f"output_dir: {path} holds {foreign[0]}, which is not of a run; name a new folder")


def model_file(folder: Path) -> str | None:
    """The name of a file that only a model's folder has; None for other folders."""
    patterns = ("config.json", "*.safetensors", "*.distcp")
    return next((file.name for pattern in patterns for file in sorted(folder.glob(pattern))), None)


def is_held(path: Path) -> bool:
    """Whether a process trains in the folder, as far as its lock tells: True also where that cannot be asked. A start
    in the very moment of the question would be refused, so ask seldom."""
    try:
        lock = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def has_results(path: Path) -> bool:
    """Whether a run in the folder has come to something that another would overwrite."""
    patterns = ("metrics.jsonl", "evaluations.jsonl", "rollouts/*", "checkpoints/*")
    kept = (p for pattern in patterns for p in path.glob(pattern))
    return any(p.is_dir() or p.stat().st_size for p in kept)
