"""The spec file of a comparison, and the runs that it defines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError, model_validator

from dynamo_megatron.config import Config, shipped
from dynamo_megatron.config.files import compose, differing, identity, read_saved, read_yaml, scored_by, to_plain
from dynamo_megatron.config.method import Section
from dynamo_megatron.errors import ConfigError, InputError
from dynamo_megatron.runtime.plain_text import on_one_line
from dynamo_megatron.runtime.whole_files import replacing

SET_BY_RUN = {"seed": "seeds", "optimizer.lr": "learning_rates", "output_dir": "output_dir"}  # run's key -> spec's key
# These keys depend on the servers and the machine that a run uses, or change no more than rounding.
SERVERS = ("placement", "urls", "api_key_env", "port", "servers", "memory_fraction")
ADDRESS = (*(f"rollout.{key}" for key in SERVERS), "reward.workers", "parallel.sequence_parallel")
NOT_FINITE = "NonFiniteError"  # in the last line of a run that failed with NaN or infinity
ArmName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+-]+$")]  # it names folders


class Spec(Section):
    base: list[str] = Field(default=[])  # config files and key=value words of every run
    arms: Annotated[dict[ArmName, list[str]], Field(min_length=2)]  # config files and words beside those of `base`
    control: str  # the arm that the others are compared with
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    learning_rates: list[float] | dict[str, list[float]]  # one list for all arms, or a list by arm
    metric: Annotated[str, Field(pattern="^eval/")] = "eval/pass@1"  # of the evaluations during training
    output_dir: Annotated[str, AfterValidator(os.path.expanduser)]

    @model_validator(mode="after")
    def _fits(self) -> Spec:
        if self.control not in self.arms:
            raise InputError(f"control: {self.control!r} is none of the arms: {', '.join(self.arms)}")
        if isinstance(self.learning_rates, dict) and (odd := self.learning_rates.keys() ^ self.arms.keys()):
            raise InputError(f"learning_rates: {min(odd)}: give a list for all arms, or one for each of them")
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError("seeds: a seed stands there twice; a second run with it is the same run")
        for name, words in self.arms.items():
            rates = self.rates(name)
            if not rates or rates[0] <= 0 or len(set(rates)) < len(rates):
                raise InputError(f"learning_rates: {rates}: give distinct rates above 0")
            for word in words:
                if (from_ := SET_BY_RUN.get(word.partition("=")[0])) is not None:
                    raise InputError(f"arms: {name}: {word}: it differs from run to run and comes from {from_}")
        return self

    def rates(self, arm: str) -> list[float]:
        """The arm's learning rates, ascending."""
        return sorted(self.learning_rates[arm] if isinstance(self.learning_rates, dict) else self.learning_rates)


@dataclass(frozen=True)
class RunOutcome:
    """How a run's process ended: its exit code, and `said`, the last line of its output."""

    code: int
    said: str

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def final(self) -> bool:
        """True where another attempt would end in the same way: the run finished, or failed with NaN or infinity."""
        return self.finished or NOT_FINITE in self.said


@dataclass(frozen=True, eq=False)
class PlannedRun:
    arm: str
    seed: int
    rate: float
    words: tuple[str, ...]  # arguments of `dynamo-megatron train`
    config: Config

    @property
    def key(self) -> tuple[str, int, float]:
        return self.arm, self.seed, self.rate

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def folder(self) -> Path:
        return Path(self.config.output_dir)

    @property
    def outcome_file(self) -> Path:
        return self.folder.with_name(f"{self.name}.json")

    @property
    def server_options(self) -> tuple[Any, ...]:
        """Runs with equal values can use the same servers."""
        return self.config.rollout, self.config.model, self.config.trainer.deterministic


