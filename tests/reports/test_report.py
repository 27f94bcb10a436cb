import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure
from PIL import Image

from dynamo_megatron.algorithm.allocation import RolloutAllocator
from dynamo_megatron.config import Config
from dynamo_megatron.config.files import to_plain
from dynamo_megatron.evaluation.results import results_file, summarise, write_results
from dynamo_megatron.reports.picture import moving_average, title
from dynamo_megatron.reports.report import price_rows, write_report
from dynamo_megatron.reports.run_record import read_revisits, read_run
from dynamo_megatron.rollout.store import RolloutStore, step_file
from dynamo_megatron.runtime.line_files import compressed
from dynamo_megatron.types import ProblemResult, Rollout


def append(path: Path, *rows: dict) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_config(folder: Path, steps: int = 60, prompts: int = 8) -> Config:
    config = Config(
        model={"path": "models/tiny"},
        data={"source": "sums.jsonl", "batch_prompts": prompts},
        trainer={"steps": steps},
        output_dir=str(folder),
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    return config


def metrics(step: int, reward: float, entropy: float, epoch: int) -> dict:
    return {"step": step, "reward/mean": reward, "policy/entropy": entropy, "data/epoch": epoch}


def write_evaluation(
    folder: Path, step: int, chances, generator, *, prefix: str = "held-out", samples: int = 4
) -> None:
    results = []
    for i, chance in enumerate(chances):
        right = generator.random(samples) < chance
        results.append(
            ProblemResult(
                prompt_id=f"{prefix}/{i}",
                source="sums.jsonl",
                rewards=[float(r) for r in right],
                successes=[bool(r) for r in right],
                lengths=[5] * samples,
                finish_reasons=["stop"] * samples,
                statuses=["ok"] * samples,
                responses=["17"] * samples,
            )
        )
    write_results(results_file(folder, step), results)
    append(folder / "evaluations.jsonl", {"step": step, **summarise(results, [1, samples])})


def rollout(step: int, prompt_id: str, position: int, index: int, success: bool, status: str = "ok") -> Rollout:
    return Rollout(
        rollout_id=f"{step:06d}-{position:04d}-{index:03d}",
        group_id=f"{step:06d}-{position:04d}",
        prompt_id=prompt_id,
        step=step,
        tokens=[1, 2],
        response_mask=[0, 1],
        engine_logprobs=[-1.0],
        weight_versions=[(step - 1, 0, 1)],
        finish_reason="stop",
        reward=float(success),
        success=bool(success),
        reward_parts={},
        status=status,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """48 problems of all difficulties, 10 passes over them, that the policy slowly learns; the real allocator."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    config = write_config(folder)
    generator, store = np.random.default_rng(0), RolloutStore(folder)
    allocator = RolloutAllocator(config.algorithm.allocation)
    skill = np.concatenate([np.full(12, -9.0), generator.normal(0, 2, 24), np.full(12, 9.0)])
    chance = lambda step: 1 / (1 + np.exp(-skill - step / 40))  # noqa: E731
    write_evaluation(folder, 0, chance(0), generator)
    for step in range(1, 61):
        first = (step - 1) * 8 % 48
        drawn = [int(x) for x in np.random.default_rng((step - 1) // 6).permutation(48)[first : first + 8]]
        ids = [f"sum/{i}" for i in drawn]
        counts = allocator.allocate(ids, config.rollout_budget, step=step)
        rollouts = [
            rollout(step, ids[p], p, j, generator.random() < chance(step)[drawn[p]])
            for p, n in enumerate(counts)
            for j in range(n)
        ]
        for each in rollouts:
            store.append(each)
        rewards = [r.reward for r in rollouts]
        allocator.observe([r.prompt_id for r in rollouts], rewards, [r.success for r in rollouts], step)
        append(folder / "allocation.jsonl", *allocator.last.rows())
        entropy = 1.5 * np.exp(-step / 40) + generator.normal(0, 0.03)
        append(folder / "metrics.jsonl", metrics(step, float(np.mean(rewards)), entropy, (step - 1) // 6))
        if step % 20 == 0:
            write_evaluation(folder, step, chance(step), generator)
    return folder


def shape_line(folder: Path, *noise: tuple[float, float]) -> str:
    write_config(folder)
    for step, (between, within) in enumerate(noise, 1):
        sizes = {"allocation/prompts": 8, "rollout/requested": 64}
        found = {f"gradient_noise/{n}": v for n, v in {"signal": 9.0, "between": between, "within": within}.items()}
        append(folder / "metrics.jsonl", metrics(step, 0.5, 1.0, 0) | sizes | found)
    append(folder / "metrics.jsonl", metrics(len(noise) + 1, 0.5, 1.0, 0))
    text = write_report(folder, folder)
    return text.split("## The batch's shape\n\n")[1].split("\n\n")[0]


def test_what_another_shape_would_have_given(run, tmp_path):
    """Mean between 3 and within 8: 3/8 + 8/64 = .5; four prompts 7/8, sixteen 5/16."""
    assert shape_line(tmp_path / "two", (2.0, 12.0), (4.0, 4.0)) == (
        "2 measurements of the gradient's noise: the variance between prompts is 0.38 of that of a rollout within one. "
        "With a baseline that is not from the group, 4 prompts with 16 rollouts each 1.75 times and 16 prompts with 4 "
        "rollouts each 0.62 times would have given the variance of 8 prompts with 8."
    )
    assert shape_line(tmp_path / "one", (-1.0, 2.0)).startswith("1 measurement of the gradient's noise: too few")
    assert "The noise of the gradient was not measured (`data.shape.every` asks for it)." in write_report(run, run)


def test_report_and_picture(run):
    text = write_report(run, run)
    report = (run / "report.md").read_text()
    assert report == text.rpartition("\n\n")[0] + "\n\n![the run in three panels](report.png)\n"
    assert "models/tiny trained on sums.jsonl, allocation neyman: 60 of 60 steps, in pass 10" in text
    assert "Before is step 0, after is step 60" in text and "| pass@1 |" in text and "| pass@4 |" in text
    assert "The 48 visits to problems without earlier rollouts are left out" in text
    names = ["never solved", "rarely", "sometimes", "mostly", "always solved"]
    rows = [next(line.split("|") for line in text.splitlines() if line.startswith(f"| {name} (")) for name in names]
    visits, given = [row[2] for row in rows], [row[3] for row in rows]
    assert sum(int(v) for v in visits) == 60 * 8 - 48
    never, _, sometimes, _, always = (float(n) for n in given)
    assert sometimes > 1.5 * always and sometimes > 1.5 * never
    ratio = text.split("A problem solved sometimes got ")[1].split()[0]
    assert float(ratio) == pytest.approx(sometimes / always, abs=0.01)
    with Image.open(run / "report.png") as picture:
        assert picture.width >= 1000
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10


def test_lost_steps_are_named_and_a_gap_in_the_picture(tmp_path, monkeypatch):
    write_config(tmp_path / "run", steps=8)
    append(tmp_path / "run" / "metrics.jsonl", *(metrics(step, 0.5, 1.0, 0) for step in (1, 2, 5, 6)))
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    text = write_report(tmp_path / "run", tmp_path)
    assert "metrics.jsonl has no line of these steps: 3 to 4. The curves have a gap there." in text
    lines = [line for axes in figures[0].axes[:2] for line in axes.lines]  # reward and entropy, each with its average
    assert len(lines) == 4
    for line in lines:
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, np.nan, 5, 6])


def test_the_title_of_the_picture_says_what_it_is_of(run):
    assert title(read_run(run)) == f"{run}: 60 of 60 steps, neyman allocation"


def test_revisits_count_earlier_steps_only(tmp_path):
    """A problem twice in a step has no history in either place; failed rollouts say nothing of a problem."""
    folder = tmp_path / "run"
    write_config(folder)
    row = {"variance": 0.25, "history": False}
    append(folder / "allocation.jsonl", *({"step": 1, "prompt_id": "a", "n": 2, **row} for _ in range(2)))
    append(folder / "allocation.jsonl", {"step": 2, "prompt_id": "b", "n": 8, **row})
    append(folder / "allocation.jsonl", {"step": 3, "prompt_id": "a", "n": 3, **row})
    append(folder / "allocation.jsonl", {"step": 4, "prompt_id": "b", "n": 5, **row})
    append(folder / "allocation.jsonl", {"step": 4, "prompt_id": "a", "n": 6, **row})
    store = RolloutStore(folder)
    for position, right in enumerate([(1, 0), (0, 0)]):
        for index, success in enumerate(right):
            store.append(rollout(1, "a", position, index, success))
    store.append(rollout(2, "b", 0, 0, False, status="failed"))
    store.append(rollout(3, "a", 0, 0, True))
    store.append(rollout(3, "a", 0, 1, False, status="failed"))
    store.append(rollout(4, "b", 0, 0, True))
    revisits = read_revisits(folder)
    assert revisits.success_rates.tolist() == [0.25, 0.4]
    assert revisits.rollouts.tolist() == [3, 6]
    assert (revisits.first_visits, revisits.uniform) == (4, 26 / 6)


def test_who_got_the_rollouts_by_what_one_was_expected_to_cost(tmp_path):
    folder = tmp_path / "run"
    write_config(folder)
    append(folder / "metrics.jsonl", metrics(1, 0.25, 1.5, 0))
    given = [(2, 300.0), (6, 100.0), (4, 200.0), (10, 20.0), (8, 40.0), (2, 400.0)]
    row = {"step": 1, "variance": 0.25, "history": True}
    rows = [{**row, "prompt_id": f"p{i}", "n": n, "tokens": tokens} for i, (n, tokens) in enumerate(given)]
    append(folder / "allocation.jsonl", *rows)
    assert price_rows(folder) == [
        {"class": "lowest third", "visits": 2, "tokens": 30.0, "rollouts": 9.0, "share": 520 / 3320},
        {"class": "middle third", "visits": 2, "tokens": 150.0, "rollouts": 5.0, "share": 1400 / 3320},
        {"class": "highest third", "visits": 2, "tokens": 350.0, "rollouts": 2.0, "share": 1400 / 3320},
    ]
    assert "| lowest third | 2 | 30 | 9.00 | 16% |" in write_report(folder, folder)
    append(folder / "allocation.jsonl", {**row, "prompt_id": "a", "n": 8})
    assert price_rows(folder) == [] and "expected to cost" not in write_report(folder, folder)


def test_a_run_killed_in_its_first_steps(tmp_path):
    folder = tmp_path / "run"
    write_config(folder)
    append(folder / "metrics.jsonl", metrics(1, 0.25, 1.5, 0))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    append(folder / "allocation.jsonl", {"step": 1, "prompt_id": "a", "n": 8, "variance": 0.25, "history": False})
    text = write_report(folder, folder)
    assert "1 of 60 steps" in text and "first step | last step" in text and "| reward | 0.250 | 0.250 |" in text
    assert "no evaluation" in text and "lacks the rollouts" in text
    RolloutStore(folder).append(rollout(1, "a", 0, 0, True))
    step_file(folder, 2).write_bytes(compressed(b'{"rollout_id"')[:-1])
    write_evaluation(folder, 0, [0.5] * 3, np.random.default_rng(0))
    text = write_report(folder, folder)
    assert "No problem has been visited a second time" in text
    assert "one evaluation so far" in text and "| step 0 | 3 | 4 |" in text


def test_evaluations_of_other_problems_are_not_compared(tmp_path):
    folder = tmp_path / "run"
    write_config(folder)
    append(folder / "metrics.jsonl", metrics(1, 0.25, 1.5, 0))
    generator = np.random.default_rng(0)
    write_evaluation(folder, 0, [0.5] * 3, generator)
    write_evaluation(folder, 1, [0.5] * 3, generator, prefix="others", samples=2)
    text = write_report(folder, folder)
    assert "cannot be paired" in text and "| step 0 |" in text and "| step 1 |" in text
    assert "difference, points" not in text


@pytest.mark.parametrize("missing", ["folder", "config", "steps"])
def test_what_is_no_run_is_one_clear_line(tmp_path, missing):
    folder = tmp_path / "run"
    if missing != "folder":
        write_config(folder)
    if missing == "config":
        (folder / "config.yaml").unlink()
    said = "no step in metrics.jsonl" if missing == "steps" else "no config.yaml"
    with pytest.raises(ValueError, match=rf"run: {said}.*") as error:
        write_report(folder, folder)
    assert "\n" not in str(error.value)


def test_a_run_of_sft_has_no_report(tmp_path):
    write_config(tmp_path / "run")
    append(tmp_path / "run" / "metrics.jsonl", {"step": 1, "sft/loss": 2.0})
    with pytest.raises(ValueError, match="a run of sft"):
        write_report(tmp_path / "run", tmp_path / "run")


def test_a_broken_line_is_named(tmp_path):
    folder = tmp_path / "run"
    write_config(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: not JSON"):
        write_report(folder, folder)


def test_moving_average():
    assert moving_average(np.array([1.0, 3.0, 5.0, 10.0]), 3).tolist() == [2, 3, 6, 7.5]
    np.testing.assert_equal(moving_average(np.array([1.0, np.nan, 5.0]), 11), [3, np.nan, 3])
    rising = np.arange(50.0)
    np.testing.assert_allclose(moving_average(rising, 7)[3:-3], rising[3:-3])  # no lag
