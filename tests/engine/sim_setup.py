"""What the simulated world begins with, all of it drawn from its seed: servers' facts and sizes, and requests."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from disagg.decode_server.role import DECODE
from disagg.engine.facts import EngineFacts, MemoryFacts, ModelFacts, OffloadFacts, SchedulingFacts, TransferFacts
from disagg.memory.groups import spec_of
from disagg.memory.kv_memory import KvMemory
from disagg.memory.layout import PageSizing, PoolLayout, pool_layout
from disagg.messages.layout import LayerGroup
from disagg.offload.keys import Scope
from disagg.prefill_server.role import PREFILL
from disagg.scheduler.policies import POLICIES
from disagg.server.role import ServerRole
from disagg.types.sampling import SamplingParams
from tests.engine.mixed_role import mixed_engine
from tests.engine.sim_model import EOS, VOCAB, models, reference
from tests.engine.sim_router import Request
from tests.engine.sim_server import Server
from tests.scheduler.mixed_policies import MIXED_POLICIES


class Kind(Struct, frozen=True):
    """tight: two servers of each kind, pools and arenas as small as they can be, and many requests. mixed: each server has
    both phases, and some requests stay with one. offload: KV goes to hosts, and mostly to one storage, and comes back.
    careless: what begins is not asked whether all can go on, so that sequences give way.
    """

    tight: bool = False
    mixed: bool = False
    offload: bool = False
    careless: bool = False


class Dice:
    """all: of what every world has. tiers, local: of what came later, so that the other draws are as they were."""

    def __init__(self, seed: int) -> None:
        self.all = random.Random(seed)
        self.tiers = random.Random(seed)
        self.local = random.Random(f"local {seed}")
        self.policy = random.Random(f"policy of {seed}")


class Limits(Struct, frozen=True):
    """In tokens, and max_n in choices."""

    page_tokens: int
    max_prompt: int
    max_new: int
    max_n: int
    max_model_len: int

    @property
    def longest(self) -> int:
        return min(self.max_prompt + self.max_new, self.max_model_len)


class Setup(Struct, frozen=True):
    """to_prefill, to_decode: the fewest large pages that a server of that phase can do with."""

    kind: Kind
    limits: Limits
    facts: EngineFacts
    to_prefill: int
    to_decode: int


def limits_of(dice: Dice, kind: Kind) -> Limits:
    rng = dice.all
    page_tokens = rng.choice((1, 4, 16))
    if kind.offload:
        page_tokens = dice.tiers.choice((1, 2, 4))
    max_prompt = rng.choice((3, 12, 40))
    max_new = rng.choice((1, 3, 12))
    if kind.offload:
        max_prompt = dice.tiers.choice((16, 40))
    max_n = rng.choice((1, 1, 2, 3))
    return Limits(page_tokens, max_prompt, max_new, max_n, max_prompt + max_new + rng.choice((-1, 2)))


def setup_of(dice: Dice, kind: Kind, limits: Limits) -> Setup:
    """All but a server's TP size, pages and slots."""
    rng = dice.all
    segment = rng.choice((48, 128, 256))
    segments = 1 if kind.tight else rng.choice((1, 2, 4, 8))
    groups = models(rng)
    layout = layout_of(rng, groups, limits.page_tokens)
    chunk_tokens = rng.choice((4, 8, 16, 64))
    policy = dice.policy.choice(("", *MIXED_POLICIES)) if kind.mixed else ""
    if policy and POLICIES[policy].whole_prompts:
        chunk_tokens = limits.longest
    kv = KvMemory(layout, 1)
    to_prefill = max(kv.large_pages_to_prefill(k, chunk_tokens) for k in range(1, limits.longest + 1))
    to_decode = max(
        to_prefill, *(kv.large_pages_to_decode(k, limits.longest, limits.max_n) for k in range(limits.longest))
    )
    facts = EngineFacts(
        incarnation="",
        tp=1,
        model=ModelFacts(groups, VOCAB, (EOS,), limits.max_model_len),
        memory=MemoryFacts(
            layout,
            0,
            prefix_cache=rng.random() < 0.75,
            scope=Scope("weights", "float32", limits.page_tokens, groups),
        ),
        scheduling=scheduling_of(dice, limits, chunk_tokens, policy),
        transfer=TransferFacts(
            gather_bytes=rng.choice((48, 128, 256)),
            arena_bytes=segment * segments,
            segment_bytes=segment,
            link_segments=rng.choice((1, 2)),
            link_idle_s=0.5,
            progress_s=20.0,
        ),
    )
    if kind.careless:
        scheduling = replace(facts.scheduling, lookahead_tokens=0, spare_tokens=0, max_running=100)
        facts = replace(facts, scheduling=scheduling)
    return Setup(kind, limits, facts, to_prefill, to_decode)


