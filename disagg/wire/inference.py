"""The public API (`disagg.v1.Inference`): requests and responses to protobuf and back. Pure; knows nothing of the router.

Both ends use it: the router's gRPC face reads requests and writes responses, a client of ours the reverse. What a client
got wrong raises InvalidRequest naming the field; ranges are checked by `SamplingParams.validate`, which knows the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol, TypedDict, Unpack

from msgspec import Struct, structs

from disagg.messages.legs import TimelineEvent
from disagg.types.errors import InvalidRequest
from disagg.types.ids import FinishReason
from disagg.types.plain import NAME_CHARS
from disagg.types.sampling import (
    MAX_DEADLINE_MS,
    MAX_LOGIT_BIAS,
    MAX_SESSION_CHARS,
    MAX_SLO_MS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
    at_most,
)
from disagg.wire import pb
from disagg.wire.fields import FINISH_TO_PROTO, fill_timeline, read_finish, read_timeline, refuse, require

# ---- sampling parameters

_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "seed",
    "logprobs",
    "n",
)


def fill_sampling(out: pb.inference.SamplingParams, params: SamplingParams) -> None:
    """Every field is set, so that the receiver's defaults do not matter."""
    for name in _OPTIONAL:
        value = getattr(params, name)
        if value is not None:
            setattr(out, name, value)
    for token_id, bias in params.logit_bias:
        out.logit_bias.add(token_id=token_id, bias=bias)
    out.stop.extend(params.stop)
    out.stop_token_ids.extend(params.stop_token_ids)


def read_sampling(message: pb.inference.SamplingParams) -> SamplingParams:
    """An absent field means its default; max_tokens absent becomes 0 ("as many as fit").

    Of a list that is too long, one entry more than is allowed is read: enough for `validate` to refuse it.
    """
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    given.setdefault("max_tokens", 0)
    return SamplingParams(
        **given,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias[: MAX_LOGIT_BIAS + 1]),
        stop=tuple(message.stop[: MAX_STOP_STRINGS + 1]),
        stop_token_ids=tuple(message.stop_token_ids[: MAX_STOP_TOKENS + 1]),
    )


# ---- Generate: the request


class GenerateOptions(TypedDict, total=False):
    """What a client may leave out."""

    seed: int | None
    deadline_s: float | None
    cache_salt: str
    client_request_id: str
    add_special_tokens: bool
    priority: int
    slo_ttft_s: float | None
    session: str


class GenerateFields(TypedDict):
    """The fields of a router's GenerateRequest, by name.

    params.max_tokens 0, and None elsewhere: the client left it out. The seed is in `seed`; params.seed is always 0.
    """

    model: str
    prompt: str | tuple[int, ...]
    params: SamplingParams
    seed: int | None
    deadline_s: float | None
    cache_salt: str
    client_request_id: str
    add_special_tokens: bool
    priority: int
    slo_ttft_s: float | None
    session: str


def generate_request_to_proto(
    *, model: str, prompt: str | tuple[int, ...], params: SamplingParams, **options: Unpack[GenerateOptions]
) -> pb.inference.GenerateRequest:
    """`seed` goes out, `params.seed` does not; params.max_tokens 0 goes out as absent."""
    out = pb.inference.GenerateRequest(
        model=model,
        cache_salt=options.get("cache_salt", ""),
        request_id=options.get("client_request_id", ""),
        add_special_tokens=options.get("add_special_tokens", True),
        priority=options.get("priority", 0),
        session_id=options.get("session", ""),
    )
    if isinstance(prompt, str):
        out.text = prompt
    else:
        out.token_ids.SetInParent()
        out.token_ids.ids.extend(prompt)
    fill_sampling(out.sampling, params)
    if params.max_tokens == 0:
        out.sampling.ClearField("max_tokens")
    out.sampling.ClearField("seed")
    if (seed := options.get("seed")) is not None:
        out.sampling.seed = seed
    if (deadline_s := options.get("deadline_s")) is not None:
        out.deadline_ms = max(1, round(deadline_s * 1000))
    if (slo_ttft_s := options.get("slo_ttft_s")) is not None:
        out.slo_ttft_ms = max(1, round(slo_ttft_s * 1000))
    return out


