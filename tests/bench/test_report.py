"""`disagg report`: from records, some of them cut off, to one page that needs nothing else."""

from __future__ import annotations

import re
from array import array
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from disagg.bench.plan.learn import COLUMNS as MORE_COLUMNS
from disagg.bench.report.merge import Answer, busiest, merge
from disagg.bench.report.read import REQUEST_COLUMNS, STEP_COLUMNS, read_records
from disagg.bench.serve.figures import Answered, Failed
from disagg.bench.serve.plot import plot_run
from disagg.cli.main import cli
from disagg.messages.legs import GroupMemory, MemoryReport
from disagg.server.record_columns import Origin, RequestColumns, RequestRow, Runs, StepColumns, StepRow

parquet = pytest.importorskip("pyarrow.parquet")
BEGAN_S = 1_800_000_000.0


def request(server: str, number: int, times: list[float], **changes: object) -> tuple[RequestRow, array[float]]:
    at_s = BEGAN_S + number
    fields = {
        "request_id": f"r{number}",
        "attempt": 1,
        "trunk": 0,
        "choice": 0,
        "tenant": "<script>",
        "arrival_s": at_s,
        "admitted_s": at_s + 0.1,
        "first_token_s": at_s + times[0] if times else None,
        "end_s": at_s + 3.0,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "first_index": 0,
        "output_tokens": len(times),
        "finish_reason": None,
        "outcome": "done",
        "preemptions": 0,
    }
    return RequestRow(**(fields | changes)), array("f", times)  # type: ignore[arg-type]


def make_records(directory: Path) -> None:
    memory = MemoryReport(
        "lcm", 64, 10, 20, 30, 0, (GroupMemory("a", "full", 1, 1, 2, 3), GroupMemory("b", "window", 1, 1, 2, 4))
    )
    for server, life in (("prefill-0", "aa"), ("decode-0", "bb"), ("decode-0", "cc")):
        origin = Origin(server, server[:-2], life)
        steps, requests = StepColumns(origin), RequestColumns(origin)
        for number in range(20):
            runs = Runs(array("i", [0, 1]), array("i", [0, 0]), array("b", [0, 1]), array("i", [60, 1]))
            later = 30.0 * (life == "cc")
            steps.add(StepRow(BEGAN_S + later + number, 0.5, number, 60, 1, 64, 2, 3), memory, runs)
        for number in range(10):
            if life != "cc":
                times = [1.0] if server == "prefill-0" else [1.2, 1.5, 2.0]
                requests.add(*request(server, number, times, finish_reason=None if len(times) == 1 else "length"))
        parquet.write_table(steps.table(["r0", "r1"]), directory / f"steps-{server}-{life}-00001.parquet")
        if len(requests):
            parquet.write_table(requests.table(), directory / f"requests-{server}-{life}-00001.parquet")


