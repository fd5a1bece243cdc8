"""What an engine must know of its model and its workers. Values only, gathered by the server before the engine starts."""

from __future__ import annotations

from msgspec import Struct

from disagg.memory.layout import PoolLayout
from disagg.messages.layout import GroupKind, LayerGroup
from disagg.offload.keys import Scope


class ModelFacts(Struct, frozen=True):
    """The model, whole: what all ranks together have."""

    groups: tuple[LayerGroup, ...]  # of the whole model (all KV heads), not of one rank
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


class MemoryFacts(Struct, frozen=True):
    """The pool of KV memory that each rank has."""

    layout: PoolLayout  # of a rank's pool
    num_large: int  # large pages of it
    prefix_cache: bool
    scope: Scope  # what two caches must agree on, without a tenant: all page hashes begin with it

    @property
    def page_tokens(self) -> int:
        return self.layout.page_tokens

    @property
    def checkpoint_tokens(self) -> int:
        """Where chunks end at the latest; 0 for a model without recurrent states."""
        states = any(group.kind is GroupKind.STATE for group in self.layout.groups)
        return self.layout.checkpoint_tokens if states else 0


class SchedulingFacts(Struct, frozen=True):
    """How much may run, wait and be promised at once. Settings, or what was chosen for the device; see config/tree."""

    max_slots: int  # choices sampled at once
    max_running: int  # prompts and choices computed at once, whatever their choices
    chunk_tokens: int  # of prompts, in one step
    target_step_s: float  # which steps with prompts should take; 0: as long as the budget of tokens takes
    policy: str  # of a role that leaves it to the configuration: a key of scheduler.policies.POLICIES
    max_waiting: int  # legs that have not begun
    local_prefill_tokens: int  # of one prompt, that a decode server computes itself
    ungranted_share: float  # of the pool, for KV that is computed and that no decode server has granted pages for
    spare_tokens: int  # of each choice's outputs, for which a grant reserves pages
    lookahead_tokens: int  # for so many more, all that has begun must be able to go on for something new to begin
    preempt_after_s: float  # a sequence that gave way waits so long before younger ones give way to it
    preemption: str  # a key of scheduler.policies.PREEMPTION
    prefill_delay_passes: int  # of data-parallel ranks in lockstep: see scheduler.prefill_delayer.Limits; 0: none waits
    prefill_delay_low_usage: float


class TransferFacts(Struct, frozen=True):
    """What memory a transfer may take on each rank, and how long it may stand still."""

    gather_bytes: int  # of one gather buffer: the most that one write takes
    arena_bytes: int
    segment_bytes: int
    link_segments: int  # of the arena, for one link's ring
    link_idle_s: float  # after which a ring that nobody uses is given back
    progress_s: float  # a transfer that stands still for so long is given up


class OffloadFacts(Struct, frozen=True):
    """What there is beyond the pool for KV."""

    host_large: int  # large pages of each rank's host pool
    stride_tokens: int  # as it is configured
    storage: bool  # there is one
    load_always: bool = False  # and not where computing is faster


class EngineFacts(Struct, frozen=True):
    """All of it. incarnation: of this group of workers; whatever is told to others is told under this name."""

    incarnation: str
    tp: int
    model: ModelFacts
    memory: MemoryFacts
    scheduling: SchedulingFacts
    transfer: TransferFacts
    offload: OffloadFacts | None = None  # KV has no place but the pool
    pp: int = 1  # pipeline stages, of tp ranks each

    @property
    def ranks(self) -> int:
        """Rank r is in stage r // tp."""
        return self.tp * self.pp

    @property
    def sampling_rank(self) -> int:
        """The first one of the last stage."""
        return self.ranks - self.tp
