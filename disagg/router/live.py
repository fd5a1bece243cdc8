"""A request from its acceptance to its end: its machine, and what its text, its reader and its timers have come to."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from disagg.messages.legs import TimelineEvent
from disagg.router.budget import Held
from disagg.router.choice_text import ChoiceText
from disagg.router.events import NeedPair
from disagg.router.machine import RequestMachine
from disagg.router.mailbox import Mailbox
from disagg.router.outstanding import Account
from disagg.router.requests import Finished, Usage
from disagg.router.timelines import in_order
from disagg.text.stops import StopTable


class Live:
    """Owned by the router; changes only as its machine says."""

    def __init__(
        self,
        machine: RequestMachine,
        stops: StopTable | None,
        mailbox: Mailbox,
        held: Held,
        account: Account,
        arrived_s: float,
        arrived_unix_s: float,
    ) -> None:
        self.machine = machine
        self.abort_token = secrets.token_hex(16)  # proves to `abort` that the caller began this request
        self.held = held  # its prompt's bytes
        self.account = account  # what its servers have to do
        self.stops = stops
        self.texts: dict[int, ChoiceText] = {}  # of the choices that have tokens: 8,192 at once would hold the loop
        self.mailbox = mailbox
        self.arrived_s = arrived_s
        self.arrived_unix_s = arrived_unix_s
        self.dispatched = False  # it has a place among max_inflight
        self.wish: NeedPair | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.heard_s: dict[int, float] = {}  # per choice that has begun and not finished, when tokens last came
        self.began = False
        self.longest_silence_s = 0.0  # of any choice, from one message with tokens of it to the next
        self.timeline: list[TimelineEvent] = []
        self.attempt_unix_s = 0.0
        self.finish_reasons: list[str] = []  # of choices that have ended, in that order

    @property
    def log(self) -> dict[str, str]:
        return {"request_id": self.machine.request_id}

    @property
    def events(self) -> list[TimelineEvent]:
        """All that is known of where its time went."""
        return self.timeline + self.machine.timeline

    @property
    def num_tokens(self) -> int:
        """Given out, of all choices."""
        return sum(text.num_tokens for text in self.texts.values())

    def note_attempt(self, outcome: str, now_unix_s: float) -> None:
        """The current attempt ends so, if there is one."""
        pair = self.machine.pair
        if pair is not None and self.attempt_unix_s > 0:
            detail = f"{' > '.join(pair.servers)}: {outcome}"
            name = f"attempt {self.machine.attempt}"
            self.timeline.append(TimelineEvent(name, self.attempt_unix_s, now_unix_s, detail))
            self.attempt_unix_s = 0.0

    def finished(self) -> Finished:
        machine = self.machine
        usage = Usage(
            prompt_tokens=len(machine.prompt_token_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=machine.cached_tokens,
        )
        return Finished(usage, in_order(self.events), machine.attempts_counted)

    def dump(self, now_s: float) -> dict[str, Any]:
        """For a person to read."""
        machine = self.machine
        pair = machine.pair
        return {
            "request_id": machine.request_id,
            "phase": machine.phase.value,
            "age_s": round(now_s - self.arrived_s, 3),
            "attempt": machine.attempt,
            "prefill": pair.prefill.name if pair is not None else None,
            "decode": pair.decode.name if pair is not None else None,
            "prompt_tokens": len(machine.prompt_token_ids),
            "accepted_tokens": [len(machine.table.token_ids(c)) for c in range(machine.params.n)],
            "unfinished_choices": list(machine.table.unfinished()),
        }
