"""Everything that a client may ask, at once, and compared.

Greedy answers with what `transformers` says, sampled ones with what the same request was answered alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.cluster.cluster import Cluster
from tests.models.reference import Answer

ATOL = 2e-3  # of a logprob
CHOICES = 3
CONCURRENCY = 12


class Round:
    """`alone`, then `at_once` as often as wanted, of any number of clusters of one model."""

    def __init__(self, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> None:
        self.compared: Counter[str] = Counter()
        self._asked = list(zip(prompts, answers, strict=True))
        self._sampled: dict[int, list[list[int]]] = {}  # by prompt, of each choice

    def alone(self, cluster: Cluster) -> None:
        """One after another: sampled ones, of which the first time tells what is right; and a prompt that is cached, again."""
        for number in range(0, len(self._asked), 3):
            self._seeded(cluster, number)
        prompt, answer = max(self._asked, key=lambda each: len(each[0]))
        for _ in range(2):
            again = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True)
        assert again.usage["prompt_tokens_details"]["cached_tokens"] > len(prompt) // 2
        self._check(answer, again.token_ids[0], "the same prompt again")

    def at_once(self, cluster: Cluster, what: str) -> None:
        """All of it, in an order of its own. Raises AssertionError for the first answer that is wrong."""
        ways = (self._plain, self._streamed, self._choices, self._stopped, self._told, self._seeded)
        jobs = [
            (way, number)
            for way in ways
            for number in range(len(self._asked))
            if way != self._seeded or number % 3 == 0
        ]
        random.Random(what).shuffle(jobs)
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            for future in [pool.submit(self._one, cluster, what, *job) for job in jobs]:
                future.result()

    def _one(self, cluster: Cluster, what: str, way: Callable[[Cluster, int], None], number: int) -> None:
        try:
            way(cluster, number)
        except AssertionError as error:
            raise AssertionError(f"{what}, prompt {number}, {way.__name__}: {error}") from error
        self.compared[way.__name__.strip("_")] += 1

    def _plain(self, cluster: Cluster, number: int) -> None:
        prompt, answer = self._asked[number]
        got = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True)
        self._check(answer, got.token_ids[0], "outputs")
        assert (got.usage["prompt_tokens"], got.usage["completion_tokens"]) == (len(prompt), len(answer.outputs))
        assert got.finish == ["length"]

    def _choices(self, cluster: Cluster, number: int) -> None:
        prompt, answer = self._asked[number]
        got = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True, n=CHOICES)
        assert len(got.token_ids) == CHOICES and got.usage["completion_tokens"] == CHOICES * len(answer.outputs)
        for choice, outputs in enumerate(got.token_ids):
            self._check(answer, outputs, f"choice {choice}")

    def _seeded(self, cluster: Cluster, number: int) -> None:
        prompt, answer = self._asked[number]
        fields = {"temperature": 1.0, "top_p": 0.9, "seed": number, "n": CHOICES}
        got = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True, **fields)
        first = self._sampled.setdefault(number, got.token_ids)
        assert got.token_ids == first, "sampled choices differ"
        assert len({tuple(each) for each in first}) > 1, "choices of one seed are all alike"

    def _streamed(self, cluster: Cluster, number: int) -> None:
        prompt, answer = self._asked[number]
        fields = {"max_tokens": len(answer.outputs), "ignore_eos": True, "stream_options": {"include_usage": True}}
        outputs: list[int] = []
        usage = None
        for event in cluster.stream(prompt, **fields):
            outputs += [token for choice in event["choices"] for token in choice["token_ids"]]
            usage = event.get("usage") or usage
        self._check(answer, outputs, "a stream")
        assert usage is not None and usage["completion_tokens"] == len(answer.outputs)

    def _stopped(self, cluster: Cluster, number: int) -> None:
        """Ends where its own text has something for the first time."""
        prompt, answer = self._asked[number]
        whole = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True)
        self._check(answer, whole.token_ids[0], "what is to be stopped")
        text = whole.text[0]
        stop = text[len(text) // 2 :][:3]
        if "\ufffd" in stop or not stop:
            return  # no characters of their own
        got = cluster.complete(prompt, max_tokens=len(answer.outputs), ignore_eos=True, stop=[stop])
        assert got.finish == ["stop"]
        assert got.text[0] == text[: text.index(stop)], f"stopped at {stop!r}"

    def _told(self, cluster: Cluster, number: int) -> None:
        """Logprobs are those of the reference, as far as no tie went the other way."""
        prompt, answer = self._asked[number]
        body = {"model": cluster.model, "prompt": prompt, "max_tokens": len(answer.outputs), "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True, "logprobs": 2}
        reply = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=300)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        self._check(answer, choice["token_ids"], "outputs with logprobs")
        theirs = answer.logits.log_softmax(-1)
        for step, (token, logprob) in enumerate(
            zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        ):
            if token != answer.outputs[step]:
                break
            assert abs(logprob - theirs[step, token].item()) < ATOL, f"logprob {step} is {logprob}"

    def _check(self, answer: Answer, outputs: list[int], what: str) -> None:
        """What follows a tie that went the other way is not compared."""
        assert len(outputs) == len(answer.outputs), f"{what}: {len(outputs)} tokens"
        for step, (ours, theirs) in enumerate(zip(outputs, answer.outputs, strict=True)):
            if ours != theirs:
                assert answer.tied(step), f"{what}: output {step} is {ours}, not {theirs}"
                self.compared["ties"] += 1
                return