class Page(HTMLParser):
    """What a page asks for from elsewhere, and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asks: list[str] = []
        self.tags: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.asks += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


def test_the_report_is_one_page_with_everything_in_it(tmp_path: Path) -> None:
    make_records(tmp_path)
    whole = (tmp_path / "steps-decode-0-bb-00001.parquet").read_bytes()
    (tmp_path / "steps-decode-0-bb-00002.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "requests-x.parquet").write_bytes(b"nonsense")
    (tmp_path / ".steps-decode-0-bb-00003.parquet.part").write_bytes(b"")
    one_column = parquet.read_table(tmp_path / "steps-prefill-0-aa-00001.parquet", columns=["step"])
    parquet.write_table(one_column, tmp_path / "steps-y.parquet")
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    said = (
        "steps-decode-0-bb-00002.parquet is passed over",
        "requests-x.parquet is passed over",
        "00003.parquet.part was being written",
        "steps-y.parquet is passed over: has no column",
    )
    for words in said:
        assert words in done.output, words
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.asks == [] and "script" not in page.tags and "link" not in page.tags
    assert "url(" not in text and "@import" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}, "a name, which nobody fetches"
    assert page.tags.count("svg") >= 4 + 2 + 2 * 5 + 1
    words = re.sub(r"\s+", " ", page.words)
    for tile in ("10 answers", "10 completed", "1,000 prompt tokens", "40.0% of them cached", "30 output tokens"):
        assert tile in words, tile
    assert "1.00 s TTFT p50" in words and "500 ms ITL p99" in words  # gaps of 0.5 s: 1.0, 1.5, 2.0
    assert "restarted" in words and "decode-0" in words


def test_columns_are_those_that_are_read(tmp_path: Path) -> None:
    make_records(tmp_path)
    for kind, columns in (("steps", {*STEP_COLUMNS, *MORE_COLUMNS}), ("requests", set(REQUEST_COLUMNS))):
        assert set(parquet.read_schema(next(tmp_path.glob(f"{kind}*.parquet"))).names) == columns
    records = read_records(tmp_path)
    assert (records.steps.num_rows, records.requests.num_rows, records.passed_over) == (60, 20, [])


def test_a_directory_without_records_is_said_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "no records" in done.output
    make_records(tmp_path)
    for path in tmp_path.glob("requests*"):
        path.unlink()
    assert CliRunner().invoke(cli, ["report", str(tmp_path)]).exit_code == 0, "steps alone are something"


LEGS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.lists(st.floats(0, 50), max_size=5)), max_size=12)


@given(LEGS)
def test_an_answer_has_each_token_once_at_its_earliest(legs: list[tuple[int, int, list[float]]]) -> None:
    rows = []
    for number, first_index, times in legs:
        row, token_s = request("decode-0", number, times, first_index=first_index)
        fields = {name: getattr(row, name) for name in row.__struct_fields__}
        rows.append({**fields, "server": "decode-0", "role": "decode", "incarnation": "", "token_s": list(token_s)})
    answers = merge(rows)
    assert [a.request_id for a in answers] == sorted({f"r{number}" for number, _, _ in legs})
    for answer in answers:
        mine = [row for row in rows if row["request_id"] == answer.request_id]
        for index, at_s in answer.token_s.items():
            places = [(row, index - row["first_index"]) for row in mine]
            said = [row["arrival_s"] + row["token_s"][n] for row, n in places if 0 <= n < len(row["token_s"])]
            assert at_s == min(said)
        assert len(answer.token_s) == len({r["first_index"] + n for r in mine for n in range(len(r["token_s"]))})
        assert answer.times_s == sorted(answer.times_s)


@pytest.mark.parametrize(
    ("roles", "cached"),
    [
        ({"prefill": 40, "decode": 60}, 40),
        ({"decode": 60, "prefill": 40}, 40),
        ({"decode": 90}, 90),  # which has computed the rest itself
        ({"mixed": 30}, 30),
    ],
)
def test_what_was_cached_of_a_prompt_is_said_by_who_computed_it(roles: dict[str, int], cached: int) -> None:
    rows = [
        {**msgspec.structs.asdict(request("", 0, [1.0], cached_tokens=found)[0]), "role": role, "server": role}
        for role, found in roles.items()
    ]
    (answer,) = merge([{**row, "token_s": [1.0]} for row in rows])
    assert answer.cached_tokens == cached


def test_timelines_are_of_where_most_were_under_way() -> None:
    answers = [
        Answer(f"r{n}", 0, arrival_s=10.0 * n, end_s=10.0 * n + (95.0 if 40 <= n < 50 else 1.0)) for n in range(90)
    ]
    assert [a.request_id for a in busiest(answers, 6)] == [f"r{n}" for n in range(46, 52)]
    assert busiest(answers[:4], 6) == answers[:4]


def test_a_load_is_plotted_as_one_svg_also_when_nothing_was_answered() -> None:
    answered = [Answered(n, n + 0.5, n + 1.5, [0.5, 0.5], 10, 3) for n in range(20)]
    assert plot_run([*answered, Failed(0.0, 1.0, "x")], "<load>").count("<svg") == 5
    assert "&lt;load&gt;" in plot_run([], "<load>")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("arrival_s", "x"),
        ("arrival_s", None),
        ("arrival_s", float("nan")),
        ("arrival_s", 1e300),
        ("end_s", float("inf")),
        ("token_s", None),
        ("token_s", [1.0, 1e300]),
        ("token_s", [1.0, None]),
        ("prompt_tokens", "x"),
        ("prompt_tokens", None),
        ("server", None),
        ("request_id", None),
    ],
)
def test_a_file_with_values_that_no_server_writes_is_passed_over(tmp_path: Path, column: str, value: object) -> None:
    import pyarrow as pa

    make_records(tmp_path)
    path = next(tmp_path.glob("requests-*"))
    table = parquet.read_table(path)
    index = table.column_names.index(column)
    of_type = None if isinstance(value, str) or column == "token_s" else table.schema.field(column).type
    odd = pa.array([value] * table.num_rows, pa.list_(pa.float64()) if column == "token_s" else of_type)
    parquet.write_table(table.set_column(index, column, odd), path)
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"{path.name} is passed over: " in done.output
    assert (tmp_path / "report.html").is_file()


def test_files_without_rows_are_no_records(tmp_path: Path) -> None:
    make_records(tmp_path)
    for path in tmp_path.glob("*.parquet"):
        parquet.write_table(parquet.read_table(path).slice(0, 0), path)
    done = CliRunner().invoke(cli, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "has no records that can be read" in done.output, done.output
