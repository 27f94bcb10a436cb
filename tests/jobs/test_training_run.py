"""A failure while a failed step is kept does not hide why the step failed."""

from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron.config import Config
from dynamo_megatron.jobs.training_run import TrainingRun
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.runtime.coordination import StopRequested

NAN = NonFiniteError("loss nan", SimpleNamespace())


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """failing(rank=, error=, settles=, frees=, enters=, writes=) -> (a loop whose third step raises `error`, all that
    was called and said); these calls raise what is given."""

    def make(rank=0, error=NAN, settles=None, frees=None, enters=None, writes=None):
        order: list[str] = []

        def step(name: str, error: Exception | None):
            def call(*given):
                order.append(" ".join([name, *(str(word) for word in given if isinstance(word, str | Exception))]))
                if error is not None:
                    raise error

            return call

        for name, made in (("settle", step("settle", settles)), ("save", step("save", None)), ("_resume", lambda _: 0)):
            monkeypatch.setattr(TrainingRun, name, made)
        monkeypatch.setattr(TrainingRun, "_write_failed_step", step("write", writes))
        config = Config(
            model={"path": "m"}, data={"source": "s"}, output_dir=str(tmp_path), tracking={"profile_steps": [3]}
        )
        layout = SimpleNamespace(rank=rank, world_size=1, dp=SimpleNamespace(rank=lambda: 0))
        begun = SimpleNamespace(step=0, rank=rank)
        begun.begin_step = lambda number: (setattr(begun, "step", number), order.append(f"begin {number}"))
        begun.end_step = lambda: order.append("end")
        progress = SimpleNamespace(phase=lambda name: None)
        journal = SimpleNamespace(open=lambda start: None, say=order.append, progress=progress) if rank == 0 else None
        job = SimpleNamespace(config=config, journal=journal, output=SimpleNamespace(take_over=lambda *_: None))
        policy, memory = SimpleNamespace(layout=layout), SimpleNamespace(enter=step("memory", enters))
        run = TrainingRun(job, policy, begun, {}, memory, step("free", frees))

        def train() -> None:
            run.begin_step(3)
            raise error

        return lambda: run.carry_out(train), order

    return make


SAID = "step 3: NonFiniteError: loss nan"
SECOND = {
    "no room for the save under way": {"settles": OSError("disk full")},
    "servers that cannot be ended": {"frees": RuntimeError("no answer")},
    "no memory for the weights": {"enters": torch.OutOfMemoryError("CUDA out of memory")},
}


def test_the_step_is_kept_within_a_time_of_its_own_after_the_error_is_told(failing):
    run, order = failing()
    with pytest.raises(NonFiniteError):
        run()
    assert order == ["end", "begin 3", "begin 3", SAID, "settle", "free", "memory failed step", "write loss nan"]


@pytest.mark.parametrize("what", SECOND)
def test_a_second_failure_is_one_warning(failing, what):
    run, order = failing(**SECOND[what])
    with pytest.raises(NonFiniteError, match="loss nan"):
        run()
    (error,) = SECOND[what].values()
    warning = f"warning: saving after this error failed: {type(error).__name__}: {error}"
    assert order.index(SAID) < order.index(warning) == len(order) - 1


@pytest.mark.parametrize("error", [RuntimeError("here"), OSError("on all")])
def test_another_rank_warns_of_what_rank_0_cannot_know(failing, capsys, error):
    with pytest.raises(NonFiniteError):
        failing(rank=5, writes=error)[0]()
    said = "rank 5: warning: saving after this error failed: RuntimeError: here\n"
    assert capsys.readouterr().err == (said if isinstance(error, RuntimeError) else "")


def test_a_save_under_way_is_completed_before_an_error_without_a_batch_to_keep(failing):
    run, order = failing(error=NonFiniteError("critic: NaN", None))
    with pytest.raises(NonFiniteError, match="critic: NaN"):
        run()
    assert order == ["end", "begin 3", "begin 3", "step 3: NonFiniteError: critic: NaN", "settle"]


def test_a_stop_ends_the_servers_and_saves(failing):
    run, order = failing(error=StopRequested("SIGTERM"))
    with pytest.raises(StopRequested):
        run()
    assert order == ["end", "begin 3", "begin 3", "free", "save", "settle"]  # the save has the time of a step


def test_a_step_that_raises_ends_its_profile(failing, tmp_path):
    run, _ = failing(error=ValueError("the cause"))
    with pytest.raises(ValueError, match="the cause"):
        run()
    assert not list(tmp_path.glob("profile/*"))
    assert not torch.autograd._profiler_enabled()
