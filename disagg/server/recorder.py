"""`record.dir`: what each step of a server did, and what became of each request, for `disagg report` and for people.

    Dispatch ── legs, plans, results, what routers are told ──> Recorder ──> columns ──every few seconds──> files

Listens beside the engine and decides nothing. A step is noted when its plan leaves and becomes a row when it is reported; a
request becomes one when its leg ends. Files are written every 5 s, later every hundredth of the time that has passed: a kill
loses that much, and a day has some hundred files.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from msgspec import Struct

from disagg.engine.data_parallel import AnyEngine
from disagg.engine.now import Now
from disagg.messages.legs import LegEnd, LegTokens, ServerMessage, StartLeg
from disagg.messages.plan import StepResult, WorkerPlan
from disagg.server.record_columns import Origin, RequestColumns, RequestRow, Runs, StepColumns, StepRow
from disagg.telemetry.record_files import RecordFiles
from disagg.types.ids import LegKey

WRITE_S = 5.0
WRITE_SHARE = 0.01  # of the time since the incarnation began
MOST_TIMES = 1 << 16  # of one choice's tokens; later ones are counted only
CLOSE_S = 5.0


class Unrecorded:
    """Hears what a server's dispatch does, and keeps nothing of it."""

    def up(self, engine: AnyEngine, now: Now) -> None:
        """An engine begins."""

    def down(self) -> None:
        """It is gone, with all that it had under way."""

    def started(self, start: StartLeg, now: Now) -> None:
        """A leg is given to the engine."""

    def planned(self, plan: WorkerPlan, now: Now) -> None:
        """A plan is on its way to the workers."""

    def computed(self, result: StepResult) -> None:
        """A rank has computed one. The engine does not know yet."""

    def told(self, message: ServerMessage, now: Now) -> None:
        """A router is told of tokens, or of a leg's end."""

    def tick(self, now: Now) -> None:
        """Time has passed."""

    def close(self) -> None:
        """Waits for what is to be written. Blocks."""


class _Running(Struct):
    """A sequence that workers know."""

    request: str
    choice: int
    position: int
    joined_tokens: int
    is_prompt: bool


@dataclass(slots=True)
class _Choice:
    token_s: array[float] = field(default_factory=lambda: array("f"))
    tokens: int = 0
    first_s: float | None = None
    finish: str | None = None
    starts: int = 0  # how often it joined the batch


@dataclass(slots=True)
class _Leg:
    start: StartLeg
    arrival_s: float
    choices: dict[int, _Choice]
    admitted_s: float | None = None


class _Step(Struct):
    runs: list[tuple[_Running, bool, int]]  # (who, decodes, tokens)
    budget_tokens: int


