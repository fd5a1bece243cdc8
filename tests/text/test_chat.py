from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from disagg.text.chat import ChatTemplate
from disagg.types.errors import ConfigError, InvalidRequest

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{% for message in messages %}
    {% if loop.index0 > ns.last + 1 %}{% break %}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}{% if message.name is defined %} ({{ message.name | tojson }}){% endif %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
{% set role = message['role'].replace('assistant', 'model') %}
{% generation %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim }}{% endgeneration %}
<end_of_turn>
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "user", "content": "  <b>&amp; \"quotes\" 'n' {{ 7 * 7 }} {% raw %} 日本 🎉 "},
        {"role": "assistant", "content": "line\n\nline\n"},
        {"role": "user", "content": "", "name": 'Zoë "Z" <z>'},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
]


@pytest.fixture(scope="module")
def theirs(smollm_dir: Path) -> Any:
    """SmolLM2's tokenizer in transformers."""
    return AutoTokenizer.from_pretrained(smollm_dir)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_smollm_renders_as_transformers_does(
    smollm_dir: Path, theirs: Any, chat: list[dict[str, Any]], prompt: bool
) -> None:
    ours = ChatTemplate.load(smollm_dir)
    assert ours is not None
    assert ours.render(chat, add_generation_prompt=prompt) == theirs.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=prompt
    )


@pytest.fixture(scope="module")
def other(smollm_dir: Path) -> PreTrainedTokenizerFast:
    """One with other special tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(smollm_dir / "tokenizer.json"), bos_token="<|begin|>", eos_token="<|end|>"
    )


@pytest.mark.parametrize("template", [LLAMA3, QWEN, GEMMA], ids=["llama3", "qwen", "gemma"])
@pytest.mark.parametrize("chat", CHATS[:2])
@pytest.mark.parametrize("prompt", [True, False])
def test_other_families_render_as_transformers_does(
    other: PreTrainedTokenizerFast, template: str, chat: list[dict[str, Any]], prompt: bool
) -> None:
    ours = ChatTemplate(template, {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    assert ours.render(chat, add_generation_prompt=prompt) == other.apply_chat_template(
        chat, chat_template=template, tokenize=False, add_generation_prompt=prompt
    )


def test_what_the_template_refuses_is_the_clients_mistake_in_the_templates_words() -> None:
    with pytest.raises(InvalidRequest, match="System role not supported") as caught:
        ChatTemplate(GEMMA, {"bos_token": "<bos>"}).render(CHATS[2])
    assert caught.value.param == "messages"


def test_request_text_is_never_evaluated() -> None:
    attack = "{{ ''.__class__.__mro__ }}{% for x in range(9) %}x{% endfor %}{{ raise_exception('no') }}"
    template = ChatTemplate("{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.name }}{% endfor %}")
    assert template.render([{"role": attack, "content": attack, "name": attack}]) == f"{attack}:{attack}{attack}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(template).render(CHATS[0])


def test_text_parts_are_joined() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ("hello", "messages[0]"),
    ],
)
def test_other_contents_are_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate("x").render([message])
    assert caught.value.param == param


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one message"):
        ChatTemplate("x").render([])


def test_the_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named {{ eos_token }}"}]
    config.write_text(json.dumps({"chat_template": named, "eos_token": {"content": "</s>"}}))
    assert _rendered(tmp_path) == "named </s>"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert _rendered(tmp_path) == "plain"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert _rendered(tmp_path) == "from the file"


def test_a_broken_template_is_the_operators_mistake(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate.load(tmp_path)


def _rendered(model_dir: Path) -> str:
    template = ChatTemplate.load(model_dir)
    assert template is not None
    return template.render([{"role": "user", "content": "hi"}])


LOOPS = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{{ c.role }}{% endfor %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOPS, "it is not rendered after 0.2 s"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
        ("{{ 'x' * 10000000000 }}", "repeated 10000000000 times"),
        ("{{ 10000000000 * [1] }}", "repeated 10000000000 times"),
        ("{{ 10 ** 1000000000 }}", "power"),
        ("{% for a in range(10**9) %}{% endfor %}", "[Rr]ange too big"),
    ],
)
def test_a_template_that_would_take_for_ever_or_all_memory_is_ended(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.text.chat.RENDER_S", 0.2)
    template = ChatTemplate(source)
    with pytest.raises(InvalidRequest, match=words):
        template.render([{"role": "user", "content": "hi"}] * 500)


def test_what_templates_multiply_within_reason_is_multiplied() -> None:
    assert ChatTemplate("{{ '-' * 20 }}{{ 2 ** 10 }}{{ 3 * 4 }}").render([{"role": "user", "content": ""}]) == (
        "-" * 20 + "102412"
    )
