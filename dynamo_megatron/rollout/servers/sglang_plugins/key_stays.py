"""An SGLang plugin: a server does not send its key to its own address.

SGLang calls its own URL, with the key, to freeze the heap, from a thread that may start before the server has bound the
port: a stranger who listens there would get the key. `SGLangServer.wait_ready` makes the same call once it knows who
answers.
"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup", _nothing, HookType.REPLACE
    )


def _nothing(server_args) -> None:
    pass
