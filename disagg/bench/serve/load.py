"""Sends a run's requests when they are due, hears the answers, and watches whether the client itself keeps up.

    open loop      a task for each conversation at its moment, whatever has been answered
    closed loop    so many conversations at a time

Everything is on one loop. Every wait ends: requests have deadlines, and `stop` ends a run at once, with what there is.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from msgspec import Struct

from disagg.bench.serve.figures import Answered, ClientLoad, Outcome, spread
from disagg.bench.serve.target import Form, Target
from disagg.bench.serve.workload import Conversation, PromptIds, PromptWords, Turn

WATCH_S = 0.01
AHEAD_BYTES = 256 << 20  # of bodies that are made before a run begins; later ones are made one request ahead
LEAD_S = 0.05  # from the end of preparations to the first request


class OfferedLoad(Struct, frozen=True):
    """moments_s: of each conversation's first request, from the start on; None for a closed loop of `concurrency`."""

    conversations: tuple[Conversation, ...]
    moments_s: tuple[float, ...] | None
    concurrency: int = 0
    think_s: float = 0.0  # from an answer to the next turn

    @property
    def requests(self) -> int:
        return sum(len(each.turns) for each in self.conversations)


class LoadResult(Struct):
    """What came of it. unfinished: requests under way, or not yet sent, when it was stopped. made_up: later turns in which
    random tokens stood for an answer of which the endpoint does not say the ids. peak: most requests under way at once.
    """

    outcomes: list[Outcome]
    began_s: float
    client: ClientLoad
    unfinished: int
    made_up: int
    peak: int


class Prompts:
    """Bodies of requests, from parts."""

    def __init__(self, form: Form, words_ratio: float, seed: int) -> None:
        self.form = form
        low, high = form.ids or (0, 1)
        self._maker = PromptIds(low, high, seed) if form.ids is not None else PromptWords(words_ratio, seed)
        self._seed = seed

    def said(self, turn: Turn) -> list[int] | str:
        return self._maker.parts(turn.parts)

    def body(self, prompt: list[int] | str, turn: Turn, more: bool) -> bytes:
        """more: another turn follows, for which the answer's ids are wanted."""
        return self.form.body(prompt, turn.output_tokens, return_ids=more and self.form.ids is not None)

    def stand_in(self, number: int, tokens: int) -> list[int]:
        low, high = self.form.ids or (0, 1)
        return [low + (number + each) % (high - low) for each in range(tokens)]


class Load:
    """One run. heard: is told of every outcome; True ends the run."""

    def __init__(
        self,
        target: Target,
        prompts: Prompts,
        offered: OfferedLoad,
        heard: Callable[[Outcome], bool] = lambda outcome: False,
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._offered = offered
        self._heard = heard
        self._sent = sent
        self._outcomes: list[Outcome] = []
        self._late_s = array("d")
        self._made_up = 0
        self._under_way = self._peak = 0
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Nothing more is sent, and what is under way is given up."""
        self._stop.set()

    async def run(self) -> LoadResult:
        bodies = _ahead(self._first_bodies())
        watch = asyncio.create_task(self._watch(), name="watch")
        began_s = time.perf_counter() + LEAD_S
        cpu_s = time.process_time()
        load = asyncio.create_task(self._all(began_s, bodies), name="load")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({load, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()
        finally:
            for task in (load, stopped, watch):
                task.cancel()
            await asyncio.gather(load, stopped, watch, return_exceptions=True)
        taken_s = max(1e-9, time.perf_counter() - began_s + LEAD_S)
        client = ClientLoad(
            send_late_s=spread([each.late_s for each in self._outcomes] if self._offered.moments_s is not None else []),
            loop_late_s=spread(self._late_s),
            cpu_share=(time.process_time() - cpu_s) / taken_s,
        )
        unfinished = self._offered.requests - len(self._outcomes)
        return LoadResult(self._outcomes, began_s, client, unfinished, self._made_up, self._peak)

    def _first_bodies(self) -> Iterator[tuple[bytes, list[int] | str]]:
        """Of every conversation's first turn; its prompt, too, if there are more turns."""
        for conversation in self._offered.conversations:
            turn, more = conversation.turns[0], len(conversation.turns) > 1
            prompt = self._prompts.said(turn)
            yield self._prompts.body(prompt, turn, more), prompt if more else ""

    async def _all(self, began_s: float, bodies: Iterator[tuple[bytes, list[int] | str]]) -> None:
        offered = self._offered
        if offered.moments_s is None:
            todo = zip(offered.conversations, bodies, strict=True)
            workers = min(offered.concurrency, len(offered.conversations))

            async def work() -> None:
                for conversation, (body, prompt) in todo:
                    await self._converse(conversation, body, prompt, None)

            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
            return
        async with asyncio.TaskGroup() as group:
            for conversation, at_s, (body, prompt) in zip(
                offered.conversations, offered.moments_s, bodies, strict=True
            ):
                due_s = began_s + at_s
                if (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._converse(conversation, body, prompt, due_s))

    async def _converse(
        self, conversation: Conversation, body: bytes, prompt: list[int] | str, due_s: float | None
    ) -> None:
        tokens = 0  # of the prompt: all that was said before, and what this turn adds
        for number, turn in enumerate(conversation.turns):
            more = number + 1 < len(conversation.turns)
            self._sent()
            tokens += sum(part.tokens for part in turn.parts)
            self._under_way += 1
            self._peak = max(self._peak, self._under_way)
            answer = await self._target.ask(body, (tokens, turn.output_tokens), due_s, keep=more)
            self._under_way -= 1
            self._outcomes.append(answer.outcome)
            if self._heard(answer.outcome):
                self.stop()
            if not more:
                return
            if not isinstance(answer.outcome, Answered):
                # What would have followed cannot be asked: it counts as failed for the same reason.
                for _ in conversation.turns[number + 1 :]:
                    self._outcomes.append(answer.outcome)
                return
            tokens += answer.outcome.output_tokens
            next_turn = conversation.turns[number + 1]
            said = self._prompts.said(next_turn)
            if isinstance(prompt, str):
                assert isinstance(said, str)
                prompt = prompt + answer.text + said
            else:
                assert isinstance(said, list)
                ids = answer.ids
                if not ids:
                    self._made_up += 1
                    ids = self._prompts.stand_in(number, answer.outcome.output_tokens)
                prompt = [*prompt, *ids, *said]
            body = self._prompts.body(prompt, next_turn, number + 2 < len(conversation.turns))
            due_s = None
            if self._offered.think_s:
                await asyncio.sleep(self._offered.think_s)

    async def _watch(self) -> None:
        """How late a timer is: for so long the loop, or the machine, did something else, and heard nobody."""
        while True:
            due_s = time.perf_counter() + WATCH_S
            await asyncio.sleep(WATCH_S)
            self._late_s.append(max(0.0, time.perf_counter() - due_s))


def _ahead(bodies: Iterator[tuple[bytes, list[int] | str]]) -> Iterator[tuple[bytes, list[int] | str]]:
    """The same, with the first of them made already."""
    made, size = [], 0
    for body in bodies:
        made.append(body)
        size += len(body[0])
        if size > AHEAD_BYTES:
            break
    return chain(made, bodies)


def warm_up_load(conversations: Sequence[Conversation], requests: int) -> OfferedLoad:
    """Each one alone and all at once: what a server does for the first time, it does here."""
    chosen = [Conversation(each.turns[:1]) for each in conversations[:requests]]
    return OfferedLoad(tuple(chosen), None, concurrency=max(1, len(chosen)))
