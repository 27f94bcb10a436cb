"""Early stopping: a metric can end a run before `trainer.steps`. The trainer watches the wall time itself."""

from __future__ import annotations

import difflib
import heapq
from collections import deque
from collections.abc import Iterable, Mapping

from dynamo_megatron.config import StopConfig
from dynamo_megatron.config.files import ConfigError


class StopRule:
    """Applies `trainer.stop_when` to the metrics of a run.

    Only an average over `window` values counts, so that one lucky value does not end a run. Patience is checked only
    when a value of the metric arrives, so never between two evaluations.
    """

    def __init__(self, config: StopConfig):
        self._config = config
        self._values: deque[float] = deque(maxlen=config.window)
        self._step = 0  # of the last value
        self._best: float | None = None
        self._best_step = 0

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Takes one row of metrics (of a step, an evaluation or both). Returns the reason to end the run, for the user,
        or None.

        A row without the metric is ignored. Raises ConfigError where the first row of the metric's kind lacks it: an
        `eval/` metric is expected in the first evaluation, any other metric in the first step.
        """
        name = self._config.metric
        if name is None:
            return None
        if name not in metrics:
            if not self._values:
                self._check_name(metrics)
            return None
        self._values.append(float(metrics[name]))
        self._step = int(metrics["step"])
        average = self._average()
        if average is not None and (self._best is None or self._is_better(average)):
            self._best, self._best_step = average, self._step
        return self._reason()

    def replay(self, *logs: Iterable[Mapping[str, float]]) -> str | None:
        """Takes all rows of a run so far, from logs in order of steps. Returns the reason to end the run that the rows
        of its last step give, or None."""
        why, last = None, None
        for metrics in heapq.merge(*logs, key=lambda m: m["step"]):
            if metrics["step"] != last:
                why, last = None, metrics["step"]
            why = self.observe(metrics) or why
        return why

    def _reason(self) -> str | None:
        config, average = self._config, self._average()
        if average is None:
            return None
        windowed = config.window > 1
        is_now = f"averaged {average:.4g} over {config.window} values" if windowed else f"is {average:.4g}"
        if config.above is not None and average >= config.above:
            return f"{config.metric} {is_now}, at or above {config.above:g}"
        if config.below is not None and average <= config.below:
            return f"{config.metric} {is_now}, at or below {config.below:g}"
        waited = self._step - self._best_step
        if config.patience is not None and waited >= config.patience:
            what = f"average of {config.metric} over {config.window} values" if windowed else config.metric
            return f"no better {what} than {self._best:.4g} (step {self._best_step}) for {waited} steps"
        return None

    def _average(self) -> float | None:
        full = len(self._values) == self._config.window
        return sum(self._values) / len(self._values) if full else None

    def _is_better(self, average: float) -> bool:
        return average > self._best if self._config.mode == "max" else average < self._best

    def _check_name(self, metrics: Mapping[str, float]) -> None:
        name = self._config.metric
        kin = [key for key in metrics if key != "step" and key.startswith("eval/") == name.startswith("eval/")]
        if kin:
            nearest = difflib.get_close_matches(name, kin, 1, cutoff=0.0)[0]
            raise ConfigError(f"trainer.stop_when.metric: this run has no {name}; the nearest metric is {nearest}")