def generate_request_from_proto(message: pb.inference.GenerateRequest, max_ids: int) -> GenerateFields:
    """Raises InvalidRequest. Lists are counted before they become Python's: that takes ten times their bytes."""
    _require_model(message.model)
    at_most("prompt", len(message.token_ids.ids), max_ids, "token ids")
    at_most("stop", len(message.sampling.stop), MAX_STOP_STRINGS, "strings")
    at_most("stop_token_ids", len(message.sampling.stop_token_ids), MAX_STOP_TOKENS, "ids")
    at_most("logit_bias", len(message.sampling.logit_bias), MAX_LOGIT_BIAS, "entries")
    kind = message.WhichOneof("prompt")
    if kind is None:
        _invalid("prompt", "is missing; send text or token_ids")
    sampling = message.sampling
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        # 0 means "as many as fit" inside, so it must not slip through from outside.
        _invalid("max_tokens", f"is {sampling.max_tokens}; it must be at least 1, or absent for as many as fit")
    if message.HasField("deadline_ms") and not 1 <= message.deadline_ms <= MAX_DEADLINE_MS:
        _invalid("deadline_ms", f"is {message.deadline_ms}; it must be from 1 to {MAX_DEADLINE_MS}")
    if message.HasField("slo_ttft_ms") and not 1 <= message.slo_ttft_ms <= MAX_SLO_MS:
        _invalid("slo_ttft_ms", f"is {message.slo_ttft_ms}; it must be from 1 to {MAX_SLO_MS}")
    if len(message.session_id) > MAX_SESSION_CHARS:
        _invalid("session_id", f"has {len(message.session_id)} characters; at most {MAX_SESSION_CHARS} are allowed")
    return GenerateFields(
        model=message.model,
        prompt=message.text if kind == "text" else tuple(message.token_ids.ids),
        params=structs.replace(read_sampling(sampling), seed=0),
        seed=sampling.seed if sampling.HasField("seed") else None,
        deadline_s=message.deadline_ms / 1000 if message.HasField("deadline_ms") else None,
        cache_salt=message.cache_salt,
        client_request_id=message.request_id[:NAME_CHARS],  # for the logs only, so cut rather than refused
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
        priority=message.priority,
        slo_ttft_s=message.slo_ttft_ms / 1000 if message.HasField("slo_ttft_ms") else None,
        session=message.session_id,
    )


# ---- Generate: the response
#
# The router's own structs cannot be imported here. Writing takes whatever has their fields; reading, which only clients
# do, gives the *View structs, which have them too.


class LogprobEntryLike(Protocol):
    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def raw(self) -> bytes: ...
    @property
    def logprob(self) -> float: ...


class TokenLogprobsLike(Protocol):
    @property
    def chosen(self) -> LogprobEntryLike: ...
    @property
    def top(self) -> Sequence[LogprobEntryLike]: ...
    @property
    def text_offset(self) -> int: ...


class StartedLike(Protocol):
    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def created_unix_s(self) -> float: ...
    @property
    def abort_token(self) -> str: ...


class ChoiceDeltaLike(Protocol):
    @property
    def choice(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobsLike]: ...
    @property
    def finish(self) -> FinishReason | None: ...
    @property
    def stop_reason(self) -> str | int | None: ...


class UsageLike(Protocol):
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...


class FinishedLike(Protocol):
    @property
    def usage(self) -> UsageLike: ...
    @property
    def timeline(self) -> tuple[TimelineEvent, ...]: ...
    @property
    def attempts(self) -> int: ...


class LogprobEntryView(Struct, frozen=True):
    token_id: int
    text: str
    raw: bytes
    logprob: float


class TokenLogprobsView(Struct, frozen=True):
    chosen: LogprobEntryView
    top: tuple[LogprobEntryView, ...]
    text_offset: int


class StartedView(Struct, frozen=True):
    request_id: str
    prompt_token_ids: tuple[int, ...]
    created_unix_s: float
    abort_token: str = ""