class Recorder(Unrecorded):
    """Of one server process."""

    def __init__(self, files: RecordFiles, server: str, role: str) -> None:
        self._files = files
        self._server, self._role = server, role
        self._engine: AnyEngine | None = None
        self._forget()

    def _forget(self) -> None:
        self._legs: dict[LegKey, _Leg] = {}
        # By data-parallel rank, and by sequence and by plan of that: not yet ended, and not yet reported.
        self._running: dict[tuple[int, int], _Running] = {}
        self._steps: dict[tuple[int, int], _Step] = {}
        self._names: dict[str, int] = {}  # of requests in the steps' columns
        self._written = 0

    # ---- the life of an engine

    def up(self, engine: AnyEngine, now: Now) -> None:
        self._engine = engine
        one = engine.ranks[0]
        facts = one.core.facts
        self._origin = Origin(
            self._server, self._role, facts.incarnation, facts.tp, one.max_tokens_in_pool, facts.scheduling.max_running
        )
        self._step_columns, self._request_columns = StepColumns(self._origin), RequestColumns(self._origin)
        self._began_s = self._written_s = now.s

    def down(self) -> None:
        if self._engine is not None:
            self._write()
        self._engine = None
        self._forget()

    def close(self) -> None:
        self.down()
        self._files.close(CLOSE_S)

    def tick(self, now: Now) -> None:
        if self._engine is None:
            return
        if now.s - self._written_s >= max(WRITE_S, WRITE_SHARE * (now.s - self._began_s)):
            self._written_s = now.s
            self._write()

    def _write(self) -> None:
        """What there is becomes a file of each kind."""
        self._written += 1
        tail = f"{self._server}-{self._origin.incarnation}-{self._written:05d}.parquet"
        if len(self._step_columns):
            steps, names = self._step_columns, list(self._names)
            self._files.put(f"steps-{tail}", lambda: steps.table(names))
            self._step_columns, self._names = StepColumns(self._origin), {}
        if len(self._request_columns):
            self._files.put(f"requests-{tail}", self._request_columns.table)
            self._request_columns = RequestColumns(self._origin)

    # ---- steps

    def planned(self, plan: WorkerPlan, now: Now) -> None:
        if self._engine is None:
            return
        rank, engine = plan.dp_rank, self._engine.ranks[plan.dp_rank]
        for seq_id in plan.ends:
            self._running.pop((rank, seq_id), None)
        for start in plan.starts:
            sequence = engine.sequence(start.seq_id)
            if sequence is None:
                continue
            self._running[rank, start.seq_id] = _Running(
                sequence.key.request_id,
                sequence.choices[0],
                start.computed,
                len(start.token_ids),
                sequence.is_prompt,
            )
            leg = self._legs.get(sequence.key)
            if leg is None:
                continue
            if leg.admitted_s is None:
                leg.admitted_s = now.unix_s
            if not sequence.is_prompt and (choice := leg.choices.get(sequence.choice)) is not None:
                choice.starts += 1
        runs = []
        for run in plan.runs:
            running = self._running.get((rank, run.seq_id))
            if running is not None:
                decodes = not running.is_prompt and running.position >= running.joined_tokens - 1
                running.position += run.num_tokens
                runs.append((running, decodes, run.num_tokens))
        if runs:
            self._steps[rank, plan.plan_no] = _Step(runs, engine.budget_tokens)

    def computed(self, result: StepResult) -> None:
        """The rank that samples speaks for all of its data-parallel rank: they compute the same steps."""
        if self._engine is None:
            return
        facts = self._engine.ranks[0].core.facts
        rank, worker = divmod(result.rank, facts.ranks)
        if worker != facts.sampling_rank or (step := self._steps.pop((rank, result.plan_no), None)) is None:
            return
        engine = self._engine.ranks[rank]
        runs, names = Runs.empty(), self._names
        decoded = prefilled = 0
        for running, decodes, tokens in step.runs:
            runs.request.append(names.setdefault(running.request, len(names)))
            runs.choice.append(running.choice)
            runs.decodes.append(decodes)
            runs.tokens.append(tokens)
            if decodes:
                decoded += tokens
            else:
                prefilled += tokens
        running_now, waiting = engine.running_and_waiting
        row = StepRow(
            result.started_unix_s,
            result.compute_s,
            result.plan_no,
            prefilled,
            decoded,
            step.budget_tokens,
            running_now,
            waiting,
            rank,
        )
        self._step_columns.add(row, engine.core.pool.report(), runs)
        if self._step_columns.full:
            self._write()

    # ---- requests

    def started(self, start: StartLeg, now: Now) -> None:
        if start.key not in self._legs:
            self._legs[start.key] = _Leg(start, now.unix_s, {choice: _Choice() for choice in start.choices})

    def told(self, message: ServerMessage, now: Now) -> None:
        leg = self._legs.get(message.key)
        if leg is None:
            return
        if isinstance(message, LegEnd):
            del self._legs[message.key]
            self._end(leg, message, now)
            return
        assert isinstance(message, LegTokens)
        choice = leg.choices.get(message.choice)
        if choice is None:
            return
        if choice.first_s is None:
            choice.first_s = now.unix_s
        choice.tokens += len(message.token_ids)
        if len(choice.token_s) < MOST_TIMES:
            choice.token_s.extend([now.unix_s - leg.arrival_s] * len(message.token_ids))
        if message.finish is not None:
            choice.finish = message.finish.value

    def _end(self, leg: _Leg, end: LegEnd, now: Now) -> None:
        start = leg.start
        for number, choice in leg.choices.items():
            row = RequestRow(
                request_id=start.key.request_id,
                attempt=start.key.attempt,
                trunk=start.key.prefix_no,
                choice=number,
                tenant=start.tenant,
                arrival_s=leg.arrival_s,
                admitted_s=leg.admitted_s,
                first_token_s=choice.first_s,
                end_s=now.unix_s,
                prompt_tokens=start.num_prompt,
                cached_tokens=end.cached_tokens,
                first_index=len(start.token_ids) - start.num_prompt,
                output_tokens=choice.tokens,
                finish_reason=choice.finish,
                outcome=end.outcome.value,
                preemptions=max(0, choice.starts - 1),
            )
            self._request_columns.add(row, choice.token_s)
        if self._request_columns.full:
            self._write()


def recorder_of(directory: str, server: str, role: str) -> Unrecorded:
    """directory: record.dir; empty for none. Raises ConfigError if nothing can be written there."""
    if not directory:
        return Unrecorded()
    from disagg.types.small_files import home_expanded

    return Recorder(RecordFiles(home_expanded(directory, "record.dir")), server, role)