def layout_of(rng: random.Random, groups: tuple[LayerGroup, ...], page_tokens: int) -> PoolLayout:
    return pool_layout(
        [spec_of(group, page_tokens) for group in groups],
        page_tokens,
        page_tokens * rng.choice((1, 2, 4)),
        rng.choice((PageSizing.LCM, PageSizing.LCM, PageSizing.MAX)),
    )


def scheduling_of(dice: Dice, limits: Limits, chunk_tokens: int, policy: str) -> SchedulingFacts:
    rng = dice.all
    return SchedulingFacts(
        max_slots=limits.max_n + rng.choice((0, 1, 5)),
        chunk_tokens=chunk_tokens,
        target_step_s=0.0,
        policy=policy,
        max_waiting=10_000,
        local_prefill_tokens=dice.local.choice((0, limits.page_tokens, 1000)),
        ungranted_share=rng.choice((0.1, 0.5)),
        spare_tokens=rng.choice((0, 1, 5, 64)),
        lookahead_tokens=rng.choice((0, 0, 3, 1000)),
        preempt_after_s=rng.choice((0.2, 2.0)),
        prefill_delay_passes=0,
        prefill_delay_low_usage=0.0,
        preemption=rng.choice(("latest", "fewest_tokens")),
        max_running=rng.choice((1, 2, 100)),
    )


def with_offload(setup: Setup, draw: random.Random) -> Setup:
    """The same with a host, which may be as small as it can be, and mostly with storage."""
    storage, stride = draw.random() < 0.75, draw.choice((0, 4, 16))
    host = (setup.to_decode if draw.random() < 0.3 else 6 * setup.to_decode) + 1
    memory = replace(setup.facts.memory, prefix_cache=True)
    return replace(setup, facts=replace(setup.facts, memory=memory, offload=OffloadFacts(host, stride, storage)))


def servers_of(
    setup: Setup, rng: random.Random, least_decodes: int, made: Callable[[str, ServerRole, EngineFacts], Server]
) -> tuple[list[Server], list[Server]]:
    """Of prefill, and of decode."""
    kind, facts = setup.kind, setup.facts

    def server(name: str, role: ServerRole, pages: int) -> Server:
        own = replace(facts, tp=rng.choice((1, 1, 2)), memory=replace(facts.memory, num_large=pages))
        if role is DECODE and not kind.mixed and rng.random() < 0.3:  # choices of one request take turns in its slots
            own = replace(own, scheduling=replace(own.scheduling, max_slots=rng.randint(1, setup.limits.max_n)))
        if kind.mixed:
            role = replace(role, engine=mixed_engine)
        return made(name, role, own)

    grow = 1 if kind.tight or kind.offload else rng.choice((1, 1, 2, 4))
    counts = (2,) if kind.tight else (1, 1, 2)
    pages = (setup.to_decode if kind.mixed else setup.to_prefill) * grow
    prefills = [server(f"P{i}", PREFILL, pages) for i in range(rng.choice(counts))]
    num_decodes = max(rng.choice(counts), least_decodes)
    return prefills, [server(f"D{i}", DECODE, setup.to_decode * grow) for i in range(num_decodes)]


def requests_of(setup: Setup, rng: random.Random, abort_share: float) -> list[Request]:
    """Prompts that begin like each other, or not."""
    kind, limits = setup.kind, setup.limits
    documents = [tuple(rng.randrange(VOCAB) for _ in range(limits.max_prompt)) for _ in range(rng.choice((1, 3)))]
    requests = []
    for i in range(14 if kind.tight or kind.offload else rng.choice((1, 4, 8, 14))):
        length = rng.randint(1, max(1, min(limits.max_prompt, limits.max_model_len - 1)))
        shared = rng.choice(documents)[: rng.choice((0, length // 2, length))]
        prompt = shared + tuple(rng.randrange(VOCAB) for _ in range(length - len(shared)))
        new = rng.randint(1, limits.max_new)
        params = SamplingParams(
            max_tokens=new,
            min_tokens=rng.choice((0, 0, 0, min(2, new))),
            n=rng.randint(1, limits.max_n),
            seed=rng.randrange(100),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3)))),
            ignore_eos=rng.random() < 0.2,
        )
        requests.append(Request(f"r{i}", prompt, params))
        if rng.random() < abort_share:
            requests[-1].abort_at = rng.randrange(rng.choice((30, 150, 400)))
    return requests


def converse(requests: list[Request], draw: random.Random, limits: Limits) -> None:
    """Some requests go on from what earlier ones said and were answered, as far as it fits."""
    for i, request in enumerate(requests[1:]):
        before = requests[draw.randint(0, i)]
        if draw.random() < 0.7:
            request.after = before
            said = reference(before.prompt, 0, before.params, limits.max_model_len)
            longest = min(limits.max_prompt, limits.max_model_len - 1)
            request.prompt = (*before.prompt, *said, *request.prompt)[
                : draw.choice((longest, draw.randint(1, longest)))
            ]
