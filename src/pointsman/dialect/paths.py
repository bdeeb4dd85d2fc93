"""The API paths that engines have in common, under the names that clients use."""

__all__ = [
    "CHAT",
    "COUNT_TOKENS",
    "DETOKENIZE",
    "EMBEDDINGS",
    "MESSAGES",
    "RERANK",
    "RESPONSES",
    "SCORE",
    "TEXT",
    "TOKENIZE",
    "TRANSCRIPTIONS",
    "TRANSLATIONS",
]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
SCORE = "/v1/score"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
