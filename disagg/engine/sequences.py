"""What one run after another computes: a prompt, for all choices of a leg at once, or one choice that goes on after it.

    prompt    tokens ▓▓▓▓▓▓▓▓████░░░░    computed, scheduled, to come: it ends with the first token of every choice
    choice    tokens ▓▓▓▓▓▓▓▓▓▓▓▓▓█·     one token a step; after it gave way, first what has to be computed again

Knows tokens, pages and plans; nothing of legs' transfers, links or routers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from disagg.memory.sequence import SequencePages
from disagg.scheduler.policies import Phase
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams

# A sequence that decodes has pages for so many tokens more, so that whoever gives way for want of them has let go of its own,
# which two plans may name, before anybody sits out a step.
SOON_TOKENS = 2


class State(enum.Enum):
    """Of a sequence in the batch, or on its way there or away."""

    RUNNING = "running"
    GIVING_WAY = "giving way"  # no new plan names it; one in flight may
    PARKED = "parked"  # holds nothing
    WAITING = "waiting"  # has not begun, and holds nothing: other choices of its leg have
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """What is computed in one row of steps, what it holds for that, and how far it has come."""

    key: LegKey
    tenant: str
    choices: tuple[int, ...]  # that are sampled from its logits: a prompt's all, or the one that it is
    is_prompt: bool
    arrival: int  # its age, by the order in which answers began, and then by choice
    tokens: list[int]  # of the prompt and of outputs, as far as they are known here
    num_prompt: int
    limit: int  # most tokens that it may have
    params: SamplingParams
    root: bytes
    salt: str  # the tenant's, which is in the root
    hashes: list[bytes]  # of full pages, as far as their tokens are known
    priority: int = 0  # lower is more urgent
    pages: SequencePages | None = None
    slots: tuple[int, ...] = ()  # of the sampler, one for each of its choices
    seq_id: int = -1
    state: State = State.RUNNING
    position: int = 0  # tokens whose computation has been scheduled
    promised: int = 0  # tokens that plans so far will have made known
    computed: int = 0
    last_plan: int = -1  # that names it
    handed_over: bool = False  # a decode server has its KV, or is to have it
    in_transfer: bool = False  # a rank may still write to its pages, or send what they hold
    stops: bool = False  # no further plan names it: it goes on elsewhere
    distrusted: bool = False  # its KV may be wrong: nothing of it is kept
    recomputes: bool = False  # its pages were reserved for chunks
    partly: bool = False  # a prompt that has pages for its first tokens only, and does not end before it has all
    joined_tokens: int = 0  # how many it had when it last joined the batch
    shared_tokens: int = 0  # of its first tokens, whose pages others may hold too
    begins: bool = False  # a choice whose first step is still to come
    turn: int = 0  # among what its tenant has computed (scheduler/fairness.prompt_turn)
    parked_s: float = 0.0
    too_little_at: int = -1  # KvMemory.releases when there were too few pages to go on

    @property
    def choice(self) -> int:
        """That it is, if it is not a prompt."""
        return self.choices[0]

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def remaining(self) -> int:
        """Tokens that can be scheduled: one while it decodes, more while it is computed, none at its limit or when it stops."""
        return self.promised - self.position if self.promised < self.limit and not self.stops else 0

    @property
    def room(self) -> int:
        """Tokens that its next run may have at most. The last one of a prompt waits for what comes after it."""
        if not self.partly:
            return self.remaining
        assert self.pages is not None
        return min(self.pages.room_tokens, len(self.tokens) - 1) - self.position

    @property
    def takes_turns(self) -> bool:
        """It is computed when it is its tenant's turn, in chunks. What gave way has had its turn."""
        return self.is_prompt or (self.begins and self.phase is Phase.PREFILL)

    @property
    def phase(self) -> Phase:
        """It decodes when all that it had when it joined is scheduled, but for the last token."""
        return Phase.PREFILL if self.is_prompt or self.position < self.joined_tokens - 1 else Phase.DECODE

    @property
    def ends(self) -> bool:
        """All that it may come to is scheduled: it ends, and its pages come free, whatever it says."""
        return not self.is_prompt and self.promised >= self.limit

    @property
    def own_pages(self) -> int:
        """See SequencePages."""
        return self.pages.own_pages(self.shared_tokens) if self.pages is not None else 0

    def set_aside(self) -> bool:
        """Hold pages for its next tokens, as far as it goes. Whether it has them."""
        assert self.pages is not None
        stop = min(self.position + SOON_TOKENS, self.limit - 1)  # the last one's KV is never written
        return self.stops or stop <= self.position or self.pages.set_aside(self.position, stop)
