"""torch's profiler on chosen steps (`tracking.profile_steps`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfiler:
    """Writes `folder`/step-NNNNNN-rank-R.json.gz, a Chrome trace (chrome://tracing, Perfetto), of each step of `steps`:
    from its prompts to its weight sync, without the evaluation and the save that follow."""

    def __init__(self, steps: Sequence[int], folder: Path, rank: int):
        self._steps, self._folder, self._rank = frozenset(steps), folder, rank
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        if step in self._steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._running.start()

    def end(self, step: int) -> None:
        if self._running is None:
            return
        self._running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._folder / f"step-{step:06d}-rank-{self._rank}.json.gz"))
        self._running = None
