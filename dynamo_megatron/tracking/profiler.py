"""torch's profiler on chosen steps (`tracking.profile_steps`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile

from dynamo_megatron.config import Config

if TYPE_CHECKING:
    from dynamo_megatron.policy.layout import Layout


class StepProfiler:
    """Writes output_dir/profile/step-NNNNNN-rank-R.json.gz, a Chrome trace, of each step of `tracking.profile_steps`:
    from its prompts to its weight sync, without the evaluation and the save that follow. On the ranks of the first
    replica of the model: the others do the same with other rollouts."""

    def __init__(self, config: Config, layout: Layout):
        self._steps, self._folder = frozenset(config.tracking.profile_steps), Path(config.output_dir) / "profile"
        self._layout = layout
        self._running: profile | None = None

    def begin(self, step: int) -> None:
        if step in self._steps and self._layout.dp.rank() == 0:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._running.start()

    def end(self, step: int) -> None:
        if self._running is None:
            return
        self._running.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(str(self._folder / f"step-{step:06d}-rank-{self._layout.rank}.json.gz"))
        self._running = None
