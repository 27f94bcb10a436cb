"""The models beside the policy, of its shape: references, a teacher, and those of the reward `prime`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from dynamo_megatron.checkpoint.weights import load_folder, model_digest
from dynamo_megatron.config import Config
from dynamo_megatron.models import ModelSpec
from dynamo_megatron.policy.layout import Layout
from dynamo_megatron.policy.lora import base_parameters, without_adapters
from dynamo_megatron.policy.model import PolicyModel


class FrozenModels:
    """Loads them, one after the other, and the policy's own weights last. This rank's parts of them wait in (pinned)
    host memory. `digests`: folder -> `model_digest`."""

    def __init__(self, chunks: Sequence[PolicyModel], spec: ModelSpec, config: Config, layout: Layout):
        self._chunks = chunks
        self._waiting: dict[str, list[torch.Tensor]] = {}  # by folder
        own, cuda, folders = config.model.path, torch.cuda.is_available(), config.copied_models
        for folder in sorted(folders, key=lambda folder: (folder == own, folder)):
            load_folder(chunks, spec, folder, layout)
            copies = (p.detach().to("cpu", copy=True) for p in _weights(chunks))
            self._waiting[folder] = [copy.pin_memory() if cuda else copy for copy in copies]
        self.digests = {folder: model_digest(folder, spec, layout) for folder in sorted(folders)}
        if own not in folders:
            load_folder(chunks, spec, own, layout)

    @contextlib.contextmanager
    def in_place(self, folder: str) -> Iterator[None]:
        """Inside, the chunks have the weights of `folder`, and no adapters."""
        self._change_places(folder)
        try:
            with without_adapters(self._chunks):
                yield
        finally:
            self._change_places(folder)

    @torch.no_grad()
    def _change_places(self, folder: str) -> None:
        """Swaps one weight at a time, so that there is never a third model."""
        if folder not in self._waiting:  # the policy's own, which has adapters
            return
        for parameter, waiting in zip(_weights(self._chunks), self._waiting[folder], strict=True):
            present = parameter.clone()
            parameter.copy_(waiting)
            waiting.copy_(present)


def _weights(chunks: Sequence[PolicyModel]) -> list[torch.Tensor]:
    """Without adapters, and with the biases of routers, which `model.expert_bias_update_rate` changes."""
    biases = [b for chunk in chunks for name, b in chunk.named_buffers() if name.endswith(".expert_bias")]
    return [*base_parameters(chunks), *biases]
