"""From records of `disagg up --record DIR` to what a plan needs: how long steps took, and how KV went on.

    prefill   ├─ chunk ─┤├─ chunk ─┤                   a step counts from its start to the start of the next one of the same
    decode              handoff ─> ├─ step ─┤├─ step   request, so what lies between two of them is a part of it

Steps are grouped by role and TP size. The line is that of `scheduler.step_times`, through the medians of steps that are alike;
the shares by which steps were longer or shorter stay in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from disagg.bench.plan.cluster import SPELL_STEPS
from disagg.bench.plan.costs import Handoff, Measured, ServerFacts, StepCost
from disagg.bench.report.read import numbers, read_records
from disagg.scheduler.step_times import fit
from disagg.types.errors import ConfigError

COLUMNS = ("runs", "tp", "kv_tokens", "max_running")
LEAST_STEPS = 8
MOST_FITTED = 4000  # steps of one kind, evenly from all of them
MOST_STEPS = 200_000  # that are read, the last ones of all servers
MOST_RUNS = 5_000_000
QUANTILES = 64
MOST_RATIOS = 4096
APART_S = 0.05  # from a step's end to the next one's start: more is a pause, whatever requests they share
BUSY_S = 0.005  # a sequence that began so soon after a step's end had waited for it


class Steps(Struct):
    """Of one rank of one incarnation, in their order; arrays of one length. shares: the next step goes on with a request."""

    begin_s: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    prompt_tokens: np.ndarray
    attended: np.ndarray
    budget: np.ndarray
    shares: np.ndarray
    # When the last step of a request's prompt ended, and the first one of its answer began.
    prompt_end_s: dict[str, float]
    decode_s: dict[str, float]


def learn(directory: Path) -> Measured:
    """Raises ConfigError where there is not enough."""
    records = read_records(directory, COLUMNS)
    if records.steps is None:
        why = f": {records.passed_over[0][0]} {records.passed_over[0][1]}" if records.passed_over else ""
        raise ConfigError(f"{directory} has no records of steps (steps*.parquet) that say their TP size{why}")
    steps = _last(records.steps, MOST_STEPS)
    rows = records.requests.drop_columns(["token_s"]).to_pylist() if records.requests is not None else []
    return learned(steps, rows, str(directory))


def _last(steps: Any, most: int) -> Any:
    """Those that began last, about so many: rows lie by the names of servers, so the last rows are of some of them."""
    if steps.num_rows <= most:
        return steps
    import pyarrow as pa

    begin_s = numbers(steps, "time_s")
    since_s = np.partition(begin_s, -most)[-most]
    return steps.filter(pa.array(begin_s >= since_s))


def learned(steps: Any, requests: Sequence[dict[str, Any]], source: str) -> Measured:
    """steps: a table with COLUMNS; requests: rows. Raises ConfigError where there is not enough."""
    starts = _starts(requests)
    found: dict[tuple[str, int], list[Steps]] = {}
    limits: dict[tuple[str, int], tuple[int, int]] = {}
    for role, tp, part in _by_rank(steps):
        found.setdefault((role, tp), []).append(_steps(part, starts))
        limits[role, tp] = (int(part.column("kv_tokens")[0].as_py()), int(part.column("max_running")[0].as_py()))
    tells = {role: _tell_s(_of(role, found), requests, role) for role in ("prefill", "decode", "mixed")}
    pools: dict[str, dict[int, ServerFacts]] = {"prefill": {}, "decode": {}, "mixed": {}}
    for (role, tp), parts in sorted(found.items()):
        cost = _cost(role, parts)
        if role in pools and cost is not None:
            kv_tokens, max_running = limits[role, tp]
            budget = max(int(part.budget.max()) for part in parts)
            pools[role][tp] = ServerFacts(
                tp, cost, max(1, budget), kv_tokens or 1 << 40, max_running or 256, tells[role]
            )
    if not pools["mixed"] and not (pools["prefill"] and pools["decode"]):
        raise ConfigError(
            f"{source}: a plan needs at least {LEAST_STEPS} steps with prompts of a prefill server and as many of a decode "
            f"server, or of a mixed one; put more load on it while it records"
        )
    handoff = _handoff(_of("prefill", found), _of("decode", found), requests)
    return Measured(pools["prefill"], pools["decode"], pools["mixed"], handoff, f"records in {source}")


def _of(role: str, found: dict[tuple[str, int], list[Steps]]) -> list[Steps]:
    return [part for (whose, _), parts in found.items() if whose == role for part in parts]


def _starts(requests: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int, bool], int]:
    """Tokens before the first one that a server computed, by (server, request, choice, whether it decodes)."""
    found: dict[tuple[str, str, int, bool], int] = {}
    for row in requests:
        key = (row["server"], row["request_id"], row["choice"])
        found[*key, False] = row["cached_tokens"]
        found[*key, True] = row["prompt_tokens"] + row["first_index"]
    return found


def _by_rank(steps: Any) -> Iterator[tuple[str, int, Any]]:
    """(role, TP size, steps of one rank of one incarnation in their order)."""
    import pyarrow.compute as pc

    origins = (
        steps.select(["server", "role", "incarnation", "rank", "tp"])
        .group_by(["server", "role", "incarnation", "rank", "tp"])
        .aggregate([])
    )
    for origin in origins.to_pylist():
        mask = None
        for name in ("server", "incarnation", "rank"):
            same = pc.equal(steps.column(name), origin[name])
            mask = same if mask is None else pc.and_(mask, same)
        yield origin["role"], origin["tp"], steps.filter(mask).sort_by("step")


def _steps(part: Any, starts: dict[tuple[str, str, int, bool], int]) -> Steps:
    server = part.column("server")[0].as_py()
    begin_s, seconds = numbers(part, "time_s"), numbers(part, "seconds")
    numbered = numbers(part, "step")
    tokens = numbers(part, "prefill_tokens") + numbers(part, "decode_tokens")
    attended, shares = np.zeros(len(begin_s)), np.zeros(len(begin_s), dtype=bool)
    prompt_end_s: dict[str, float] = {}
    decode_s: dict[str, float] = {}
    positions: dict[tuple[str, int, bool], int] = {}
    before: set[str] = set()
    runs_seen = 0
    for at, runs in enumerate(part.column("runs")):
        here: set[str] = set()
        for run in runs.as_py():
            request, choice, decodes, count = run["request_id"], run["choice"], run["phase"] == "decode", run["tokens"]
            key = (request, choice, decodes)
            start = positions.get(key)
            if start is None:
                start = starts.get((server, *key), 0)
            attended[at] += count * (start + count / 2)
            positions[key] = start + count
            here.add(request)
            if decodes:
                decode_s.setdefault(request, float(begin_s[at]))
            else:
                prompt_end_s[request] = float(begin_s[at] + seconds[at])
        if at and numbered[at] == numbered[at - 1] + 1:
            shares[at - 1] = not before.isdisjoint(here)
        before = here
        runs_seen += len(here)
        if runs_seen > MOST_RUNS:
            raise ConfigError(
                f"there are more than {MOST_RUNS} runs in the steps of {server}: give records of less time"
            )
    return Steps(
        begin_s,
        seconds,
        tokens,
        numbers(part, "prefill_tokens"),
        attended,
        numbers(part, "budget_tokens"),
        shares,
        prompt_end_s,
        decode_s,
    )


def _periods(part: Steps) -> np.ndarray:
    """Of each step, until the next one could begin: [steps] seconds."""
    gaps = part.begin_s[1:] - part.begin_s[:-1] - part.seconds[:-1]
    known = part.shares[:-1] & (gaps >= 0) & (gaps < APART_S)
    usual_s = float(np.median(gaps[known])) if known.any() else 0.0
    between_s: np.ndarray = np.append(np.where(known, gaps, usual_s), usual_s)
    took_s: np.ndarray = part.seconds + between_s
    return took_s


def _cost(role: str, parts: Sequence[Steps]) -> StepCost | None:
    """None of too few steps of the kind that counts."""
    rows = np.concatenate(
        [np.stack([part.tokens, part.attended, _periods(part), part.prompt_tokens > 0], axis=1) for part in parts]
    )
    rows = rows[(rows[:, 0] > 0) & (rows[:, 2] > 0)]
    with_prompts = rows[:, 3] > 0
    if role == "decode":
        kinds = [rows[~with_prompts]]
    elif role == "prefill":
        kinds = [rows[with_prompts]]
    else:
        kinds = [rows[with_prompts], rows[~with_prompts]]
    if min(map(len, kinds)) < LEAST_STEPS:
        return None
    chosen = np.concatenate(
        [each[np.linspace(0, len(each) - 1, min(len(each), MOST_FITTED)).astype(int)] for each in kinds]
    )
    fixed_s, token_s, attended_s = fit((t, a, s) for t, a, s in medians(chosen[:, :3]).tolist())
    followed = np.concatenate([_evenly(each) for each in kinds])
    off = followed[:, 2] / (fixed_s + token_s * followed[:, 0] + attended_s * followed[:, 1])
    most_decoding = max(int((part.tokens - part.prompt_tokens).max()) for part in parts)
    return StepCost(fixed_s, token_s, attended_s, tuple(off.tolist()), len(rows), most_decoding)


def medians(rows: np.ndarray) -> np.ndarray:
    """Of steps that are alike (tokens and attended tokens within half an octave) each is taken to be their median, so that a few
    that were held up bend no line. rows: [steps, 3] of tokens, attended, seconds.
    """
    alike = np.floor(2 * np.log2(1 + rows[:, :2])).astype(int)
    _, which = np.unique(alike, axis=0, return_inverse=True)
    which = which.reshape(-1)
    middles = np.stack([np.median(rows[which == each], axis=0) for each in range(int(which.max()) + 1)])
    out: np.ndarray = middles[which]
    return out


def _evenly(rows: np.ndarray) -> np.ndarray:
    """Spells of rows that follow each other, from all of them; at most MOST_RATIOS."""
    spells = MOST_RATIOS // SPELL_STEPS
    if len(rows) <= MOST_RATIOS:
        return rows
    firsts = np.linspace(0, len(rows) - SPELL_STEPS, spells).astype(int)
    return np.concatenate([rows[first : first + SPELL_STEPS] for first in firsts])


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """As many values as stand for all of them, in order, with their mean."""
    ordered = np.sort(values)
    if len(ordered) <= QUANTILES:
        return tuple(ordered.tolist())
    return tuple(float(each.mean()) for each in np.array_split(ordered, QUANTILES))


def _tell_s(parts: Sequence[Steps], requests: Sequence[dict[str, Any]], role: str) -> float:
    """From the end of a prompt's last step until the router was told of its token; of decode servers, of a first step."""
    told = {
        row["request_id"]: row["first_token_s"]
        for row in requests
        if row["role"] == role and row["attempt"] <= 1 and row["first_token_s"]
    }
    later = [told[request] - end_s for part in parts for request, end_s in part.prompt_end_s.items() if request in told]
    if role == "decode":
        later = []
        for part in parts:
            ends_s = part.begin_s + part.seconds
            for request, begin_s in part.decode_s.items():
                if request in told:
                    later.append(told[request] - float(ends_s[np.searchsorted(part.begin_s, begin_s)]))
    return max(0.0, float(np.median(later))) if later else 0.0


