"""Request bodies: JSON to a `Call`. Pure; knows OpenAI's fields, and nothing of HTTP or of who will serve them.
A chat's messages are rendered afterwards, elsewhere: its call lacks a prompt until then.

Nothing is ignored: a field is served, or has no bearing on the answer (`user` and the like), or is refused by name. A
field that is null counts as absent, at any depth that has named fields.

    bytes ── JSON ──> dict ── drop nulls, refuse by name ──> CompletionBody | ChatBody ──> Call | Chat

JSON can make a hundred times its bytes of objects, all in one call that nothing interrupts. So the body is first cut into its
fields, which makes nothing (16 MiB: 10 to 60 ms); each is then measured, by its bytes, its commas or its elements, before
it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from disagg.api.errors import BadField
from disagg.api.json_parts import converted, cut_fields, decoded, elements, read, without_nulls
from disagg.api.messages import Message, for_template, read_messages
from disagg.router.requests import GenerateRequest
from disagg.text.limits import TextLimits
from disagg.text.render_messages import packed
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import InvalidRequest
from disagg.types.plain import quoted
from disagg.types.sampling import MAX_LOGPROBS, SamplingParams, check_once

MAX_FIELD_BYTES = 128 << 10  # of JSON, for any field but the prompt and the messages
_ESCAPED_BYTES = 12  # of one character in JSON, at most
COMPLETION_MAX_TOKENS = 16  # OpenAI's default; a chat has none
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
TokenIds = tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...]

# Fields that clients know from OpenAI and vLLM but that are not served. Any other field is refused too, as unknown.
_UNSERVED = frozenset(
    (
        "audio",
        "chat_template",
        "function_call",
        "functions",
        "parallel_tool_calls",
        "prediction",
        "prompt_logprobs",
        "reasoning_effort",
        "structured_outputs",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    )
)
# Fields that are served at one setting only: the one that asks for nothing special.
_ONE_SETTING: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "completion": {"echo": (False,), "suffix": ()},
    "chat": {
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "service_tier": ("auto", "default"),
    },
}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream carries beside text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chats share. Ranges are checked by SamplingParams, against the served model."""

    model: str
    max_tokens: Int32 | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Int32 = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    user: str = ""
    metadata: dict[str, str] = {}
    safety_identifier: str = ""
    # vLLM's
    top_k: Int32 = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Int32 = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = ()
    cache_salt: str = ""
    prompt_cache_key: str = ""
    priority: Int32 = 0
    return_token_ids: bool = False


