"""Records as they wait to be written: a column each, in arrays, so that a step of 256 sequences costs little.

Rows are added on the loop; `table` makes Arrow of them on the thread that writes. Knows columns; decides nothing.
"""

from __future__ import annotations

from array import array
from typing import Any

from msgspec import Struct

from disagg.messages.legs import MemoryReport

MOST_STEPS, MOST_RUNS = 10_000, 500_000  # of one file; about 7 MB of arrays
MOST_REQUESTS, MOST_TOKENS = 20_000, 1_000_000


class Origin(Struct, frozen=True):
    """Whose records these are. kv_tokens: that the pool of one data-parallel rank holds; 0: not known."""

    server: str
    role: str
    incarnation: str
    tp: int = 1
    kv_tokens: int = 0
    max_running: int = 0


class Runs(Struct):
    """Who runs in one step: four values each, as (request's number in the file, choice, phase, tokens)."""

    request: array[int]
    choice: array[int]
    decodes: array[int]
    tokens: array[int]

    @staticmethod
    def empty() -> Runs:
        return Runs(array("i"), array("i"), array("b"), array("i"))


class StepRow(Struct, frozen=True):
    time_s: float
    seconds: float
    step: int
    prefill_tokens: int
    decode_tokens: int
    budget_tokens: int
    running: int
    waiting: int
    rank: int = 0  # data-parallel


def _constant(value: str, rows: int) -> Any:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), [value])


def _origin(origin: Origin, rows: int) -> dict[str, Any]:
    return {name: _constant(getattr(origin, name), rows) for name in ("server", "role", "incarnation")}


def _offsets(counts: array[int]) -> Any:
    import numpy as np
    import pyarrow as pa

    return pa.array(np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int32))]).astype(np.int32))


class StepColumns:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._rows: list[StepRow] = []
        self._memory: list[MemoryReport] = []
        self._runs = Runs.empty()
        self._num_runs = array("i")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        return len(self._rows) >= MOST_STEPS or len(self._runs.tokens) >= MOST_RUNS

    def add(self, row: StepRow, memory: MemoryReport, runs: Runs) -> None:
        """runs: their requests' numbers are indices into the names that `table` is given."""
        self._rows.append(row)
        self._memory.append(memory)
        self._num_runs.append(len(runs.tokens))
        mine = self._runs
        mine.request += runs.request
        mine.choice += runs.choice
        mine.decodes += runs.decodes
        mine.tokens += runs.tokens

    def table(self, requests: list[str]) -> Any:
        """requests: names, by number."""
        import pyarrow as pa

        runs = self._runs
        names = pa.DictionaryArray.from_arrays(_ints(runs.request), pa.array(requests, pa.string()))
        phases = pa.DictionaryArray.from_arrays(_ints(runs.decodes), ["prefill", "decode"])
        each = pa.StructArray.from_arrays(
            [names, _ints(runs.choice), phases, _ints(runs.tokens)], ["request_id", "choice", "phase", "tokens"]
        )
        columns = {name: pa.array([getattr(row, name) for row in self._rows]) for name in StepRow.__struct_fields__}
        for name in ("used", "evictable", "free"):
            columns[f"pages_{name}"] = pa.array([getattr(m, f"large_{name}") for m in self._memory])
        columns["pages_total"] = pa.array([m.large_used + m.large_evictable + m.large_free for m in self._memory])
        for name in ("tp", "kv_tokens", "max_running"):
            columns[name] = pa.array([getattr(self._origin, name)] * len(self._rows), pa.int64())
        columns["pools"] = self._pools()
        columns["runs"] = pa.ListArray.from_arrays(_offsets(self._num_runs), each)
        return pa.table({**_origin(self._origin, len(self._rows)), **columns})

    def _pools(self) -> Any:
        """Small pages of each layer group."""
        import pyarrow as pa

        fields = {"name": pa.string(), "used": pa.int32(), "evictable": pa.int32(), "empty": pa.int32()}
        pools = [
            [
                {"name": g.name, "used": g.used_pages, "evictable": g.evictable_pages, "empty": g.empty_pages}
                for g in memory.groups
            ]
            for memory in self._memory
        ]
        return pa.array(pools, pa.list_(pa.struct(list(fields.items()))))


class RequestRow(Struct, frozen=True):
    """One choice of one leg on one server. Moments since the epoch; None: it did not come to that.

    output_tokens: that this server told the router of; first_index: output index of the first of them.
    """

    request_id: str
    attempt: int
    trunk: int
    choice: int
    tenant: str
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    prompt_tokens: int
    cached_tokens: int
    first_index: int
    output_tokens: int
    finish_reason: str | None
    outcome: str
    preemptions: int


class RequestColumns:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._rows: list[RequestRow] = []
        self._token_s = array("f")
        self._num_tokens = array("i")

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        return len(self._rows) >= MOST_REQUESTS or len(self._token_s) >= MOST_TOKENS

    def add(self, row: RequestRow, token_s: array[float]) -> None:
        """token_s: when each token was told, seconds after arrival."""
        self._rows.append(row)
        self._num_tokens.append(len(token_s))
        self._token_s += token_s

    def table(self) -> Any:
        import numpy as np
        import pyarrow as pa

        types = {"admitted_s": pa.float64(), "first_token_s": pa.float64(), "finish_reason": pa.string()}
        columns = {
            name: pa.array([getattr(row, name) for row in self._rows], types.get(name))
            for name in RequestRow.__struct_fields__
        }
        times = pa.array(np.asarray(self._token_s, dtype=np.float32))
        columns["token_s"] = pa.ListArray.from_arrays(_offsets(self._num_tokens), times)
        return pa.table({**_origin(self._origin, len(self._rows)), **columns})


def _ints(values: array[int]) -> Any:
    import numpy as np
    import pyarrow as pa

    return pa.array(np.asarray(values))
