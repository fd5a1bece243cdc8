"""What the faces (gRPC, OpenAI HTTP) ask of the router, and what they get back. Frozen values; no I/O.

A face parses, the router validates, tokenizes, dispatches, replays, detokenizes and finds stop strings; a face formats.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.legs import TimelineEvent
from disagg.router.prefixes import NO_PAGES, PromptPages
from disagg.types.ids import FinishReason
from disagg.types.sampling import SamplingParams
from disagg.types.trace_context import TraceContext


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """One prompt with its parameters."""

    model: str
    prompt: str | tuple[int, ...]  # text, or token ids taken as they are
    params: SamplingParams  # max_tokens 0 means "as many as fit"
    # The client named no max_tokens, and params.max_tokens is what its interface then gives; where fewer fit, as many as fit.
    max_tokens_unasked: bool = False
    seed: int | None = None  # None: the router draws one
    deadline_s: float | None = None  # None: the configured one
    cache_salt: str = ""
    tenant: str = ""  # who asks, as far as a face can tell (router/tenants): those that wait take turns
    # The tenant whose key was shown, where keys are asked for: what is cached for it is found by nobody else.
    owner: str = ""
    client_request_id: str = ""  # what the client calls it (logs only); the router's own id is `Started.request_id`
    # The tokenizer adds BOS and the like to a text prompt (a rendered chat has them already).
    add_special_tokens: bool = True
    # What the client calls the prompt, for errors: `prompt[3]` of a call with several, `messages` of a chat.
    prompt_name: str = "prompt"
    call: str = ""  # which call it is part of, of those with several prompts; empty: it is a call by itself
    # Why the face could not hold the answer, if it could not: said once everything else is in order.
    too_large: str = ""
    priority: int = 0  # lower is more urgent, among the tenant's own
    traceparent: str = ""  # which trace it is part of, as its client says (W3C); nonsense is as good as nothing
    operation: str = "text_completion"  # what it is, as OpenTelemetry's GenAI conventions name it
    # Which conversation it is part of, by its client's name for it: it is rather sent where that was before.
    session: str = ""
    # It is of no use to its client if its first token comes later than that after it was asked for.
    slo_ttft_s: float | None = None

    @property
    def the_prompt(self) -> str:
        return subject_of(self.prompt_name)


def subject_of(prompt_name: str) -> str:
    """The prompt as the subject of a sentence."""
    return {"prompt": "the prompt", "messages": "the chat's prompt"}.get(prompt_name, prompt_name)


class Asked(Struct, frozen=True, kw_only=True):
    """A request that was accepted. What has no comment is as in GenerateRequest."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams  # max_tokens 0: as many as the first pair can hold, and the model allows
    deadline_s: float  # on the clock of the events' now_s
    limit_s: float  # how long after its arrival the deadline is
    prompt_name: str = "prompt"
    cache_salt: str = ""
    tenant: str = ""
    call: str = ""
    serial: int = 0  # which request of this router it is, from 0
    priority: int = 0
    pages: PromptPages = NO_PAGES  # names of the prompt's pages, if they are of use
    trace: TraceContext | None = None  # its own span, if it is traced
    client_traceparent: str = ""  # `GenerateRequest.traceparent`
    operation: str = "text_completion"
    session: str = ""
    slo_ttft_s: float | None = None
    turns: int = 0  # as in RequestFacts


class Started(Struct, frozen=True):
    """The request was accepted (validated and tokenized). First update of every request that is.

    abort_token: known to whoever began the request, and to nobody else: what Abort asks for. Never logged.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    created_unix_s: float
    abort_token: str = ""


class LogprobEntry(Struct, frozen=True):
    """One token with its log-probability. raw: the token's own bytes (a token may be part of a character)."""

    token_id: int
    text: str
    raw: bytes
    logprob: float


class TokenLogprobInfo(Struct, frozen=True):
    """The token taken, and the most likely ones at its place, best first. text_offset: in characters, in the output."""

    chosen: LogprobEntry
    top: tuple[LogprobEntry, ...]
    text_offset: int


class ChoiceDelta(Struct, frozen=True):
    """What one choice has newly produced.

    text: final characters only; token_ids and logprobs may run ahead of it (held-back stop strings, half characters).
    finish: set on the choice's last delta. stop_reason: the stop string or token id that ended it, if one did.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobInfo, ...] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class Usage(Struct, frozen=True):
    """Tokens. completion_tokens: all choices, without what a stop string trimmed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Finished(Struct, frozen=True):
    """Last update of a request that ended in tokens. A request that fails raises an error of `types.errors` instead."""

    usage: Usage
    timeline: tuple[TimelineEvent, ...]
    attempts: int


Update = Started | ChoiceDelta | Finished
