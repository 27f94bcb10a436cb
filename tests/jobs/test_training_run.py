"""A failure while a failed step is kept does not hide why the step failed."""

from types import SimpleNamespace

import pytest
import torch

from dynamo_megatron import training_run
from dynamo_megatron.config import Config
from dynamo_megatron.phases import Phases
from dynamo_megatron.policy.non_finite import NonFiniteError
from dynamo_megatron.policy.spikes import GradientSpike
from dynamo_megatron.training_run import RunParts, TrainingRun

NAN = NonFiniteError("loss nan", SimpleNamespace())


class Fails(TrainingRun):
    """Its third step raises `error`; ending the servers raises `stops`."""

    error: Exception = NAN
    stops: Exception | None = None

    def train(self) -> None:
        self.begin_step(3)
        raise self.error

    def stop(self) -> None:
        self.order.append("stop")
        if self.stops is not None:
            raise self.stops


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """failing(rank=, settles=, enters=, writes=) -> a run in which these calls raise what is given; `order` has all
    that was called and said."""

    def make(rank=0, settles=None, enters=None, writes=None) -> Fails:
        order: list[str] = []

        def step(name: str, error: Exception | None):
            def call(*given):
                order.append(" ".join([name, *(str(word) for word in given if isinstance(word, str | Exception))]))
                if error is not None:
                    raise error

            return call

        monkeypatch.setattr(training_run, "write_failed_step", step("write", writes))
        config = Config(
            model={"path": "m"}, data={"source": "s"}, output_dir=str(tmp_path), tracking={"profile_steps": [3]}
        )
        layout = SimpleNamespace(rank=rank, dp=SimpleNamespace(rank=lambda: 0))
        begun = SimpleNamespace(step=0, rank=rank)
        begun.begin_step = lambda number: (setattr(begun, "step", number), order.append(f"begin {number}"))
        begun.end_step = lambda: order.append("end")
        journal = SimpleNamespace(open=lambda start: None, say=order.append) if rank == 0 else None
        memory = SimpleNamespace(enter=step("memory", enters))
        checkpoints = SimpleNamespace(settle=step("settle", settles))
        parts = RunParts(
            config, SimpleNamespace(layout=layout), begun, checkpoints, Phases(None, memory), journal, start=0
        )
        run = Fails(parts)
        run.order = order
        return run

    return make


SAID = "step 3: NonFiniteError: loss nan"
SECOND = {
    "no room for the save under way": {"settles": OSError("disk full")},
    "no memory for the weights": {"enters": torch.OutOfMemoryError("CUDA out of memory")},
    "a save that fails otherwise": {"writes": RuntimeError("a collective")},
    "no memory on the host": {"writes": MemoryError("no more")},
}


def test_the_step_is_kept_within_a_time_of_its_own_after_the_error_is_told(failing):
    run = failing()
    with pytest.raises(NonFiniteError):
        run.run()
    assert run.order == ["end", "begin 3", "begin 3", SAID, "settle", "stop", "memory failed step", "write loss nan"]


def test_the_last_step_and_the_export_are_held_to_their_time_too(failing):
    run = failing()
    run.train = lambda: run.begin_step(3)
    run.checkpoints.export_final = lambda: run.order.append("export")
    run.journal.ended = lambda step: run.order.append(f"ended {step}")
    run.run()
    assert run.order == ["end", "begin 3", "end", "begin 3", "memory save", "export", "end", "ended 3"]


@pytest.mark.parametrize("what", SECOND)
def test_a_second_failure_is_one_warning(failing, what):
    run = failing(**SECOND[what])
    with pytest.raises(NonFiniteError, match="loss nan"):
        run.run()
    (error,) = SECOND[what].values()
    warning = f"warning: saving after this error failed: {type(error).__name__}: {error}"
    assert run.order.index(SAID) < run.order.index(warning) == len(run.order) - 1


def test_servers_that_cannot_be_ended_are_one_warning(failing):
    run = failing()
    run.stops = RuntimeError("no answer")
    with pytest.raises(NonFiniteError):
        run.run()
    assert run.order[-1] == "warning: saving after this error failed: RuntimeError: no answer"


def test_another_rank_warns_of_what_rank_0_cannot_know(failing, capsys):
    for error, said in (
        (RuntimeError("here"), "rank 5: warning: saving after this error failed: RuntimeError: here\n"),
        (OSError("on all"), ""),
    ):
        with pytest.raises(NonFiniteError):
            failing(rank=5, writes=error).run()
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("error", [GradientSpike("gradient norm 9"), NonFiniteError("ruined weights", None)])
@pytest.mark.parametrize("settles", [None, OSError("disk full")])
def test_a_save_under_way_is_completed_before_an_error_without_a_batch_to_keep(failing, settles, error):
    run = failing(settles=settles)
    run.error = error
    with pytest.raises(type(error), match=str(error)):
        run.run()
    warned = [] if settles is None else ["warning: saving after this error failed: OSError: disk full"]
    assert run.order == ["end", "begin 3", "begin 3", f"step 3: {type(error).__name__}: {error}", "settle", *warned]


def test_a_step_that_raises_ends_its_profile(failing, tmp_path):
    run = failing()
    run.error = ValueError("the cause")
    with pytest.raises(ValueError, match="the cause"):
        run.run()
    assert not list(tmp_path.glob("profile/*"))
    assert not torch.autograd._profiler_enabled()


def test_a_profile_that_cannot_be_written_is_one_warning(failing, tmp_path):
    (tmp_path / "profile").write_text("a file in the folder's place")
    run = failing()
    run.checkpoints.reached = lambda step: None
    run.begin_step(3)
    run.reached(3)
    (line,) = run.order[2:]
    assert line.startswith(f"warning: the profile {tmp_path}/profile/step-000003-rank-0.json.gz was not written: ")
