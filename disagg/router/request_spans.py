"""A request that has ended, as spans: itself, by OpenTelemetry's GenAI conventions, and its timeline below it. Pure.

Prompts and answers are never in them.
"""

from __future__ import annotations

from msgspec import Struct

from disagg.messages.legs import TimelineEvent
from disagg.router.requests import Asked
from disagg.telemetry.traces import Span, Value, spans_of
from disagg.types.trace_context import TraceContext, read_traceparent

NAMES = {"queued": "queue"}


class Ended(Struct, frozen=True, kw_only=True):
    """What has become of it. timeline: of the router alone; servers tell of theirs. error: empty if it was answered."""

    asked: Asked
    model: str
    arrived_unix_s: float
    ended_unix_s: float
    output_tokens: int
    cached_tokens: int
    attempts: int
    finish_reasons: tuple[str, ...]
    timeline: tuple[TimelineEvent, ...]
    outcome: str
    error: str = ""


def request_spans(ended: Ended, context: TraceContext) -> list[Span]:
    """context: of the request itself, as its legs were given it."""
    asked, params = ended.asked, ended.asked.params
    parent = read_traceparent(asked.client_traceparent)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": asked.operation,
        "gen_ai.provider.name": "disagg",
        "gen_ai.request.model": ended.model,
        "gen_ai.response.model": ended.model,
        "gen_ai.response.id": asked.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.usage.input_tokens": len(asked.prompt_token_ids),
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": ended.cached_tokens,
        "disagg.attempts": ended.attempts,
        "disagg.outcome": ended.outcome,
    }
    if params.max_tokens:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if ended.finish_reasons:
        attributes["gen_ai.response.finish_reasons"] = ended.finish_reasons
    if ended.error:
        attributes["error.type"] = ended.outcome
    whole = Span(
        name=f"{asked.operation} {ended.model}",
        context=context,
        parent_span_id=parent.span_id if parent is not None else "",
        start_unix_s=ended.arrived_unix_s,
        end_unix_s=max(ended.arrived_unix_s, ended.ended_unix_s),
        kind="server",
        attributes=attributes,
        error=ended.error,
    )
    return [whole, *spans_of(ended.timeline, context, NAMES)]
