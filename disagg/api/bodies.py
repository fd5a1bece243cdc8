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

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from disagg.api.errors import BadField
from disagg.router.requests import GenerateRequest
from disagg.text.limits import MAX_MESSAGES, TextLimits
from disagg.text.render_messages import packed
from disagg.types.errors import InvalidRequest
from disagg.types.plain import NAME_CHARS, one_line, quoted
from disagg.types.sampling import MAX_LOGPROBS, SamplingParams

MAX_FIELD_BYTES = 128 << 10  # of JSON, for any field but the prompt and the messages
MAX_SMALL_BYTES = 4 << 10  # of a message's other fields, and of parts that are no text
MAX_UNKNOWN = 8  # unknown fields that are looked at, in case they are null
MAX_NAME_CHARS = 64  # of an unknown field, as it is said
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
        "prompt_cache_key",
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
    return_token_ids: bool = False


class CompletionBody(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: Any
    logprobs: Int32 | None = None
    best_of: Int32 | None = None


class Message(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One message of a chat. content: text, or a list of parts."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[dict[str, Any], ...]
    name: str = ""


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
_MESSAGE_FIELDS = tuple(field.name for field in msgspec.structs.fields(Message))


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
    parsed = _convert(fields, CompletionBody)
    if parsed.best_of not in (None, parsed.n):
        raise BadField(
            f"best_of is {parsed.best_of}; only best_of equal to n ({parsed.n}) is served",
            "best_of",
            "unsupported_value",
        )
    max_tokens = COMPLETION_MAX_TOKENS if parsed.max_tokens is None else _positive(parsed.max_tokens, "max_tokens")
    return _call("completion", parsed, prompts, max_tokens, parsed.logprobs, client_request_id, tenant)


def parse_chat(
    body: bytes, limits: TextLimits, has_template: bool, client_request_id: str = "", tenant: str = ""
) -> Chat:
    """Raises InvalidRequest naming the field. has_template: whether the model can chat."""
    fields = _fields(body, "chat")
    if "messages" in fields:
        fields["messages"] = _messages(fields["messages"])
    parsed = _convert(fields, ChatBody)
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
    messages = [_for_template(i, m) for i, m in enumerate(parsed.messages)]
    limits.check_chars(sum(len(text) for m in messages for text in m.values()), "the messages have", "messages")
    call = _call("chat", parsed, ("",), _chat_max_tokens(parsed), logprobs, client_request_id, tenant)
    return Chat(call, packed(messages))


def _call(
    kind: Literal["completion", "chat"],
    body: _Body,
    prompts: tuple[str | tuple[int, ...], ...],
    max_tokens: int,
    logprobs: int | None,
    client_request_id: str,
    tenant: str,
) -> Call:
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options is set but stream is not; set stream to true", "stream_options")
    if options.include_obfuscation:
        raise BadField("include_obfuscation is not served", "stream_options.include_obfuscation", "unsupported_value")
    params = SamplingParams(
        max_tokens=max_tokens,
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
    seed = _seed(body.seed)
    requests = tuple(
        GenerateRequest(
            model=body.model,
            prompt=prompt,
            params=params,
            seed=seed,
            cache_salt=body.cache_salt,
            tenant=tenant,
            client_request_id=client_request_id,
            add_special_tokens=kind == "completion",
        )
        for prompt in prompts
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


# ---- JSON to a body


def _fields(body: bytes, kind: str) -> dict[str, Any]:
    """The body's fields that are not null, without those that ask for nothing special. Refuses what is not served."""
    fields: dict[str, Any] = {}
    for name, raw in _cut(body, _KNOWN, "the body").items():
        if name in ("prompt", "messages"):
            if raw != b"null":
                fields[name] = raw
            continue
        if len(raw) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"{name} has {len(raw)} bytes of JSON; at most {MAX_FIELD_BYTES} are allowed", name)
        value = _json(raw)
        if value is not None:
            fields[name] = value
    for name in list(fields):
        if name in _UNSERVED:
            raise BadField(f"{name} is not served", name, "unsupported_parameter")
        served = _ONE_SETTING[kind].get(name)
        if served is None:
            continue
        value = fields.pop(name)
        if not any(type(value) is type(one) and value == one for one in served):
            only = " or ".join(msgspec.json.encode(one).decode() for one in (*served, None))
            raise BadField(f"{name} is served as {only} only", name, "unsupported_value")
    if isinstance(fields.get("stream_options"), dict):
        fields["stream_options"] = _without_nulls(fields["stream_options"])
    return fields


def _cut(raw: bytes, known: tuple[str, ...], what: str, path: str = "") -> dict[str, bytes]:
    """The fields of a JSON object, each still as JSON. Those not `known` are refused here only if they are too many."""
    unknown: tuple[str, ...] = ()
    while True:
        names = (*known, *unknown)
        try:
            cut = _json(raw, _known_object(names) if not unknown else _object_of(names))
        except msgspec.ValidationError as error:
            named = _QUOTED.match(str(error))
            if named is None:
                raise BadField(f"{what} must be a JSON object", path or None, "invalid_type") from error
            name = named["name"]
            if len(unknown) == MAX_UNKNOWN or name in names or not _PLAIN_NAME.fullmatch(name):
                raise _bad_field(str(error), path) from error
            unknown = (*unknown, name)
        else:
            raws = (getattr(cut, f"f{at}") for at in range(len(names)))
            return {name: bytes(raw).strip() for name, raw in zip(names, raws, strict=True) if raw is not UNSET}


def _object_of(names: tuple[str, ...]) -> type[Struct]:
    """A struct with a field `f0`, `f1`, ... for each name, that takes any JSON as it is."""
    fields = [(f"f{at}", Raw | UnsetType, msgspec.field(default=UNSET, name=name)) for at, name in enumerate(names)]
    return msgspec.defstruct("Object", fields, forbid_unknown_fields=True)


_known_object = lru_cache(8)(_object_of)  # of names that no client chose


def _json(raw: bytes, to: Any = Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=to)
    except msgspec.ValidationError as error:
        if to is not Any:
            raise
        raise _no_json(error) from error  # a number that no 64 bits hold
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_json(error) from error


def _no_json(error: Exception) -> BadField:
    return BadField(f"the body cannot be read as JSON: {error}", None, "invalid_json")


def _elements(raw: bytes, most: int) -> list[bytes] | None:
    """The elements of a JSON list, each still as JSON; None if there are more than `most`: they are not even cut."""
    try:
        cut = _json(raw, _list_of(most))
    except msgspec.ValidationError:
        return None
    found = (getattr(cut, f"f{at}") for at in range(most))
    return [bytes(element) for element in found if element is not UNSET]


@lru_cache(4)
def _list_of(most: int) -> type[Struct]:
    fields = [(f"f{at}", Raw | UnsetType, UNSET) for at in range(most)]
    return msgspec.defstruct("List", fields, array_like=True, forbid_unknown_fields=True)


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


_B = TypeVar("_B")
_PLAIN_NAME = re.compile(rf"[\w.-]{{1,{MAX_NAME_CHARS}}}")  # of an unknown field that may be null
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_QUOTED = re.compile(r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`", re.DOTALL)


def _convert(fields: object, to: type[_B], root: str = "") -> _B:
    """`fields` as a `to`. root: the name of the field that `fields` is, if it is not the whole body."""
    try:
        return msgspec.convert(fields, to)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error), root) from error


def _bad_field(problem: str, root: str) -> BadField:
    """msgspec's sentence, e.g. "Expected `int`, got `str` - at `$.stop[0]`", in OpenAI's words."""
    found = _PATH.search(problem)
    path = root + (found["path"] if found else "")
    problem = problem[: found.start()] if found else problem
    named = _QUOTED.match(problem)
    if named is None:
        return BadField(f"{path}: {problem}" if path else problem, path or None, "invalid_type")
    name = named["name"][:MAX_NAME_CHARS]
    path = f"{path}.{name}" if path else name
    if named["what"] == "contains unknown":
        return BadField(f"unknown field {path}", path, "unknown_parameter")
    return BadField(f"{path} is required", path, "missing_required_parameter")


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
    cut = _elements(raw, max_prompts)
    if cut is None:
        raise InvalidRequest(
            f"prompt holds more than {max_prompts} prompts; at most {max_prompts} are allowed", "prompt"
        )
    read = _text if first == b'"' else _token_ids
    return tuple(read(element.strip(), limits, f"prompt[{at}]") for at, element in enumerate(cut))


def _text(raw: bytes, limits: TextLimits, path: str) -> str:
    """Measured as JSON first: 10 ms per 16 MiB are then the most that it takes to read."""
    limits.check_chars(-(-(len(raw) - 2) // _ESCAPED_BYTES), f"{path} has at least", "prompt")
    text = _read(raw, str, path)
    limits.check_chars(len(text), f"{path} has", "prompt")
    return text


def _token_ids(raw: bytes, limits: TextLimits, path: str) -> tuple[int, ...]:
    """Counted by their commas first: 30 ns per id are then what they take to read."""
    limits.check_count(raw.count(b",") + 1, f"{path} has", "prompt")
    ids = _read(raw, TokenIds, path)
    if not ids:
        raise InvalidRequest("prompt holds an empty list of token ids", "prompt")
    return ids


def _messages(raw: bytes) -> list[Any]:
    """The messages of a chat as JSON has them, without their nulls; with their parts, at most so many."""
    cut = _elements(raw, MAX_MESSAGES) if raw[:1] == b"[" else []
    if raw[:1] != b"[":
        raise BadField("messages must be a list of messages", "messages", "invalid_type")
    if cut is None:
        raise _too_many_messages()
    messages = []
    left = MAX_MESSAGES - len(cut)
    for at, element in enumerate(cut):
        message = _message(element, f"messages[{at}]", left)
        content = message.get("content")
        left -= len(content) if isinstance(content, list) else 0
        messages.append(message)
    return messages


def _too_many_messages() -> InvalidRequest:
    return InvalidRequest(f"messages holds more than {MAX_MESSAGES} messages and parts, which is the most", "messages")


def _message(raw: bytes, path: str, max_parts: int) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for name, value in _cut(raw, _MESSAGE_FIELDS, path, path).items():
        if value == b"null":
            continue
        if name == "content" and value[:1] == b"[":
            parts = _elements(value, MAX_MESSAGES)
            if parts is None or len(parts) > max_parts:
                raise _too_many_messages()
            message[name] = [_part(part, f"{path}.content[{at}]") for at, part in enumerate(parts)]
        elif name == "content" and value[:1] == b'"':
            message[name] = _read(value, str, f"{path}.content")
        else:
            message[name] = _small(value, f"{path}.{name}")
    return message


class _Part(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


def _part(raw: bytes, path: str) -> Any:
    """A text part. Any other is refused later, by a name that needs to know it; so it is read if it is small."""
    try:
        return msgspec.to_builtins(_json(raw, _Part))
    except msgspec.ValidationError:
        return _small(raw, path)


def _small(raw: bytes, path: str) -> Any:
    if len(raw) > MAX_SMALL_BYTES:
        raise InvalidRequest(f"{path} has {len(raw)} bytes of JSON; at most {MAX_SMALL_BYTES} are allowed", path)
    return _json(raw)


_R = TypeVar("_R")


def _read(raw: bytes, to: type[_R], path: str) -> _R:
    try:
        read: _R = _json(raw, to)
    except msgspec.ValidationError as error:
        raise _bad_field(str(error), path) from error
    return read


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise InvalidRequest(f"logit_bias names {quoted(token)}; its keys must be token ids", "logit_bias")
    by_id = {int(token): bias for token, bias in biases.items()}
    if len(by_id) < len(biases):
        raise InvalidRequest("logit_bias names a token twice", "logit_bias")
    return tuple(by_id.items())


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


def _for_template(index: int, message: Message) -> dict[str, str]:
    """The message as templates know it: text content, and "system" for what OpenAI now calls "developer"."""
    rendered = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content if isinstance(message.content, str) else _joined(index, message.content),
    }
    return {**rendered, "name": message.name} if message.name else rendered


def _joined(index: int, parts: tuple[dict[str, Any], ...]) -> str:
    """Text parts, a line each, as vLLM joins them for templates that take a string."""
    texts = []
    for i, part in enumerate(parts):
        path = f"messages[{index}].content[{i}]"
        if part.get("type") != "text":
            raise BadField(
                f"{path} is of type {_shown(part.get('type'))}; only text parts are served",
                f"{path}.type",
                "unsupported_value",
            )
        extra = sorted(part.keys() - {"type", "text"})
        if extra:
            unknown = f"{path}.{one_line(extra[0], NAME_CHARS)}"
            raise BadField(f"unknown field {unknown}", unknown, "unknown_parameter")
        if not isinstance(part.get("text"), str):
            raise BadField(f"{path}.text must be a string", f"{path}.text", "invalid_type")
        texts.append(part["text"])
    return "\n".join(texts)


def _shown(value: object) -> str:
    """A value of any JSON type for an error, without writing out what is in it."""
    return quoted(value) if isinstance(value, str) else f"a {type(value).__name__}"