class CompletionBody(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Any
    logprobs: Int32 | None = None
    best_of: Int32 | None = None


class ChatBody(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: tuple[Message, ...]
    max_completion_tokens: Int32 | None = None
    logprobs: bool = False
    top_logprobs: Int32 | None = None


_KNOWN = tuple(
    dict.fromkeys(
        (
            *(field.name for body in (CompletionBody, ChatBody) for field in msgspec.structs.fields(body)),
            *sorted(_UNSERVED),
            *(name for settings in _ONE_SETTING.values() for name in settings),
        )
    )
)


class Call(Struct, frozen=True, kw_only=True):
    """What one HTTP call asks for: one router request per prompt, and how to write the answer.

    Choice c of prompt p has index p * n + c. usage_last: a chunk with the usage ends the stream; usage_each: every chunk
    carries the usage so far.
    """

    kind: Literal["completion", "chat"]
    model: str
    requests: tuple[GenerateRequest, ...]
    n: int
    logprobs: bool
    return_token_ids: bool
    stream: bool = False
    usage_last: bool = False
    usage_each: bool = False

    def asked_by(self, operation: str, who: Mapping[str, object]) -> Call:
        """The same, with what GenerateRequest calls so. who: out of headers."""
        requests = tuple(msgspec.structs.replace(request, operation=operation, **who) for request in self.requests)
        return msgspec.structs.replace(self, requests=requests)


class Chat(Struct, frozen=True):
    """A chat before its messages are rendered. messages: packed, so that it takes little while it waits for that."""

    call: Call
    messages: bytes

    def rendered(self, prompt: str) -> Call:
        """The call, with its prompt."""
        requests = tuple(msgspec.structs.replace(request, prompt=prompt) for request in self.call.requests)
        return msgspec.structs.replace(self.call, requests=requests)


def parse_completion(
    body: bytes, limits: TextLimits, max_prompts: int, client_request_id: str = "", tenant: str = ""
) -> Call:
    """Raises InvalidRequest naming the field."""
    fields = _fields(body, "completion")
    prompts = _prompts(fields["prompt"], limits, max_prompts) if "prompt" in fields else ()
    parsed = converted(fields, CompletionBody)
    if parsed.best_of not in (None, parsed.n):
        raise BadField(
            f"best_of is {parsed.best_of}; only best_of equal to n ({parsed.n}) is served",
            "best_of",
            "unsupported_value",
        )
    max_tokens = None if parsed.max_tokens is None else _positive(parsed.max_tokens, "max_tokens")
    return _call("completion", parsed, prompts, max_tokens, parsed.logprobs, client_request_id, tenant)


def parse_chat(
    body: bytes, limits: TextLimits, has_template: bool, client_request_id: str = "", tenant: str = ""
) -> Chat:
    """Raises InvalidRequest naming the field. has_template: whether the model can chat."""
    fields = _fields(body, "chat")
    if "messages" in fields:
        fields["messages"] = read_messages(fields["messages"])
    parsed = converted(fields, ChatBody)
    if not has_template:
        raise InvalidRequest(
            f"{parsed.model} has no chat template, so it cannot chat; POST /v1/completions works", "messages"
        )
    if not parsed.messages:
        raise InvalidRequest("messages is empty; a chat needs at least one message", "messages")
    if parsed.top_logprobs is not None and not parsed.logprobs:
        raise InvalidRequest("top_logprobs is set but logprobs is not; set logprobs to true", "top_logprobs")
    if parsed.top_logprobs is not None and not 0 <= parsed.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs is {parsed.top_logprobs}; it must be between 0 and {MAX_LOGPROBS}", "top_logprobs"
        )
    logprobs = (parsed.top_logprobs or 0) if parsed.logprobs else None
    messages = [for_template(i, m) for i, m in enumerate(parsed.messages)]
    limits.check_chars(sum(len(text) for m in messages for text in m.values()), "the messages have", "messages")
    call = _call("chat", parsed, ("",), _chat_max_tokens(parsed), logprobs, client_request_id, tenant)
    return Chat(call, packed(messages))


def _call(
    kind: Literal["completion", "chat"],
    body: _Body,
    prompts: tuple[str | tuple[int, ...], ...],
    max_tokens: int | None,
    logprobs: int | None,
    client_request_id: str,
    tenant: str,
) -> Call:
    """max_tokens None: the client named none, of a completion."""
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set but stream is not; set stream to true", "stream_options")
    if options.include_obfuscation:
        raise BadField("include_obfuscation is not served", "stream_options.include_obfuscation", "unsupported_value")
    params = _params(body, max_tokens, logprobs)
    seed = _seed(body.seed)
    requests = tuple(
        GenerateRequest(
            model=body.model,
            prompt=prompt,
            params=params,
            max_tokens_unasked=max_tokens is None,
            seed=seed,
            cache_salt=body.cache_salt,
            session=body.prompt_cache_key,
            priority=body.priority,
            tenant=tenant,
            prompt_name="messages" if kind == "chat" else "prompt" if len(prompts) == 1 else f"prompt[{at}]",
            client_request_id=client_request_id,
            add_special_tokens=kind == "completion",
        )
        for at, prompt in enumerate(prompts)
    )
    return Call(
        kind=kind,
        model=body.model,
        requests=requests,
        n=body.n,
        logprobs=logprobs is not None,
        return_token_ids=body.return_token_ids,
        stream=body.stream,
        usage_last=options.include_usage,
        usage_each=options.continuous_usage_stats,
    )


def _params(body: _Body, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        max_tokens=COMPLETION_MAX_TOKENS if max_tokens is None else max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        stop=(body.stop,) if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs,
        n=body.n,
    )


# ---- JSON to a body


def _fields(body: bytes, kind: str) -> dict[str, Any]:
    """The body's fields that are not null, without those that ask for nothing special. Refuses what is not served."""
    fields: dict[str, Any] = {}
    for name, raw in cut_fields(body, _KNOWN, "the body").items():
        if name in ("prompt", "messages"):
            if raw != b"null":
                fields[name] = raw
            continue
        if len(raw) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} has {len(raw)} bytes of JSON; at most {MAX_FIELD_BYTES} are allowed", name)
        value = decoded(raw)
        if value is not None:
            fields[name] = value
    for name in list(fields):
        if name in _UNSERVED:
            raise BadField(f"{name} is not served", name, "unsupported_parameter")
        served = _ONE_SETTING[kind].get(name)
        if served is None:
            continue
        value = fields.pop(name)
        value = without_nulls(value) if isinstance(value, dict) else value
        if not any(type(value) is type(one) and value == one for one in served):
            only = " or ".join(msgspec.json.encode(one).decode() for one in (*served, None))
            raise BadField(f"{name} is served as {only} only", name, "unsupported_value")
    if isinstance(fields.get("stream_options"), dict):
        fields["stream_options"] = without_nulls(fields["stream_options"])
    return fields


