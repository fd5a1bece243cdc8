"""Hypothesis strategies for every value that crosses the wire, over the full range of each field."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from msgspec import structs

from disagg.messages import legs, link
from disagg.messages.channel import Frame
from disagg.messages.pieces import Piece
from disagg.messages.plan import TokenLogprobs
from disagg.types.ids import FinishReason, LegKey, Role
from disagg.types.protocol import Version
from disagg.types.sampling import SamplingParams
from disagg.wire.inference import (
    ChoiceDeltaView,
    FinishedView,
    LogprobEntryView,
    StartedView,
    TokenLogprobsView,
    UsageView,
)
from disagg.wire.peer import LinkGreeting
from disagg.wire.server import MAX_GROUPS, AttachReply, KvUpdate, RouterHello, ServerSays

settings.register_profile("wire", derandomize=True, deadline=None, max_examples=60, database=None)
WIRE = settings.get_profile("wire")

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(max_size=8)
name = st.text(min_size=1, max_size=8)
seconds = st.floats(allow_nan=False, allow_infinity=False)
real = st.floats(allow_nan=False)
float32 = st.floats(width=32, allow_nan=False)


def tuples(of, max_size=3, min_size=0):
    return st.lists(of, min_size=min_size, max_size=max_size).map(tuple)


token_ids = tuples(u32, 5)
keys = st.builds(LegKey, name, u32, u32)
finishes = st.none() | st.sampled_from(FinishReason)
token_logprobs = st.builds(TokenLogprobs, float32, tuples(st.tuples(u32, float32)))
events = st.builds(legs.TimelineEvent, text, seconds, seconds, text)

sampling = st.builds(
    SamplingParams,
    max_tokens=i32,
    min_tokens=i32,
    temperature=real,
    top_k=i32,
    top_p=real,
    min_p=real,
    repetition_penalty=real,
    presence_penalty=real,
    frequency_penalty=real,
    logit_bias=tuples(st.tuples(u32, real)),
    stop=tuples(text),
    stop_token_ids=token_ids,
    ignore_eos=st.booleans(),
    seed=u64,
    logprobs=st.none() | i32,
    n=i32,
)


@st.composite
def start_legs(draw):
    ids = draw(token_ids)
    return legs.StartLeg(
        key=draw(keys),
        token_ids=ids,
        num_prompt=draw(st.integers(0, len(ids))),
        params=draw(sampling),
        choices=draw(tuples(u32)),
        peer=draw(st.builds(legs.PeerRef, text, text, text)),
        deadline_s=draw(seconds),
        cache_salt=draw(text),
        incarnation=draw(text),
        tenant=draw(text),
        priority=draw(st.integers(-1000, 1000)),
        moves_attempt=draw(u32),
        moved=draw(st.booleans()),
        traceparent=draw(text),
    )


@st.composite
def leg_tokens(draw):
    ids = draw(token_ids)
    with_logprobs = draw(st.booleans())
    return legs.LegTokens(
        key=draw(keys),
        choice=draw(u32),
        first_index=draw(u32),
        token_ids=ids,
        logprobs=draw(tuples(token_logprobs, len(ids), len(ids))) if with_logprobs else (),
        finish=draw(finishes),
    )


verdicts = {legs.ServerState.DRAINED, legs.ServerState.DEAD, legs.ServerState.MISMATCH}  # of routers
states = st.sampled_from([state for state in legs.ServerState if state not in verdicts])
group_memories = st.builds(legs.GroupMemory, text, text, u64, u64, u64, u64)
hosts = st.builds(legs.HostMemory, u64, u64, u64)
memories = st.builds(legs.MemoryReport, text, u64, u64, u64, u64, u64, tuples(group_memories), st.none() | hosts)
stores = st.sampled_from(legs.StorageState)
loads = st.builds(
    legs.LoadReport,
    states,
    u32,
    u32,
    u64,
    u64,
    u64,
    u64,
    st.none() | memories,
    stores,
    st.lists(text, max_size=3).map(tuple),
    st.none() | st.builds(legs.ArenaReport, u64, u64, u64),
    tuples(st.builds(legs.ReceivedFrom, text, u64, u64, u64, st.floats(0, 1e9))),
    st.floats(0, 1e9),
    tuples(st.builds(legs.CarriedBy, text, tuples(text), st.booleans())),
    st.none() | st.builds(legs.StepCosts, *[st.floats(0, 1e9)] * 3, u32, u64, u64, u32),
    st.none() | st.builds(legs.LoadCosts, *[st.floats(0, 1e9)] * 2),
)
cached_pages = tuples(st.tuples(st.integers(0, MAX_GROUPS - 1), st.binary(max_size=36)))
kv_updates = st.builds(
    KvUpdate, st.builds(legs.KvEvents, cached_pages, cached_pages), st.booleans(), st.sampled_from(legs.Tier)
)
prefix_rules = st.builds(
    legs.PrefixRules,
    tuples(text),
    st.integers(1, 2**32 - 1),
    u32,
    st.lists(st.builds(legs.PrefixGroup, text, u32), min_size=1, max_size=3).map(tuple),
)
versions = st.tuples(u32, u32, text).map(lambda said: Version(max(said[:2]), min(said[:2]), said[2]))
role_changes = st.builds(legs.RoleChange, st.sampled_from(Role), st.none() | st.sampled_from(Role), text, u32)
server_hellos = st.builds(
    legs.ServerHello,
    name,
    st.sampled_from(Role),
    u32,
    u32,
    tuples(u32),
    *(text, text, text, u32, u64, text, loads, text),
    st.dictionaries(name, text, max_size=3),
    text,
    st.none() | prefix_rules,
    st.integers(1, 2**32 - 1),
    st.integers(1, 2**32 - 1),
    st.booleans(),
    st.booleans(),
    versions,
    st.none() | role_changes,
    text,
)
router_hellos = st.builds(RouterHello, name, name, name, u64, text, text, versions)
attach_replies = st.builds(AttachReply, u64, st.booleans())

# One strategy per message class: the tests check that none of the unions' members is missing here.
ROUTER_MESSAGES = {
    legs.StartLeg: start_legs(),
    legs.PodGone: st.builds(legs.PodGone, text),
    legs.Drain: st.builds(legs.Drain, st.booleans()),
    legs.HandOver: st.builds(legs.HandOver, keys),
    legs.SetRole: st.builds(legs.SetRole, st.sampled_from(Role)),
    legs.AbortLeg: st.builds(legs.AbortLeg, keys, st.none() | u32),
}
SERVER_MESSAGES = {
    legs.LegTokens: leg_tokens(),
    legs.LegEnd: st.builds(legs.LegEnd, keys, st.sampled_from(legs.Outcome), text, tuples(events), u32),
}


@st.composite
def pieces(draw):
    layer_start, token_start = draw(st.integers(0, 2**31)), draw(st.integers(0, 2**31))
    layers, tokens = draw(st.integers(1, 2**30)), draw(st.integers(1, 2**30))
    return Piece(draw(u32), layer_start, layer_start + layers, token_start, token_start + tokens)


entries = st.builds(link.Entry, u64, u32, u32, u32, u32, u32, u64, u64)
first_tokens = st.builds(link.FirstToken, u32, u32, st.none() | token_logprobs, finishes)
ranks = st.builds(link.RankInfo, u32, u32, u64, st.binary(max_size=8), st.integers(0, 2**62), i32, u64)


@st.composite
def link_hellos(draw):
    numbered = tuple(structs.replace(rank, rank=i) for i, rank in enumerate(draw(tuples(ranks, min_size=1))))
    return link.LinkHello(
        *(draw(name), draw(name), draw(name), draw(text), len(numbered), draw(text), numbered, draw(text), draw(text)),
        draw(versions),
    )


link_greetings = st.builds(LinkGreeting, link_hellos(), u64, text)
LINK_MESSAGES = {
    link.Announce: st.builds(link.Announce, keys, u32),
    link.OpenRing: st.builds(link.OpenRing, u32, u32, st.integers(1, 2**64 - 1), tuples(u64)),
    link.CloseRing: st.builds(link.CloseRing, u32),
    link.RingClosed: st.builds(link.RingClosed, u32),
    link.Grant: st.builds(link.Grant, keys, tuples(u32, min_size=1), u32),
    link.OfferPieces: st.builds(link.OfferPieces, keys, u32, tuples(pieces())),
    link.AssignEntries: st.builds(link.AssignEntries, keys, u32, tuples(entries)),
    link.Watermarks: st.builds(link.Watermarks, u32, tuples(u64)),
    link.FirstTokens: st.builds(link.FirstTokens, keys, tuples(first_tokens)),
    link.SentAll: st.builds(link.SentAll, keys, u32),
    link.Complete: st.builds(link.Complete, keys),
    link.Revoke: st.builds(link.Revoke, keys, text, st.booleans()),
    link.Withdraw: st.builds(link.Withdraw, keys, text, st.booleans()),
    link.Drained: st.builds(link.Drained, keys),
    link.WantPieces: st.builds(link.WantPieces, keys, tuples(pieces())),
    link.AskWritten: st.builds(link.AskWritten, u32, tuples(u64)),
    link.Written: st.builds(link.Written, u32, tuples(u64)),
    link.QuietLinks: st.builds(link.QuietLinks, tuples(text)),
}


def frames(messages):
    """Frames of these messages; number 0 only without any."""
    return st.builds(Frame, st.integers(1, 2**64 - 1), u64, tuples(messages)) | st.builds(
        Frame, st.just(0), u64, st.just(())
    )


server_says = st.builds(
    ServerSays,
    frames(st.one_of(*SERVER_MESSAGES.values())),
    st.none() | loads,
    st.none() | server_hellos,
    kv=st.none() | kv_updates,
) | st.builds(ServerSays, st.just(Frame(0, 0, ())), st.none(), server_hellos, attach_replies)


# ---- public API

logprob_entries = st.builds(LogprobEntryView, u32, text, st.binary(max_size=4), real)
token_logprob_views = st.builds(TokenLogprobsView, logprob_entries, tuples(logprob_entries), u32)


@st.composite
def choice_deltas(draw):
    ids = draw(token_ids)
    with_logprobs = draw(st.booleans())
    return ChoiceDeltaView(
        choice=draw(u32),
        text=draw(text),
        token_ids=ids,
        logprobs=draw(tuples(token_logprob_views, len(ids), len(ids))) if with_logprobs else (),
        finish=draw(finishes),
        stop_reason=draw(st.none() | text | u32),
    )


started = st.builds(StartedView, text, token_ids, seconds, text)
finished = st.builds(FinishedView, st.builds(UsageView, u32, u32, u32), tuples(events), u32)

generate_fields = st.fixed_dictionaries(
    {
        "model": name,
        "prompt": text | token_ids,
        "params": st.builds(
            lambda params, max_tokens: structs.replace(params, max_tokens=max_tokens, seed=0),
            sampling,
            st.integers(0, 2**31 - 1),
        ),
        "seed": st.none() | u64,
        "deadline_s": st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1000),
        "cache_salt": text,
        "client_request_id": text,
        "add_special_tokens": st.booleans(),
        "priority": st.integers(-1000, 1000),
        "slo_ttft_s": st.none() | st.integers(1, 10**9).map(lambda ms: ms / 1000),
        "session": st.text(max_size=256),
    }
)
