"""What may be in the folder that a command writes its results to, and what of it goes again where it is refused."""

from __future__ import annotations

import fcntl
import os
import shutil
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
    *("mcore", "scores", "chat_template.jinja", "report*", "replay*", "train.sbatch", "*.log", "*.out", "*.err", ".*"),
    *(FAILED_STEPS, ENDED_FILE, "profile", "mlflow-id", "mlflow.db*"),
)
_OF_A_START = {LOCK_FILE, "logs", "rollouts", "servers", "chat_template.jinja"}  # that has not come to training


class NewFolder:
    """A folder for the results of a command that may still be refused. Raises OSError where it cannot be made."""

    def __init__(self, path: Path):
        self.path = path
        self._made = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self._before = set(os.listdir(path))

    def discard(self, why: str) -> None:
        """The command is refused: removes the folders that it has made, and its lock and logs in them, but not the logs
        that the message `why` names, nor what else has come there."""
        new = set(os.listdir(self.path)) - self._before
        if new - _OF_A_START or str(self.path / "logs") in why:
            return
        for name in new:
            if (self.path / name).is_dir():
                shutil.rmtree(self.path / name, ignore_errors=True)
            else:
                (self.path / name).unlink()
        for folder in self._made:
            if any(folder.iterdir()):
                return
            folder.rmdir()


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
