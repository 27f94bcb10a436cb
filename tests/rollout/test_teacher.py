"""A teacher that is a server: its logprobs of given tokens, against transformers'; another tokenizer is refused."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.config.method import TeacherConfig
from dynamo_megatron.data.templates import load_tokenizer
from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.result import RolloutError
from dynamo_megatron.rollout.servers.server_api import ServerError
from dynamo_megatron.rollout.teacher import check_teacher, prompt_logprobs
from dynamo_megatron.types import Sequences

pytestmark = pytest.mark.full
ROWS = 128  # of the tiny model's embedding


def sequences(vocabulary: int) -> Sequences:
    """Three sequences, the last of two segments with answers in between."""
    rng, lengths = np.random.default_rng(0), [9, 14, 30]
    trained = np.zeros(sum(lengths), bool)
    trained[[*range(4, 9), *range(15, 23), 27, 28, 36, *range(45, 53)]] = True
    of = [int(part.sum()) for part in np.split(trained, np.cumsum(lengths)[:-1])]
    return Sequences(
        prompt_ids=["a", "b", "c"],
        tokens=rng.integers(3, vocabulary, sum(lengths)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lengths=np.asarray(lengths) - of,
        trained=trained,
        segment_starts=np.array([0, 9, 23, 40]),
    )


@pytest.fixture
def teacher(sglang_server, monkeypatch) -> TeacherConfig:
    monkeypatch.setenv("TEACHER_KEY", sglang_server.endpoint.api_key)
    return TeacherConfig(path=sglang_server.endpoint.url, api_key_env="TEACHER_KEY")


def test_its_logprobs_are_those_of_the_model(teacher, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    given = sequences(model.config.vocab_size - 28)
    got, expected = prompt_logprobs(teacher, given), []
    for start, end in zip(given.segment_starts, [*given.segment_starts[1:], len(given.tokens)], strict=True):
        ids = torch.from_numpy(given.tokens[start:end])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        expected += logprobs[torch.from_numpy(given.trained[start + 1 : end])].tolist()
    assert len(expected) == given.trained.sum() == 24
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("added", ["12.5%", "<think>"])
def test_its_tokenizer_is_the_policys(teacher, tiny_model, added):
    tokenizer, folder = load_tokenizer(tiny_model), TeacherConfig(path=str(tiny_model))
    check_teacher(folder, tokenizer, ROWS, 2000)
    assert check_teacher(teacher, tokenizer, ROWS, 2000) is None
    assert "tokens, and a sequence may have 2048, which would end" in check_teacher(teacher, tokenizer, ROWS, 2048)
    tokenizer.add_tokens([added])
    for other in (teacher, folder):
        with pytest.raises(InputError, match="has another tokenizer than the policy"):
            check_teacher(other, tokenizer, ROWS, 2000)


def test_a_server_without_a_tokenizer_is_told_from_one_that_is_gone(tiny_model, monkeypatch):
    gone = TeacherConfig(path="http://127.0.0.1:9")
    with pytest.raises(InputError, match=r"no answer \(.*\)$"):
        check_teacher(gone, load_tokenizer(tiny_model), ROWS, 2000)

    def refuse(*_):
        raise ServerError("/generate said 400: The engine initialized with skip_tokenizer_init=True cannot accept text")

    monkeypatch.setattr("dynamo_megatron.rollout.teacher.call_for", refuse)
    with pytest.raises(InputError, match=r"cannot accept text; .*: start it without --skip-tokenizer-init$"):
        check_teacher(gone, load_tokenizer(tiny_model), ROWS, 2000)


def test_a_server_that_refuses_is_named(teacher, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "wrong")
    with pytest.raises(RolloutError, match=f"teacher.path: {teacher.path} gave no logprobs: "):
        prompt_logprobs(teacher, sequences(90))
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(InputError, match="the environment variable TEACHER_KEY is not set"):
        check_teacher(teacher, None, ROWS, 2000)
