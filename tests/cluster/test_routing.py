"""Where requests go: the next turn of a conversation to the server that has what was said before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.models.tiny import VOCAB_SIZE, make_tiny

PAGE, TALKS, TURNS = 8, 3, 3
PROMPTS, LENGTH = 11, 40 * PAGE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_next_turn_of_a_conversation_goes_where_its_prefix_is(tmp_path: Path, family: str) -> None:
    """An odd number of conversations over two prefill servers, one turn at a time: in turns, every second one would go wrong.

    With a window, too, whose pages at the end of the prompt are what a prefix needs. A server that stood still for a moment
    counts as slow, so what is cached is much more than what is new: else it were right to compute it all on the other one.
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
                talk += [rng.randrange(3, VOCAB_SIZE) for _ in range(32 if turn else 320)]
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


@pytest.mark.timeout(600)
def test_a_prompt_goes_where_the_host_has_it_and_what_is_stored_is_known_of_all(tmp_path: Path) -> None:
    """Prefill servers whose pools hold one prompt and a half: of an odd number asked again, each is found on one of the hosts.

    Every prompt ends with its first token, so that prefill stores it; then all servers have it. The model computes much for
    little KV, so that a copy from the host is faster on any machine, however busy: that is what routers go by. They rightly pass
    over a server that stood still for a moment, of which it costs more than reading storage elsewhere, as happens to
    one prompt now and then where processors are scarce; in turns it would be five or six of these.
    """
    model = make_tiny("llama", tmp_path / "llama", intermediate_size=4096)
    pool = f"{LENGTH * 3 // 2 * 3 * 2 * 2 * 16 * 4}B"  # 3 layers, keys and values, 2 heads of 16, float32
    flags = ("--prefill", "2", "--page-tokens", str(PAGE), "--kv-memory", pool, "--dtype", "float32")
    tiers = ("--offload", "on", "--host-memory", "16MiB", "--storage", f"file://{tmp_path / 'store'}")
    always = ("--set", "offload.load=always")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(LENGTH)] for _ in range(PROMPTS)]
    with Cluster(tmp_path / "run", "--model", str(model), *flags, *tiers, *always) as cluster:
        names = cluster.servers("prefill")

        def pages(which: str) -> list[int]:
            return [sum(cluster.server(name)[which]) for name in names]

        def tokens(tier: str) -> float:
            series = f'disagg_prefix_hit_tokens_total{{tier="{tier}"}}'
            return sum(cluster.metrics(name).get(series, 0) for name in names)

        first = [cluster.complete(prompt, max_tokens=1, temperature=0).token_ids for prompt in prompts]
        whole = PROMPTS * LENGTH // PAGE
        cluster.wait(
            lambda: sum(pages("host_cached_pages")) >= whole, 30, f"{whole} pages on hosts that the router knows"
        )
        cluster.wait(lambda: pages("stored_pages") == [whole, whole], 30, f"{whole} pages in storage, known of all")
        assert sum(pages("cached_pages")) < whole, "pools hold it all, and nothing is shown"
        assert min(pages("host_cached_pages")) > 0, "one server did it all"
        for at in rng.sample(range(PROMPTS), PROMPTS):
            answer = cluster.complete(prompts[at], max_tokens=1, temperature=0)
            assert answer.token_ids == first[at]
            assert answer.usage["prompt_tokens_details"]["cached_tokens"] >= LENGTH - 2 * PAGE
        assert tokens("host") > PROMPTS * LENGTH / 2
        elsewhere = tokens("storage") / LENGTH
        assert elsewhere <= 2, (
            "prompts were sent to a server whose host has not got them, more than some stillness explains"
        )
        cluster.check_adds_up()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_next_turn_is_computed_by_the_decode_server_that_gave_the_last_answer(tmp_path: Path, family: str) -> None:
    """Where no prefill server has the answers that were given before. Each turn is asked under another salt, too, by which
    nothing is cached: no token differs.
    """
    model = make_tiny(family, tmp_path / family)
    rng = random.Random(family)
    pools = ("--prefill", "1", "--decode", "2", "--decode-tp", "2", "--page-tokens", str(PAGE), "--dtype", "float32")
    talk: list[int] = [rng.randrange(3, VOCAB_SIZE) for _ in range(120)]
    with Cluster(tmp_path / "run", "--model", str(model), *pools, "--kv-memory", "8MiB") as cluster:

        def computed(role: str) -> float:
            return sum(cluster.metrics(name)["disagg_prefill_tokens_total"] for name in cluster.servers(role))

        def settled(role: str, least: float) -> float:
            """`computed`, once it is that much: servers export by a beat, so an answer may come before what it took is seen."""
            cluster.wait(lambda: computed(role) >= least, 30, f"{least:g} prompt tokens of {role} servers")
            return computed(role)

        def known() -> int:
            """Pages of full attention that the router knows a decode server to have of the longest prompt."""
            return max(max(cluster.server(name)["cached_pages"], default=0) for name in cluster.servers("decode"))

        by_prefill = by_decode = 0.0
        for turn in range(TURNS):
            before = len(talk) // PAGE * PAGE if turn else 0
            talk += [rng.randrange(3, VOCAB_SIZE) for _ in range(20)]
            answer = cluster.complete(talk, max_tokens=24, temperature=0, ignore_eos=True)
            cached = answer.usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                by_decode += len(talk) - cached
                assert settled("decode", by_decode) == by_decode and computed("prefill") == by_prefill
                assert cached >= before - PAGE, f"of the {before} tokens before turn {turn}"
            fresh = cluster.complete(talk, max_tokens=24, temperature=0, ignore_eos=True, cache_salt=str(turn))
            assert fresh.usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer.token_ids == fresh.token_ids, f"turn {turn}"
            prompts = 1 if turn else 2  # the first answer's prompt is computed there, too
            by_prefill = settled("prefill", by_prefill + prompts * len(talk))
            talk += answer.token_ids[0]
            least = (len(talk) - 1) // PAGE
            cluster.wait(lambda least=least: known() >= least, 30, f"{least} pages that the router knows of")
        assert cluster.router_metrics()["disagg_router_local_prefills_total"] == TURNS - 1
        cluster.check_adds_up()
