"""Which spans a request leaves, through the router: within its client's trace, with what the conventions name, and no text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.telemetry.traces import Span, Traces
from disagg.types.errors import DeadlineExceeded
from disagg.types.trace_context import TraceContext, begun, read_traceparent
from tests.router.conftest import Cluster
from tests.router.fake_server import decode, prefill, silent

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Kept(Traces):
    """Every request that says nothing is traced; spans are kept."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.spans: list[Span] = []
        self._ratio = ratio

    def begin(self, traceparent: str) -> TraceContext | None:
        return begun(traceparent, self._ratio, lambda size: b"\x07" * size)

    def put(self, spans: Sequence[Span]) -> None:
        self.spans += spans


async def test_a_request_leaves_a_span_in_its_clients_trace_and_its_legs_are_given_it(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": decode})
    kept = cluster.router._dispatch.outcomes.traces = Kept()
    await cluster.ask("hi there", max_tokens=4, n=2, traceparent=f"00-{TRACE}-{PARENT}-01", operation="chat")
    whole, *rest = kept.spans
    assert (whole.name, whole.kind, whole.error) == ("chat tiny", "server", "")
    assert (whole.context.trace_id, whole.parent_span_id) == (TRACE, PARENT)
    facts = whole.attributes
    assert facts["gen_ai.usage.input_tokens"] == 8 and facts["gen_ai.usage.output_tokens"] == 8
    assert facts["gen_ai.response.finish_reasons"] == ("length", "length") and facts["gen_ai.request.choice.count"] == 2
    assert "hi there" not in str(kept.spans)
    assert {span.name for span in rest} == {"queue", "attempt 1"}
    assert all(span.parent_span_id == whole.context.span_id for span in rest)
    for name in ("p0", "d0"):
        [leg] = cluster.servers[name].started
        assert read_traceparent(leg.traceparent) == whole.context


async def test_a_request_that_fails_says_why_and_one_that_is_not_sampled_says_nothing(cluster: Cluster) -> None:
    await cluster.up({"p0": prefill, "d0": silent})
    kept = cluster.router._dispatch.outcomes.traces = Kept(ratio=0.0)
    for said in (f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-01", ""):
        with pytest.raises(DeadlineExceeded):
            await cluster.ask("hi", max_tokens=4, deadline_s=0.5, traceparent=said)
    [whole] = [span for span in kept.spans if span.kind == "server"]
    assert whole.attributes["error.type"] == "deadline" and "deadline" in whole.error
    assert [leg.traceparent != "" for leg in cluster.servers["p0"].started] == [False, True, False]