def read_spec(word: str) -> Spec:
    """Parses the spec `word`: a file, or the name of a shipped one (`compare/demo`). Raises ConfigError with one line
    for each fault."""
    path = Path(word) if Path(word).is_file() else shipped.path(word)
    if path is None:
        names = ", ".join(name for name in shipped.names() if name.startswith("compare/"))
        raise ConfigError(f"{word}: no such spec; give a file or one of {names}")
    try:
        return Spec.model_validate(read_yaml(path, word))
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors()]
        lines = [on_one_line(f"{word}: {key}: {text.removeprefix('Value error, ')}") for key, text in faults]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def planned_runs(spec: Spec, options: Sequence[str] = ()) -> list[PlannedRun]:
    """All runs; their `words` have these `options` of `train`. Those that can use the same servers come together, and
    among them seed after seed, so that a comparison that is stopped early has complete seeds.

    Raises ConfigError for a config that is refused, arms whose scores could not be compared, or another run on disk in
    the folder of one of the runs.
    """
    configs = {arm: _compose(spec, arm) for arm in spec.arms}
    # Scores are comparable only where these are equal.
    tasks = {a: {**scored_by(c), "model.path": c.model.path, "eval.k": c.eval.k} for a, c in configs.items()}
    if spec.metric == "eval/reward":  # of all functions; pass@k goes by the first one
        for arm, config in configs.items():
            tasks[arm] |= {key: v for key, v in identity(to_plain(config)).items() if key.startswith("reward.")}
    for arm, config in configs.items():
        if spec.arms[arm] != spec.arms[spec.control] and config == configs[spec.control]:
            hides = "all files come before all keys, so that a key of base hides what an arm's file says"
            raise ConfigError(f"arms.{arm}: its config is that of {spec.control}; {hides}")
    reference = tasks[spec.control]
    for arm, task in tasks.items():
        if differ := differing(reference, task):
            here, there = task.get(differ[0]), reference.get(differ[0])
            raise ConfigError(
                f"arms.{arm}: {differ[0]} is {here}, of {spec.control} {there}; compare scores of one task"
            )
    runs = []
    for seed in spec.seeds:
        for arm, config in configs.items():
            for rate in spec.rates(arm):
                folder = Path(spec.output_dir) / "runs" / f"{arm}-lr{rate:.12g}-seed{seed}"
                own = {"seed": seed, "optimizer.lr": rate, "output_dir": folder}
                words = (*spec.base, *spec.arms[arm], *(f"{key}={value}" for key, value in own.items()), *options)
                optimizer = config.optimizer.model_copy(update={"lr": rate})
                update = {"seed": seed, "optimizer": optimizer, "output_dir": str(folder)}
                runs.append(PlannedRun(arm, seed, rate, words, config.model_copy(update=update)))
                _check_on_disk(runs[-1])
    kinds = [run.server_options for run in runs]
    return sorted(runs, key=lambda run: kinds.index(run.server_options))


def write_outcome(run: PlannedRun, outcome: RunOutcome) -> None:
    with replacing(run.outcome_file) as file:
        file.write(json.dumps({"exit code": outcome.code, "said": outcome.said}).encode())


def read_outcome(run: PlannedRun) -> RunOutcome | None:
    """The run's outcome; None where it has not ended, or its folder is gone."""
    if not (run.outcome_file.is_file() and run.folder.is_dir()):
        return None
    read = json.loads(run.outcome_file.read_text(encoding="utf-8"))
    return RunOutcome(read["exit code"], read["said"])


def _compose(spec: Spec, arm: str) -> Config:
    words = (*spec.base, *spec.arms[arm])
    keys = [word for word in words if "=" in word and not Path(word).exists()]
    files = [word for word in words if word not in keys]
    try:
        config, _ = compose(files, [*keys, f"output_dir={spec.output_dir}"])
    except ConfigError as error:
        raise ConfigError("\n".join(f"arms.{arm}: {line}" for line in str(error).split("\n"))) from None
    if config.eval.every is None:
        raise ConfigError(f"arms.{arm}: eval.every: scores come from evaluations during training; set it and eval.data")
    passes = [f"eval/pass@{k}" for k in config.eval.k]
    if spec.metric.startswith("eval/pass@") and spec.metric not in passes:
        raise ConfigError(f"metric: eval.k of {arm} gives {', '.join(passes)}, not {spec.metric}")
    return config


def _check_on_disk(run: PlannedRun) -> None:
    """Raises ConfigError where the run's folder has another run's config.yaml."""
    file = run.folder / "config.yaml"
    if not file.is_file():
        return
    saved, asked = (identity(plain, list(plain)) for plain in (read_saved(file), to_plain(run.config)))
    if differ := sorted({*differing(saved, asked)} - {*ADDRESS}):
        raise ConfigError(
            f"{run.folder}: the run there has another {', '.join(differ)} than the spec asks for; remove that folder, "
            "or name another output_dir"
        )
