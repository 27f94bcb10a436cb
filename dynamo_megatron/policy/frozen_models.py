"""Models of the policy's shape that are not trained: the KL term's reference, and the two of the reward `prime`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from dynamo_megatron.checkpoint.weights import load_folder
from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.model import PolicyModel


class FrozenModels:
    """Holds this rank's part of each of `config.frozen_models` in (pinned) host memory. While one of them is in the
    policy's place, its memory holds the policy's weights. A folder that is named twice is held once."""

    def __init__(self, chunks: Sequence[PolicyModel], spec: ModelSpec, config: Config, layout: Layout):
        """Loads the models into `chunks`, one after the other, and the policy's weights last."""
        self._chunks = chunks
        self._held: dict[str, list[torch.Tensor]] = {}
        own, cuda = config.model.path, torch.cuda.is_available()
        for folder in sorted(set(config.frozen_models.values()), key=lambda folder: (folder == own, folder)):
            load_folder(chunks, spec, folder, layout)
            copies = (p.detach().to("cpu", copy=True) for p in self._parameters)
            self._held[folder] = [copy.pin_memory() if cuda else copy for copy in copies]
        if own not in self._held:
            load_folder(chunks, spec, own, layout)

    @contextlib.contextmanager
    def in_place_of_policy(self, folder: str) -> Iterator[None]:
        """Inside, the parameters are those of the model in `folder`."""
        self._change_places(self._held[folder])
        try:
            yield
        finally:
            self._change_places(self._held[folder])

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [p for chunk in self._chunks for p in chunk.parameters()]

    @torch.no_grad()
    def _change_places(self, held: list[torch.Tensor]) -> None:
        """Swaps the parameters with the copies in `held`, one at a time, so that there is never a third model."""
        for parameter, waiting in zip(self._parameters, held, strict=True):
            present = parameter.clone()
            parameter.copy_(waiting)
            waiting.copy_(present)
