"""A router and a chat template for tests: no cluster, no model, scripted words.

A greedy choice says WORDS in order; a sampled one says them in an order drawn from (seed, choice), so that equal seeds
give equal text. A word is a token, and its id is its place in WORDS.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from disagg.auth.quotas import Limits, Quotas, Use
from disagg.messages.legs import TimelineEvent
from disagg.router.budget import Budget, Held
from disagg.router.mailbox import Taker
from disagg.router.requests import (
    ChoiceDelta,
    Finished,
    GenerateRequest,
    LogprobEntry,
    Started,
    TokenLogprobInfo,
    Update,
    Usage,
)
from disagg.text.limits import TextLimits
from disagg.types.errors import DisaggError, InvalidRequest, UnknownModel
from disagg.types.ids import FinishReason

WORDS = (" one", " two", " three", " four", " five", " six", " seven", " eight")
MODEL = "fake/words"
MAX_MODEL_LEN = 200
VOCAB_SIZE = 100


class Card(Struct, frozen=True):
    name: str
    max_model_len: int


class FakeRouter:
    """Implements RouterPort. What a test may set: `refusal`, `failure`, `gate`, `state`. What it may read: the rest."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.noted: list[tuple[DisaggError, str]] = []  # refused by the face
        self.drained: list[tuple[str, bool, bool]] = []
        self.roles: list[tuple[str, str, bool]] = []
        self.aborted: list[str] = []  # iterators closed before their end
        self.running: set[str] = set()
        self.refusal: DisaggError | None = None  # raised instead of Started
        self.early_failure: DisaggError | None = None  # raised right after Started
        self.failure: Exception | None = None  # raised after two tokens of each choice
        self.gate: asyncio.Event | None = None  # awaited after two tokens of each choice
        self.early_gate: asyncio.Event | None = None  # awaited before Started
        self.state = "ready"
        self.is_open = True
        self.words: Sequence[str] = WORDS
        self.raw: Mapping[str, bytes] = {}  # a token's own bytes, where they are not its text's
        self.timelines: dict[str, tuple[TimelineEvent, ...]] = {}
        self.limits = TextLimits(MAX_MODEL_LEN, 100_000)
        self.budget = Budget(64 << 20)
        self.quota: dict[str, Limits] = {}  # by tenant
        self.quotas = Quotas(lambda: self.quota)  # time stands still for them
        self._numbers = itertools.count()

    def hold(self) -> Held:
        return self.budget.hold()

    async def beside(self, tenant: str, size: int, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    async def generate(
        self, request: GenerateRequest, use: Use, taker: Taker | None = None
    ) -> AsyncGenerator[Update, None]:
        number = next(self._numbers)
        request_id = f"r{number}"
        self.requests.append(request)
        self.running.add(request_id)
        try:
            if self.early_gate is not None:
                await self.early_gate.wait()
            prompt_ids = self._accept(request)
            yield Started(request_id, prompt_ids, 1_700_000_000.5)
            if self.early_failure is not None:
                raise self.early_failure
            seed = number if request.seed is None else request.seed
            said = 0
            async for delta in self._deltas(request, seed, len(prompt_ids)):
                said += len(delta.token_ids)
                # As a router's mailbox: some come while all before them have been read, and some do not.
                if not (taker is not None and said % 3 and taker(delta)):
                    yield delta
            events = (TimelineEvent("prefill", 1.0, 2.0, "p0"), TimelineEvent("decode", 2.0, 3.0))
            self.timelines[request_id] = events
            yield Finished(Usage(len(prompt_ids), said, cached_tokens=len(prompt_ids) // 2), events, attempts=1)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    def _accept(self, request: GenerateRequest) -> tuple[int, ...]:
        if self.refusal is not None:
            raise self.refusal
        if request.model != MODEL:
            raise UnknownModel(f"the model {request.model!r} does not exist", "model")
        prompt_ids = tuple(range(len(request.prompt.split()))) if isinstance(request.prompt, str) else request.prompt
        room = MAX_MODEL_LEN - len(prompt_ids)
        if room < 1 or request.params.max_tokens > room:
            raise InvalidRequest(f"{MODEL} has a context of {MAX_MODEL_LEN} tokens", "max_tokens")
        if request.too_large:
            raise InvalidRequest(request.too_large, "max_tokens")
        replace(request.params, max_tokens=request.params.max_tokens or room).validate(VOCAB_SIZE)
        return prompt_ids

    async def _deltas(self, request: GenerateRequest, seed: int, num_prompt: int) -> AsyncGenerator[ChoiceDelta, None]:
        params = request.params
        limit = params.max_tokens or MAX_MODEL_LEN - num_prompt
        words = [self._order(params.greedy, seed, choice) for choice in range(params.n)]
        texts = [""] * params.n
        done: set[int] = set()
        for index in range(min(limit, len(self.words))):
            if index == 2:
                if self.failure is not None:
                    raise self.failure
                if self.gate is not None:
                    await self.gate.wait()
            for choice in sorted(set(range(params.n)) - done):
                await asyncio.sleep(0)
                word = words[choice][index]
                begun = len(texts[choice])
                texts[choice] += word
                stop = next((s for s in params.stop if s in texts[choice]), None)
                end = texts[choice].index(stop) if stop is not None else len(texts[choice])
                finish = FinishReason.STOP if stop is not None or index + 1 == len(self.words) else None
                if finish is None and index + 1 == limit:
                    finish = FinishReason.LENGTH
                if finish is not None:
                    done.add(choice)
                logprobs = () if params.logprobs is None else (self._logprobs(word, params.logprobs, begun),)
                text = texts[choice][begun:end]
                yield ChoiceDelta(choice, text, (self.words.index(word),), logprobs, finish, stop)

    def _order(self, greedy: bool, seed: int, choice: int) -> list[str]:
        words = list(self.words)
        if not greedy:
            random.Random(f"{seed}/{choice}").shuffle(words)
        return words

    def _logprobs(self, word: str, count: int, offset: int) -> TokenLogprobInfo:
        others = [w for w in self.words if w != word]
        top = [self._entry(w, -0.5 - i) for i, w in enumerate([word, *others][:count])]
        return TokenLogprobInfo(self._entry(word, -0.5), tuple(top), offset)

    def _entry(self, word: str, logprob: float) -> LogprobEntry:
        return LogprobEntry(self.words.index(word), word, self.raw.get(word, word.encode()), logprob)

    # ---- the rest of RouterPort

    async def set_role(self, server: str, role: str, force: bool) -> bool:
        self.roles.append((server, role, force))
        return True

    def drain_server(self, server: str, on: bool, force: bool) -> Mapping[str, object]:
        self.drained.append((server, on, force))
        return {"name": server, "state": "loading", "becomes": "", "silent_s": 0.0}

    def ask_quota(self, use: Use, count: int = 1) -> None:
        self.quotas.ask(use, count, 0.0)

    def note_refused(self, error: DisaggError, client_request_id: str = "") -> None:
        self.noted.append((error, client_request_id))

    def models(self) -> Sequence[Card]:
        return (Card(MODEL, MAX_MODEL_LEN),)

    def healthy(self) -> bool:
        return self.state == "ready"

    def open(self) -> bool:
        return self.is_open

    def status(self) -> Mapping[str, object]:
        return {"state": self.state, "servers": [{"name": "p0", "role": "prefill"}]}

    def timeline(self, request_id: str) -> tuple[TimelineEvent, ...] | None:
        return self.timelines.get(request_id)

    def known_requests(self) -> Mapping[str, object]:
        return {"running": [], "running_total": 0, "ended": [{"request_id": each} for each in self.timelines]}

    async def dump(self) -> object:
        return {"running": sorted(self.running)}


class FakeChatTemplate:
    """`<role>content` for every message."""

    async def render(self, messages: bytes, max_chars: int, tenant: str) -> str:
        return fake_prompt(messages)


def fake_prompt(messages: bytes) -> str:
    read = msgspec.msgpack.decode(messages)
    return "".join(f"<{m['role']}>{m['content']}" for m in read) + "<assistant>"
