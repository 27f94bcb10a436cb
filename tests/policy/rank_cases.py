"""Cases of a test file on ranks: the test calls `run_cases`, and every rank of a case calls the file's `on_rank`."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from preloaded import run_preloaded

RANKS = 4  # that run at the same time


def settings(model: Path, parallel: dict, **sections) -> dict:
    """A configuration in float32 of a policy alone."""
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"source": "none"},
        "output_dir": "none",
        "parallel": parallel,
        "optimizer": {"eps": 1e-6, "warmup_steps": 0},
        **sections,
    }


def run_cases(file: str, cases: list[dict], folder: Path, timeout: float = 600) -> list[list[Any]]:
    """What `on_rank(case, config, layout)` of the test file `file` returns on each rank of each case. A case has
    `config` and `ranks`; it gets `out`, a folder of its own. Cases begin in order, as many as fit on RANKS ranks at
    the same time. Raises AssertionError with the end of the log if a rank fails."""
    for number, case in enumerate(cases):
        case.setdefault("out", str(folder / f"case{number}"))
        Path(case["out"]).mkdir(parents=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    run_preloaded(__file__, file, str(folder / "cases.json"), log=folder / "log", timeout=timeout)
    return [
        [json.loads((Path(case["out"]) / f"rank{rank}.json").read_text()) for rank in range(case["ranks"])]
        for case in cases
    ]


def as_rank(on_rank, case: dict) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from dynamo_megatron.config import Config
    from dynamo_megatron.policy.layout import join_ranks
    from dynamo_megatron.runtime.coordination import connect_store

    torch.set_num_threads(1)
    config = Config.model_validate(case["config"])
    layout = join_ranks(config, connect_store(300))
    found = on_rank(case, config, layout)
    (Path(case["out"]) / f"rank{layout.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main(file: str, cases_file: str) -> None:
    """The ranks of a case end with it: gloo's threads of groups that have ended would spin on."""
    sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "models")]
    from forked_ranks import fork_ranks, wait_for

    from dynamo_megatron.policy import backend

    backend.enable_cpu()
    import dynamo_megatron.policy.policy  # noqa: F401  once, before the ranks are forked

    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    running: list[tuple[dict, list[int]]] = []

    def finish() -> None:
        for case, pids in running:
            wait_for(pids, Path(case["out"]))
        running.clear()

    for case in json.loads(Path(cases_file).read_text()):
        if sum(other["ranks"] for other, _ in running) + case["ranks"] > RANKS:
            finish()
        running.append((case, fork_ranks(case["ranks"], partial(as_rank, module.on_rank, case), Path(case["out"]))))
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
