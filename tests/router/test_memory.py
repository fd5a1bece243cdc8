"""What answers and texts may take in a router, by what is really there: slow readers lose theirs, and nobody else anything."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages.legs import StartLeg
from disagg.router.budget import SMALL_BYTES, Budget
from disagg.router.mailbox import CHUNK_BYTES, Mailbox
from disagg.router.requests import ChoiceDelta, Finished, LogprobEntry, Started, TokenLogprobInfo, Update, Usage
from disagg.types.errors import Overloaded
from disagg.types.ids import FinishReason
from tests.router.conftest import NORMAL, Cluster, request
from tests.router.fake_server import FakeServer, answer, prefill

MIB = 1 << 20
LARGE = 4 * MIB
END = Finished(Usage(1, 1, 0), (), 1)


def test_new_requests_are_refused_at_half_and_answers_at_the_whole() -> None:
    budget = Budget(LARGE)
    first, second, third = budget.hold(), budget.hold(), budget.hold()
    first.add(LARGE // 2)
    with pytest.raises(Overloaded, match=r"have 2MiB of text and answers in memory; router\.memory_bytes = 4MiB"):
        second.add(SMALL_BYTES + 1, new=True)
    second.add(LARGE // 2)
    with pytest.raises(Overloaded):
        third.add(SMALL_BYTES + 1)
    third.add(SMALL_BYTES)  # who holds little is always served
    first.release()
    first.release()
    third.give(100)
    assert budget.used_bytes == LARGE // 2 + SMALL_BYTES - 100
    second.release()
    third.release()
    assert budget.used_bytes == 0


def delta(choice: int, text: str = "x", tokens: int = 1, logprobs: int = 0) -> ChoiceDelta:
    entry = LogprobEntry(1, "x", b"x", -1.0)
    rows = (TokenLogprobInfo(entry, (entry,) * logprobs, 0),) * tokens if logprobs else ()
    return ChoiceDelta(choice, text, tuple(range(tokens)), rows)


class Taker:
    """Takes deltas at once, as long as it is ready."""

    def __init__(self) -> None:
        self.ready = False
        self.got: list[Update] = []
        self.num_taken = 0

    def __call__(self, delta: ChoiceDelta) -> bool:
        if self.ready:
            self.got.append(delta)
            self.num_taken += 1
        return self.ready

    async def read(self, mailbox: Mailbox) -> None:
        """The reader that it belongs to."""
        async for update in mailbox.updates():
            self.got.append(update)


@given(steps=st.lists(st.sampled_from(["put", "two", "ready", "busy", "turn"]), max_size=40))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_what_is_taken_at_once_overtakes_nothing(steps: list[str]) -> None:
    budget = Budget(64 * MIB)

    async def run() -> None:
        taker, words = Taker(), iter(range(1000))
        mailbox = Mailbox(budget.hold(), 32 * MIB, taker)
        reading = asyncio.create_task(taker.read(mailbox))
        mailbox.put(Started("r", (1,), 0.0))
        for step in steps:
            match step:
                case "ready" | "busy":
                    taker.ready = step == "ready"
                case "turn":
                    await asyncio.sleep(0)
                case _:
                    for _ in range(1 + (step == "two")):
                        mailbox.put(delta(0, f"{next(words)} "))
        mailbox.put(END)
        await reading
        assert isinstance(taker.got[0], Started) and taker.got[-1] is END
        text = "".join(each.text for each in taker.got if isinstance(each, ChoiceDelta))
        assert text == "".join(f"{word} " for word in range(next(words)))
        mailbox.close()

    asyncio.run(run())
    assert budget.used_bytes == 0


async def test_who_waits_with_nothing_before_it_takes_at_once_and_never_after_it_is_gone() -> None:
    taker = Taker()
    mailbox = Mailbox(Budget(64 * MIB).hold(), 32 * MIB, taker)
    reading = asyncio.create_task(taker.read(mailbox))
    mailbox.put(Started("r", (1,), 0.0))
    await asyncio.sleep(0)
    taker.ready = True
    mailbox.put(delta(0))
    assert taker.num_taken == 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    mailbox.put(delta(0))
    assert taker.num_taken == 1


async def everything(mailbox: Mailbox) -> list[Update]:
    return [update async for update in mailbox.updates()]


@given(puts=st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=3), st.integers(0, 40)), max_size=40))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_what_was_put_is_read_in_order_and_nothing_is_held_after(puts: list[tuple[int, str, int]]) -> None:
    budget = Budget(64 * MIB)
    mailbox = Mailbox(budget.hold(), 32 * MIB)
    mailbox.put(Started("r", (1,), 0.0))
    for choice, text, tokens in puts:
        mailbox.put(delta(choice, text, tokens))
    mailbox.put(END)
    updates = asyncio.run(everything(mailbox))
    assert isinstance(updates[0], Started) and updates[-1] == END
    for choice in range(4):
        read = [update for update in updates if isinstance(update, ChoiceDelta) and update.choice == choice]
        assert "".join(d.text for d in read) == "".join(text for c, text, _ in puts if c == choice)
        assert [t for d in read for t in d.token_ids] == [t for c, _, n in puts if c == choice for t in range(n)]
    assert budget.used_bytes == 0


async def test_what_waits_is_formatted_in_pieces_however_much_it_is() -> None:
    mailbox = Mailbox(Budget(1024 * MIB).hold(), 1024 * MIB)
    for _ in range(3000):
        mailbox.put(delta(0, logprobs=20))
    mailbox.put(END)
    read = [update for update in await everything(mailbox) if isinstance(update, ChoiceDelta)]
    assert sum(len(update.token_ids) for update in read) == 3000
    assert max(len(update.token_ids) for update in read) < CHUNK_BYTES // (20 * 250)


async def test_more_than_one_answer_may_take_ends_it_and_frees_what_waits() -> None:
    budget = Budget(64 * MIB)
    mailbox = Mailbox(budget.hold(), MIB)
    while mailbox.overfull is None:
        mailbox.put(delta(0, logprobs=20))
    assert budget.used_bytes == 0
    assert "wait for the client to read them; router.answer_bytes = 1MiB" in str(mailbox.overfull)


async def test_a_client_that_does_not_read_loses_its_request_and_nobody_else_does(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL, answer_bytes=MIB)
    slow = router.generate(request("hi", n=8, max_tokens=400, logprobs=2))
    await anext(slow)
    await cluster.until(lambda: not router._dispatch.live, timeout_s=60.0)
    assert (await cluster.ask("hi")).text == {0: answer(0, 8)}
    with pytest.raises(Overloaded, match="wait for the client to read them"):
        async for _ in slow:
            pass
    assert router._budget.used_bytes == 0


async def all_at_once(server: FakeServer, leg: StartLeg) -> None:
    """The whole answer and the last word in one frame, as after a stream that was broken for a while."""
    finish, stop = FinishReason.LENGTH, leg.params.max_tokens
    server.say(*(server.tokens(leg, choice, 0, stop, finish) for choice in leg.choices), server.end(leg))


async def test_an_answer_whose_end_finds_no_room_is_no_whole_answer(cluster: Cluster) -> None:
    router = await cluster.up({"p0": prefill, "d0": all_at_once}, answer_bytes=MIB)
    slow = router.generate(request("hi", n=8, max_tokens=400, logprobs=2))
    await anext(slow)
    await cluster.until(lambda: not router._dispatch.live)
    with pytest.raises(Overloaded, match="wait for the client to read them"):
        async for _ in slow:
            pass
    assert cluster.metric("disagg_router_requests_total", outcome="overloaded") == 1


async def test_all_that_requests_held_is_given_back_however_they_end(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL)
    await cluster.ask("hi there", n=4, stop=("zzz",), logprobs=3)
    gone = router.generate(request("hi", n=8, max_tokens=100, logprobs=2))
    await anext(gone)
    assert router._budget.used_bytes > 0
    await gone.aclose()
    left = router.generate(request("hi"))
    task = asyncio.create_task(anext(left))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await left.aclose()
    assert router._budget.used_bytes == 0


async def test_a_full_router_refuses_long_prompts_and_serves_short_ones(cluster: Cluster) -> None:
    router = await cluster.up(NORMAL, memory_bytes=16 * MIB)
    filling = router.hold()
    filling.add(9 * MIB)
    assert (await cluster.ask("hi")).last[0].finish is FinishReason.LENGTH
    other = router.hold()
    with pytest.raises(Overloaded):
        other.add(MIB, new=True)
    filling.release()
    other.add(MIB, new=True)
    other.release()
