"""Replies in OpenAI's shapes: shapes, and what becomes of a choice's deltas. Pure; knows no router and no HTTP.

`null` and absent differ here: OpenAI writes `"logprobs": null`, but leaves out fields that were not asked for, which are
UNSET. `stop_reason`, `token_ids` and `prompt_token_ids` are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, Raw, Struct, UnsetType

from disagg.api.bodies import Call
from disagg.router.requests import ChoiceDelta, LogprobEntry, Started, TokenLogprobInfo, Usage


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class UsageReply(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


# Of a chunk: left out (nobody asked), null (it comes at the end of the stream), or what was used so far.
ChunkUsage = UsageReply | UnsetType | None


class CompletionLogprobs(Struct, frozen=True):
    """Parallel lists, one element per token. text_offset: where the token begins in the choice's text, characters."""

    text_offset: list[int] | Raw
    token_logprobs: list[float] | Raw
    tokens: list[str] | Raw
    top_logprobs: list[dict[str, float]] | Raw


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str | Raw
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | Raw | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class CompletionReply(Struct, frozen=True):
    """A completion, or one chunk of its stream: they have the same shape."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET


class ChatToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatToken]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob] | Raw
    refusal: None = None


class ChatMessage(Struct, frozen=True):
    content: str | Raw
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | Raw | UnsetType = UNSET


class ChatReply(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET


Chunk = CompletionReply | ChatChunk


def usage_reply(usages: Iterable[Usage]) -> UsageReply:
    """The sum over the prompts of one call."""
    each = tuple(usages)
    prompt = sum(u.prompt_tokens for u in each)
    completion = sum(u.completion_tokens for u in each)
    cached = PromptTokensDetails(sum(u.cached_tokens for u in each))
    return UsageReply(prompt, completion, prompt + completion, cached)


class WholeChoice(Struct, frozen=True):
    """A choice that is complete. What is long is JSON already: see `whole`."""

    choice: int
    text: Raw
    token_ids: Raw
    logprobs: ChatLogprobs | CompletionLogprobs | None
    finish: str | None
    stop_reason: str | int | None


class CompletionWriter:
    """Writes the replies of one completion call. started: one per prompt, in the prompts' order."""

    def __init__(self, call: Call, started: Sequence[Started], fingerprint: str) -> None:
        self._call = call
        self._started = started
        self._first = {(p, c) for p in range(len(started)) for c in range(call.n)}  # choices not yet heard of
        self._id = f"cmpl-{started[0].request_id}"
        self._created = int(started[0].created_unix_s)
        self._fingerprint = fingerprint

    def without_choices(self, usage: UsageReply) -> CompletionReply:
        """The complete reply but for its choices."""
        return self._reply([], usage)

    def whole(self, prompt: int, done: WholeChoice) -> CompletionChoice:
        """One of its choices."""
        assert not isinstance(done.logprobs, ChatLogprobs)
        ids = self._call.return_token_ids
        return CompletionChoice(
            index=prompt * self._call.n + done.choice,
            text=done.text,
            logprobs=done.logprobs,
            finish_reason=done.finish,
            stop_reason=done.stop_reason,
            token_ids=done.token_ids if ids else UNSET,
            prompt_token_ids=self._started[prompt].prompt_token_ids if ids else UNSET,
        )

    def opening(self, usage: ChunkUsage) -> list[Chunk]:
        return []

    def chunks(self, prompt: int, delta: ChoiceDelta, usage: ChunkUsage) -> list[Chunk]:
        return [self._reply([self._choice(prompt, delta)], usage)]

    def usage(self, usage: UsageReply) -> Chunk:
        return self._reply([], usage)

    def _reply(self, choices: list[CompletionChoice], usage: ChunkUsage) -> CompletionReply:
        return CompletionReply(
            self._id, "text_completion", self._created, self._call.model, self._fingerprint, choices, usage
        )

    def _choice(self, prompt: int, delta: ChoiceDelta) -> CompletionChoice:
        first = (prompt, delta.choice) in self._first
        self._first.discard((prompt, delta.choice))
        ids = self._call.return_token_ids
        return CompletionChoice(
            index=prompt * self._call.n + delta.choice,
            text=delta.text,
            logprobs=completion_logprobs(delta.logprobs) if self._call.logprobs else None,
            finish_reason=delta.finish,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if ids else UNSET,
            prompt_token_ids=self._started[prompt].prompt_token_ids if ids and first else UNSET,
        )


