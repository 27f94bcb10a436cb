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
        self._best: tuple[float, int] | None = None  # average and step

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Takes one row of metrics (of a step, an evaluation or both). Returns the reason to end the run, for the user,
        or None.

        A row without the metric is ignored. Raises ConfigError where the first row of the metric's kind lacks it: an
        `eval/` metric is expected in the first evaluation, any other metric in the first step.
        """
        config, name = self._config, self._config.metric
        if name is None:
            return None
        if name not in metrics:
            kin = [key for key in metrics if key != "step" and key.startswith("eval/") == name.startswith("eval/")]
            if kin and not self._values:
                near = difflib.get_close_matches(name, kin, 1, cutoff=0.0)[0]
                raise ConfigError(f"trainer.stop_when.metric: this run has no {name}; the nearest metric is {near}")
            return None
        self._values.append(float(metrics[name]))
        if len(self._values) < config.window:
            return None
        average, step = sum(self._values) / config.window, int(metrics["step"])
        sign = 1 if config.mode == "max" else -1
        if self._best is None or sign * average > sign * self._best[0]:
            self._best = average, step
        what = f"{name}, averaged over {config.window} values," if config.window > 1 else name
        if config.above is not None and average >= config.above:
            return f"{what} is {average:.4g}, at or above {config.above:g}"
        if config.below is not None and average <= config.below:
            return f"{what} is {average:.4g}, at or below {config.below:g}"
        best, since = self._best
        if config.patience is not None and step - since >= config.patience:
            return f"{what} is not better than {best:.4g} (step {since}) for {step - since} steps"
        return None

    def replay(self, *logs: Iterable[Mapping[str, float]]) -> str | None:
        """Takes all rows of a run so far, from logs in order of steps. Returns the reason to end the run that the rows
        of its last step give, or None."""
        why, last = None, None
        for metrics in heapq.merge(*logs, key=lambda m: m["step"]):
            if metrics["step"] != last:
                why, last = None, metrics["step"]
            why = self.observe(metrics) or why
        return why
