"""Any template and any messages: a text within its limit, or one clear error; in a process that is replaced when needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from disagg.text.chat import TemplateSource
from disagg.text.render_messages import packed
from disagg.text.renderer import RenderBounds, Renderer
from disagg.types.errors import InvalidRequest
from tests.campaigns import Campaign, sizes
from tests.text.test_renderer import resident_bytes

MOST_CHARS = 20_000
DEADLINE_S = 0.1
MOST_GROWTH = 64 << 20  # of this process, over all examples

NAMES = ["x", "ns.a", "m", "m.role", "m.content", "m.name", "messages", "messages[0].content", "loop", "nothing"]
WIDE = ["0", "-1", "3", "99", "100000", "2000000000", "10**18", "10**400", "1.5", "'x'"]

numbers = st.sampled_from(WIDE)
atoms = st.one_of(
    st.sampled_from(NAMES),
    numbers,
    st.sampled_from(
        ["'x'", "'é日🎉'", "''", "'%s'", "'%*d'", "'{:>{}}'", "[1, [2]]", "{'a': 1}", "none", "true", "'\\ud800'"]
    ),
    st.sampled_from(
        ["''.__class__", "messages.append", "ns.__init__", "m.format", "cycler", "joiner()", "lipsum(2000)"]
    ),
)


def bigger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, st.sampled_from(["~", "+", "-", "*", "**", "//", "%", "in", "==", "<", "and"]), inner)
    filters = [
        *("center({n})", "indent({n})", "format({e})", "replace('x', {e})", "join({e})", "trim", "upper", "length"),
        *("tojson({n})", "tojson(indent={n})", "list", "batch({n})", "slice({n})", "wordwrap({n})", "truncate({n})"),
        *("map('upper')", "select", "sort", "unique", "pprint", "urlencode", "striptags", "round({n})", "sum", "items"),
        *("groupby({e})", "attr({e})", "default({e})", "xmlattr", "reverse", "first", "last", "random", "wordcount"),
    ]
    methods = [
        *("center({n})", "ljust({n})", "zfill({n})", "expandtabs({n})", "replace('', {e})", "split()", "join({e})"),
        *(
            "format({e}, {n})",
            "encode()",
            "upper()",
            "startswith({e})",
            "items()",
            "get({e})",
            "translate({e})",
            "pop()",
        ),
    ]
    filled = st.builds(lambda form, e, n: form.format(e=e, n=n), st.sampled_from(filters), inner, numbers)
    called = st.builds(lambda form, e, n: form.format(e=e, n=n), st.sampled_from(methods), inner, numbers)
    return st.one_of(
        st.builds(lambda parts: f"({parts[0]} {parts[1]} {parts[2]})", two),
        st.builds(lambda of, what: f"({of} | {what})", inner, filled),
        st.builds(lambda of, what: f"({of}).{what}", inner, called),
        st.builds(lambda of, at: f"({of})[{at}]", inner, inner),
        st.builds(lambda of, at: f"({of})[{at}:]", inner, numbers),
        st.builds(lambda of: f"range({of})", inner),
        st.builds(lambda of: f"raise_exception({of})", inner),
        st.builds(lambda of: f"strftime_now({of})", inner),
        st.builds(lambda of: f"f({of})", inner),
    )


expressions = st.recursive(atoms, bigger, max_leaves=5)


def longer(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    loops = st.sampled_from(["messages", "range(3)", "range(99999)", "(messages | list)", "'abc'", "m.items()"])
    return st.one_of(
        st.builds(lambda of, body: f"{{% for m in {of} %}}{body}{{% endfor %}}", loops | expressions, inner),
        st.builds(
            lambda on, body: f"{{% for m in {on} recursive %}}{body}{{{{ loop(m) }}}}{{% endfor %}}", loops, inner
        ),
        st.builds(lambda on, body: f"{{% if {on} %}}{body}{{% else %}}{body}{{% endif %}}", expressions, inner),
        st.builds(lambda body: f"{{% macro f(x) %}}{body}{{{{ f(x ~ x) }}}}{{% endmacro %}}{{{{ f('x') }}}}", inner),
        st.builds(lambda body: f"{{% set x %}}{body}{{% endset %}}", inner),
        st.builds(lambda body: f"{{% filter upper %}}{body}{{% endfilter %}}", inner),
        st.builds(lambda body: f"{{% generation %}}{body}{{% endgeneration %}}", inner),
        st.builds(
            lambda body: f"{{% for a in range(99999) %}}{{% set ns.a = ns.a ~ ns.a %}}{body}{{% endfor %}}", inner
        ),
        st.builds(lambda one, two: one + two, inner, inner),
    )


statements = st.recursive(
    st.one_of(
        st.builds(lambda e: f"{{{{ {e} }}}}", expressions),
        st.builds(lambda e: f"{{% set x = {e} %}}", expressions),
        st.builds(lambda e: f"{{% set ns.a = {e} %}}", expressions),
        st.sampled_from(["text\n", "{% break %}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}"]),
        st.sampled_from(
            ["{% if %}", "{{", "{% endfor %}", "{# #}", "{% raw %}{{{% endraw %}", "{{ 1 +", "{% block a %}"]
        ),
    ),
    longer,
    max_leaves=6,
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("x" * 5000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "日"]), "content": st.text(max_size=20) | values},
    optional={"name": values},
)
conversations = st.one_of(
    st.lists(message, max_size=4),
    st.lists(message | values, max_size=4),
    st.lists(message, max_size=1).map(lambda m: m * 600),
)


def check_error(error: InvalidRequest) -> str:
    words = str(error)
    assert (error.param or "").startswith("messages") and 0 < len(words) < 1000
    return words


async def outcome(renderer: Renderer, source: str, messages: list[Any]) -> str:
    """Whatever else it raises, or that it does not end, is the failure that is looked for."""
    try:
        async with asyncio.timeout(60):
            text = await renderer.render(packed([source, *messages]), MOST_CHARS)
    except InvalidRequest as error:
        words = check_error(error)
        if "cannot render these messages" in words:
            return "ended"
        return "uncompiled" if "cannot be compiled" in words else "refused"
    assert isinstance(text, str) and len(text) <= MOST_CHARS
    return "text"


def fuzzed(campaign: Campaign, test: Any) -> Any:
    limits = settings(
        max_examples=campaign.examples,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    return seed(20261122)(limits(test))


@sizes(60)
def test_any_template_makes_a_text_or_one_error_of_any_messages(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.text.renderer.PROGRAM", "tests.text.any_template")
    loop = asyncio.new_event_loop()
    found: Counter[str] = Counter()
    processes: set[int | None] = set()
    campaign = Campaign(examples)
    renderer = loop.run_until_complete(Renderer.start(TemplateSource(""), RenderBounds(deadline_s=DEADLINE_S)))
    kept: list[tuple[str, list[Any]]] = []

    def once(source: str, messages: list[Any]) -> str:
        return loop.run_until_complete(outcome(renderer, "{% set ns = namespace(a='x') %}" + source, messages))

    def run(source: str, messages: list[Any]) -> None:
        campaign.begin()
        found[said := once(source, messages)] += 1
        processes.add(renderer.pid)
        if said != "ended" and len(kept) < 50:  # those take as long as they may
            kept.append((source, messages))

    fuzzed(campaign, given(source=statements, messages=conversations)(run))()
    # The same over and over, since hypothesis keeps much of what it has drawn.
    before = resident_bytes()
    for _ in range(10):
        for source, messages in kept:
            once(source, messages)
    grown = resident_bytes() - before
    last = loop.run_until_complete(
        renderer.render(packed(["{{ messages[0].content }}", {"role": "user", "content": "well"}]), 9)
    )
    loop.run_until_complete(renderer.close())
    loop.close()
    assert last == "well"
    assert grown < MOST_GROWTH
    campaign.check()
    assert sum(found.values()) >= campaign.examples
    if campaign.examples >= 1000:
        assert min(found[kind] for kind in ("text", "refused", "uncompiled")) > campaign.examples // 200
        assert found["ended"] > 0 and len(processes) > 1
