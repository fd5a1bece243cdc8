"""A server that speaks `disagg.v1.Server` over real gRPC and follows a script instead of computing.

Its model says the letters a, b, c, ... (`letter`), so any answer can be checked, also one that several attempts made.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tokenizers
from msgspec import json
from msgspec.structs import replace
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import (
    AbortLeg,
    KvEvents,
    LegEnd,
    LegTokens,
    LoadReport,
    Outcome,
    PodGone,
    ServerHello,
    ServerMessage,
    ServerState,
    SetRole,
    StartLeg,
    TimelineEvent,
)
from disagg.messages.plan import TokenLogprobs
from disagg.text.tokenizer import Tokenizer
from disagg.types.ids import FinishReason, LegKey, Role
from disagg.wire import pb
from disagg.wire.server import (
    AttachReply,
    KvUpdate,
    RouterHello,
    ServerSays,
    router_frame_from_proto,
    server_says_to_proto,
)
from disagg.wire.services import ServerServicer, make_server, server_handler

Script = Callable[["FakeServer", StartLeg], Awaitable[None]]
MODEL = "tiny"
HEARTBEAT_S = 0.05
EOS = 256


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, and an end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<eos>"])
    return Tokenizer(inner)


TOKENIZER = tiny_tokenizer()


def write_model(directory: Path) -> Path:
    """What a router reads of a model: a tokenizer, a configuration, and weights that have a header."""
    TOKENIZER._inner.save(str(directory / "tokenizer.json"))
    facts = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 256}
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4, "vocab_size": 257}
    (directory / "config.json").write_bytes(json.encode({**facts, **sizes}))
    save_file({"model.embed_tokens.weight": np.zeros((257, 4), np.float32)}, directory / "model.safetensors")
    return directory


def letter(choice: int, index: int) -> str:
    return chr(ord("a") + (index + 3 * choice) % 26)


def answer(choice: int, length: int) -> str:
    return "".join(letter(choice, index) for index in range(length))


def token(choice: int, index: int) -> int:
    [token_id] = TOKENIZER.encode(letter(choice, index))
    return token_id


class FakeServer(ServerServicer):
    """One server of one incarnation after another. `script` plays each leg; `aborted` and `started` are its memory."""

    def __init__(self, name: str, role: Role, script: Script, /, **hello: Any) -> None:
        self.name = name
        self.script = script
        self.started: list[StartLeg] = []
        self.aborted: list[AbortLeg] = []
        self.pods_gone: list[str] = []
        self.frozen = False
        self.on_role: Callable[[Role], None] = lambda role: None
        self.greetings: list[RouterHello] = []
        self.hello = ServerHello(
            **{
                "name": name,
                "role": role,
                "tp": 1,
                "pid": os.getpid(),
                "worker_pids": (1,),
                "incarnation": secrets.token_hex(4),
                "fingerprint": "f",
                "model": MODEL,
                "max_model_len": 512,
                "max_tokens_in_pool": 512,
                "link_address": f"{name}.test:1",
                "load": LoadReport(ServerState.READY, 0, 0, 0, 64, 0, 64),
                **hello,
            }
        )
        self.host, self.port = "127.0.0.1", 0
        self.one_stream = False  # as servers have it: another stream of a router ends the one before, and its legs
        self._server: grpc.aio.Server | None = None
        self._channels: dict[str, ReliableChannel[Any]] = {}
        self._out: dict[str, asyncio.Queue[ServerSays | None]] = {}
        self._legs: dict[LegKey, asyncio.Task[None]] = {}

    # ---- the life of the process

    async def start(self) -> None:
        self._server = make_server(server_handler(self))
        self.port = self._server.add_insecure_port(f"{self.host}:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        """The process is gone, with its port and all that it knew."""
        self._forget()
        self._channels.clear()
        for queue in self._out.values():
            queue.put_nowait(None)
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def restart(self) -> None:
        self.hello = replace(self.hello, incarnation=secrets.token_hex(4), pid=self.hello.pid + 1)
        self._out.clear()
        await self.start()

    def new_incarnation(self) -> None:
        """The workers died and came back under the living server."""
        self._forget()
        self.hello = replace(self.hello, incarnation=secrets.token_hex(4))
        self._tell(hello=self.hello)

    def become(self, role: Role, script: Script, **change: Any) -> None:
        """The same process, with other workers. change: of its RoleChange."""
        assert self.hello.role_change is not None
        said = replace(self.hello.role_change, **change)
        self.script = script
        self.hello = replace(self.hello, role=role, role_change=said)
        self.new_incarnation()

    def set_state(self, state: ServerState) -> None:
        self.hello = replace(self.hello, load=replace(self.hello.load, state=state))
        self._tell(load=self.hello.load)

    def lose_pods(self, *pods: str) -> None:
        """Said with every heartbeat from now on."""
        self.hello = replace(self.hello, load=replace(self.hello.load, lost_pods=pods))

    def tell_cache(self, events: KvEvents, reset: bool = False) -> None:
        self._tell(kv=KvUpdate(events, reset))

    def break_streams(self) -> None:
        """The connection breaks; the process and its channels live on."""
        for queue in self._out.values():
            queue.put_nowait(None)

    def forget_channels(self) -> None:
        self._forget()
        self._channels.clear()

    def _forget(self) -> None:
        for task in self._legs.values():
            task.cancel()
        self._legs.clear()

    def _tell(self, **says: Any) -> None:
        for stream_id, queue in self._out.items():
            if stream_id in self._channels:
                queue.put_nowait(ServerSays(self._channels[stream_id].ack_frame(), **says))

    # ---- what scripts call

    def say(self, *messages: ServerMessage) -> None:
        now_s = asyncio.get_running_loop().time()
        for stream_id, channel in self._channels.items():
            frame = channel.push(messages, now_s)
            if stream_id in self._out:
                self._out[stream_id].put_nowait(ServerSays(frame))

    def tokens(
        self, leg: StartLeg, choice: int, first: int, stop: int, finish: FinishReason | None = None
    ) -> LegTokens:
        ids = tuple(token(choice, index) for index in range(first, stop))
        logprobs: tuple[TokenLogprobs, ...] = ()
        if leg.params.logprobs is not None:
            logprobs = tuple(TokenLogprobs(-0.5, ((i, -0.5), (i + 1, -1.5))[: leg.params.logprobs]) for i in ids)
        return LegTokens(leg.key, choice, first, ids, logprobs, finish)

    def end(self, leg: StartLeg, outcome: Outcome = Outcome.DONE, reason: str = "") -> LegEnd:
        return LegEnd(leg.key, outcome, reason, (TimelineEvent("work", 1.0, 2.0, self.name),), 1)

    # ---- the stream

    async def attach(
        self, requests: AsyncIterator[pb.server.RouterFrame], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.server.ServerFrame]:
        greeting = router_frame_from_proto(await anext(aiter(requests)))
        assert isinstance(greeting, RouterHello)
        self.greetings.append(greeting)
        resumed = greeting.stream_id in self._channels
        if self.one_stream and not resumed:
            self.break_streams()
            self.forget_channels()
        channel = self._channels.setdefault(greeting.stream_id, ReliableChannel(retransmit_s=0.2))
        queue: asyncio.Queue[ServerSays | None] = asyncio.Queue()
        now_s = asyncio.get_running_loop().time()
        first = ServerSays(
            channel.ack_frame(), hello=self.hello, load=self.hello.load, attached=AttachReply(channel.received, resumed)
        )
        queue.put_nowait(first)
        channel.take(Frame(0, greeting.last_received, ()), now_s)
        for frame in channel.repeat(now_s):
            queue.put_nowait(ServerSays(frame))
        self._out[greeting.stream_id] = queue
        reader = asyncio.create_task(self._read(requests, channel, queue))
        try:
            while True:
                try:
                    says = await asyncio.wait_for(queue.get(), HEARTBEAT_S)
                except TimeoutError:
                    if self.frozen:
                        continue
                    for frame in channel.overdue(asyncio.get_running_loop().time()):
                        yield server_says_to_proto(ServerSays(frame))
                    says = ServerSays(channel.ack_frame(), load=self.hello.load)
                if says is None:
                    return
                if not self.frozen:
                    yield server_says_to_proto(says)
        finally:
            reader.cancel()
            if self._out.get(greeting.stream_id) is queue:
                del self._out[greeting.stream_id]

    async def _read(
        self, requests: Any, channel: ReliableChannel[Any], queue: asyncio.Queue[ServerSays | None]
    ) -> None:
        async for message in requests:
            if self.frozen:
                continue
            frame = router_frame_from_proto(message)
            assert not isinstance(frame, RouterHello)
            for said in channel.take(frame, asyncio.get_running_loop().time()):
                if isinstance(said, StartLeg):
                    self.started.append(said)
                    self._legs[said.key] = asyncio.create_task(self._play(said))
                elif isinstance(said, PodGone):
                    self.pods_gone.append(said.pod)
                elif isinstance(said, SetRole):
                    self.on_role(said.role)
                else:
                    self.aborted.append(said)
                    leg = self._legs.get(said.key)
                    if said.choice is None and leg is not None and not leg.done():
                        leg.cancel()
                        self.say(LegEnd(said.key, Outcome.ABORTED, "aborted"))
        queue.put_nowait(None)

    async def _play(self, leg: StartLeg) -> None:
        await self.script(self, leg)

    async def dump(self, request: Any, context: Any) -> pb.server.DumpResponse:
        return pb.server.DumpResponse(text="fake")


# ---- scripts


def first_index(leg: StartLeg) -> int:
    return len(leg.token_ids) - leg.num_prompt


async def prefill(server: FakeServer, leg: StartLeg) -> None:
    """The first token of each choice, then done."""
    first = first_index(leg)
    for choice in leg.choices:
        finish = FinishReason.LENGTH if first + 1 == leg.params.max_tokens else None
        server.say(server.tokens(leg, choice, first, first + 1, finish))
    await asyncio.sleep(0.01)
    server.say(server.end(leg))


async def decode(server: FakeServer, leg: StartLeg) -> None:
    """Every token, one message a step with all choices."""
    await decode_until(server, leg, leg.params.max_tokens)
    server.say(server.end(leg))


async def decode_until(server: FakeServer, leg: StartLeg, stop: int) -> None:
    for index in range(first_index(leg), min(stop, leg.params.max_tokens)):
        await asyncio.sleep(0.005)
        finish = FinishReason.LENGTH if index + 1 == leg.params.max_tokens else None
        server.say(*(server.tokens(leg, choice, index, index + 1, finish) for choice in leg.choices))


async def silent(server: FakeServer, leg: StartLeg) -> None:
    """Nothing, for ever."""
    await asyncio.Event().wait()


def verdict(outcome: Outcome, times: int = 1, after: int = 0) -> Script:
    """Decodes `after` tokens and ends with `outcome`, so many times; then does it right."""
    left = [times]

    async def script(server: FakeServer, leg: StartLeg) -> None:
        if left[0] == 0:
            await decode(server, leg)
            return
        left[0] -= 1
        await decode_until(server, leg, first_index(leg) + after)
        server.say(server.end(leg, outcome, f"scripted {outcome.value}"))

    return script


def ending(outcome: Outcome) -> Script:
    async def script(server: FakeServer, leg: StartLeg) -> None:
        server.say(server.end(leg, outcome, f"scripted {outcome.value}"))

    return script
