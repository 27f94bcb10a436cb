"""An SGLang plugin: attention over short sequences on a CPU is one call for the whole batch.

SGLang's torch_native backend loops over the sequences of a batch in Python, which for sequences of some dozen tokens
costs several times what their attention does.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
LARGEST = 1 << 15  # tokens of a padded batch; above, the loop costs little beside the attention


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_decode", _decode, HookType.AROUND)
    HookRegistry.register(f"{BACKEND}._run_sdpa_forward_extend", _extend, HookType.AROUND)


def _decode(original, backend, *tensors, **options):
    *_, seq_lens, encoder_lens = tensors
    return _attend(original, backend, tensors, options, seq_lens, torch.ones_like(seq_lens), encoder_lens)


def _extend(original, backend, *tensors, **options):
    *_, seq_lens, _, query_lens, encoder_lens = tensors
    return _attend(original, backend, tensors, options, seq_lens, query_lens, encoder_lens)


def _attend(original, backend, tensors, options, seq_lens, query_lens, encoder_lens):
    query, output, keys, values, req_to_token, requests, *_ = tensors
    longest = int(seq_lens.max())
    plain = encoder_lens is None and options["sliding_window_size"] is None and query.dtype == keys.dtype
    if not plain or longest * len(seq_lens) > LARGEST:
        return original(backend, *tensors, **options)
    slots = req_to_token[requests, :longest]
    output.copy_(attention(query, keys, values, slots, seq_lens, query_lens, options["scaling"]))
    return output


def attention(query, keys, values, slots, seq_lens, query_lens, scaling):
    """Returns causal attention for the last tokens of each sequence, [tokens, heads, size] like `query`, the sequences
    one after another.

    `keys` and `values` [slots, key heads, size] are the caches. `slots` [n, longest] has the places of the sequences'
    tokens in the caches, `seq_lens` [n] the tokens of each sequence, `query_lens` [n] how many of them, the last ones,
    are in `query`.
    """
    positions = torch.arange(slots.shape[1])
    slots = torch.where(positions < seq_lens[:, None], slots, slots[:, :1])  # padding: a token with finite values
    asked = torch.arange(int(query_lens.max()))
    real = asked < query_lens[:, None]
    padded = query.new_zeros(*real.shape, *query.shape[1:])
    padded[real] = query
    visible = positions <= ((seq_lens - query_lens)[:, None] + asked)[:, :, None]
    found = scaled_dot_product_attention(
        padded.transpose(1, 2),
        keys[slots].transpose(1, 2),
        values[slots].transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return found.transpose(1, 2)[real]
