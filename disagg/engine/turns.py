"""Who begins next: prompts, legs that wait for a grant, and choices that wait for their slots.

First those that have begun and gave way for want of pages (engine/batch), oldest first; while there are any, nothing new
begins. Then those that have begun on another server and stand still until they go on here. Then whoever waits, in both cases
tenant by tenant in turns (scheduler/fairness). Nobody overtakes one who waits for pages or
a slot, and nobody gives way to what has not begun.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from disagg.engine.batch import Batch
from disagg.engine.facts import SchedulingFacts
from disagg.engine.legs import Legs
from disagg.engine.load import Urgency
from disagg.engine.lookahead import FIRST_CHOICES_SHARE
from disagg.engine.now import Now
from disagg.engine.sequences import Sequence
from disagg.messages.legs import StartLeg, TimelineEvent
from disagg.scheduler.fairness import FairQueue

MOST_AWAIT = 1024  # what one pass spends on turns that await something, and
MOST_AWAIT_OF_TENANT = 256  # of one tenant, before its later ones, and then all, are left for the next pass
FIRST_AWAIT = 16  # of that, for one that did not await it before: it is hashed, and compared with all that are computed
TURN_TOKENS = 16  # a sequence that joined the batch makes at least so many before it gives way to an older one


class Begins(enum.Enum):
    """How it went when something's turn had come."""

    NOW = "now"
    NOT_NOW = "not now"  # for a reason of its own: others need not wait for it, and overtake it
    AWAITS = "awaits"  # something that others are at: whoever comes later need not wait for it
    CLOSED = "closed"  # nobody may, who asks for the same: its tenant's others are not asked
    TOO_LITTLE = "too little"  # pages or a slot: nobody may overtake it


@dataclass(slots=True, eq=False)
class Turn:
    """A place in the queue. begin: tries, as urgently as it then is; it takes the place out of the queue when it begins, or when
    the last one of those that share it does. what: whose it is. overtaken: how many began that came after it, while it was the
    first one that they overtook. partly: it holds a slot already, and part of its pages. awaits: it did, when it was asked last.
    """

    tenant: str
    begin: Callable[[Now, Urgency], Begins]
    what: object
    overtaken: int = 0
    partly: bool = False
    awaits: bool = False


class Turns:
    """See the module. Whoever adds a turn takes it, or removes it."""

    def __init__(self, facts: SchedulingFacts, batch: Batch, legs: Legs) -> None:
        self._facts = facts
        self._batch = batch
        self._legs = legs
        self.moving: FairQueue[Turn] = FairQueue()
        self.queue: FairQueue[Turn] = FairQueue()

    def queue_of(self, start: StartLeg) -> FairQueue[Turn]:
        """Where what is asked for by it waits."""
        return self.moving if start.moved else self.queue

    def begin(self, now: Now) -> None:
        """Let go on, and then begin, who can."""
        batch = self._batch
        if batch.short:
            return
        while batch.parked:
            oldest = batch.parked[0]
            if not batch.resume(oldest, now.s):
                if batch.end_partly("memory"):
                    return
                if now.s - oldest.parked_s >= self._facts.preempt_after_s:
                    batch.give_way("age", TURN_TOKENS, to_arrival=oldest.arrival)
                return
            self._note_parked(oldest, now)
        awaiting, awaiting_in_all = Counter[str](), 0
        passed: Turn | None = None
        for queue in (self.moving, self.queue):
            for turn in queue.a_pass(lambda tenant: awaiting[tenant] < MOST_AWAIT_OF_TENANT):
                urgency = Urgency.FIRST if passed is None else Urgency.BY_TURN
                may = turn.partly or (batch.slots.free and not batch.full)
                awaited, turn.awaits = turn.awaits, False
                went = turn.begin(now, urgency) if may else Begins.TOO_LITTLE
                if went is Begins.TOO_LITTLE:
                    if not turn.partly:
                        batch.end_partly("memory")  # it comes before the one that holds part of its pages
                    return
                if went is Begins.NOW:
                    if passed is not None:
                        passed.overtaken += 1
                elif went is Begins.CLOSED:
                    awaiting[turn.tenant] = MOST_AWAIT_OF_TENANT
                else:
                    queue.passed_over(turn)
                if went is Begins.NOT_NOW:
                    passed = passed or turn
                elif went is Begins.AWAITS:
                    turn.awaits, spent = True, 1 if awaited else FIRST_AWAIT
                    awaiting[turn.tenant] += spent
                    awaiting_in_all += spent
                    if awaiting_in_all >= MOST_AWAIT:
                        return

    def _note_parked(self, sequence: Sequence, now: Now) -> None:
        leg = self._legs.get(sequence.key)
        if leg is not None:
            since_unix_s = now.unix_s - (now.s - sequence.parked_s)
            leg.note_part(TimelineEvent("parked", since_unix_s, now.unix_s, f"choice {sequence.choice}"))

    @property
    def slots_for_more(self) -> int:
        """Free slots that second and further choices of a request may take: were they all, whoever asks next would wait for the
        end of somebody else's 64 choices, which come to it all at once.
        """
        return min(self._batch.slots.free, self._batch.room) - self._for_first_choices

    def is_due(self, turn: Turn) -> bool:
        """So many others have overtaken it as slots are kept for them: a free one is its own now, or whoever keeps all slots
        busy with requests of one choice would keep it waiting for ever.
        """
        return turn.overtaken >= self._for_first_choices

    @property
    def _for_first_choices(self) -> int:
        return min(self._facts.max_slots, self._facts.max_running) // FIRST_CHOICES_SHARE
