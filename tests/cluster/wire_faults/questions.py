"""Many requests at once to a cluster that suffers, each answer compared with what `transformers` says."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import reference as kept
from tests.cluster.cluster import Cluster
from tests.models.reference import Answer, generate
from tests.models.tiny import VOCAB_SIZE, make_tiny

HANG_S = 240.0  # a request that takes longer hangs


@dataclass(frozen=True)
class Questions:
    """Prompts, and what transformers answers to each."""

    model_dir: Path
    prompts: Sequence[Sequence[int]]
    answers: Sequence[Answer | kept.Answer]

    @property
    def outputs(self) -> int:
        return len(self.answers[0].outputs)

    def wrong(self, number: int, ours: list[int]) -> str:
        """What is wrong with an answer, or "". After a tie that went the other way nothing is compared."""
        answer = self.answers[number]
        for step, (mine, theirs) in enumerate(zip(ours, answer.outputs, strict=True)):
            if mine != theirs:
                tied = answer.tied(step) if isinstance(answer, Answer) else answer.gaps[step] < kept.TIE
                return "" if tied else f"prompt {number}: output {step} is {mine}, not {theirs}"
        return ""


def two_layers(directory: Path, prompts: int, shortest: int, longest: int, outputs: int) -> Questions:
    """For a random model of two layers, whose every token depends on its whole cache."""
    model_dir = make_tiny("llama", directory / "llama", num_hidden_layers=2)
    rng = random.Random(5)
    asked = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(shortest, longest))] for _ in range(prompts)]
    return Questions(model_dir, asked, generate(model_dir, asked, outputs))


@dataclass
class Outcome:
    answered: int = 0  # as far as it was counted
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert not self.failed, "\n".join(self.failed[:5])
        assert not self.wrong, "\n".join(self.wrong[:5])


def ask(
    cluster: Cluster,
    questions: Questions,
    serials: Sequence[int],
    concurrency: int,
    during: Callable[[], None] | None = None,
) -> Outcome:
    """Asks the questions over and over. during: called when a third of these requests has been answered."""
    outcome = Outcome()
    answered = threading.Semaphore(0)

    def one(serial: int) -> None:
        number = serial % len(questions.prompts)
        # Two of three requests find nothing cached, so that their KV crosses the wire.
        salt = f"request {serial}" if serial % 3 else "shared"
        fields = {"max_tokens": questions.outputs, "ignore_eos": True, "cache_salt": salt, "timeout_s": HANG_S}
        try:
            said = cluster.complete(list(questions.prompts[number]), **fields).token_ids[0]
        except Exception as error:  # noqa: BLE001 - whatever it is, this request has failed
            outcome.failed.append(f"request {serial}: {error}")
        else:
            if wrong := questions.wrong(number, said):
                outcome.wrong.append(f"request {serial}, {wrong}")
        answered.release()

    with ThreadPoolExecutor(concurrency) as pool:
        futures: list[Future[None]] = [pool.submit(one, serial) for serial in serials]
        if during is not None:
            for _ in range(len(serials) // 3):
                answered.acquire(timeout=HANG_S)
            during()
        for future in futures:
            future.result()
    return outcome
