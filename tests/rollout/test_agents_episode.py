"""What an episode trains is what was sampled, whatever its agent does with the conversation."""

import itertools
import random
from collections import Counter

import pytest
from agents_chat import ToyModel, make_tokenizer

from dynamo_megatron.rollout.agents.chat_tokens import ChatTokens
from dynamo_megatron.rollout.agents.episode import Episode
from dynamo_megatron.rollout.agents.messages import normalised

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ANSWERS = [
    "the sum is 7",
    "größer 日本語 😀",
    '<tool_call>\n{"name":"add","arguments":{"b": 2,   "a":1}}\n</tool_call>',
    "<think>\nthe tool says\n</think>\n\nthree",
    "",
    "  \n",
    "not</think>in order<think>",
]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "thinks"])
def tokenizer(request):
    return make_tokenizer(request.param)


class Harness:
    """An episode whose answers come from `ToyModel`, and a record of all that was sampled."""

    def __init__(self, tokenizer, seed: int = 0):
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.other_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.chat = ChatTokens(tokenizer, [self.end, self.other_end])
        self.model, self.episode = ToyModel(len(tokenizer)), Episode(self.chat)
        self.sampled: list[tuple[tuple[int, ...], int, int]] = []  # context, token, version

    def answer(self, place, tokens, finish="stop", text=None):
        """The message that the agent gets."""
        context = place.ids
        version = len(self.episode.turns) // 2
        for i, token in enumerate(tokens):
            self.sampled.append(((*context, *tokens[:i]), token, version))
        message = {"role": "assistant", "content": self.chat.text_of(tokens, True) if text is None else text}
        response = self.model.says(context, tokens, finish, version)
        held = None if place.messages is None else [*place.messages, *normalised([message])]
        self.episode.record(place, response, held)
        return message

    def ask(self, messages, tokens, tools=None, **options):
        return self.answer(self.episode.place_chat(normalised(messages), tools), tokens, **options)

    def ids(self, text: str, end: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) + [self.end] * end

    def random_answer(self) -> tuple[list[int], str]:
        """Token ids and a finish reason."""
        kind = self.random.random()
        if kind < 0.3:  # any bytes, characters split in the middle
            tokens = [self.random.randrange(5, len(self.tokenizer)) for _ in range(self.random.randrange(1, 12))]
        else:
            text = self.random.choice(ANSWERS)
            tokens = self.ids(text, end=False)
            if self.random.random() < 0.4:  # not as the tokenizer would divide it
                tokens = [t for c in text for t in self.ids(c, end=False)]
        how = self.random.random()
        if how < 0.15 and tokens:
            return tokens, self.random.choice(["length", "stop"])  # truncated, or ended by a text
        return [*tokens, self.end if how < 0.9 else self.other_end], "stop"

    def check(self):
        """Every trained token was sampled in that place, with that logprob and version, and every sampled one is
        trained once."""
        trained, found, k = self.episode.trained, [], 0
        versions = [v for v, start, end in trained.weight_versions for _ in range(start, end)]
        bounds = [*trained.record.starts, len(trained.sequence)]
        assert trained.record.starts[0] == 0 and len(trained.mask) == len(trained.sequence)
        for start, end in itertools.pairwise(bounds):
            assert trained.mask[start] == 0, "a segment begins with what was sampled"
            for p in range(start, end):
                if trained.mask[p]:
                    context, token = trained.sequence[start:p], trained.sequence[p]
                    assert abs(self.model.logprob(context, token) - trained.logprobs[k]) < 1e-4
                    assert trained.tokens[k] == token
                    found.append((tuple(context), token, versions[k]))
                    k += 1
        assert k == len(trained.logprobs) == len(versions)
        assert Counter(found) == Counter(self.sampled)
        assert self.episode.reasons.total() == len(self.episode.segments) - 1

    def random_episode(self):
        """Of an agent that does whatever agents do."""
        rng, tools = self.random, None
        messages = [{"role": "user", "content": rng.choice(["how much is 3 + 4?", "größer?", ""])}]
        earlier = [list(messages)]
        for _ in range(rng.randrange(1, 8)):
            action = rng.random()
            if action < 0.1 and len(messages) > 1:  # edits
                place = rng.randrange(len(messages))
                messages[place] = {**messages[place], "content": messages[place]["content"] + "!"}
            elif action < 0.2 and len(messages) > 2:  # drops, or compacts
                del messages[1 : rng.randrange(2, len(messages))]
            elif action < 0.25:
                tools = None if tools else TOOLS
            elif action < 0.35:  # asks again, or goes back
                messages = list(rng.choice(earlier))
            if messages[-1]["role"] == "assistant":
                role = rng.choice(["user", "tool"])
                messages.append({"role": role, "content": rng.choice(["7", "and 日本?", ""])})
            earlier.append(list(messages))
            if action > 0.95:  # token ids
                ids = self.episode.turns[-1].ids if self.episode.turns and rng.random() < 0.5 else []
                self.answer(self.episode.place_tokens([*ids, *self.ids("go on")]), *self.random_answer())
            places = [self.episode.place_chat(normalised(messages), tools) for _ in range(rng.choice([1, 1, 1, 3]))]
            rng.shuffle(places)
            answers = [self.answer(place, *self.random_answer()) for place in places]
            messages = [*messages, rng.choice(answers)]


def test_every_trained_token_was_sampled_there_and_every_sampled_one_is_trained_once(tokenizer):
    reasons, turns = Counter(), 0
    for seed in range(40):  # with each of two templates
        harness = Harness(tokenizer, seed)
        harness.random_episode()
        harness.check()
        reasons += harness.episode.reasons
        turns += len(harness.episode.turns)
    assert set(reasons) >= {"branched", "history", "tools"} and turns > 150
    assert bool(reasons["template"]) == ("if true" in tokenizer.chat_template)


def test_a_conversation_that_goes_on_is_one_segment(tokenizer):
    harness, messages = Harness(tokenizer), [{"role": "user", "content": "how much?"}]
    odd = [t for c in "the sum" for t in harness.ids(c, end=False)] + [harness.end]
    messages += [harness.ask(messages, odd), {"role": "tool", "content": "7"}]
    messages += [harness.ask(messages, harness.ids("the answer")), {"role": "user", "content": "sure?"}]
    harness.ask(messages, harness.ids("sum"))
    harness.check()
    trained = harness.episode.trained
    assert trained.record.starts == [0] and not harness.episode.reasons
    text = harness.tokenizer.decode(trained.sequence)
    assert text == harness.tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "sum"}], tokenize=False
    ).removesuffix("\n")
    assert trained.sequence != harness.ids(text, end=False)  # which is why ids are kept
