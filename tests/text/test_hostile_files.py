"""Tokenizer files that make no sense: one clear error of ours, at once, or a tokenizer that works."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import multiprocessing
import re
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.telemetry.process import CRASHES
from disagg.text.chat import ChatTemplate
from disagg.text.model_files import LIMITS, ModelFiles
from disagg.text.tokenizer import Tokenizer
from disagg.text.tokenizer_trial import try_out
from disagg.types.errors import ConfigError, DisaggError, InvalidRequest
from tests.campaigns import Campaign, sizes
from tests.text.conftest import STYLES

TEXT = "the ab a\n日 <s> x▁y <tool> é, and more"
MESSAGES = [{"role": "user", "content": "hello"}]
MOST_GROWTH = 64 << 20  # of the process, over all examples
TOKENIZERS: list[dict[str, Any]] = [json.loads(make()._inner.to_str()) for make in STYLES.values()]
SETTINGS: dict[str, Any] = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "special": True},
    "unk_token": None,
    "chat_template": "{% for m in messages %}{{ bos_token }}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}},
}
TEMPLATES: list[Any] = [
    "{{",
    "{% for x in messages %}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ " + "(" * 5000 + ")" * 5000 + " }}",
    "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "{% for x in messages %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "9" * 5000 + " }}",
    "{{ " + "+".join("1" * 3000) + " }}",
    "{{ messages[0].__class__.__mro__ }}",
    [{"name": "default", "template": "{{ messages }}"}],
    [{"name": ["default"], "template": 3}, None],
    {"name": "default"},
]

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 3, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**30, 1e300]),
    st.text(max_size=6),
    st.sampled_from(["Sequence", "BPE", "Unigram", "WordPiece", "ByteLevel", "(a*)*b", "((", "[", "<s>", "\ud800"]),
    st.sampled_from(
        [
            {"type": "ByteLevel"},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            {"type": "Unigram", "vocab": [], "unk_id": 5},
            {"type": "Sequence", "decoders": []},
            {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""},
            {"type": "Replace", "pattern": {"String": ""}, "content": "x"},
            {"type": "Strip", "content": "", "start": 3, "stop": 3},
            {"type": "Metaspace", "replacement": "", "prepend_scheme": "never"},
        ]
    ),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def spoilt(draw: st.DrawFn, bases: list[dict[str, Any]]) -> bytes:
    """One or two places of it replaced or taken away; sometimes the bytes themselves are spoilt."""
    made = json.loads(json.dumps(draw(st.sampled_from(bases))))
    for _ in range(draw(st.integers(1, 2))):
        where: Any = made
        while True:
            key = draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(min(len(where), 30))))
            if not isinstance(where[key], dict | list) or not where[key] or draw(st.integers(0, 3)) == 0:
                break
            where = where[key]
        if draw(st.integers(0, 4)) == 0:
            del where[key]
        else:
            where[key] = copy.deepcopy(draw(values))
        if not made:
            break
    content = bytearray(json.dumps(made).encode())
    how = draw(st.sampled_from(["json"] * 8 + ["flip", "cut", "deep"]))
    if how == "flip":
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    elif how == "cut":
        del content[draw(st.integers(0, len(content))) :]
    elif how == "deep":
        depth = draw(st.sampled_from([10, 100, 3000]))
        content = bytearray(b'{"model":' * depth + content + b"}" * depth)
    return bytes(content)


def fuzz(campaign: Campaign) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        limits = settings(
            max_examples=campaign.examples,
            deadline=None,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        return seed(20260730)(limits(test))

    return decorate


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZERS[0]))
    return tmp_path


def load(folder: Path) -> Tokenizer | None:
    """None where it was refused, with our words."""
    try:
        return Tokenizer.load(folder)
    except ConfigError as error:
        said = str(error)
    assert str(folder) in said and len(said) < 2000
    return None


def load_template(folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(folder)
    except ConfigError as error:
        said = str(error)
    assert ("chat template" in said or str(folder) in said) and len(said) < 2000
    return None


def use(tokenizer: Tokenizer) -> None:
    """What a router does with it. Ids that come out are ids, and their text is text."""
    ids = tokenizer.encode(TEXT)
    assert isinstance(tokenizer.decode(ids), str)
    decoder = tokenizer.new_decoder()
    for token_id in ids:
        assert isinstance(tokenizer.token_bytes(token_id), bytes)
        decoder.feed(tokenizer.token(token_id) or "")
    decoder.flush()


def taken(folder: Path, content: bytes) -> bool:
    """Whether it was read, and used."""
    (folder / "tokenizer.json").write_bytes(content)
    tokenizer = load(folder)
    if tokenizer is not None:
        use(tokenizer)
    return tokenizer is not None


def read_what_comes(asked: Connection, folder: Path) -> None:
    """Of a process that tokenizers may end: each file in turn, and what came of it. None asks how much memory it has."""
    with contextlib.suppress(EOFError):
        while True:
            content = asked.recv()
            try:
                asked.send(resident_bytes() if content is None else taken(folder, content))
            except BaseException:  # noqa: BLE001  it is the test's to fail
                asked.send(traceback.format_exc())


class Reader:
    """Reads tokenizer files in a process of its own, and in a new one where that has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: BaseProcess | None = None
        self._asked: Connection
        self.ended_with: list[bytes] = []

    def ask(self, content: bytes | None) -> Any:
        """False also where it ended the process."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._asked, theirs = context.Pipe()
            self._process = context.Process(target=read_what_comes, args=(theirs, self._folder), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._asked.send(content)
            assert self._asked.poll(60), f"no answer within 60 s: {content!r}"
            answer = self._asked.recv()
        except (EOFError, ConnectionError):
            assert content is not None
            self.end()
            self.ended_with.append(content)
            return False
        assert not isinstance(answer, str), answer
        return answer

    def end(self) -> None:
        if self._process is not None:
            self._asked.close()
            self._process.join(10)
            self._process.kill()
            self._process = None


@sizes()
def test_a_spoilt_tokenizer_is_one_error_or_works(folder: Path, examples: int) -> None:
    read = 0
    campaign = Campaign(examples)
    kept: list[bytes] = []
    reader = Reader(folder)

    @fuzz(campaign)
    @given(content=spoilt(TOKENIZERS))
    def run(content: bytes) -> None:
        nonlocal read
        campaign.begin()
        read += reader.ask(content)
        if len(kept) < 50:
            kept.append(content)

    run()
    campaign.check()
    assert read > campaign.examples // 50  # it is not all refused at once
    for content in reader.ended_with:  # a router finds it out in the same way, and refuses the file or can read it
        print(f"tokenizers ended a process that read {content!r}")
        (folder / "tokenizer.json").write_bytes(content)
        with contextlib.suppress(ConfigError):
            asyncio.run(try_out(ModelFiles.read(folder), None))
    # The same files over and over, since hypothesis keeps much of what it has drawn.
    before = reader.ask(None)
    for content in kept * 10:
        reader.ask(content)
    assert reader.ask(None) - before < MOST_GROWTH
    reader.end()


def test_files_that_end_whoever_reads_them_are_refused(folder: Path) -> None:
    """With programs in place of what the library may do."""

    def tried(program: str, deadline_s: float = 30.0) -> None:
        asyncio.run(try_out(ModelFiles.read(folder), None, program=("-c", program), deadline_s=deadline_s))

    read = "import sys, os; sys.stdin.buffer.read(); "
    name = re.escape(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match=f"^{name} cannot be used: a process that read it ended with SIGABRT$"):
        tried(read + "os.abort()")
    with pytest.raises(ConfigError, match="ended with SIGABRT"):
        tried("import os; os.abort()")  # before all of it was read
    with pytest.raises(ConfigError, match="ended with status 1"):
        tried(read + "raise MemoryError")
    with pytest.raises(ConfigError, match="takes more than 1 s"):
        tried("import time; time.sleep(100)", 1.0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_trial_that_somebody_else_ends_says_nothing_of_the_files(folder: Path, number: signal.Signals) -> None:
    program = f"import os, signal, sys; signal.signal({number:d}, 0); os.kill(os.getpid(), {number:d})"
    if number == signal.SIGKILL:
        program = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(DisaggError, match=f"is not known: .* ended with {number.name}$") as caught:
        asyncio.run(try_out(ModelFiles.read(folder), None, program=("-c", program)))
    assert not isinstance(caught.value, ConfigError)  # by which a router would be said to be unable to start, ever


@pytest.mark.parametrize("number", sorted(CRASHES))
def test_a_trial_that_crashes_is_the_files_fault(folder: Path, number: int) -> None:
    program = f"import os; os.kill(os.getpid(), {number})"
    with pytest.raises(ConfigError, match="cannot be used"):
        asyncio.run(try_out(ModelFiles.read(folder), None, program=("-c", program)))


def test_files_are_tried_as_they_are_read(folder: Path) -> None:
    asyncio.run(try_out(ModelFiles.read(folder), None))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read: ") as tried:
        asyncio.run(try_out(ModelFiles.read(folder), None))
    with pytest.raises(ConfigError) as read:
        Tokenizer.load(folder)
    assert str(tried.value) == str(read.value)


def test_a_trial_has_a_bound_of_memory(folder: Path) -> None:
    program = (
        "from disagg.telemetry.process import limit_resources; limit_resources(64 << 20); import sys; "
        "sys.stdin.buffer.read(); bytearray(1 << 30)"
    )
    with pytest.raises(ConfigError, match="ended with status 1"):
        asyncio.run(try_out(ModelFiles.read(folder), None, program=("-c", program)))


@sizes(50)
def test_spoilt_settings_of_a_tokenizer_are_one_error_or_work(folder: Path, examples: int) -> None:
    campaign = Campaign(examples)

    @fuzz(campaign)
    @given(content=spoilt([SETTINGS, *({**SETTINGS, "chat_template": each} for each in TEMPLATES)]))
    def run(content: bytes) -> None:
        campaign.begin()
        (folder / "tokenizer_config.json").write_bytes(content)
        tokenizer, template = load(folder), load_template(folder)
        if tokenizer is not None and template is not None and b"*" not in content:
            with contextlib.suppress(InvalidRequest):
                assert isinstance(template.render(MESSAGES), str)

    run()
    campaign.check()


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
def test_a_template_is_compiled_at_once_or_refused(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    before = resident_bytes()
    load_template(folder)
    assert resident_bytes() - before < MOST_GROWTH


@pytest.mark.parametrize("number", ["9" * 400 + ".9", "9e999", "1e308 * 10"])
def test_a_number_that_is_not_finite_is_refused_or_shown(number: str) -> None:
    """What the library makes of it is a program that names `inf`."""
    template = ChatTemplate("{{ " + number + " }}")
    with contextlib.suppress(InvalidRequest):
        assert template.render(MESSAGES) == "inf"


@pytest.mark.parametrize("name", LIMITS)
def test_a_file_that_is_too_large_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(LIMITS[name] + 1)  # a hole: it takes no disk, and reading it would take memory
    with pytest.raises(ConfigError, match=f"{name} has .* bytes; at most {LIMITS[name]}"):
        Tokenizer.load(folder)
