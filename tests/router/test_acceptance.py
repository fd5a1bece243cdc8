"""The acceptance table: whatever is repeated, reordered, lost and sent again, each token is taken once, in order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.messages.legs import LegTokens
from disagg.messages.plan import TokenLogprobs
from disagg.router.acceptance import AcceptanceTable, Accepted, Dropped
from disagg.types.ids import FinishReason, LegKey


def says(attempt: int, choice: int, first: int, *ids: int, finish: FinishReason | None = None) -> LegTokens:
    logprobs = tuple(TokenLogprobs(-float(token_id)) for token_id in ids)
    return LegTokens(LegKey("r", attempt, 0), choice, first, tuple(ids), logprobs, finish)


def table(n: int = 1) -> AcceptanceTable:
    made = AcceptanceTable(n)
    made.begin(1)
    return made


def feed(into: AcceptanceTable, message: LegTokens) -> Accepted | Dropped:
    return into.accept(message.key.attempt, message)


def test_the_first_token_is_taken_from_prefill_and_not_again_from_decode() -> None:
    t = table()
    assert feed(t, says(1, 0, 0, 7)) == Accepted(0, 0, (7,), (TokenLogprobs(-7.0),), None)
    assert feed(t, says(1, 0, 0, 7)) is Dropped.DUPLICATE
    assert t.counts.duplicates == 1


def test_overlap_is_trimmed_and_the_rest_taken() -> None:
    t = table()
    feed(t, says(1, 0, 0, 7))
    taken = feed(t, says(1, 0, 0, 7, 8, 9))
    assert isinstance(taken, Accepted)
    assert (taken.first_index, taken.token_ids, [p.logprob for p in taken.logprobs]) == (1, (8, 9), [-8.0, -9.0])


def test_a_gap_is_held_until_it_is_filled() -> None:
    t = table()
    assert feed(t, says(1, 0, 1, 8, finish=FinishReason.LENGTH)) is Dropped.HELD
    taken = feed(t, says(1, 0, 0, 7))
    assert isinstance(taken, Accepted)
    assert (taken.token_ids, taken.finish) == ((7, 8), FinishReason.LENGTH)


def test_held_tokens_are_bounded_and_the_next_index_is_taken_all_the_same() -> None:
    t = AcceptanceTable(1, max_held_tokens=2)
    t.begin(1)
    feed(t, says(1, 0, 1, 1, 2, 3, 4))
    feed(t, says(1, 0, 0, 0))
    assert t.token_ids(0) == (0, 1, 2)
    feed(t, says(1, 0, 3, 3, 4, 5, 6))
    assert t.token_ids(0) == tuple(range(7))


def test_another_attempt_and_an_unknown_choice_are_stale() -> None:
    t = table()
    t.begin(2)
    assert feed(t, says(1, 0, 0, 7)) is Dropped.STALE
    assert feed(t, says(3, 0, 0, 7)) is Dropped.STALE
    assert feed(t, says(2, 1, 0, 7)) is Dropped.STALE
    assert t.counts.stale == 3


def test_what_a_retired_attempt_left_behind_a_gap_is_forgotten() -> None:
    t = table()
    feed(t, says(1, 0, 1, 99, finish=FinishReason.STOP))
    t.begin(2)
    feed(t, says(2, 0, 0, 7))
    assert (t.token_ids(0), t.finished(0)) == ((7,), None)


def test_a_contradiction_is_counted_and_ignored_whole() -> None:
    t = table()
    feed(t, says(1, 0, 0, 7, 8))
    assert feed(t, says(1, 0, 1, 9, 10)) is Dropped.CONTRADICTION
    assert (t.token_ids(0), t.counts.contradictions) == ((7, 8), 1)
    feed(t, says(1, 0, 3, 11))
    assert feed(t, says(1, 0, 3, 12)) is Dropped.CONTRADICTION


def test_a_second_opinion_about_the_end_is_a_contradiction() -> None:
    t = table()
    feed(t, says(1, 0, 1, 8, finish=FinishReason.STOP))
    assert feed(t, says(1, 0, 1, 8, 9)) is Dropped.CONTRADICTION
    assert feed(t, says(1, 0, 0, 7, finish=FinishReason.STOP)) is Dropped.CONTRADICTION
    feed(t, says(1, 0, 0, 7))
    assert t.finished(0) is FinishReason.STOP


def test_after_the_finish_everything_is_dropped() -> None:
    t = table(2)
    feed(t, says(1, 0, 0, 7, finish=FinishReason.STOP))
    assert feed(t, says(1, 0, 1, 8)) is Dropped.DUPLICATE
    assert t.finish(1, FinishReason.STOP)
    assert not t.finish(1, FinishReason.STOP)
    assert feed(t, says(1, 1, 0, 8)) is Dropped.DUPLICATE
    assert t.unfinished() == ()


def test_a_finish_may_come_without_tokens() -> None:
    t = table()
    feed(t, says(1, 0, 0, 7))
    taken = feed(t, says(1, 0, 1, finish=FinishReason.ABORT))
    assert isinstance(taken, Accepted)
    assert (taken.token_ids, taken.finish) == ((), FinishReason.ABORT)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[list[int]], list[list[tuple[int, int, int]]]]:
    """Outputs per choice, and per attempt the pieces (choice, start, stop) that arrive, in any order, some twice, some not."""
    outputs = [draw(st.lists(st.integers(0, 50), min_size=1, max_size=12)) for _ in range(draw(st.integers(1, 3)))]
    attempts = []
    for _ in range(draw(st.integers(1, 3))):
        pieces = []
        for _ in range(draw(st.integers(0, 12))):
            choice = draw(st.integers(0, len(outputs) - 1))
            start = draw(st.integers(0, len(outputs[choice]) - 1))
            pieces.append((choice, start, draw(st.integers(start + 1, len(outputs[choice])))))
        attempts.append(pieces)
    return outputs, attempts


@settings(derandomize=True, deadline=None, max_examples=150)
@given(histories(), st.randoms(use_true_random=False))
def test_any_interleaving_of_any_attempts_gives_the_sequence_once(history: object, random: object) -> None:
    outputs, attempts = history  # type: ignore[misc]
    t = AcceptanceTable(len(outputs), max_held_tokens=5)
    got: list[list[int]] = [[] for _ in outputs]
    old: list[LegTokens] = []

    def take(message: LegTokens) -> None:
        taken = feed(t, message)
        if isinstance(taken, Accepted):
            assert taken.first_index == len(got[taken.choice])
            assert [p.logprob for p in taken.logprobs] == [-float(i) for i in taken.token_ids]
            got[taken.choice].extend(taken.token_ids)

    for attempt, pieces in enumerate(attempts, 1):
        t.begin(attempt)
        messages = []
        for choice, start, stop in pieces:
            end = FinishReason.LENGTH if stop == len(outputs[choice]) else None
            messages.append(says(attempt, choice, start, *outputs[choice][start:stop], finish=end))
        stale = [m for m in old if random.random() < 0.5]  # type: ignore[attr-defined]
        mixed = messages + stale
        random.shuffle(mixed)  # type: ignore[attr-defined]
        for message in mixed:
            take(message)
        old += messages
        for choice, output in enumerate(outputs):
            assert got[choice] == output[: len(got[choice])]
    # The last attempt's sender repeats what was not acknowledged: everything, in order.
    t.begin(len(attempts) + 1)
    for choice, output in enumerate(outputs):
        for index, token_id in enumerate(output):
            last = index == len(output) - 1
            take(says(len(attempts) + 1, choice, index, token_id, finish=FinishReason.LENGTH if last else None))
    assert got == outputs
    assert [list(t.token_ids(c)) for c in range(len(outputs))] == outputs
    assert t.unfinished() == ()
    assert t.counts.contradictions == 0
