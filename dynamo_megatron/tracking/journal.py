"""Rank 0's record of a run: the JSON lines on disk, the trackers, and the terminal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dynamo_megatron.checkpoint.folder import latest_checkpoint
from dynamo_megatron.checkpoint.safetensors_folder import every_export, exported_step
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import scored_by
from dynamo_megatron.rollout.store import step_files, tokens_file
from dynamo_megatron.tracking.metrics import STEP_LOGS, StepLog, read_rows
from dynamo_megatron.tracking.progress import Progress
from dynamo_megatron.tracking.trackers import Trackers


def last_line(config: Config, step: int) -> str:
    """Where the model of a run that ended at `step` is."""
    output, export = Path(config.output_dir), config.checkpoint.export_hf
    model = every_export(output, step) if export == "every" else output / "hf"
    if export != "never" and (exported := exported_step(model)) is not None:
        return f"model: {model} (step {exported})"
    if (saved := latest_checkpoint(output / "checkpoints")) is None:
        return f"model: not saved (checkpoint.every is null and checkpoint.export_hf {export})"
    which = "" if saved[0] == step else f" of step {saved[0]}; later ones are not saved"
    return f"model: {saved[1]} (Megatron checkpoint{which}, for `dynamo-megatron convert mcore2hf`)"


class Journal:
    """`metrics.jsonl` (an object a step), `allocation.jsonl` (a prompt of a step), `evaluations.jsonl`, `tokens/`."""

    def __init__(self, config: Config):
        self._config, self._folder = config, Path(config.output_dir)
        self.progress = Progress(config.trainer.steps)
        self._trackers: Trackers | None = None
        self._last_line: str | None = None  # of a run that is complete
        self._of = ""

    def evaluates(self, problems: str) -> None:
        """Call it before `open`. Scores of problems with another fingerprint, of other prompts or of another sampling,
        from before a resume, cannot be compared."""
        by = {**scored_by(self._config), "problems": problems}
        self._of = hashlib.sha256(json.dumps(by, sort_keys=True).encode()).hexdigest()[:8]

    def open(self, start: int) -> None:
        """The run goes on after step `start`: lines and statistics of later steps are dropped."""
        self._logs = {name.removesuffix(".jsonl"): StepLog(self._folder / name, keep_to=start) for name in STEP_LOGS}
        for step, path in step_files(self._folder, "tokens").items():
            if step > start:
                path.unlink()
        self._trackers = Trackers(self._config, start, self.say)
        rows = read_rows(self._folder / "evaluations.jsonl", "step")
        self._evaluations = [row for row in rows if row.get("eval/of") == self._of]
        exported = exported_step(self._folder / "hf") if self._config.checkpoint.export_hf == "best" else None
        kept = self._folder / f"hf-step-{exported or 0:06d}"
        if exported is not None and self._scores.get(exported, -1.0) < 0 and not kept.exists():
            (self._folder / "hf").rename(kept)  # else the next one would take its place
            self.say(f"hf has a step without a score to compare, {exported}: it is {kept.name} now")

    def step(self, metrics: Mapping[str, Any], line: str | None, allocation: Iterable[Mapping[str, Any]] = ()) -> None:
        """A step's metrics and allocation; `line` is what the screen gets of it."""
        self._logs["metrics"].write([metrics])
        self._logs["allocation"].write(allocation)
        self._trackers.write(metrics)
        if line is not None:
            self.say(line)
        self.progress.step_done(metrics["step"])

    def tokens(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Statistics of a step's tokens, as `token_rows`. Raises OSError."""
        from dynamo_megatron.tracking.token_rows import write_token_rows  # imports torch

        write_token_rows(tokens_file(self._folder, step), rows)

    def evaluated(self, step: int) -> bool:
        return any(e["step"] == step for e in self._evaluations)

    def best(self, step: int) -> bool:
        """Whether `step` has a higher pass@k, for the first `eval.k`, than the step that output_dir/hf has."""
        exported, scores = exported_step(self._folder / "hf"), self._scores
        return exported not in scores or scores[step] > scores[exported]

    @property
    def _scores(self) -> dict[int, float]:
        """step -> pass@k for the first `eval.k`; -1: of another eval.k."""
        key = f"eval/pass@{self._config.eval.k[0]}"
        return {e["step"]: e.get(key, -1.0) for e in self._evaluations}

    def evaluation(self, summary: Mapping[str, Any]) -> None:
        summary = {**summary, "eval/of": self._of}
        self._evaluations.append(summary)
        self._logs["evaluations"].write([summary])
        self._trackers.write(summary)
        scores = "  ".join(
            f"pass@{k} {summary[f'eval/pass@{k}']:.3f} "
            f"[{summary[f'eval/pass@{k}_low']:.3f}, {summary[f'eval/pass@{k}_high']:.3f}]"
            for k in self._config.eval.k
        )
        problems = f"{summary['eval/problems']} problems"
        if summary["eval/failed"]:
            problems += f", {summary['eval/failed']:.1%} of responses failed and count as wrong"
        self.say(f"evaluation at step {summary['step']}: {scores}  ({problems})")

    def ended(self, step: int) -> None:
        """The run is complete, with its model of `step`: `close` prints the last line."""
        self._last_line, scores = last_line(self._config, step), self._scores
        exported = exported_step(self._folder / "hf") if self._config.checkpoint.export_hf == "best" else None
        if exported in scores and scores[best := max(scores, key=scores.get)] > scores[exported]:
            self._last_line += f"; step {best} has a higher score, but is not exported"

    def say(self, line: str) -> None:
        self.progress.say(line)

    def close(self) -> None:
        """Closes the trackers, then prints the last line of a run that is complete."""
        self.progress.close()
        if self._trackers is not None:
            self._trackers.close()
        if self._last_line is not None:
            self.say(self._last_line)
