"""Where requests go: the next turn of a conversation to the server that has what was said before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

PAGE, TALKS, TURNS = 8, 3, 3


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_next_turn_of_a_conversation_goes_where_its_prefix_is(tmp_path: Path, family: str) -> None:
    """An odd number of conversations over two prefill servers, one turn at a time: in turns, every second one would go wrong.

    With a window, too, whose pages at the end of the prompt are what a prefix needs.
    """
    model = make_tiny(family, tmp_path / family)
    rng = random.Random(family)
    pools = ("--prefill", "2", "--decode", "1", "--page-tokens", str(PAGE), "--kv-memory", "8MiB")
    with Cluster(tmp_path / "run", "--model", str(model), *pools) as cluster:

        def known_pages() -> int:
            """Of full attention, which all that was computed adds to, in all prefill servers."""
            cached = [cluster.server(name)["cached_pages"] for name in cluster.servers("prefill")]
            return sum(max(pages, default=0) for pages in cached)

        said: list[list[int]] = [[] for _ in range(TALKS)]
        pages = 0
        for turn in range(TURNS):
            for talk in said:
                before = len(talk) // PAGE * PAGE
                talk += [rng.randrange(3, VOCAB_SIZE) for _ in range(64)]
                answer = cluster.complete(talk, max_tokens=1, ignore_eos=True)
                cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
                assert cached >= before - 2 * PAGE, f"turn {turn} found {cached} of {before} tokens"
                pages += (len(talk) - before) // PAGE
                wanted = pages - TALKS
                cluster.wait(
                    lambda least=wanted: known_pages() >= least, 30, f"{wanted} pages that the router knows of"
                )
        used = [cluster.metrics(name)["disagg_prefill_tokens_total"] for name in cluster.servers("prefill")]
        assert min(used) > 0, "one server did it all"
        assert cluster.router_metrics()["disagg_router_expected_cached_tokens_total"] > 0
        cluster.check_adds_up()
