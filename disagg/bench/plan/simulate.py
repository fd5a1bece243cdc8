"""Runs requests through a simulated cluster, event by event. Pure: the same arguments give the same answers.

    at_s ──router──> prefill: queue, chunks ──> first token ──handoff──> decode: a token a step ──> end
             └─────> decode: KV is set aside ────┘ (no answer begins before that)

Both servers are chosen when a request comes, as routers do: prefill by the seconds until its prompt would be computed, less what
is cached there; decode by sequences per free KV. What stands still, or would for ever, is a bug, and asserts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from disagg.bench.plan.cluster import Asked, Caches, Job, Server
from disagg.bench.plan.costs import Measured, MixedFacts, ServerFacts, mixed_facts
from disagg.bench.serve.figures import Answered, Failed, Outcome
from disagg.bench.serve.goodput import Slo

TOO_LARGE = "does not fit the KV of a server"
WATCH_EVERY = 2048  # events


class Cluster(Struct, frozen=True, order=True):
    """How many servers of which TP size. decode = 0 beside prefill servers: only first tokens are simulated."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    prefill_tp: int = 1
    decode_tp: int = 1
    mixed_tp: int = 1

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp + self.mixed * self.mixed_tp

    def __str__(self) -> str:
        if self.mixed:
            return f"{self.mixed} mixed (TP {self.mixed_tp})"
        return f"{self.prefill} prefill (TP {self.prefill_tp}) and {self.decode} decode (TP {self.decode_tp})"


class PoolUse(Struct, frozen=True):
    """Of the servers of a pool: share of the time in which they compute steps, of all and of the busiest, and steps. One that
    decodes anything always computes one: this is no share of what they could take. most_decoding: sequences in one step.
    """

    busy: float
    busiest: float
    steps: int
    prompt_tokens: int
    most_decoding: int = 0


class Simulated(Struct):
    """What came of it. given_up: so many first tokens were late that the rest was not simulated."""

    outcomes: list[Outcome]
    duration_s: float
    pools: dict[str, PoolUse]
    given_up: bool = False


Watch = Callable[[int], None]  # told how many requests have ended; may raise


class _Pool:
    """Servers of one kind, and what is promised to each."""

    def __init__(self, servers: list[Server], usual: ServerFacts) -> None:
        self.servers = servers
        self.sequences = np.zeros(len(servers))
        self.kv_tokens = np.zeros(len(servers))  # of them
        self.queued_s = np.zeros(len(servers))  # of prompts that were sent there
        self.usual = usual
        self.grants: list[deque[Job]] = [deque() for _ in servers]

    def least_sequences(self) -> int:
        free_share = np.maximum(0.0, self.usual.kv_tokens - self.kv_tokens) / self.usual.kv_tokens + 1e-6
        return int(np.argmin((self.sequences + 1) / free_share))

    def prompt_s(self, tokens: int) -> float:
        cost, chunk = self.usual.cost, self.usual.chunk_tokens
        return cost.work_s(tokens, tokens * tokens / 2) + cost.fixed_s * tokens / chunk

    def first_ready(self, input_tokens: int, hits: dict[int, int]) -> tuple[int, int]:
        """(server, tokens cached there) where the prompt would be computed first."""
        whole_s = self.prompt_s(input_tokens)
        ready_s = self.queued_s + whole_s
        for server, cached in hits.items():
            ready_s[server] -= whole_s - self.prompt_s(input_tokens - cached)
        # Among equals who has been given least, so that idle servers take turns.
        best = int(np.lexsort((np.asarray(self._given()), np.round(ready_s, 6)))[0])
        return best, hits.get(best, 0)

    def _given(self) -> list[int]:
        return [server.prompt_tokens for server in self.servers]

    def use(self, duration_s: float) -> PoolUse:
        busy = [server.busy_s / duration_s if duration_s > 0 else 0.0 for server in self.servers]
        steps, tokens = sum(s.steps for s in self.servers), sum(s.prompt_tokens for s in self.servers)
        most = max(server.most_decoding for server in self.servers)
        return PoolUse(sum(busy) / len(busy), max(busy), steps, tokens, most)