class ChoiceDeltaView(Struct, frozen=True):
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobsView, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class UsageView(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class FinishedView(Struct, frozen=True):
    usage: UsageView
    timeline: tuple[TimelineEvent, ...]
    attempts: int


UpdateView = StartedView | ChoiceDeltaView | FinishedView


def started_to_proto(started: StartedLike) -> pb.inference.GenerateResponse:
    out = pb.inference.GenerateResponse()
    out.started.request_id = started.request_id
    out.started.prompt_token_ids.extend(started.prompt_token_ids)
    out.started.created_unix_s = started.created_unix_s
    out.started.abort_token = started.abort_token
    return out


def choice_delta_to_proto(delta: ChoiceDeltaLike) -> pb.inference.GenerateResponse:
    out = pb.inference.GenerateResponse()
    added = out.delta
    added.SetInParent()
    added.choice = delta.choice
    added.text = delta.text
    added.token_ids.extend(delta.token_ids)
    for row in delta.logprobs:
        entry = added.logprobs.add(text_offset=row.text_offset)
        _fill_entry(entry.chosen, row.chosen)
        for top in row.top:
            _fill_entry(entry.top.add(), top)
    added.finish = FINISH_TO_PROTO[delta.finish]
    if isinstance(delta.stop_reason, str):
        added.stop_string = delta.stop_reason
    elif delta.stop_reason is not None:
        added.stop_token_id = delta.stop_reason
    return out


def finished_to_proto(finished: FinishedLike) -> pb.inference.GenerateResponse:
    out = pb.inference.GenerateResponse()
    usage = finished.usage
    out.finished.usage.SetInParent()
    out.finished.usage.prompt_tokens = usage.prompt_tokens
    out.finished.usage.completion_tokens = usage.completion_tokens
    out.finished.usage.cached_tokens = usage.cached_tokens
    fill_timeline(out.finished.timeline, finished.timeline)
    out.finished.attempts = finished.attempts
    return out


def update_from_proto(message: pb.inference.GenerateResponse) -> UpdateView | None:
    """None: a kind out of a newer version, to be skipped. Raises ProtocolError."""
    kind = message.WhichOneof("update")
    if kind == "started":
        started = message.started
        return StartedView(
            started.request_id, tuple(started.prompt_token_ids), started.created_unix_s, started.abort_token
        )
    if kind == "delta":
        return _read_delta(message.delta)
    if kind == "finished":
        require(message.finished, "usage")
        usage = message.finished.usage
        return FinishedView(
            usage=UsageView(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            timeline=read_timeline(message.finished.timeline),
            attempts=message.finished.attempts,
        )
    return None


def _fill_entry(out: pb.inference.LogprobEntry, entry: LogprobEntryLike) -> None:
    out.token_id = entry.token_id
    out.text = entry.text
    out.raw = entry.raw
    out.logprob = entry.logprob
    out.SetInParent()


def _read_entry(entry: pb.inference.LogprobEntry) -> LogprobEntryView:
    return LogprobEntryView(entry.token_id, entry.text, entry.raw, entry.logprob)


def _read_delta(delta: pb.inference.ChoiceDelta) -> ChoiceDeltaView:
    if delta.logprobs and len(delta.logprobs) != len(delta.token_ids):
        refuse(delta, "logprobs", f"has {len(delta.logprobs)} entries for {len(delta.token_ids)} tokens")
    for row in delta.logprobs:
        require(row, "chosen")
    stop_kind = delta.WhichOneof("stop_reason")
    return ChoiceDeltaView(
        choice=delta.choice,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(
            TokenLogprobsView(_read_entry(row.chosen), tuple(_read_entry(top) for top in row.top), row.text_offset)
            for row in delta.logprobs
        ),
        finish=read_finish(delta),
        stop_reason=None if stop_kind is None else getattr(delta, stop_kind),
    )


# ---- the other calls


class TokenizeFields(TypedDict):
    model: str
    text: str
    add_special_tokens: bool


class DetokenizeFields(TypedDict):
    model: str
    token_ids: tuple[int, ...]
    skip_special_tokens: bool


class ModelInfo(Struct, frozen=True):
    """A served model. max_model_len: tokens of prompt and output together; 0: not known yet."""

    name: str
    max_model_len: int


def tokenize_request_from_proto(message: pb.inference.TokenizeRequest) -> TokenizeFields:
    """Raises InvalidRequest."""
    _require_model(message.model)
    return TokenizeFields(
        model=message.model,
        text=message.text,
        add_special_tokens=message.add_special_tokens if message.HasField("add_special_tokens") else True,
    )


def tokenize_response_to_proto(token_ids: Sequence[int]) -> pb.inference.TokenizeResponse:
    return pb.inference.TokenizeResponse(token_ids=token_ids)


def detokenize_request_from_proto(message: pb.inference.DetokenizeRequest, max_ids: int) -> DetokenizeFields:
    """Raises InvalidRequest."""
    _require_model(message.model)
    at_most("token_ids", len(message.token_ids), max_ids, "token ids")
    return DetokenizeFields(
        model=message.model,
        token_ids=tuple(message.token_ids),
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
    )


def detokenize_response_to_proto(text: str) -> pb.inference.DetokenizeResponse:
    return pb.inference.DetokenizeResponse(text=text)


def list_models_response_to_proto(models: Sequence[ModelInfo]) -> pb.inference.ListModelsResponse:
    out = pb.inference.ListModelsResponse()
    for model in models:
        out.models.add(name=model.name, max_model_len=model.max_model_len)
    return out


def list_models_response_from_proto(message: pb.inference.ListModelsResponse) -> tuple[ModelInfo, ...]:
    return tuple(ModelInfo(model.name, model.max_model_len) for model in message.models)


def abort_request_from_proto(message: pb.inference.AbortRequest) -> tuple[str, str]:
    """The id of the request to end, and its abort token. Raises InvalidRequest."""
    if not message.request_id:
        _invalid("request_id", "is missing; send the one of `started`")
    if not message.abort_token:
        _invalid("abort_token", "is missing; send the one of `started`")
    return message.request_id, message.abort_token


def _require_model(model: str) -> None:
    if not model:
        _invalid("model", "is missing; ListModels says which there are")


def _invalid(param: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{param} {why}", param)
