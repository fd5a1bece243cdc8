"""What the engine tells its workers to compute, and what they answer. Frozen values; msgspec on ZeroMQ.

A `WorkerPlan` is a diff: `starts` carries everything about sequences that the worker has not seen, `runs` says how many
tokens of which known sequence to compute, `ends` which to forget. Plans are numbered without gaps; a gap ends the
workers, because PUB/SUB drops silently. Knows tokens, pages and slots; nothing of tensors, peers or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from disagg.messages.layout import GroupPages
from disagg.types.sampling import SamplingParams


class SamplerStart(Struct, frozen=True, array_like=True):
    """Opens sampling slot `slot` for one choice of a sequence."""

    slot: int
    choice: int


class SequenceStart(Struct, frozen=True, array_like=True):
    """A sequence that the worker has not seen.

    token_ids: prompt followed by outputs already accepted; the first `num_prompt` are the prompt.
    computed: tokens that the pages already hold (a decode sequence starts with all but its last token computed).
    tables: per layer group, the pages that hold them, from the first that is still needed on. samplers: one per choice
    that is sampled from this sequence's logits.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt: int
    computed: int
    tables: tuple[GroupPages, ...]
    params: SamplingParams
    samplers: tuple[SamplerStart, ...]


class Run(Struct, frozen=True, array_like=True):
    """Compute the next `num_tokens` tokens of a sequence, having appended `new_pages` to its page tables.

    new_pages: per layer group, or empty for none at all; what they hold is of no use. A state group's run reads the state
    that was the last before these were appended (none when nothing was computed), and writes the one that is last then.
    Where the next token is one that the worker sampled itself, the worker knows it and the engine need not. Workers of
    pipeline stages know none that way: token_ids are those that no plan has said.
    """

    seq_id: int
    num_tokens: int
    sample: bool
    new_pages: tuple[tuple[int, ...], ...] = ()
    token_ids: tuple[int, ...] = ()


class PageCopy(Struct, frozen=True, array_like=True):
    """Copy a whole small page of a layer group."""

    group: int
    source: int
    destination: int


class WorkerPlan(Struct, frozen=True, tag="plan"):
    """One engine step. Order of application: ends, copies, starts, runs.

    dp_rank: which of the server's data-parallel ranks it is for. rows: tokens that each of them computes in this step, where
    all take part in it; else empty.
    """

    plan_no: int
    ends: tuple[int, ...] = ()
    copies: tuple[PageCopy, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    runs: tuple[Run, ...] = ()
    dp_rank: int = 0
    rows: tuple[int, ...] = ()

    def of_groups(self, own: Sequence[int]) -> WorkerPlan:
        """The same for a stage that has layers of these groups only, by their indices, which count from 0 there."""
        place = {group: index for index, group in enumerate(own)}
        return replace(
            self,
            copies=tuple(replace(copy, group=place[copy.group]) for copy in self.copies if copy.group in place),
            starts=tuple(replace(start, tables=tuple(start.tables[group] for group in own)) for start in self.starts),
            runs=tuple(
                replace(run, new_pages=tuple(run.new_pages[group] for group in own)) if run.new_pages else run
                for run in self.runs
            ),
        )


class Hello(Struct, frozen=True, tag="hello"):
    """Published until every rank answered READY: SUB sockets join late and PUB drops until they have."""

    incarnation: str


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Log-probability of the token taken, and the most likely tokens: (token id, logprob), best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


NO_TOKEN = -1  # of logits that are no numbers: NaN, or infinitely large, or minus infinity all of them


class SampledToken(Struct, frozen=True, array_like=True):
    """One sampled token of one choice. token_id: NO_TOKEN, where there was none to choose."""

    seq_id: int
    choice: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Ready(Struct, frozen=True, tag="ready"):
    """The rank hears the plan socket."""

    rank: int
    incarnation: str


class StepResult(Struct, frozen=True, tag="result"):
    """A plan has been computed on this rank. Only the rank that samples reports tokens. compute_s: seconds in the
    model and sampler. ahead_s: how long its launch was over when the step before it was; None where launching is computing.
    """

    rank: int
    plan_no: int
    sampled: tuple[SampledToken, ...]
    compute_s: float
    started_unix_s: float
    ended_unix_s: float
    ahead_s: float | None = None


class WorkerFailed(Struct, frozen=True, tag="failed"):
    """The rank cannot go on; it exits right after this."""

    rank: int
    reason: str


ToWorker = WorkerPlan | Hello
FromWorker = StepResult | Ready | WorkerFailed


def plans_of(dp_rank: int) -> bytes:
    """The first frame of what is published for the workers of a data-parallel rank."""
    return b"%d:" % dp_rank


encode_to_worker = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
encode_from_worker = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
