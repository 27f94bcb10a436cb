"""An SGLang plugin: of a response that is asked for in one part (`stream_interval`), nothing is sent before its end.

SGLang sends the first token alone, which costs each process on its way, and the client, as much as a short response.
"""

ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ACCEPT, send_when_whole, HookType.AROUND)


def send_when_whole(original, accumulator, *, req):
    unsent = len(req.output_ids) - req.send_token_offset
    if req.finished() or unsent >= (req.sampling_params.stream_interval or 1):
        original(accumulator, req=req)