class ChatWriter:
    """Writes the replies of one chat call."""

    def __init__(self, call: Call, started: Sequence[Started], fingerprint: str) -> None:
        assert len(started) == 1, "a chat is one prompt"
        self._call = call
        self._prompt_ids = started[0].prompt_token_ids if call.return_token_ids else UNSET
        self._id = f"chatcmpl-{started[0].request_id}"
        self._created = int(started[0].created_unix_s)
        self._fingerprint = fingerprint

    def whole(self, prompt: int, done: WholeChoice) -> ChatChoice:
        """One choice of the complete reply."""
        assert prompt == 0 and not isinstance(done.logprobs, CompletionLogprobs)
        ids = done.token_ids if self._call.return_token_ids else UNSET
        return ChatChoice(done.choice, ChatMessage(done.text), done.logprobs, done.finish, done.stop_reason, ids)

    def without_choices(self, usage: UsageReply) -> ChatReply:
        """The complete reply but for its choices."""
        return ChatReply(
            self._id,
            "chat.completion",
            self._created,
            self._call.model,
            self._fingerprint,
            [],
            usage,
            self._prompt_ids,
        )

    def opening(self, usage: ChunkUsage) -> list[Chunk]:
        """What a stream begins with: the role of every choice's message."""
        role = ChatDelta("assistant", "")
        chunks = [self._chunk([ChatChunkChoice(c, role)], usage) for c in range(self._call.n)]
        return [self._chunk(chunks[0].choices, usage, self._prompt_ids), *chunks[1:]]

    def chunks(self, prompt: int, delta: ChoiceDelta, usage: ChunkUsage) -> list[Chunk]:
        """Text in one chunk, the finish in another that has no text, as OpenAI's own streams have it."""
        chunks: list[Chunk] = []
        if delta.text or delta.token_ids:
            content = ChatChunkChoice(
                delta.choice, ChatDelta(content=delta.text), self._logprobs(delta), token_ids=self._ids(delta)
            )
            chunks.append(self._chunk([content], usage))
        if delta.finish is not None:
            end = ChatChunkChoice(delta.choice, ChatDelta(), None, delta.finish, delta.stop_reason)
            chunks.append(self._chunk([end], usage))
        return chunks

    def usage(self, usage: UsageReply) -> Chunk:
        return self._chunk([], usage)

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: ChunkUsage,
        prompt_ids: Sequence[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._created,
            self._call.model,
            self._fingerprint,
            choices,
            usage,
            prompt_ids,
        )

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        return chat_logprobs(delta.logprobs) if self._call.logprobs else None

    def _ids(self, delta: ChoiceDelta) -> Sequence[int] | UnsetType:
        return delta.token_ids if self._call.return_token_ids else UNSET


def completion_logprobs(infos: Sequence[TokenLogprobInfo]) -> CompletionLogprobs:
    """The token taken is always among the top ones, so there may be one more of them than was asked for."""
    return CompletionLogprobs(
        text_offset=[info.text_offset for info in infos],
        token_logprobs=[info.chosen.logprob for info in infos],
        tokens=[_token_name(info.chosen) for info in infos],
        top_logprobs=[_by_name((*info.top, info.chosen)) for info in infos],
    )


def chat_logprobs(infos: Sequence[TokenLogprobInfo]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                info.chosen.text,
                info.chosen.logprob,
                list(info.chosen.raw),
                [ChatToken(entry.text, entry.logprob, list(entry.raw)) for entry in info.top],
            )
            for info in infos
        ]
    )


def _by_name(entries: Iterable[LogprobEntry]) -> dict[str, float]:
    """Two ids may have one text; the likelier of them, which comes first, keeps the name."""
    named: dict[str, float] = {}
    for entry in entries:
        named.setdefault(_token_name(entry), entry.logprob)
    return named


def _token_name(entry: LogprobEntry) -> str:
    """A token that is part of a character has no text of its own; OpenAI writes its bytes, as in "bytes:\\xe2\\x82"."""
    try:
        entry.raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.raw)
    return entry.text
