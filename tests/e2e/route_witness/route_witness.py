"""A plugin of SGLang's: writes the experts of every token of every forward pass, as the layers chose them, to a file in
$ROUTE_WITNESS: {"rid", "start", "tokens", "routes"} for each request in the pass, from position `start` on.

What SGLang itself returns has been through its cache, by the slots of the tokens' keys and values.
"""

import json
import os
from pathlib import Path

CAPTURER = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{CAPTURER}.on_forward_end", _write, HookType.AROUND)


def _write(original, capturer, forward_batch, **options):
    routes, start, rids = capturer.device_cache.buffer, 0, forward_batch.rids
    extends = forward_batch.forward_mode.is_extend()
    lengths = forward_batch.extend_seq_lens_cpu if extends else [1] * len(rids)
    with open(Path(os.environ["ROUTE_WITNESS"], f"{os.getpid()}.jsonl"), "a") as file:
        for rid, length in zip(rids, lengths, strict=True):
            here = slice(start, start + int(length))
            line = {"rid": rid, "start": int(forward_batch.positions[start])}
            line |= {"tokens": forward_batch.input_ids[here].tolist(), "routes": routes[here].tolist()}
            file.write(json.dumps(line) + "\n")
            start = here.stop
    return original(capturer, forward_batch=forward_batch, **options)
