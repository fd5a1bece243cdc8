"""What a client may ask of sampling, with its limits. One frozen value from the router to the worker's sampler.

Meanings follow vLLM: presence and frequency penalties count output tokens only, repetition penalty counts prompt and
output; log-probabilities are the model's own, before temperature and penalties; EOS and stop tokens are masked before
`min_tokens`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from disagg.types.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 2048  # of all stop strings together: a table of some 0.4 MB, built in 2 ms (text/stops)
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIAS = 1024
REPETITION_PENALTIES = (1e-3, 100.0)  # divided by next to nothing logits are beyond float32, and all the same
MAX_PRIORITY = 1000  # of a request, either way
MAX_SESSION_CHARS = 256
MAX_SLO_MS = 10**9
MAX_DEADLINE_MS = 10**12  # some thirty years
MAX_CACHE_SALT_CHARS = 1024  # beside the parameters; it goes to servers with every leg
MAX_INT = 2**31 - 1  # what the wire carries


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to choose tokens. Lengths are in tokens; `seed` is always set by the time a server sees it."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()  # found by the router, in text
    stop_token_ids: tuple[int, ...] = ()  # found by the engine
    ignore_eos: bool = False
    seed: int = 0  # 64 bits, unsigned
    logprobs: int | None = None  # None: none; 0: the chosen token's only; k: also the k most likely tokens
    n: int = 1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the field, its value and what is allowed."""
        _within("max_tokens", self.max_tokens, 1, MAX_INT)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_k", self.top_k, -1, MAX_INT)  # 0 and -1: no limit
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("seed", self.seed, 0, 2**64 - 1)
        _within("n", self.n, 1, MAX_CHOICES)
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        at_most("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        at_most("stop", sum(map(len, self.stop)), MAX_STOP_CHARS, "characters in all")
        if any(not s for s in self.stop):
            raise InvalidRequest("stop holds an empty string; every stop string needs at least one character", "stop")
        if any(0xD800 <= ord(c) <= 0xDFFF for s in self.stop for c in s):
            raise InvalidRequest("stop holds half of a surrogate pair, which is no character", "stop")
        at_most("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS, "ids")
        at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "entries")
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        biased = [token_id for token_id, _ in self.logit_bias]
        check_ids("logit_bias", biased, vocab_size)
        check_once("logit_bias", biased)
        for token_id, bias in self.logit_bias:
            _within("logit_bias", bias, -100.0, 100.0, f" of token {token_id}")


def _within(name: str, value: float, low: float, high: float, of: str = "") -> None:
    if math.isfinite(value) and low <= value <= high:
        return
    allowed = f"between {low} and {high}"
    raise InvalidRequest(f"{name}{of} is {value}; it must be {allowed}", name)


def check_once(name: str, token_ids: Sequence[int]) -> None:
    """Raises InvalidRequest for an id that is named twice: whoever reads the list would take one or the other."""
    if len(set(token_ids)) < len(token_ids):
        twice = next(token_id for token_id, count in Counter(token_ids).items() if count > 1)
        raise InvalidRequest(f"{name} names token {twice} more than once", name)


def at_most(name: str, count: int, most: int, what: str) -> None:
    """Raises InvalidRequest."""
    if count > most:
        raise InvalidRequest(f"{name} holds {count} {what}; at most {most} are allowed", name)


def check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest for an id that the model has no row for: 20 ns per id."""
    if not token_ids:
        return
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{name} has token {token_id}; the vocabulary has ids 0 to {vocab_size - 1}", name)
