"""What the keys of routes mean.

The structs are values of the domain, which the admin API speaks as well, so their documentation stands here.
"""

from pointsman.domain.routes import Backend, Route, Step, StreamHold

__all__ = ["ROUTE_DOCS"]

ROUTE_DOCS = {
    Route: {
        "model": "Public model id, unique over ids and aliases.",
        "aliases": "Other names for it.",
        "targets": "`unified` or `disaggregated`, in order of preference.",
        "backends": "What serves it, drawn by request id. Empty: workers of the model id itself.",
        "cascade": "Models to ask one after another, until an answer is good enough.",
        "default_max_tokens": "For requests that set no limit of their own (disaggregated only).",
        "disagg_min_tokens": "A shorter prompt is computed by the decode worker itself.",
        "stream_hold": "Lets every step of the cascade try a streamed request; without it the last one gets it.",
        "shadow": "Fraction of a cascade's requests for which the last model is asked, too, to compare.",
    },
    Backend: {
        "model": "Model id as the workers report it.",
        "weight": "Its share of the requests; the weights of a route sum to 1.",
    },
    Step: {
        "model": "Model id as the workers report it.",
        "accept_if": "When its answer is kept, such as `mean_logprob >= -1.0`.",
        "acceptor": "Name of the learned acceptor that a rule over `score` asks.",
    },
    StreamHold: {
        "tokens": "Tokens after which a held stream is judged.",
        "seconds": "Time after which it is judged by the tokens that are there.",
    },
}
"""What the keys of a route are."""
