"""The traps into which rings of this kind fall, one test each: the naive version falls in, what is shipped does not.

Each naive version stands here, as small as it can be and still look right. A trap that no naive version fell into would
prove nothing.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from disagg.engine.handoff.ring_table import RingTable
from disagg.messages.layout import GroupPages, LayerGroup
from disagg.messages.link import Entry, FirstToken
from disagg.messages.pieces import HeadSlice, Piece, RankSlice
from disagg.messages.transfer import Landing, Unbind
from disagg.staging.copy import gather, scatter
from disagg.staging.identity import identity_seed
from disagg.staging.pieces import group_piece_bytes, split_group_piece
from disagg.staging.ring import RingAllocator, RingEntry, RingWriterView
from disagg.staging.rows import PagedRows, PageShape
from disagg.transfer.session import ReceiveSession, SendSession
from disagg.transfer.states import ReceiveState
from disagg.types.ids import LegKey
from disagg.worker import transfer_driver
from tests.transfer.test_transfer_driver import Pair
from tests.transfer_backends.loopback import Hub, LoopbackBackend

SEGMENT = 64
FULL = LayerGroup("full", (0, 1), 1, 4, "float32")
PAGE_TOKENS = 4


class NaiveRing:
    """(round, offset), and a watermark that moves only when nothing is live. No segments: an entry may not wrap."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.head, self.round = capacity, 0, 0
        self.live: set[tuple[int, int, int]] = set()
        self.watermark = (0, 0)

    def assign(self, nbytes: int) -> tuple[int, int, int]:
        assert nbytes <= self.capacity, "an oversized piece fails"
        if nbytes > self.capacity - self.head:
            self.round, self.head = self.round + 1, 0
        entry = (self.round, self.head, nbytes)
        self.head += nbytes
        self.live.add(entry)
        return entry

    def free(self, entry: tuple[int, int, int]) -> None:
        self.live.remove(entry)
        if not self.live:
            self.watermark = (self.round, self.head)

    def may_write(self, entry: tuple[int, int, int]) -> bool:
        round_, offset, nbytes = entry
        mark = self.watermark[0] * self.capacity + self.watermark[1]
        return round_ * self.capacity + offset + nbytes <= mark + self.capacity


# ---- an empty ring whose head is past the watermark wedges


def test_an_empty_ring_whose_head_is_past_the_watermark_does_not_wedge() -> None:
    # One segment, half used and freed: the next large entry skips to the next round, beyond watermark + capacity.
    naive = NaiveRing(SEGMENT)
    naive.free(naive.assign(40))
    assert not naive.may_write(naive.assign(60)), "the naive ring is empty but for this entry, and may never write it"

    ring, writer = RingAllocator(SEGMENT, SEGMENT), RingWriterView(SEGMENT)
    ring.free(ring.assign(40))
    writer.update(ring.watermark)
    entry = ring.assign(60)
    assert entry.locate(SEGMENT) == (1, 0)
    writer.update(ring.watermark)  # the watermark that travels with the entry is past the skipped bytes
    assert writer.may_write(entry)


def test_a_new_subscriber_begins_at_the_current_watermark() -> None:
    ring = RingAllocator(5 * SEGMENT, SEGMENT)
    for _ in range(40):
        ring.free(ring.assign(SEGMENT))
    entry = ring.assign(SEGMENT)
    assert not RingWriterView(5 * SEGMENT).may_write(entry), "a view that begins at zero waits for ever"
    assert RingWriterView(5 * SEGMENT, watermark=ring.watermark).may_write(entry)


# ---- one leaked allocation after an abort pins the watermark for ever


def test_an_abort_leaves_no_entry_behind_that_would_pin_the_watermark() -> None:
    aborted, other = LegKey("aborted", 0, 0), LegKey("other", 0, 0)
    for forgets in (True, False):
        rings = RingTable(4 * 2 * SEGMENT, SEGMENT, 2, ranks=1, idle_s=1.0)
        rings.add(0)
        assert rings.open(0, "peer", 0.0)
        ring, writer = rings.links[0], RingWriterView(2 * SEGMENT)
        ring.assign(aborted, 0, 0, SEGMENT, 0.0)
        if not forgets:  # the naive version drops the leg and, with it, who would free its entry
            ring.free_leg(aborted)
        written = 0
        for piece_no in range(20):
            entry_id, entry = ring.assign(other, piece_no, 0, SEGMENT, 0.0)
            writer.update(ring.watermarks[0])
            if not writer.may_write(entry):
                break
            written += 1
            ring.free(entry_id)
        assert written == (1 if forgets else 20), "the rest of one round, and then nothing ever again"


