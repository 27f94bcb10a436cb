"""A plugin of SGLang's: a server does not send its key to its own address.

SGLang asks its own URL to freeze the heap, with the key, from a thread that may start before it has bound the port: a
stranger who listens there would get the key. `SGLangServer.wait_ready` asks for the same once it knows who answers.
"""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._freeze_gc_after_server_warmup", _nothing, HookType.REPLACE
    )


def _nothing(server_args) -> None:
    pass
