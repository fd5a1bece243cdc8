"""Where a request's time went, read off its timeline."""

from __future__ import annotations

import pytest

from bench.gpu_cluster import Parts, kv_bytes, parse, parts_of
from disagg.messages.legs import TimelineEvent

EVENTS = (
    TimelineEvent("queued", 10.0, 10.1),
    TimelineEvent("decode-0/queued", 10.2, 10.25),
    TimelineEvent("prefill-0/chunk", 10.3, 10.5, "tokens 0-2048"),
    TimelineEvent("prefill-0/chunk", 10.5, 10.75, "tokens 2048-4096"),
    TimelineEvent("decode-0/grant", 10.25, 10.4),
    TimelineEvent("decode-0/piece", 10.6, 10.65, "rank 0"),
    TimelineEvent("decode-0/piece", 10.78, 10.8, "rank 0"),
    TimelineEvent("prefill-0/first_token", 10.75, 10.75),
    TimelineEvent("decode-0/transfer", 10.4, 10.85),
)


def test_the_parts_of_a_request_are_read_off_its_timeline() -> None:
    parts = parts_of(EVENTS)
    expected = Parts(
        waited=0.3,
        prefill=0.45,
        chunks=2,
        granted=0.2,
        first_piece=0.45,
        landed=0.05,
        transferred=0.1,
        pieces=2,
        late_pieces=1,
    )
    for name in Parts.__struct_fields__:
        assert getattr(parts, name) == pytest.approx(getattr(expected, name)), name


@pytest.mark.parametrize("name", ["prefill-0/chunk", "prefill-0/first_token", "decode-0/grant", "decode-0/transfer"])
def test_a_timeline_that_lacks_a_part_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=name.partition("/")[2]):
        parts_of([event for event in EVENTS if event.name != name])


def test_the_default_shape_has_the_kv_of_llama_3_1_8b() -> None:
    assert kv_bytes(parse([])) == 8192 * 128 * 1024