def test_the_watermark_moves_at_each_free_not_only_when_the_ring_is_empty() -> None:
    naive = NaiveRing(5 * SEGMENT)
    entries = [naive.assign(SEGMENT) for _ in range(5)]
    naive.free(entries[0])
    assert not naive.may_write(naive.assign(SEGMENT)), "a ring that is never empty stops for ever"

    ring, writer = RingAllocator(5 * SEGMENT, SEGMENT), RingWriterView(5 * SEGMENT)
    live = [ring.assign(SEGMENT) for _ in range(5)]
    ring.free(live[1])
    assert ring.watermark == live[0].ring_byte
    ring.free(live[0])
    assert ring.watermark == live[2].ring_byte
    writer.update(ring.watermark)
    assert writer.may_write(ring.assign(SEGMENT))


# ---- notifications that come too early, and too late


class NaiveReceiver:
    """Scatters what a notification names, if it is known; pages stay in its table when a request ends."""

    def __init__(self) -> None:
        self.expected: dict[int, tuple[LegKey, int]] = {}  # entry -> (leg, page)
        self.pages: dict[int, str] = {}

    def expect(self, entry_id: int, key: LegKey, page: int) -> None:
        self.expected[entry_id] = (key, page)

    def notified(self, entry_id: int) -> None:
        if entry_id in self.expected:
            key, page = self.expected[entry_id]
            self.pages[page] = key.request_id


