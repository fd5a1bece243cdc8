"""JSON bodies become router requests, or a refusal that names the field."""

from __future__ import annotations

import json

import pytest

from disagg.api.bodies import Call, parse_chat, parse_completion
from disagg.api.errors import BadField
from disagg.text.limits import TextLimits
from disagg.types.errors import InvalidRequest
from disagg.types.sampling import SamplingParams
from tests.api.fakes import fake_prompt

LIMITS = TextLimits(max_tokens=200, max_chars=2000)
MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: object) -> Call:
    return parse_completion(json.dumps({"model": "m", "prompt": "hello", **fields}).encode(), LIMITS, max_prompts=4)


def chat(**fields: object) -> Call:
    parsed = parse_chat(json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode(), LIMITS, True)
    return parsed.rendered(fake_prompt(parsed.messages))


def refusal(parse: object, **fields: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)  # type: ignore[operator]
    return caught.value


def test_a_bare_completion_has_the_defaults_of_openai() -> None:
    call = completion()
    assert len(call.requests) == 1
    request = call.requests[0]
    assert request.prompt == "hello"
    assert request.add_special_tokens
    assert request.seed is None
    assert request.params == SamplingParams(max_tokens=16)
    assert request.max_tokens_unasked
    assert not call.stream
    assert not call.logprobs


def test_a_bare_chat_asks_for_as_many_tokens_as_fit_and_adds_no_special_tokens() -> None:
    request = chat().requests[0]
    assert request.params == SamplingParams(max_tokens=0)
    assert request.prompt == "<user>hello<assistant>"
    assert not request.add_special_tokens


def test_every_served_field_reaches_the_router() -> None:
    params = (
        completion(
            max_tokens=7,
            min_tokens=2,
            temperature=0,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={"3": -1, "4": 2.5},
            stop=["a", "b"],
            stop_token_ids=[8, 9],
            ignore_eos=True,
            logprobs=3,
            n=2,
            best_of=2,
            cache_salt="s",
            user="u",
            return_token_ids=True,
        )
        .requests[0]
        .params
    )
    assert params == SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=((3, -1.0), (4, 2.5)),
        stop=("a", "b"),
        stop_token_ids=(8, 9),
        ignore_eos=True,
        logprobs=3,
        n=2,
    )


def test_null_means_absent_for_every_field() -> None:
    fields = dict.fromkeys(
        [
            "max_tokens",
            "temperature",
            "top_p",
            "n",
            "stream",
            "stream_options",
            "stop",
            "seed",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "logprobs",
            "echo",
            "best_of",
            "suffix",
            "user",
            "top_k",
            "min_p",
            "repetition_penalty",
            "min_tokens",
            "ignore_eos",
            "stop_token_ids",
            "cache_salt",
            "return_token_ids",
            "tools",
            "an_unknown_one",
        ]
    )
    assert completion(**fields) == completion()
    assert chat(tools=None, top_logprobs=None, response_format=None, store=None) == chat()
    assert completion(stream=True, stream_options={"include_usage": None}).usage_last is False


def test_every_prompt_of_a_call_has_its_priority() -> None:
    assert [r.priority for r in completion(prompt=["a", "b"], priority=-3).requests] == [-3, -3]
    assert chat(priority=7).requests[0].priority == 7 and completion().requests[0].priority == 0


def test_every_prompt_of_a_call_has_its_cache_salt_and_none_means_the_common_cache() -> None:
    assert [r.cache_salt for r in completion(prompt=["a", "b"], cache_salt="s").requests] == ["s", "s"]
    assert [r.cache_salt for r in chat(cache_salt="s").requests] == ["s"]
    assert [completion().requests[0].cache_salt, chat(cache_salt=None).requests[0].cache_salt] == ["", ""]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_a_prompt_comes_in_four_shapes(prompt: object, prompts: tuple[object, ...]) -> None:
    assert tuple(request.prompt for request in completion(prompt=prompt).requests) == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        (7, "prompt"),
        ({"a": 1}, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1, True]], "prompt[0][1]"),
        ([-1], "prompt[0]"),
        ([2**40], "prompt[0]"),
        (["a"] * 5, "prompt"),
    ],
)
def test_any_other_prompt_is_refused(prompt: object, param: str) -> None:
    assert refusal(completion, prompt=prompt).param == param


