"""From what a face asks to what a machine runs: checked, tokenized, with its parameters filled in. Knows text and limits, nothing
of servers or of who waits.

    GenerateRequest ── model, ranges ──> text ── ids, beside the loop if it is long ──> prompt ── context ──> SamplingParams
"""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from disagg.router.beside import Beside
from disagg.router.requests import GenerateRequest
from disagg.text.limits import INLINE_BYTES, INLINE_CHARS, TextLimits
from disagg.text.stops import StopTable
from disagg.text.tokenizer import Tokenizer
from disagg.types.errors import InvalidRequest, UnknownModel
from disagg.types.plain import quoted
from disagg.types.sampling import (
    MAX_CACHE_SALT_CHARS,
    MAX_INT,
    MAX_PRIORITY,
    MAX_SESSION_CHARS,
    MAX_STOP_TOKENS,
    SamplingParams,
    check_ids,
)

_USUAL_GROWTH = 16  # of a text's bytes in a tokenizer, at most: what takes more counts as longer


class Intake:
    """Of one router. longest: prompt and output together, as far as is known now."""

    def __init__(self, tokenizer: Tokenizer, model_name: str, max_model_len: int, longest: Callable[[], int]) -> None:
        self.tokenizer = tokenizer
        self.limits = TextLimits(max_model_len, tokenizer.most_chars(max_model_len))
        self._most_bytes = tokenizer.most_bytes(max_model_len)
        self.beside = Beside()
        self.stop_tables: weakref.WeakValueDictionary[tuple[str, ...], StopTable] = weakref.WeakValueDictionary()
        self._model_name = model_name
        self._longest = longest

    def close(self) -> None:
        self.beside.close()

    # ---- generating

    def check_before_text(self, request: GenerateRequest) -> None:
        """What needs no tokens to be refused: nobody's text is read for a request that cannot be served."""
        if len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(request.cache_salt)} characters; at most {MAX_CACHE_SALT_CHARS} are allowed",
                "cache_salt",
            )
        if len(request.session) > MAX_SESSION_CHARS:
            raise InvalidRequest(
                f"the session's name has {len(request.session)} characters; at most {MAX_SESSION_CHARS} are allowed",
                "prompt_cache_key",
            )
        if request.slo_ttft_s is not None and not (math.isfinite(request.slo_ttft_s) and request.slo_ttft_s > 0):
            raise InvalidRequest(f"slo_ttft_s is {request.slo_ttft_s}; it must be a positive number", "slo_ttft_ms")
        if abs(request.priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is {request.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}", "priority"
            )
        params = replace(request.params, seed=request.seed or 0)
        replace(params, max_tokens=params.max_tokens or MAX_INT).validate(self.tokenizer.vocab_size)

    async def prompt_ids(self, request: GenerateRequest) -> tuple[int, ...]:
        """Ids that the model has rows for, whoever made them: a tokenizer may know tokens that the model does not."""
        prompt, name, subject = request.prompt, request.prompt_name, request.the_prompt
        if not prompt:
            raise InvalidRequest(f"{subject} is empty", name)
        if isinstance(prompt, str):
            fits = partial(self._check_prompt_length, request)
            special, what = request.add_special_tokens, f"{subject} has"
            prompt = await self.encoded(prompt, special, what, name, fits, request.tenant)
            if not prompt:
                raise InvalidRequest(f"{subject} has no tokens", name)
        self._check_prompt_length(request, len(prompt))
        check_ids(name, prompt, self.tokenizer.vocab_size)
        return prompt

    def params(self, request: GenerateRequest, prompt: tuple[int, ...]) -> SamplingParams:
        """The parameters with their seed; max_tokens 0 stays, for the first pair to fill in."""
        longest = self._longest()
        room = longest - len(prompt)
        seed = secrets.randbits(64) if request.seed is None else request.seed
        params = replace(request.params, seed=seed)
        if request.max_tokens_unasked and params.max_tokens > room:
            params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
        checked = replace(params, max_tokens=room) if params.max_tokens == 0 else params
        checked.validate(self.tokenizer.vocab_size)
        if checked.max_tokens > room:
            raise InvalidRequest(
                f"{request.the_prompt} has {len(prompt)} tokens and max_tokens is {checked.max_tokens}, "
                f"{len(prompt) + checked.max_tokens} in all; the model's context holds {longest} tokens",
                "max_tokens",
            )
        if request.too_large:
            raise InvalidRequest(request.too_large, "max_tokens")
        return with_end(params, self.tokenizer.end_token_id)

    def stop_table(self, stops: tuple[str, ...]) -> StopTable | None:
        """One for all requests that have the same stop strings now, as the prompts of one call have."""
        if not stops:
            return None
        table = self.stop_tables.get(stops)
        if table is None:
            table = self.stop_tables[stops] = StopTable(stops)
        return table

    def _check_prompt_length(self, request: GenerateRequest, tokens: int) -> None:
        longest = self._longest()
        if tokens >= longest:
            raise InvalidRequest(
                f"{request.the_prompt} has {tokens} tokens; the model's context holds {longest} tokens, "
                "and at least one must be left for the answer",
                request.prompt_name,
            )

    # ---- text and ids

    async def tokenize(
        self, model: str, text: str, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        self.check_model(model)
        fits = partial(self.limits.check_count, what="the text has", param="text")
        return await self.encoded(text, add_special_tokens, "the text has", "text", fits, tenant)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], skip_special_tokens: bool = True, tenant: str = ""
    ) -> str:
        self.check_model(model)
        self.limits.check_count(len(token_ids), "token_ids has", "token_ids")
        check_ids("token_ids", token_ids, self.tokenizer.vocab_size)
        decode = partial(self.tokenizer.decode, skip_special_tokens=skip_special_tokens)
        if len(token_ids) <= INLINE_CHARS:
            return decode(token_ids)
        return await self.beside.run(tenant, len(token_ids), decode, token_ids)

    async def encoded(
        self, text: str, add_special_tokens: bool, what: str, param: str, fits: Callable[[int], None], tenant: str
    ) -> tuple[int, ...]:
        """Its ids, of which `fits` takes the number before they become Python's. Long texts are read beside the loop, tenants in
        turns."""
        self.limits.check_chars(len(text), what, param)
        size = _well_formed_bytes(text, what, param)
        if size > self._most_bytes:
            raise InvalidRequest(
                f"{what} {size} bytes; at most {self._most_bytes} are read, since the model's tokenizer may make up to "
                f"{self.tokenizer.growth:.3g} bytes of each",
                param,
            )
        seen = int(size * self.tokenizer.growth)
        encoding = self.tokenizer.encoding
        try:
            if len(text) <= INLINE_CHARS and seen <= INLINE_BYTES:
                found = encoding(text, add_special_tokens=add_special_tokens)
            else:
                work = max(len(text), seen // _USUAL_GROWTH)
                found = await self.beside.run(tenant, work, encoding, text, add_special_tokens=add_special_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(f"{what} {error}", param) from error
        fits(len(found))
        return tuple(found.ids)

    def check_model(self, model: str) -> None:
        if model != self._model_name:
            raise UnknownModel(f"model {quoted(model)} is not served here; {self._model_name!r} is", "model")


def with_end(params: SamplingParams, token_id: int | None) -> SamplingParams:
    """The tokenizer's own end ends an answer, too, as in vLLM: a fine-tuned model's files often name it there only."""
    ids = params.stop_token_ids
    if token_id is None or params.ignore_eos or token_id in ids or len(ids) == MAX_STOP_TOKENS:
        return params
    return replace(params, stop_token_ids=(*ids, token_id))


def checked_deadline_s(deadline_s: float) -> float:
    if not (math.isfinite(deadline_s) and deadline_s > 0):
        raise InvalidRequest(f"deadline_s is {deadline_s}; it must be a positive number of seconds", "deadline_s")
    return deadline_s


def _well_formed_bytes(text: str, what: str, param: str) -> int:
    """Of the text in UTF-8."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} half of a surrogate pair, which is no character", param) from error