PIECE, PAGES = Piece(0, 0, 2, 0, 4), (3,)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The drivers of a prefill and a decode rank."""
    hub = Hub()
    monkeypatch.setattr(transfer_driver, "create", lambda backend, *, name, **options: LoopbackBackend(name, hub))
    return Pair(hub)


def test_a_piece_that_arrives_before_its_request_is_registered_is_not_lost(pair: Pair) -> None:
    naive = NaiveReceiver()
    naive.notified(0)
    naive.expect(0, LegKey("r", 0, 0), page=9)
    assert naive.pages == {}, "it came, nobody knew it, and it will not come again"

    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    send, expect = pair.piece(PIECE, PAGES)
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    assert pair.dst.take_events() == (), "the bytes and their notification are here; what they are, nobody has said"
    (landing,) = pair.tell(pair.dst, expect)
    assert isinstance(landing, Landing)
    assert landing.ok


def test_a_notification_after_success_changes_nothing(pair: Pair) -> None:
    naive = NaiveReceiver()
    naive.expect(0, LegKey("first", 0, 0), page=9)
    naive.notified(0)
    naive.pages[9] = "second"  # the first is complete, and its page somebody else's
    naive.notified(0)
    assert naive.pages[9] == "first", "the second's page now holds what the first one's late notification brought"

    pair.bind(GroupPages(0, (9,)), GroupPages(0, ()), GroupPages(0, ()))
    assert pair.move(PIECE, PAGES).ok
    send, expect = pair.piece(PIECE, PAGES)  # asked for twice: the second write is under way when all is here
    pair.tell(pair.dst, expect, Unbind(expect.slice.key))
    pair.dst_pool.bytes.fill_(7)
    pair.tell(pair.src, send)
    pair.src.turn()
    pair.dst.turn()
    (late,) = (report for report in pair.dst.take_events() if isinstance(report, Landing))
    assert (late.ok, late.reason) == (False, "unbound")
    assert (pair.dst_pool.bytes == 7).all()

    session = ReceiveSession(4, (FULL,), ((1,),))
    session.announce(4)
    session.bind((0,))
    session.bound(0)
    session.offer(0, (PIECE,))
    session.landed(0, 0)
    session.first_tokens = (FirstToken(0, 5, None, None),)
    assert session.try_complete()
    session.landed(0, 0)
    assert not session.try_complete(), "complete once, whatever comes"
    assert session.state is ReceiveState.COMPLETE


# ---- a prefix hit on either side shifts the grid


@pytest.mark.parametrize(("prefill_hit", "decode_hit"), [(0, 4), (6, 0), (6, 4), (6, 8), (8, 6)])
def test_a_prefix_hit_on_either_side_shifts_no_token_and_loses_none(prefill_hit: int, decode_hit: int) -> None:
    tokens, chunk = 15, 4
    chunks = [(start, min(start + chunk, tokens)) for start in range(prefill_hit, tokens, chunk)]

    # Naive: chunk number i is taken to hold [decode_hit + i * chunk, ...), and a count of chunks says that all is here.
    believed = {
        decode_hit + number * chunk + i: start + i
        for number, (start, stop) in enumerate(chunks)
        for i in range(stop - start)
    }
    wrong = any(believed.get(token) != token for token in range(decode_hit, tokens))
    assert wrong, "decode's token t would hold another token's KV, or none"

    sender, receiver = SendSession(tokens, (FULL,), (0,)), ReceiveSession(tokens, (FULL,), ((1,),))
    receiver.announce(tokens)
    receiver.bind((decode_hit,))
    receiver.bound(0)
    offers = [sender.hit(prefill_hit, _cut)] if prefill_hit else []
    offers.append(sender.grant((decode_hit,), (1,), _cut))
    offers += [sender.chunk(start, stop, plan, _cut) for plan, (start, stop) in enumerate(chunks)]
    came: list[tuple[int, int]] = []
    for offer in offers:
        for piece_no, piece in receiver.offer(offer.first_piece_no, offer.pieces) if offer else ():
            assert not receiver.covered
            layers = range(piece.layer_start, piece.layer_stop)
            came += itertools.product(range(piece.token_start, piece.token_stop), layers)
            (write,) = sender.assign([Entry(piece_no, piece_no, 0, 0, 0, 1, 0, 16)])
            assert write.piece == piece, "both sides name the same absolute tokens"
            receiver.landed(piece_no, 0)
    assert sorted(came) == list(itertools.product(range(decode_hit, tokens), range(2)))
    assert receiver.covered


def _cut(piece: Piece) -> tuple[Piece, ...]:
    return split_group_piece(piece, 1, FULL, 2 * 2 * 16 * 4 + 8, PAGE_TOKENS)


# ---- an oversized piece is split, not failed


def test_an_oversized_piece_is_split_not_failed() -> None:
    whole = Piece(0, 0, 2, 0, 100)
    nbytes = group_piece_bytes(whole, 1, FULL)
    with pytest.raises(AssertionError, match="oversized"):
        NaiveRing(1024).assign(nbytes)
    ring = RingAllocator(2048, 1024)
    with pytest.raises(ValueError, match="does not fit"):
        ring.assign(nbytes)

    parts = split_group_piece(whole, 1, FULL, 1024, PAGE_TOKENS)
    assert sum(part.layers * part.tokens for part in parts) == whole.layers * whole.tokens
    for part in parts:
        ring.free(ring.assign(group_piece_bytes(part, 1, FULL)))


# ---- a dead peer does not block live ones


def test_a_dead_peer_does_not_block_live_ones() -> None:
    # Naive: one ring for all peers. The dead one's entry is never written and never freed.
    shared, writer = RingAllocator(4 * SEGMENT, SEGMENT), RingWriterView(4 * SEGMENT)
    shared.assign(SEGMENT)
    for _ in range(3):
        shared.free(shared.assign(SEGMENT))
    writer.update(shared.watermark)
    assert not writer.may_write(shared.assign(SEGMENT)), "everybody waits for the dead peer's entry"

    rings = RingTable(4 * SEGMENT, SEGMENT, 1, ranks=1, idle_s=1.0)
    for link in (0, 1):
        rings.add(link)
    assert rings.open(0, "dead", 0.0)
    rings.links[0].assign(LegKey("dead", 0, 0), 0, 0, SEGMENT, 0.0)
    assert rings.remove(0, gone=False), "its fate is unknown: its segment, and no other, is nobody's"
    assert rings.open(1, "live", 0.0)
    live = RingWriterView(SEGMENT)
    for piece_no in range(20):
        entry_id, entry = rings.links[1].assign(LegKey("live", 0, 0), piece_no, 0, SEGMENT, 0.0)
        live.update(rings.links[1].watermarks[0])
        assert live.may_write(entry)
        rings.links[1].free(entry_id)
    assert rings.arena.quarantined_bytes == SEGMENT


# ---- a stale piece of the previous request in the same slot


def test_a_stale_piece_of_the_previous_request_in_the_same_place_is_not_taken_for_the_new_one() -> None:
    torch.set_num_threads(1)
    shape, page_ids = PageShape.of(FULL, PAGE_TOKENS), torch.tensor([0])
    source = torch.arange(shape.nbytes, dtype=torch.int64).remainder(251).to(torch.uint8)[None]
    ring, head = RingAllocator(512, 512), HeadSlice(0, 0, 0, 0, 1)
    staging = torch.zeros(512, dtype=torch.uint8)

    def place(entry: RingEntry) -> torch.Tensor:
        offset = entry.locate(512)[1]
        return staging[offset : offset + entry.nbytes]

    def identity(request_id: str, attempt: int) -> int:
        return identity_seed(RankSlice(LegKey(request_id, attempt, 0), Piece(0, 0, 2, 0, 4), head, "P", "D"))

    nbytes = group_piece_bytes(PIECE, 1, FULL)
    for before, now in ((("a", 0), ("b", 0)), (("a", 0), ("a", 1))):
        for seed_of, fooled in ((lambda *_: 0, True), (identity, False)):  # naive: a checksum of the bytes alone
            first = ring.assign(nbytes)
            gather(PagedRows(source, page_ids, shape, PIECE, head, seed_of(*before)), place(first))
            ring.free(first)
            second = ring.assign(nbytes)  # notified too early: what lies there is the other request's
            assert place(second).data_ptr() == place(first).data_ptr()
            pool = torch.full_like(source, 7)
            assert scatter(PagedRows(pool, page_ids, shape, PIECE, head, seed_of(*now)), place(second)) == fooled
            assert torch.equal(pool, source) == fooled
            assert fooled or (pool == 7).all(), "dropped, and not one byte written"
            ring.free(second)