def _handoff(senders: Sequence[Steps], receivers: Sequence[Steps], requests: Sequence[dict[str, Any]]) -> Handoff:
    """From the end of a prompt until its sequence was in a plan of decode, less half a step where one was under way."""
    prompts = {request: end_s for part in senders for request, end_s in part.prompt_end_s.items()}
    rows = {
        row["request_id"]: row
        for row in requests
        if row["role"] == "decode" and row["attempt"] <= 1 and row["admitted_s"]
    }
    points = []
    for part in receivers:
        ends_s = part.begin_s + part.seconds
        for request in part.decode_s:
            if request not in rows or request not in prompts:
                continue
            planned_s = rows[request]["admitted_s"]
            before = int(np.searchsorted(ends_s, planned_s, side="right")) - 1
            waited_s = 0.0
            if before >= 0 and planned_s - ends_s[before] < BUSY_S:
                waited_s = float(part.seconds[before]) / 2
            points.append((float(rows[request]["prompt_tokens"]), planned_s - waited_s - prompts[request]))
    if len(points) < LEAST_STEPS:
        return Handoff()
    tokens, seconds = (np.asarray(each) for each in zip(*points, strict=True))
    slope = 0.0
    if float(tokens.std()) > 0.1 * float(tokens.mean()):
        slope = max(0.0, float(np.polyfit(tokens, seconds, 1)[0]))
    rest = seconds - slope * tokens
    fixed_s = float(np.median(rest))
    return Handoff(fixed_s, slope, _quantiles(rest - fixed_s))