# ---- fields that need a closer look


def _prompts(raw: bytes, limits: TextLimits, max_prompts: int) -> tuple[str | tuple[int, ...], ...]:
    """A string, token ids, a list of strings, or a list of lists of token ids; `raw` is its JSON."""
    if raw[:1] == b'"':
        return (_text(raw, limits, "prompt"),)
    if raw[:1] != b"[":
        raise BadField("prompt must be a string, a list of token ids, or a list of either", "prompt", "invalid_type")
    first = raw[1:MAX_FIELD_BYTES].lstrip()[:1]
    if first == b"]":
        raise InvalidRequest("prompt is an empty list", "prompt")
    if first not in (b'"', b"["):
        return (_token_ids(raw, limits, "prompt"),)
    cut = elements(raw, max_prompts)
    if cut is None:
        raise InvalidRequest(
            f"prompt holds more than {max_prompts} prompts; at most {max_prompts} are allowed", "prompt"
        )
    one = _text if first == b'"' else _token_ids
    return tuple(one(element.strip(), limits, f"prompt[{at}]") for at, element in enumerate(cut))


def _text(raw: bytes, limits: TextLimits, path: str) -> str:
    """Measured as JSON first: 10 ms per 16 MiB are then the most that it takes to read."""
    limits.check_chars(ceil_div(len(raw) - 2, _ESCAPED_BYTES), f"{path} has at least", path)
    text = read(raw, str, path)
    limits.check_chars(len(text), f"{path} has", path)
    return text


def _token_ids(raw: bytes, limits: TextLimits, path: str) -> tuple[int, ...]:
    """Counted by their commas first: 30 ns per id are then what they take to read."""
    limits.check_count(raw.count(b",") + 1, f"{path} has", path)
    ids = read(raw, TokenIds, path)
    if not ids:
        raise InvalidRequest(f"{path} is an empty list of token ids", path)
    return ids


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias names {quoted(token)}; its keys must be token ids", "logit_bias")
    check_once("logit_bias", [int(token) for token in biases])  # "7" and "07" are one
    return tuple((int(token), bias) for token, bias in biases.items())


def _seed(seed: int | None) -> int | None:
    """Any signed or unsigned 64-bit number, as an unsigned one."""
    if seed is None:
        return None
    if not SEED_MIN <= seed <= SEED_MAX:
        raise InvalidRequest(f"seed is {seed}; it must fit in 64 bits", "seed")
    return seed % 2**64


def _positive(count: int, name: str) -> int:
    """0 must not get through: to the router it means "as many as fit"."""
    if count < 1:
        raise InvalidRequest(f"{name} is {count}; it must be at least 1", name)
    return count


def _chat_max_tokens(body: ChatBody) -> int:
    """max_completion_tokens is the newer name of max_tokens; with neither, as many as fit."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so set one", "max_tokens"
        )
    if new is not None:
        return _positive(new, "max_completion_tokens")
    return 0 if old is None else _positive(old, "max_tokens")
