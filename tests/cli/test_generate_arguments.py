"""What `disagg generate` is given: checked before anybody is asked, and never a traceback."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.cli import generate as generate_module
from disagg.cli.generate import GenerateOptions
from disagg.cli.main import cli
from tests.campaigns import Campaign, sizes


def generate(*args: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *args], input=stdin, prog_name="disagg")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, GenerateOptions]]:
    """What would be asked."""
    calls: list[tuple[str, GenerateOptions]] = []

    def record(prompt: str, options: GenerateOptions) -> int:
        calls.append((prompt, options))
        return 0

    monkeypatch.setattr(generate_module, "run_generate", record)
    return calls


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["hi", "--grpc", ""], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost"], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost:"], "it must be HOST:PORT"),
        (["hi", "--grpc", ":50051"], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost:0"], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost:65536"], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost:-1"], "it must be HOST:PORT"),
        (["hi", "--grpc", "localhost:\u0661"], "it must be HOST:PORT"),
        (["hi", "--grpc", "http://localhost:50051"], "it must be HOST:PORT"),
        (["hi", "--grpc", "unix:/tmp/x"], "it must be HOST:PORT"),
        (["hi", "--grpc", "::1:50051"], "it must be HOST:PORT"),
        (["hi", "--grpc", "a b:50051"], "it must be HOST:PORT"),
        (["hi", "--grpc", "\udcff:50051"], "'--grpc': it is not UTF-8 at character 0"),
        (["hi", "--model", "m\udcff"], "'--model': it is not UTF-8 at character 1"),
        (["hi", "--stop", "ok", "--stop", "ab\udcff"], "'--stop': it is not UTF-8 at character 2"),
        (["h\udcff"], "PROMPT': it is not UTF-8 at character 1"),
        (["hi", "--temperature", "nan"], "'--temperature': it must be a finite number"),
        (["hi", "--temperature", "warm"], "'--temperature'"),
        (["hi", "--top-p", "inf"], "'--top-p': it must be a finite number"),
        (["hi", "--deadline", "nan"], "'--deadline': it must be a finite number"),
        (["hi", "--deadline", "0"], "'--deadline': 0.0 is not in the range"),
        (["hi", "--max-tokens", "0"], "'--max-tokens': 0 is not in the range"),
        (["hi", "--min-tokens", "-1"], "'--min-tokens': -1 is not in the range"),
        (["hi", "--top-k", "9" * 40], "'--top-k'"),
        (["hi", "--seed", str(2**64)], "'--seed'"),
        ([], "Missing argument 'PROMPT'"),
        (["hi", "there"], "unexpected extra argument"),
    ],
)
def test_an_argument_that_makes_no_sense_is_named(
    asked: list[tuple[str, GenerateOptions]], args: list[str], said: str
) -> None:
    shown = generate(*args)
    assert (shown.exit_code, asked) == (2, [])
    assert said in shown.stderr and shown.stdout == ""


def test_what_makes_sense_is_asked_as_it_is(asked: list[tuple[str, GenerateOptions]]) -> None:
    assert generate("h\u00e9", "--grpc", "[::1]:7", "--stop", "a", "--stop", "\u00e9").exit_code == 0
    ((prompt, options),) = asked
    assert (prompt, options.address, options.stop) == ("h\u00e9", "[::1]:7", ("a", "\u00e9"))


def test_a_prompt_from_stdin_is_utf_8_or_refused(asked: list[tuple[str, GenerateOptions]]) -> None:
    assert generate("-", stdin="h\u00e9\n".encode()).exit_code == 0
    assert [prompt for prompt, _ in asked] == ["h\u00e9\n"]
    shown = generate("-", stdin=b"ab\xff")
    assert (shown.exit_code, len(asked)) == (2, 1)
    assert "stdin is not UTF-8 at byte 2" in shown.stderr


def test_nobody_there_is_one_line() -> None:
    shown = generate("hi", "--raw", "--grpc", "127.0.0.1:1")
    assert (shown.exit_code, shown.output) == (
        1,
        "error: no router answers at 127.0.0.1:1; is `disagg up` running?\n",
    )


options = st.sampled_from(
    ["--model", "--max-tokens", "--min-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--stop", "--deadline"]
)
values = st.one_of(
    st.text(max_size=8),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["", "\udcff", "\0", "-", "--", "1e999", "9" * 400, "\u0663", "0x10", "1_000"]),
)


@sizes()
def test_whatever_is_given_is_asked_or_refused(asked: list[tuple[str, GenerateOptions]], examples: int) -> None:
    campaign = Campaign(examples)

    @settings(derandomize=True, deadline=None, database=None, max_examples=campaign.examples)
    @given(values, st.lists(st.tuples(options, values), max_size=3), st.sets(st.sampled_from(["--raw"])))
    def run(prompt: str, pairs: list[tuple[str, str]], flags: set[str]) -> None:
        campaign.begin()
        asked_or_refused(asked, prompt, pairs, flags)

    run()
    campaign.check()


def asked_or_refused(
    asked: list[tuple[str, GenerateOptions]], prompt: str, pairs: list[tuple[str, str]], flags: set[str]
) -> None:
    asked.clear()
    shown = generate(*flags, *(each for pair in pairs for each in pair), "--", prompt)
    assert shown.exception is None or isinstance(shown.exception, SystemExit)
    assert (shown.exit_code, len(asked)) in ((0, 1), (2, 0))
    for text, chosen in asked:  # whatever is asked can be sent
        for each in (text, chosen.model, *chosen.stop):
            each.encode()