class Simulation:
    """One run."""

    def __init__(
        self, cluster: Cluster, measured: Measured, block_tokens: int = 512, caches: bool = True, seed: int = 1
    ) -> None:
        self._measured = measured
        self._block_tokens = block_tokens
        self._mixed = cluster.mixed > 0
        prompts: ServerFacts
        if self._mixed:
            both: MixedFacts = mixed_facts(measured)[cluster.mixed_tp]
            prompts = both.prefill
            servers = [Server(n, both.prefill, both.decode, seed) for n in range(cluster.mixed)]
            self._prefill = self._decode = _Pool(servers, prompts)
            self._pools = {"mixed": self._prefill}
        else:
            prompts = measured.prefill[cluster.prefill_tp]
            servers = [Server(n, prompts, prompts, seed) for n in range(cluster.prefill)]
            self._prefill = _Pool(servers, prompts)
            self._pools = {"prefill": self._prefill}
            if cluster.decode:
                facts = measured.decode[cluster.decode_tp]
                servers = [Server(n, facts, facts, seed + 1) for n in range(cluster.decode)]
                self._decode = self._pools["decode"] = _Pool(servers, facts)
        self._decodes = cluster.decode > 0 and not self._mixed
        blocks = max(1, prompts.kv_tokens // block_tokens)
        self._caches = Caches(len(self._prefill.servers), blocks) if caches else None
        self._events: list[tuple[float, int, Callable[[float, object], None], object]] = []
        self._serial = count()
        self._outcomes: list[Outcome] = []
        self._late = self._judged = 0

    def run(self, asked: Sequence[Asked], slo: Slo | None = None, watch: Watch = lambda ended: None) -> Simulated:
        """asked: in their order. slo: it ends as soon as that cannot be met."""
        for each in asked:
            self._at(each.at_s + self._measured.router_s, self._came, Job(each))
        limit_s = slo.limits_s.get("ttft") if slo is not None else None
        events, seen, given_up, now_s = self._events, 0, False, 0.0
        while events:
            now_s, _, do, what = heapq.heappop(events)
            do(now_s, what)
            seen += 1
            if seen % WATCH_EVERY == 0:
                watch(len(self._outcomes))
                if limit_s is not None and slo is not None and self._hopeless(slo, limit_s, len(asked)):
                    given_up = True
                    break
        assert given_up or len(self._outcomes) == len(asked), "a request stands still"
        duration_s = max(1e-9, now_s - (asked[0].at_s if asked else 0.0))
        pools = {name: pool.use(duration_s) for name, pool in self._pools.items()}
        return Simulated(self._outcomes, duration_s, pools, given_up)

    def _hopeless(self, slo: Slo, limit_s: float, requests: int) -> bool:
        late = sum(isinstance(each, Failed) or each.ttft_s > limit_s for each in self._outcomes[self._judged :])
        self._judged = len(self._outcomes)
        self._late += late
        return slo.hopeless(self._late, requests)

    def _at(self, at_s: float, do: Callable[[float, object], None], what: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._serial), do, what))

    # ---- a request comes

    def _came(self, now_s: float, what: object) -> None:
        assert isinstance(what, Job)
        job, asked = what, what.asked
        pool = self._prefill
        if asked.input_tokens > pool.usual.kv_tokens or (
            self._whole and asked.kv_tokens > self._last_pool.usual.kv_tokens
        ):
            self._outcomes.append(Failed(asked.at_s, now_s, TOO_LARGE))
            return
        hits = {}
        if self._caches is not None and asked.hash_ids:
            blocks = self._caches.hits(asked.hash_ids)
            hits = {server: min(n * self._block_tokens, asked.input_tokens - 1) for server, n in blocks.items()}
        if self._mixed:
            at = self._best_mixed(asked, hits)
            cached = hits.get(at, 0)
        else:
            at, cached = pool.first_ready(asked.input_tokens, hits)
        job.prefill, job.computed = pool.servers[at], cached
        job.queued_s = pool.prompt_s(asked.input_tokens - cached)
        pool.queued_s[at] += job.queued_s
        job.prefill.ask(job)
        last = at
        if self._decodes:
            last = self._decode.least_sequences()
            job.decode = self._decode.servers[last]
            self._decode.grants[last].append(job)
        else:
            job.decode, job.granted_s = (job.prefill if self._mixed else None), now_s
        if self._whole:
            self._last_pool.sequences[last] += 1
            self._last_pool.kv_tokens[last] += asked.kv_tokens
        if self._decodes:
            self._grant(last, now_s)
        self._plan(job.prefill, now_s)

    @property
    def _last_pool(self) -> _Pool:
        """Of the servers that hold a whole answer."""
        return self._decode if self._decodes else self._prefill

    @property
    def _whole(self) -> bool:
        """Not only first tokens are simulated."""
        return self._decodes or self._mixed

    def _best_mixed(self, asked: Asked, hits: dict[int, int]) -> int:
        """By what there is to compute before it, and by sequences."""
        pool = self._prefill
        ready_s = pool.queued_s.copy()
        for server, cached in hits.items():
            ready_s[server] -= pool.prompt_s(cached)
        free_share = np.maximum(0.0, pool.usual.kv_tokens - pool.kv_tokens) / pool.usual.kv_tokens + 1e-6
        return int(np.argmin(ready_s + 0.002 * (pool.sequences + 1) / free_share))

    # ---- steps

    def _plan(self, server: Server, now_s: float) -> None:
        for step in server.plan(now_s, self._mixed):
            self._at(step.end_s, self._stepped, server)

    def _stepped(self, now_s: float, what: object) -> None:
        assert isinstance(what, Server)
        step, left = what.done()
        for job in step.prompts:
            self._prompt_done(job, now_s)
        for job in left:
            self._end(job, now_s, what.tokens_s(job))
        self._plan(what, now_s)

    def _prompt_done(self, job: Job, now_s: float) -> None:
        assert job.prefill is not None
        pool, asked = self._prefill, job.asked
        job.prompt_s = now_s
        pool.queued_s[job.prefill.index] -= job.queued_s
        if self._caches is not None and asked.hash_ids:
            self._caches.keep(job.prefill.index, asked.hash_ids)
        if job.granted_s is not None:
            self._begin(job, now_s)

    def _begin(self, job: Job, now_s: float) -> None:
        """Its prompt is computed, and its KV has a place."""
        assert job.prefill is not None
        asked = job.asked
        job.first_s = now_s + self._prefill.usual.tell_s
        if self._mixed:
            if asked.output_tokens == 1:
                self._end(job, now_s, np.zeros(0))
            return
        if not self._decodes:
            job.prefill.let_go(asked.input_tokens)
            self._outcomes.append(Answered(asked.at_s, job.first_s, job.first_s, (), asked.input_tokens, 1))
            self._plan(job.prefill, now_s)
            return
        later = self._measured.handoff.later_s
        after_s = self._measured.handoff.seconds(asked.input_tokens, later[asked.number * 7919 % len(later)])
        self._at(now_s + after_s, self._landed, job)

    def _landed(self, now_s: float, what: object) -> None:
        assert isinstance(what, Job)
        job, prefill, decode = what, what.prefill, what.decode
        assert prefill is not None and decode is not None
        prefill.let_go(job.asked.input_tokens)
        if job.asked.output_tokens == 1:
            self._end(job, now_s, np.zeros(0))
        else:
            decode.join(job)
        self._plan(prefill, now_s)
        self._plan(decode, now_s)

    def _end(self, job: Job, now_s: float, tokens_s: np.ndarray) -> None:
        """Its last token is made."""
        server, asked = job.decode, job.asked
        assert server is not None
        server.end(asked)
        pool = self._last_pool
        pool.sequences[server.index] -= 1
        pool.kv_tokens[server.index] -= asked.kv_tokens
        told_s = np.maximum(tokens_s + pool.usual.tell_s, job.first_s)
        gaps_s = np.diff(told_s, prepend=job.first_s)
        last_s = float(told_s[-1]) if len(told_s) else job.first_s
        self._outcomes.append(
            Answered(asked.at_s, job.first_s, last_s, gaps_s, asked.input_tokens, asked.output_tokens)  # type: ignore[arg-type]
        )
        if self._decodes:
            self._grant(server.index, now_s)

    def _grant(self, index: int, now_s: float) -> None:
        """KV of those that wait for it, in their order, as far as there is room."""
        waiting, server = self._decode.grants[index], self._decode.servers[index]
        while waiting and server.has_room(waiting[0].asked):
            job = waiting.popleft()
            server.take(job.asked)
            job.granted_s = now_s
            if job.prompt_s is not None:
                self._begin(job, now_s)
