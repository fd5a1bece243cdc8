"""From records of legs on servers to answers: what one choice of one request had on all servers and in all attempts. Pure.

prefill-0   arrival ──queue──> admitted ──chunks──> first token
decode-0    arrival ─────────── grant, transfer ──────────────> token ─ token ─ token ─ end
answer      the earliest of each: arrival, admitted, and every output index's token
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PREFILLS = ("prefill", "mixed")


@dataclass(slots=True)
class Answer:
    request_id: str
    choice: int
    arrival_s: float = float("inf")
    admitted_s: float = float("inf")
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    attempts: int = 0
    finish: str | None = None
    outcomes: set[str] = field(default_factory=set)
    servers: list[str] = field(default_factory=list)
    token_s: dict[int, float] = field(default_factory=dict)  # by output index

    @property
    def completed(self) -> bool:
        return self.finish is not None

    @property
    def times_s(self) -> list[float]:
        """Of its tokens, in their order; one that was told out of order counts from the one before."""
        found = np.maximum.accumulate([self.token_s[index] for index in sorted(self.token_s)] or [0.0])
        return [float(each) for each in found] if self.token_s else []

    @property
    def ttft_s(self) -> float | None:
        return min(self.token_s.values()) - self.arrival_s if self.token_s else None

    @property
    def what(self) -> str:
        """completed, or how it ended."""
        if self.completed:
            return "completed"
        return ", ".join(sorted(self.outcomes - {"done"})) or "ended by the router"


def merge(rows: Iterable[Mapping[str, Any]]) -> list[Answer]:
    """In order of arrival. rows: of the requests' table."""
    answers: dict[tuple[str, int], Answer] = {}
    of_prefill: set[tuple[str, int]] = set()
    for row in rows:
        key = (row["request_id"], row["choice"])
        answer = answers.get(key)
        if answer is None:
            answer = answers[key] = Answer(*key)
        answer.arrival_s = min(answer.arrival_s, row["arrival_s"])
        answer.end_s = max(answer.end_s, row["end_s"])
        if row["admitted_s"] is not None:
            answer.admitted_s = min(answer.admitted_s, row["admitted_s"])
        answer.prompt_tokens = max(answer.prompt_tokens, row["prompt_tokens"])
        if row["attempt"] <= 1:
            _note_cached(answer, row, of_prefill)
        answer.attempts = max(answer.attempts, row["attempt"])
        answer.preemptions += row["preemptions"]
        answer.finish = answer.finish or row["finish_reason"]
        answer.outcomes.add(row["outcome"])
        if row["server"] not in answer.servers:
            answer.servers.append(row["server"])
        for number, after_s in enumerate(row["token_s"]):
            index, at_s = row["first_index"] + number, row["arrival_s"] + after_s
            answer.token_s[index] = min(at_s, answer.token_s.get(index, at_s))
    return sorted(answers.values(), key=lambda each: each.arrival_s)


def _note_cached(answer: Answer, row: Mapping[str, Any], of_prefill: set[tuple[str, int]]) -> None:
    """What the server that computed the prompt had of it: a decode server only where no other one did. of_prefill: answers whose
    prompt another one computed, as far as is known."""
    key = (answer.request_id, answer.choice)
    if row["role"] in PREFILLS and key not in of_prefill:
        of_prefill.add(key)
        answer.cached_tokens = 0
    if row["role"] in PREFILLS or key not in of_prefill:
        answer.cached_tokens = max(answer.cached_tokens, row["cached_tokens"])


def busiest(answers: list[Answer], most: int) -> list[Answer]:
    """The `most` consecutive answers around the moment when most were under way."""
    if len(answers) <= most:
        return answers
    moments = [(answer.arrival_s, 1, n) for n, answer in enumerate(answers)]
    moments += [(answer.end_s, -1, n) for n, answer in enumerate(answers)]
    under_way, highest, at = 0, 0, 0
    for _, change, number in sorted(moments):
        under_way += change
        if under_way > highest:
            highest, at = under_way, number
    first = min(max(0, at - most // 2), len(answers) - most)
    return answers[first : first + most]