@pytest.mark.parametrize(
    ("seed", "drawn"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1), (2**64 - 1, 2**64 - 1)]
)
def test_any_64_bit_seed_is_taken_as_an_unsigned_one(seed: int, drawn: int) -> None:
    assert completion(seed=seed).requests[0].seed == drawn


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"seed": 2**64 - 1 + 1}, None),  # msgspec cannot read it as an integer at all
        ({"seed": -(2**63) - 1}, None),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 1.5}, "n"),
        ({"stream": 1}, "stream"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_all": True}}, "stream_options.include_all"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"logprobs": True}, "logprobs"),
        ({"model": 7}, "model"),
    ],
)
def test_a_bad_value_is_refused_with_the_name_of_its_field(fields: dict[str, object], param: str | None) -> None:
    error = refusal(completion, **fields)
    if param is None:
        assert error.param in (None, next(iter(fields)))
    else:
        assert error.param == param


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"logit_bias": {"1": 1, "5": "x"}}, "logit_bias['5']"),
        ({"logit_bias": {"1": 1, "5": None}}, "logit_bias['5']"),
        ({"metadata": {"a": "b", "c\n`d": 5}}, "metadata['c\\n'd']"),
        ({"metadata": {"x" * 5000: 5}}, "metadata['" + "x" * 128),
        ({"logit_bias": {"a\x1b": 1}}, "'a\\x1b'"),
        ({"logit_bias": {"7": 1, "07": 2}}, "token 7"),
    ],
)
def test_a_bad_entry_is_refused_with_its_key(fields: dict[str, object], names: str) -> None:
    error = refusal(completion, **fields)
    assert names in str(error)
    assert len(str(error)) < 500


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (["a", "b" * 2001], "prompt[1] has 2001 characters"),
        ([[1], [], [2]], "prompt[1] is an empty list"),
        ([[1], [2] * 201], "prompt[1] has 201 token ids"),
    ],
)
def test_which_of_several_prompts_is_wrong_is_said(prompt: list[object], says: str) -> None:
    error = refusal(completion, prompt=prompt)
    assert says in str(error)
    assert error.param == "prompt[1]"


def test_every_prompt_has_the_name_that_the_client_knows_it_by() -> None:
    assert [request.prompt_name for request in completion(prompt=["a", "b"]).requests] == ["prompt[0]", "prompt[1]"]
    assert [request.the_prompt for request in completion(prompt=["a"]).requests] == ["the prompt"]
    assert [(request.prompt_name, request.the_prompt) for request in chat().requests] == [
        ("messages", "the chat's prompt")
    ]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"suffix": "x"}, "unsupported_value"),
        ({"echo": True}, "unsupported_value"),
        ({"echo": 0}, "unsupported_value"),  # wrong type, though Python finds it equal to False
        ({"best_of": 3}, "unsupported_value"),
        ({"n": 2, "best_of": 1}, "unsupported_value"),
        ({"max_completion_tokens": 3}, "unknown_parameter"),
        ({"messages": []}, "unknown_parameter"),
        ({"temprature": 1}, "unknown_parameter"),
        ({"prompt_logprobs": 1}, "unsupported_parameter"),
    ],
)
def test_what_completions_do_not_serve_is_refused_by_name(fields: dict[str, object], code: str) -> None:
    error = refusal(completion, **fields)
    assert isinstance(error, BadField)
    assert (error.param, error.code) == (list(fields)[-1], code)
    assert list(fields)[-1] in str(error)


