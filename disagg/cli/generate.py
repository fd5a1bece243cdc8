"""`disagg generate`: one request over gRPC, text as it comes. Also the gRPC half of the demo."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import grpc
from msgspec import Struct

from disagg.auth.tls import PEM_BYTES
from disagg.cli.flags import given_ca, given_key
from disagg.cli.terminal import for_terminal, note
from disagg.cli.timeline import print_timeline
from disagg.config.load import load_config
from disagg.messages.legs import TimelineEvent
from disagg.types.errors import ConfigError, DisaggError, Interrupted, UnknownModel
from disagg.types.plain import one_line
from disagg.types.sampling import SamplingParams
from disagg.types.small_files import home_expanded, read_small
from disagg.wire.inference import (
    ChoiceDeltaView,
    FinishedView,
    StartedView,
    generate_request_to_proto,
    list_models_response_from_proto,
    update_from_proto,
)
from disagg.wire.pb import inference as messages
from disagg.wire.services import InferenceStub, open_channel
from disagg.wire.status import error_of

ANSWER_TIMEOUT_S = 10.0  # of calls that take no time
DEFAULT_SEED = 0  # stands in the parameters; only a seed that was given is sent


class GenerateOptions(Struct, frozen=True, kw_only=True):
    """The flags of the command. chat None: with the template where the model has one on this machine."""

    address: str
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    deadline: float | None = None
    chat: bool | None = None
    timeline: bool = False
    as_json: bool = False


class Answer(Struct, frozen=True, kw_only=True):
    """What came of one request, and how long it took on this side, in seconds."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int
    timeline: tuple[TimelineEvent, ...]
    ttft_s: float
    total_s: float


def run_generate(prompt: str, options: GenerateOptions) -> int:
    """Prints the answer; returns the exit code. Raises DisaggError."""
    answer = asyncio.run(_cancelled_by_ctrl_c(ask(prompt, options, echo=not options.as_json)))
    if options.as_json:
        import msgspec

        print(for_terminal(json.dumps(msgspec.to_builtins(answer), ensure_ascii=False), sys.stdout))
    elif options.timeline:
        from rich.console import Console

        print_timeline(Console(), answer.timeline, f"request {answer.request_id}")
    return 0


async def ask(prompt: str, options: GenerateOptions, *, echo: bool) -> Answer:
    """One request and its answer; echo prints text as it comes. Raises DisaggError."""
    channel = _channel(options.address)
    try:
        stub = InferenceStub(channel)
        model = options.model or await _only_model(stub)
        text, chat = _render(prompt, model, options.chat)
        request = generate_request_to_proto(
            model=model,
            prompt=text,
            params=SamplingParams(
                max_tokens=options.max_tokens or 0,
                min_tokens=options.min_tokens,
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                stop=options.stop,
                ignore_eos=options.ignore_eos,
                seed=DEFAULT_SEED,
            ),
            seed=options.seed,
            deadline_s=options.deadline,
            add_special_tokens=not chat,
        )
        return await _stream(stub, request, echo)
    except grpc.aio.AioRpcError as error:
        raise _explained(error, options.address) from error
    finally:
        await channel.close()


def _channel(address: str) -> grpc.aio.Channel:
    ca = given_ca()
    if ca is None:
        return open_channel(address)
    try:
        roots = read_small(ca, PEM_BYTES)
    except FileNotFoundError as error:
        raise ConfigError(f"--ca {ca}: there is no such file") from error
    return open_channel(address, grpc.ssl_channel_credentials(roots))


def _metadata() -> tuple[tuple[str, str], ...]:
    key = given_key()
    return (("authorization", f"Bearer {key}"),) if key else ()


async def _stream(stub: InferenceStub, request: messages.GenerateRequest, echo: bool) -> Answer:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    ttft_s = 0.0
    request_id, finish = "", ""
    parts: list[str] = []
    token_ids: list[int] = []
    finished: FinishedView | None = None
    async for message in stub.generate(request, metadata=_metadata()):
        match update_from_proto(message):
            case StartedView(started_id):
                request_id = started_id
            case ChoiceDeltaView() as delta:
                ttft_s = ttft_s or loop.time() - begin_s
                parts.append(delta.text)
                token_ids += delta.token_ids
                finish = delta.finish.value if delta.finish is not None else finish
                if echo:
                    print(for_terminal(delta.text, sys.stdout), end="", flush=True)
            case FinishedView() as last:
                finished = last
            case None:
                pass
    if echo:
        print(flush=True)
    if finished is None:
        raise DisaggError("the router ended the stream without `finished`; look into its log")
    return Answer(
        request_id=request_id,
        text="".join(parts),
        token_ids=tuple(token_ids),
        finish=finish,
        prompt_tokens=finished.usage.prompt_tokens,
        completion_tokens=finished.usage.completion_tokens,
        cached_tokens=finished.usage.cached_tokens,
        attempts=finished.attempts,
        timeline=finished.timeline,
        ttft_s=ttft_s,
        total_s=loop.time() - begin_s,
    )


async def _only_model(stub: InferenceStub) -> str:
    reply = await stub.list_models(messages.ListModelsRequest(), timeout=ANSWER_TIMEOUT_S, metadata=_metadata())
    models = list_models_response_from_proto(reply)
    if len(models) != 1:
        names = one_line(", ".join(model.name for model in models)) or "none"
        raise UnknownModel(f"the router serves {names}; name one with --model", "model")
    return models[0].name


def _render(prompt: str, model: str, chat: bool | None) -> tuple[str, bool]:
    """The prompt to send, and whether it is a rendered chat. The template is of the model as it is on this machine."""
    if chat is False:
        return prompt, False
    from disagg.convert.model_dir import resolve
    from disagg.text.chat import ChatTemplate

    settings = load_config().model
    name = settings.name if model in (settings.served_name, Path(settings.name).name) else model
    try:
        template = ChatTemplate.load(resolve(name, home_expanded(settings.cache_dir, "model.cache_dir")))
    except ConfigError as error:
        if chat:
            raise ConfigError(
                f"--chat: the model {model} is not on this machine ({error}); use --raw, or say in DISAGG__MODEL__NAME "
                "which directory it is"
            ) from error
        template = None
    if template is None:
        if chat:
            raise ConfigError(f"--chat: the model {model} has no chat template; use --raw")
        note(
            f"no chat template of {one_line(model)} here: sending the prompt as it is (--raw says so without this line)"
        )
        return prompt, False
    return template.render([{"role": "user", "content": prompt}]), True


def _explained(error: grpc.aio.AioRpcError, address: str) -> DisaggError:
    said = (error.details() or "").lower()
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return error_of(error)
    if "resolv" in said and "connect" not in said:
        return DisaggError(f"no router answers at {address}: its name is not known here")
    if not any(word in said for word in ("connect", "socket closed", "handshake", "ssl")):
        return error_of(error)
    hint = ""
    if "refused" not in said and given_ca() is None:
        hint = " If it speaks TLS, say --ca FILE."
    elif "refused" not in said:
        hint = " If it speaks no TLS, leave out --ca; if it does, --ca must name who signed its certificate."
    return DisaggError(f"no router answers at {address}; is `disagg up` running?{hint}")


async def _cancelled_by_ctrl_c(asking: object) -> Answer:
    """Cancels the call, so that the cluster frees what it holds, rather than just leaving."""
    assert asyncio.iscoroutine(asking)
    task: asyncio.Task[Answer] = asyncio.ensure_future(asking)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        print(file=sys.stderr)
        raise Interrupted("interrupted; the request was cancelled") from None
