"""How much text a request may bring, by what the model's context can hold. Pure; each limit is checked before the work.

    characters   max_model_len x the longest token of the vocabulary (see `Tokenizer.most_chars`)
    bytes        what the tokenizer may make of them: 16 MiB, or 64 for each token of max_model_len (see `Tokenizer.most_bytes`)
    ids          max_model_len
    messages     MAX_MESSAGES

What the largest request costs at these limits, on one slow core, for a context of 8,192 tokens and tokens of up to 81
characters (SmolLM2): 0.4 s of tokenizing beside the event loop, 0.2 s of a chat template in another process; 4 ms of JSON on it.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.types.errors import InvalidRequest
from disagg.types.sampling import MAX_CACHE_SALT_CHARS, MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOP_TOKENS

MAX_MESSAGES = 4096  # of one chat: a template takes some 20 us for each
INLINE_CHARS = 512  # texts up to this length are tokenized on the event loop: 0.3 ms
INLINE_BYTES = 32 << 10  # that the model sees of them; most tokenizers make 2 to 12 of one (see text/tokenizer_bounds)
_UTF8_BYTES = 4  # of a character, at most
_VARINT_BYTES = 5  # of a 32-bit number in protobuf, at most


class TextLimits(Struct, frozen=True):
    """max_tokens: of the model's context. max_chars: of one text that may become a prompt."""

    max_tokens: int
    max_chars: int

    def check_chars(self, chars: int, what: str, param: str) -> None:
        """what: with its verb, as in "the prompt has". Raises InvalidRequest."""
        if chars > self.max_chars:
            raise InvalidRequest(
                f"{what} {chars} characters; at most {self.max_chars} are read, which is more than any text has that "
                f"fits the model's context of {self.max_tokens} tokens",
                param,
            )

    def check_count(self, tokens: int, what: str, param: str) -> None:
        """Raises InvalidRequest."""
        if tokens > self.max_tokens:
            raise InvalidRequest(
                f"{what} {tokens} token ids; the model's context holds {self.max_tokens}",
                param,
            )

    @property
    def message_bytes(self) -> int:
        """The largest gRPC request that may be legal: its prompt, as text or as ids, and everything beside it."""
        prompt = max(self.max_chars * _UTF8_BYTES, self.max_tokens * _VARINT_BYTES)
        beside = MAX_STOP_CHARS * 2 * _UTF8_BYTES + MAX_LOGIT_BIAS * 24 + MAX_STOP_TOKENS * _VARINT_BYTES
        return prompt + beside + MAX_CACHE_SALT_CHARS * _UTF8_BYTES + (64 << 10)