@pytest.mark.parametrize(
    "name",
    [
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "parallel_tool_calls",
        "audio",
        "prediction",
        "reasoning_effort",
        "web_search_options",
        "prompt",
        "best_of",
        "logits",
        "echo",
    ],
)
def test_what_chats_do_not_serve_is_refused_by_name(name: str) -> None:
    error = refusal(chat, **{name: "auto"})
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"modalities": ["text", "audio"]},
        {"store": True},
        {"service_tier": "flex"},
    ],
)
def test_fields_with_one_served_setting_are_refused_at_any_other(fields: dict[str, object]) -> None:
    assert refusal(chat, **fields).param == next(iter(fields))


def test_fields_at_the_setting_that_asks_for_nothing_are_accepted() -> None:
    harmless = {
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "service_tier": "auto",
        "user": "u",
        "metadata": {"a": "b"},
        "safety_identifier": "x",
    }
    assert chat(**harmless) == chat()


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {"model": "m", "prompt": "p"}
    del body[missing]
    with pytest.raises(BadField) as caught:
        parse_completion(json.dumps(body).encode(), LIMITS, max_prompts=1)
    assert (caught.value.param, caught.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"7",
        b'{"model": nul}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 500_000,
        b"1e999",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_completion(body, LIMITS, max_prompts=1)


@pytest.mark.parametrize(
    "escape", ["\\ud800", "\\uD9ff", "\\\\\\udbff", "\\ud800abcdefgh", "\\ud800\\u0041", "\\ud800\\ud800"]
)
def test_half_of_a_surrogate_pair_is_named_wherever_it_ends(escape: str) -> None:
    body = f'{{"model": "m", "prompt": "{escape}"}}'.encode()
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        parse_completion(body, LIMITS, max_prompts=1)
    with pytest.raises(InvalidRequest, match="truncated"):
        parse_completion(b'{"model": "m", "prompt": "\\ud83d\\ude00\\\\ud800', LIMITS, max_prompts=1)


# ---- chats


def test_a_number_of_tokens_that_was_asked_for_is_not_shrunk() -> None:
    assert not completion(max_tokens=16).requests[0].max_tokens_unasked
    assert not chat(max_tokens=16).requests[0].max_tokens_unasked


def test_the_two_names_of_max_tokens_mean_the_same() -> None:
    assert chat(max_tokens=5).requests == chat(max_completion_tokens=5).requests
    assert chat(max_tokens=5, max_completion_tokens=5).requests == chat(max_tokens=5).requests
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    assert refusal(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_chat_logprobs_count_from_the_chosen_token_only() -> None:
    assert chat().requests[0].params.logprobs is None
    assert chat(logprobs=False).requests[0].params.logprobs is None
    assert chat(logprobs=True).requests[0].params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).requests[0].params.logprobs == 4
    assert refusal(chat, top_logprobs=4).param == "top_logprobs"
    assert refusal(chat, logprobs=True, top_logprobs=21).param == "top_logprobs"
    assert refusal(chat, logprobs=3).param == "logprobs"


def test_null_means_absent_within_parts_and_formats_too() -> None:
    part = {"type": "text", "text": "a", "image_url": None, "cache_control": None}
    call = chat(messages=[{"role": "user", "content": [part]}], response_format={"type": "text", "json_schema": None})
    assert call.requests[0].prompt == "<user>a<assistant>"
    assert refusal(chat, response_format={"type": "json_schema", "json_schema": None}).param == "response_format"


def test_text_parts_are_joined_and_a_developer_is_the_system() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
    ]
    assert chat(messages=messages).requests[0].prompt == "<system>be brief<user>a\nb<assistant>c<assistant>"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ("hello", "messages[0]"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused_by_name(message: object, param: str) -> None:
    assert refusal(chat, messages=[message]).param == param


def test_a_chat_needs_messages_and_a_template() -> None:
    assert refusal(chat, messages=[]).param == "messages"
    with pytest.raises(InvalidRequest, match=r"no chat template.*v1/completions"):
        parse_chat(json.dumps({"model": "m", "messages": MESSAGES}).encode(), LIMITS, False)
