"""An engine and its workers as a mixed server has them, asked by nobody but this process: no router, no link, no port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from disagg.bench.engine.work import Rows
from disagg.config.steps import size_steps
from disagg.config.tree import Config
from disagg.engine.facts import EngineFacts
from disagg.engine.now import Now
from disagg.messages.legs import AbortLeg, KvEvents, LegEnd, Outcome, PeerRef, ServerMessage, StartLeg, Tier
from disagg.messages.link import LinkMessage
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.mixed_server.role import MIXED
from disagg.server.bringup import Bringup, with_device
from disagg.server.dispatch import Dispatch
from disagg.server.recorder import Unrecorded
from disagg.server.workers import Workers
from disagg.types.arithmetic import ceil_div
from disagg.types.errors import ConfigError, DisaggError
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams

NAME = "engine"
TICK_S = 0.1
DEADLINE_S = 86400.0  # of a leg; workers have shorter ones for each step
ROUTER = 0
NOBODY = PeerRef("", "", "")


class Step(Struct, frozen=True):
    """A step that is over. ended_s: when the workers were done with it, by their clock."""

    rows: tuple[Rows, ...]
    started_s: float
    ended_s: float
    compute_s: float


class _Steps(Unrecorded):
    """Keeps the rows of each plan until it has been computed."""

    def __init__(self, rank: int) -> None:
        self.done: list[Step] = []
        self._rank = rank
        self._planned: dict[int, tuple[Rows, ...]] = {}
        self._at: dict[int, int] = {}

    def planned(self, plan: WorkerPlan, now: Now) -> None:
        for seq_id in plan.ends:
            self._at.pop(seq_id, None)
        for start in plan.starts:
            self._at[start.seq_id] = start.computed
        rows = []
        for run in plan.runs:
            rows.append(Rows(self._at[run.seq_id], run.num_tokens, run.sample))
            self._at[run.seq_id] += run.num_tokens
        self._planned[plan.plan_no] = tuple(rows)

    def computed(self, result: StepResult) -> None:
        if result.rank == self._rank:
            rows = self._planned.pop(result.plan_no)
            self.done.append(Step(rows, result.started_unix_s, result.ended_unix_s, result.compute_s))


class _Asker:
    """Stands where routers are."""

    def __init__(self) -> None:
        self.ends: dict[LegKey, LegEnd] = {}
        self.changed = asyncio.Event()

    def tell(self, router: int, message: ServerMessage) -> None:
        if isinstance(message, LegEnd):
            self.ends[message.key] = message

    def publish(self, tier: Tier, events: KvEvents) -> None: ...

    def flush(self) -> None:
        self.changed.set()


class NoLinks:
    """A mixed server that is asked for whole requests has none."""

    def send(self, number: int, message: LinkMessage) -> None: ...

    def flush(self) -> None: ...

    def dial(self, peer: PeerRef) -> None: ...

    def drop(self, number: int, reason: str) -> None: ...

    def pod_gone(self, pod: str) -> None: ...

    def forget(self, number: int) -> None: ...


class Offline:
    """`async with Offline(...) as engine`. Raises DisaggError when workers are lost."""

    def __init__(self, config: Config, model_dir: Path, most_sequences: int) -> None:
        """config: of a server. Caches of prefixes are off in it, and it has room for so many sequences at once.

        Raises ConfigError for what cannot be, as far as that can be said without loading the model.
        """
        if config.server.dp > 1:
            raise ConfigError(f"server.dp = {config.server.dp}: it must be 1 here, where one engine is measured")
        config = replace(
            config, engine=replace(config.engine, prefix_cache=False), log=replace(config.log, level="warning")
        )
        config, self.device = with_device(config, MIXED)
        self.inspected = Bringup(config, MIXED, self.device, model_dir).inspect()
        self._config = self._with_room(config, most_sequences)
        self._model_dir = model_dir
        self._asker = _Asker()
        self._serial = 0
        self.facts: EngineFacts

    async def __aenter__(self) -> Offline:
        bringup = Bringup(self._config, MIXED, self.device, self._model_dir)
        server = self._config.server
        ranks = server.tp * server.pp
        self._dispatch = dispatch = Dispatch(NAME, ranks, _now, lambda start: "")
        dispatch.routers, dispatch.links = self._asker, NoLinks()
        self._workers = workers = Workers(
            NAME, self._config.worker, self._config.log, ranks, dispatch.step_done, dispatch.transfer_event
        )
        try:
            workers.start()
            up = await bringup.run(workers, self.inspected)
            self.facts = up.facts
            self._steps = dispatch.recorder = _Steps(up.facts.sampling_rank)
            dispatch.attach(up.engine, workers)
        except BaseException:
            await workers.stop()
            raise
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ticker.cancel()
        await self._workers.stop()

    def _with_room(self, config: Config, most: int) -> Config:
        """With steps as large as each phase has alone. Raises ConfigError where fewer sequences may run than are asked for."""
        engine, _ = size_steps(config.engine, self.device, self.inspected.num_parameters // config.server.tp)
        if engine.max_running >= most:
            return replace(config, engine=engine)
        if config.engine.max_running:
            raise ConfigError(
                f"engine.max_running = {config.engine.max_running}: {most} sequences are to run at once; set it to "
                "that, or ask for fewer"
            )
        return replace(config, engine=replace(engine, max_running=most))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch.tick()
            self._asker.changed.set()

    # ---- requests

    async def prompt(self, token_ids: Sequence[int]) -> list[Step]:
        """Its steps, up to its first token. Raises DisaggError if it cannot be run."""
        first = len(self._steps.done)
        await self._until_ended([self._start(token_ids, 1)], Outcome.DONE)
        return self._steps.done[first:]

    async def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> list[Step]:
        """So many steps in a row in which each sequence has its next token. Raises DisaggError if they cannot run together."""
        count = len(prompts)
        before = sum(ceil_div(len(prompt), self.facts.scheduling.chunk_tokens) + 1 for prompt in prompts)
        looked_at = len(self._steps.done)
        keys = [self._start(prompt, before + 4 * steps + 16) for prompt in prompts]
        found: list[Step] = []
        while len(found) < steps:
            if ended := [self._asker.ends[key] for key in keys if key in self._asker.ends]:
                await self._abort(keys)
                raise DisaggError(
                    ended[0].reason
                    or "they did not run together: the first one ended before the last had begun, for want of KV memory "
                    "(engine.kv_memory_bytes)"
                )
            await self._changed()
            new = self._steps.done[looked_at:]  # alone: who looks takes time from who schedules
            looked_at += len(new)
            for step in new:
                together = len(step.rows) == count and all(rows.count == 1 for rows in step.rows)
                found = [*found, step] if together else []
        await self._abort(keys)
        return found[-steps:]

    def _start(self, token_ids: Sequence[int], max_tokens: int) -> LegKey:
        self._serial += 1
        key = LegKey(f"{NAME}-{self._serial}", 1, 0)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start = StartLeg(key, tuple(token_ids), len(token_ids), params, (0,), NOBODY, DEADLINE_S)
        self._dispatch.router_message(ROUTER, start)
        return key

    async def _abort(self, keys: Sequence[LegKey]) -> None:
        for key in keys:
            self._dispatch.router_message(ROUTER, AbortLeg(key))
        await self._until_ended(keys, Outcome.ABORTED)

    async def _until_ended(self, keys: Sequence[LegKey], outcome: Outcome) -> None:
        engine = self._dispatch.engine
        assert engine is not None
        while any(key not in self._asker.ends for key in keys) or engine.computing:
            await self._changed()
        for key in keys:
            end = self._asker.ends.pop(key)
            if outcome is Outcome.DONE and end.outcome is not outcome:
                raise DisaggError(end.reason or end.outcome.value)

    async def _changed(self) -> None:
        """Something was said, or time has passed. Raises DisaggError when the workers are lost, and what a tick raised."""
        lost = asyncio.ensure_future(self._workers.wait_lost())
        changed = asyncio.ensure_future(self._asker.changed.wait())
        try:
            await asyncio.wait({lost, changed, self._ticker}, return_when=asyncio.FIRST_COMPLETED)
            if self._ticker.done():
                self._ticker.result()
            if lost.done():
                raise DisaggError(f"the workers are lost: {lost.result()}")
        finally:
            lost.cancel()
            changed.cancel()
        self._asker.changed.clear()


def _now() -> Now:
    return Now(time.monotonic(), time.time())
