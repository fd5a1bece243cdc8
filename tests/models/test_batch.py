"""A batch says of each run which states it reads and writes."""

from __future__ import annotations

from disagg.messages.layout import LayerGroup, StatePart
from disagg.models.batch import StateTables
from disagg.worker.batch import build_batch
from tests.models.driver import run_of, sequence_of

STATES = LayerGroup.of_states("states", (0,), (StatePart("ssm", (2,), "float32"),))


def test_a_run_reads_the_state_before_it_and_writes_the_newest_page() -> None:
    runs = []
    for computed, num_tokens, table, more in ((0, 5, [], [7]), (8, 4, [3], []), (9, 1, [1, 4], [2]), (6, 1, [5], [])):
        sequence = sequence_of(range(computed + num_tokens), num_groups=1, computed=computed)
        sequence.tables[0] = table
        runs.append(run_of(sequence, num_tokens))
        table.extend(more)
    batch, _ = build_batch(runs, [STATES], page_tokens=4)
    batch.check()
    (tables,) = batch.tables
    assert isinstance(tables, StateTables)
    assert (tables.reads.tolist(), tables.writes.tolist()) == ([-1, 3, 4, 5], [7, 3, 2, 5])
