"""Routes stay with their tokens, and with the weights that sampled these, through interruptions and a resumed run."""

import base64
import json
import math

import numpy as np
import pytest
from aiohttp import web
from engine_stand_in import COUNTS, PROMPTS, Engine, length, run_steps
from stand_ins import rollout

from dynamo_megatron.errors import InputError
from dynamo_megatron.rollout.store import read_rollouts, step_file
from dynamo_megatron.runtime.routes import RouteShape
from dynamo_megatron.types import Rollout

SHAPE = RouteShape(layers=2, topk=3, experts=8)


def route(version: int, position: int) -> np.ndarray:
    """[layers, topk]: what weights of this version choose there; each version something else."""
    return (np.array([[0, 1, 2], [0, 2, 3]]) + 3 * version + position) % SHAPE.experts


class Routed(Engine):
    """Returns the routes of all positions by its present weights, as SGLang does after it has read a beginning again.
    `damage(routes)`: what it returns instead. `retracts`: none with an abort, as of what SGLang has retracted."""

    def __init__(self, *given, damage=lambda routes: routes, retracts=False):
        super().__init__(*given)
        self.damage, self.inputs, self.retracts = damage, {}, retracts

    async def generate(self, request: web.Request) -> web.Response:
        payload = await request.json()
        assert payload["return_routed_experts"]
        if isinstance(payload["rid"], str):
            self.inputs[payload["rid"]] = len(payload["input_ids"]), payload["routed_experts_start_len"]
        return await super().generate(request)

    def _reply(self, rid, made, aborted, left):
        sent, (given, start) = super()._reply(rid, made, aborted, left), self.inputs[rid]
        if aborted and self.retracts:
            return sent
        routes = np.array([route(self.version, p) for p in range(start, given + len(made) - 1)], np.int32)
        sent["meta_info"]["routed_experts"] = base64.b64encode(self.damage(routes).tobytes()).decode()
        return sent


def check(batch) -> int:
    """Holds that each route is its token's; returns how many were made before the last weights of their rollout."""
    earlier = 0
    assert batch.routes.dtype == np.uint8 and batch.routes.shape == (len(batch.tokens), SHAPE.layers, SHAPE.topk)
    for s, first in enumerate(batch.response_offsets[:-1]):
        own = batch.weight_versions[first : batch.response_offsets[s + 1]]
        versions = [own[0]] * int(batch.prompt_lengths[s]) + own.tolist()
        routes = batch.routes[batch.offsets[s] : batch.offsets[s + 1]]
        assert (routes[0] == 255).all()
        np.testing.assert_array_equal(routes[1:], [route(v, t) for t, v in enumerate(versions[1:])])
        earlier += int((own < own[-1]).sum())
    return earlier


def test_a_route_is_that_of_the_weights_that_sampled_its_token(with_generator, tmp_path):
    engines = [Routed(length, 0.004), Routed(length, 0.009)]
    options = {"routes": SHAPE, "max_staleness": 2, "max_new_tokens": 40, "concurrency": 5}
    results = with_generator(run_steps(engines, 5, 2), *engines, **options)
    assert sum(check(result.batch) for result in results.values()) > 0
    for step, result in results.items():
        stored = {r.rollout_id: r for r in read_rollouts(step_file(tmp_path, step))}
        some = result.batch.take(np.arange(1, sum(COUNTS), 3))
        routes = [stored[name].routes for name in some.rollout_ids]
        np.testing.assert_array_equal(np.concatenate(routes), some.routes)


def test_a_killed_run_continues_with_the_routes_of_what_it_has_begun(with_generator):
    engine, again = Routed(length, 0.02), Routed(length, 0.005)
    options = {"routes": SHAPE, "max_staleness": 2, "max_new_tokens": 40}
    with_generator(run_steps([engine], 8, 2, ends=(4, lambda: True)), engine, **options)
    results = with_generator(run_steps([again], 5, 2, first=3), again, **options)
    assert any(again.begun.values()) and sum(check(result.batch) for result in results.values()) > 0


def test_what_is_sampled_after_an_abort_without_routes_keeps_its_own(with_generator):
    engine, known = Routed(length, 0.004, retracts=True), []
    results = with_generator(run_steps([engine], 4, 2), engine, routes=SHAPE, max_staleness=2, max_new_tokens=40)
    for result in results.values():
        assert not any("routed experts" in note for note in result.notes)
        versions = np.split(result.batch.weight_versions, result.batch.response_offsets[1:-1])
        for own, routes in zip(versions, np.split(result.batch.routes, result.batch.offsets[1:-1]), strict=True):
            last = (own == own[-1]).tolist()
            known += last
            for t, there in enumerate(last, len(routes) - len(own)):
                assert (routes[t] == (route(own[-1], t - 1) if there else 255)).all()
    assert True in known and False in known


@pytest.mark.parametrize(
    "change",
    [*({"shape": s} for s in ([4, 4], [1 << 40], [4, 3, 1], [24, 1, 1])), {"bytes": 8}, {"data": "?"}, {"data": None}],
)
def test_damaged_routes_in_a_file_are_refused(change):
    for shape in ((4, 2, 3), (2, 2, 3)):
        routes = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
        line = json.loads(rollout("000001-0000-000", range(shape[0] - 2), routes=routes).to_json())
        assert (Rollout.from_json(json.dumps(line)).routes == routes).all()
        assert Rollout.from_json(json.dumps(line), routes=False).routes is None
        with pytest.raises(InputError, match="not a rollout: routes"):
            Rollout.from_json(json.dumps(line | {"routes": line["routes"] | change}))


def one_rollout(with_generator, engine, **options):
    async def work(generator, push):
        await push(0)
        await generator.dispatch(1, PROMPTS[:1], [1])
        return await generator.collect(1)

    return with_generator(work, engine, routes=SHAPE, **options)


@pytest.mark.parametrize("engine", [Engine, lambda *given: Routed(*given, damage=np.zeros_like)])
def test_a_server_without_them_is_noted_and_its_rollouts_are_used(with_generator, engine):
    result = one_rollout(with_generator, engine(length, 0.004))
    assert result.counts["completed"] + result.counts["truncated"] == 1 and result.batch.routes is None
    (note,) = (note for note in result.notes if "routed experts" in note)
    assert "server-0 returns no routed experts" in note and "--enable-return-routed-experts" in note


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda routes: routes[1:], "24 routed experts, 30 were expected"),
        (lambda routes: np.where(routes == 7, 8, routes), "routed experts from 0 to 8, and there are 8"),
    ],
)
def test_routes_that_cannot_be_are_no_response(with_generator, damage, said):
    result = one_rollout(with_generator, Routed(length, 0.004, damage=damage))
    assert result.counts["failed"] == 1 and said in result.notes[-1], result.notes
