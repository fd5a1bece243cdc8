"""An engine of both phases is the stages of both roles around one batch: it computes a prompt and decodes it, sends the KV of
another to a decode server, and goes on with a third that a prefill server computed, all at once."""

from __future__ import annotations

from disagg.messages import link as m
from disagg.messages.legs import Outcome
from disagg.messages.pieces import Piece
from disagg.messages.transfer import Bound, ExpectPiece, Landing, SendPiece, Unbound
from tests.engine.lone_engine import (
    D_REF,
    LINK,
    P_REF,
    Lone,
    facts,
    hello,
    outcomes,
    said,
    sent,
    start,
    to_link,
    to_transfer,
)
from tests.engine.mixed_role import NOBODY, mixed_engine

OUT, IN = LINK, LINK + 1


class Mixed(Lone):
    def __init__(self) -> None:
        super().__init__()
        self.engine = mixed_engine(facts(max_slots=3, prefix_cache=False))
        self.do(self.engine.link_up(OUT, hello(D_REF), self.now, dialled=False))
        self.do(self.engine.link_up(IN, hello(P_REF), self.now, dialled=True))


def test_three_legs_share_a_batch_and_each_phase_of_them_is_where_its_peer_says() -> None:
    mixed = Mixed()
    whole, leaves, comes = start("whole", peer=NOBODY), start("leaves", 4, peer=D_REF), start("comes", peer=P_REF)
    out = mixed.start(comes) + mixed.link(m.Announce(comes.key, 6), IN)
    (grant,) = [each for each in to_link(mixed.event(Bound(comes.key))) if isinstance(each, m.Grant)]
    (expect,) = to_transfer(mixed.link(m.OfferPieces(comes.key, 0, (Piece(0, 0, 2, grant.wants[0], 6),)), IN))
    assert isinstance(expect, ExpectPiece)
    out += mixed.link(m.FirstTokens(comes.key, (m.FirstToken(0, 50, None, None),)), IN)
    out += mixed.event(Landing(IN, expect.entry_id, comes.key, True, "", 192, 0.0, 0.0)) + mixed.event(
        Unbound(comes.key)
    )
    out += mixed.start(whole) + mixed.start(leaves) + mixed.compute()
    assert [run.num_tokens for run in mixed.unreported[-1].runs] == [1, 4, 6], "a token and two prompts in one step"
    mixed.link(m.OpenRing(0, 0, 4096, (4096,)), OUT)
    (offered,) = to_link(mixed.link(m.Grant(leaves.key, (0,), 1), OUT))
    (send,) = to_transfer(mixed.link(m.AssignEntries(leaves.key, 0, (m.Entry(1, 0, 0, 0, 0, 2, 0, 136),)), OUT))
    assert isinstance(offered, m.OfferPieces) and isinstance(send, SendPiece)
    out += mixed.compute_all() + mixed.event(sent(send)) + mixed.link(m.Complete(leaves.key), OUT)
    indices = sorted((name, index) for name, _, index, _ in said(out))
    assert indices == [("comes", i) for i in range(5)] + [("leaves", 0)] + [("whole", i) for i in range(5)]
    assert outcomes(out) == [Outcome.DONE] * 3
    mixed.do([])
    assert mixed.engine.idle and mixed.used == 0 and m.Complete(comes.key) in to_link(out)
