"""Requests with sizes like those of the workloads that the memory design was published with, drawn from a fixed seed.

    arXiv-QA     one long article and a question: tens of thousands of tokens, a short answer
    MMLU-pro     a few examples, a question, and reasoning before the answer
    MMMU-pro     a short question (43 tokens on average) about images of 6193 tokens

Knows numbers of tokens; nothing of models' layers or of memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random

import msgspec
from msgspec import Struct

SEED = 20_250_324
TOKEN_ID_BYTES = 4

IMAGE_TOKENS = 6193  # of a request of MMMU-pro, on average, with the tiles of Llama 3.2 Vision
QUESTION_TOKENS = (24, 120)
ANSWER_TOKENS = (60, 102)  # 81 on average: 20 answers in 300 steps at a mean batch of 5.39


class BenchRequest(Struct, frozen=True):
    """One request: a document (which others may share), a question of its own, and as many outputs.

    document, question: what the tokens are drawn from; equal numbers, equal tokens. image_tokens: of one image, the
    document's. Images come after the document's text and before the question.
    """

    document: int
    document_tokens: int
    question: int
    question_tokens: int
    outputs: int
    image_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Text only."""
        return self.document_tokens + self.question_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.outputs


def text_of(request: BenchRequest) -> array[int]:
    """Token ids of its document, its question and its outputs."""
    return _tokens(2 * request.document, request.document_tokens) + _tokens(
        2 * request.question + 1, request.question_tokens + request.outputs
    )


def image_of(request: BenchRequest) -> array[int]:
    """What stands for its image where images are tokens among others. Its document's, so equal for equal documents."""
    return array("I", [request.document]) * request.image_tokens


def _tokens(seed: int, count: int) -> array[int]:
    return array("I", Random(seed).randbytes(count * TOKEN_ID_BYTES))


def articles(count: int, context_tokens: int) -> list[BenchRequest]:
    """arXiv-QA: articles of 67k tokens on average, cut to the context, one question each.

    The published trace is not public. Its one-size pages wasted 38.2% with Ministral, of whose layers 3 in 4 have a window
    of 32768 tokens; that is a mean of 67k tokens, since 3/4 * (1 - 32768 / 67000) = 0.383.
    """
    random = Random(SEED)
    requests = []
    for number in range(count):
        question, outputs = random.randint(*QUESTION_TOKENS), random.randint(*ANSWER_TOKENS)
        drawn = int(random.lognormvariate(11.05, 0.35))
        document = max(8192, min(drawn, 120_000))
        document = min(document, context_tokens - question - outputs)
        requests.append(BenchRequest(number, document, number, question, outputs))
    return requests


def long_articles(count: int) -> list[BenchRequest]:
    """Retrieval-augmented questions near the end of a context of 131072 tokens."""
    random = Random(SEED + 1)
    return [
        BenchRequest(
            n, random.randint(88_000, 126_000), n, random.randint(*QUESTION_TOKENS), random.randint(*ANSWER_TOKENS)
        )
        for n in range(count)
    ]


def exams(count: int, context_tokens: int) -> list[BenchRequest]:
    """MMLU-pro: five worked examples and a question, answered with reasoning."""
    random = Random(SEED + 2)
    return [
        BenchRequest(n, random.randint(900, 2300), n, random.randint(60, 260), random.randint(120, 420))
        for n in range(count)
    ]


def pictures(count: int, context_tokens: int) -> list[BenchRequest]:
    """MMMU-pro: 43 tokens of text on average beside 6193 of images."""
    random = Random(SEED + 3)
    return [
        BenchRequest(n, 16, n, random.randint(12, 42), random.randint(16, 48), image_tokens=IMAGE_TOKENS)
        for n in range(count)
    ]


WORKLOADS: dict[str, Callable[[int, int], list[BenchRequest]]] = {
    "arXiv-QA": articles,
    "MMLU-pro": exams,
    "MMMU-pro": pictures,
}


def shared(documents: list[BenchRequest], questions: int, grid_tokens: int) -> list[BenchRequest]:
    """Several questions about each document, all in one random order. Documents are cut to multiples of grid_tokens,
    unless they are shorter."""
    random = Random(SEED + 4)
    requests = [
        msgspec.structs.replace(
            document,
            document_tokens=document.document_tokens // grid_tokens * grid_tokens or document.document_tokens,
            question=number * len(documents) + n,
            question_tokens=random.randint(*QUESTION_TOKENS),
        )
        for number in range(questions)
        for n, document in enumerate(documents)
    ]
    random.shuffle(requests)
    return requests
