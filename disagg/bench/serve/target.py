"""The endpoint that is measured: which model it has, what of a request it takes, and one request's stream from end to end.

Any server with `POST /v1/completions` that streams will do. What not all of them take is tried out before anything is measured:
prompts as token ids (and of which vocabulary), `ignore_eos`; without these, prompts are text, and answers may be short.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from disagg.bench.serve.figures import Answered, Failed, Outcome
from disagg.bench.serve.http import Client, ExchangeLost
from disagg.bench.serve.sse import DONE, EventParser, MalformedStream, decode_event, error_text
from disagg.types.errors import DisaggError, Unavailable
from disagg.types.plain import one_line

BODY_BYTES = 1 << 20  # of an answer that is no stream
DETAIL_CHARS = 300
PROBE_S = 60.0
VOCABULARIES = ((1000, 30_000), (1000, 8000), (200, 1000), (50, 200), (3, 60))  # tried in this order
PROBE_WORDS = 64


class Form(Struct, frozen=True):
    """What requests look like that this endpoint takes. ids: (from, to) of token ids, None for text."""

    model: str
    ids: tuple[int, int] | None
    ignore_eos: bool
    temperature: float | None = 0.0
    extra: dict[str, Any] = {}

    def body(self, prompt: Sequence[int] | str, output_tokens: int, return_ids: bool = False) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if return_ids:
            body["return_token_ids"] = True
        return msgspec.json.encode({**body, **self.extra})


class Answer(Struct):
    """What came of one request. ids, text: what was said, if it was to be kept."""

    outcome: Outcome
    ids: list[int]
    text: str


class _Stream:
    """Hears one answer."""

    def __init__(self, keep: bool) -> None:
        self._parser = EventParser()
        self._keep = keep
        self.raw = bytearray()  # of the beginning, for what is no stream
        self.first_s = self.last_s = 0.0
        self.gaps_s = array("d")
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.prompt_tokens = self.output_tokens = 0
        self.finished = self.done = False
        self.error = ""

    def heard(self, received: bytes, at_s: float) -> None:
        if not self.first_s and len(self.raw) < BODY_BYTES:
            self.raw += received[: BODY_BYTES - len(self.raw)]
        for data in self._parser.feed(received):
            if data == DONE:
                self.done = True
                continue
            event = decode_event(data)
            if event.error is not None:
                self.error = error_text(event.error) or "an error without words"
            if event.usage is not None:
                self.prompt_tokens = event.usage.prompt_tokens
                self.output_tokens = event.usage.completion_tokens
            if event.choices:
                choice = event.choices[0]
                if self.first_s:
                    self.gaps_s.append(at_s - self.last_s)
                else:
                    self.first_s = at_s
                    self.raw.clear()
                self.last_s = at_s
                self.finished |= choice.finish_reason is not None
                if self._keep:
                    self.ids += choice.token_ids or ()
                    self.texts.append(choice.text or "")

    def wrong(self, status: int, content_type: bytes) -> tuple[str, str] | None:
        """(cause, detail), if this was no whole answer."""
        if status != 200:
            return f"status {status}", error_text(bytes(self.raw))
        if self.error:
            return "an error within the stream", self.error
        if not content_type.startswith(b"text/event-stream") and not self.first_s:
            return "no stream", f"content-type {content_type.decode('latin-1') or 'unsaid'}"
        if not self.first_s:
            return "no token", "the stream ended without one"
        if (not self.finished and not self.done) or self._parser.partial:
            return "a stream that was cut off", f"after {1 + len(self.gaps_s)} chunks"
        return None


class Target:
    def __init__(self, client: Client, deadline_s: float) -> None:
        self._client = client
        self._deadline_s = deadline_s

    async def ask(
        self, body: bytes, wanted_tokens: tuple[int, int], due_s: float | None = None, keep: bool = False
    ) -> Answer:
        """One request, to its end. wanted_tokens: (input, output), which count where the endpoint does not say `usage`.

        due_s: when it was to be sent. keep: what is said is wanted. Cancelled, it counts as nothing.
        """
        sent_s = time.perf_counter()
        late_s = max(0.0, sent_s - due_s) if due_s is not None else 0.0
        stream = _Stream(keep)
        cause = detail = ""
        try:
            async with asyncio.timeout(self._deadline_s):
                connection = await self._client.post("/completions", body, stream.heard)
            if wrong := stream.wrong(connection.status, connection.content_type):
                cause, detail = wrong
        except TimeoutError:
            cause = f"no end within {self._deadline_s:g} s"
            detail = f"after {len(stream.gaps_s) + 1} chunks" if stream.first_s else "nothing came"
        except ExchangeLost as error:
            cause, detail = "connection", str(error)
        except MalformedStream as error:
            cause, detail = "a malformed stream", str(error)
        if cause:
            detail = one_line(detail, DETAIL_CHARS)
            return Answer(Failed(sent_s, time.perf_counter(), cause, detail, late_s), [], "")
        answered = Answered(
            sent_s,
            stream.first_s,
            stream.last_s,
            stream.gaps_s,
            stream.prompt_tokens or wanted_tokens[0],
            stream.output_tokens or 1 + len(stream.gaps_s),
            late_s,
            wanted_tokens,
        )
        return Answer(answered, stream.ids, "".join(stream.texts))

    async def model(self) -> str:
        """Its only model. Raises DisaggError."""
        body = bytearray()

        def heard(part: bytes, at_s: float) -> None:
            body.extend(part)
            if len(body) > BODY_BYTES:
                raise MalformedStream(f"/v1/models answered more than {BODY_BYTES} bytes")

        url = self._client.origin.url
        try:
            async with asyncio.timeout(min(self._deadline_s, PROBE_S)):
                connection = await self._client.get("/models", heard)
        except (ExchangeLost, TimeoutError, MalformedStream) as error:
            raise Unavailable(f"nobody answers at {url} ({one_line(str(error)) or 'no answer in time'})") from error
        try:
            models = [str(each["id"]) for each in msgspec.json.decode(bytes(body))["data"]]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, KeyError) as error:
            said = f"{url}/models answered {connection.status}, and names no models"
            raise DisaggError(f"{said}; name one with --model") from error
        if len(models) != 1:
            names = one_line(", ".join(models)) or "none"
            raise DisaggError(f"{url} serves {names}; name one with --model")
        return models[0]

    async def form(self, wished: Form, kind: str, ids: tuple[int, int] | None) -> tuple[Form, float]:
        """What it takes of a request, and tokens per word of a text. kind: auto, ids or text. ids: a range that was asked for,
        so that no text stands in for it. Raises DisaggError."""
        tried: list[Form] = []
        if kind != "text":
            tried += [msgspec.structs.replace(wished, ids=each) for each in ((ids,) if ids else VOCABULARIES)]
        if kind != "ids" and ids is None:
            tried.append(msgspec.structs.replace(wished, ids=None))
        without = [msgspec.structs.replace(form, ignore_eos=False) for form in tried]
        if wished.ignore_eos:
            tried += without[:1] + without[1:][-1:]
        else:
            tried = without
        refused: Outcome | None = None
        for form in tried:
            prompt: list[int] | str = " the" * PROBE_WORDS
            if form.ids is not None:
                prompt = [form.ids[0], (form.ids[0] + form.ids[1]) // 2, form.ids[1] - 1]
            answer = await self.ask(form.body(prompt, 2), (PROBE_WORDS, 2))
            if isinstance(answer.outcome, Answered):
                return form, max(0.1, answer.outcome.input_tokens / PROBE_WORDS)
            refused = answer.outcome
            if not refused.cause.startswith("status 4"):
                break
        assert isinstance(refused, Failed)
        answered = refused.cause.startswith("status ") or refused.cause == "no stream"
        does = "refuses" if refused.cause.startswith("status 4") else "fails" if answered else "does not answer"
        raise DisaggError(f"{self._client.origin.url} {does}: {refused.cause}: {refused.detail}")
