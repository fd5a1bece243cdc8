"""What goes in comes out: every value, through protobuf's bytes and back."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from disagg.messages.channel import Frame, ReliableChannel
from disagg.messages.legs import LegTokens, RouterMessage, ServerMessage
from disagg.messages.link import LinkMessage
from disagg.messages.plan import TokenLogprobs
from disagg.router import requests
from disagg.types.ids import LegKey
from disagg.types.sampling import SamplingParams
from disagg.wire import inference, pb, peer, server
from tests.wire import tokenizing
from tests.wire.wire_strategies import (
    LINK_MESSAGES,
    ROUTER_MESSAGES,
    SERVER_MESSAGES,
    WIRE,
    choice_deltas,
    finished,
    frames,
    generate_fields,
    link_greetings,
    router_hellos,
    sampling,
    server_says,
    started,
    text,
    token_ids,
)


def through_bytes(message):
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("union", "strategies", "proto"),
    [
        (RouterMessage, ROUTER_MESSAGES, pb.server.RouterMessage),
        (ServerMessage, SERVER_MESSAGES, pb.server.ServerMessage),
        (LinkMessage, LINK_MESSAGES, pb.peer.LinkMessage),
    ],
)
def test_every_message_has_a_strategy_and_a_kind_in_its_proto(union, strategies, proto):
    assert set(strategies) == set(typing.get_args(union))
    assert {field.message_type.name for field in proto.DESCRIPTOR.oneofs_by_name["kind"].fields} == {
        cls.__name__ for cls in strategies
    }


@pytest.mark.parametrize("cls", ROUTER_MESSAGES, ids=lambda cls: cls.__name__)
def test_every_router_message_survives(cls):
    @WIRE
    @given(frames(ROUTER_MESSAGES[cls]))
    def check(frame):
        assert server.router_frame_from_proto(through_bytes(server.router_frame_to_proto(frame))) == frame

    check()


@WIRE
@given(router_hellos)
def test_router_hello_survives(hello):
    assert server.router_frame_from_proto(through_bytes(server.router_hello_to_proto(hello))) == hello


@pytest.mark.parametrize("cls", SERVER_MESSAGES, ids=lambda cls: cls.__name__)
def test_every_server_message_survives(cls):
    @WIRE
    @given(frames(SERVER_MESSAGES[cls]))
    def check(frame):
        says = server.ServerSays(frame)
        assert server.server_says_from_proto(through_bytes(server.server_says_to_proto(says))) == says

    check()


@WIRE
@given(server_says)
def test_what_a_server_says_survives(says):
    assert server.server_says_from_proto(through_bytes(server.server_says_to_proto(says))) == says


@pytest.mark.parametrize("cls", LINK_MESSAGES, ids=lambda cls: cls.__name__)
def test_every_link_message_survives(cls):
    @WIRE
    @given(frames(LINK_MESSAGES[cls]))
    def check(frame):
        back = peer.link_frame_from_proto(through_bytes(peer.link_frame_to_proto(frame)))
        assert back == frame
        assert [type(m) for m in back.messages] == [type(m) for m in frame.messages]

    check()


@WIRE
@given(link_greetings)
def test_link_greeting_survives(greeting):
    assert peer.link_frame_from_proto(through_bytes(peer.link_greeting_to_proto(greeting))) == greeting


def test_messages_of_different_kinds_keep_their_order():
    key = LegKey("r", 0, 0)
    one, two = LegTokens(key, 0, 0, (1,)), LegTokens(key, 0, 1, (2,))
    end = server.LegEnd(key, server.Outcome.DONE, "")
    says = server.ServerSays(Frame(1, 0, (one, two, end, one)))
    assert server.server_says_from_proto(through_bytes(server.server_says_to_proto(says))) == says


def test_frames_of_a_channel_and_its_acknowledgements_survive():
    channel: ReliableChannel[ServerMessage] = ReliableChannel()
    frame = channel.push((LegTokens(LegKey("r", 0, 0), 0, 0, (1,)),), now_s=0.0)
    says = server.server_says_from_proto(through_bytes(server.server_says_to_proto(server.ServerSays(frame))))
    other: ReliableChannel[ServerMessage] = ReliableChannel()
    assert other.take(says.frame, now_s=0.0) == frame.messages
    ack = server.router_frame_from_proto(through_bytes(server.router_frame_to_proto(other.ack_frame())))
    assert isinstance(ack, Frame)
    channel.take(ack, now_s=0.0)
    assert channel.unacked == 0


def test_log_probabilities_lie_in_columns_and_take_few_bytes():
    row = TokenLogprobs(-0.5, tuple((1000 + i, -0.5 - i) for i in range(5)))
    bare = LegTokens(LegKey("r", 0, 0), 0, 0, tuple(range(8)))
    rich = structs.replace(bare, logprobs=(row,) * 8)
    sizes = [
        len(server.server_says_to_proto(server.ServerSays(Frame(1, 0, (m,)))).SerializeToString()) for m in (bare, rich)
    ]
    assert sizes[1] - sizes[0] <= 8 * (4 + 1 + 5 * (2 + 4)) + 20  # values and varints, and 20 bytes of tags and lengths


# ---- public API


@WIRE
@given(sampling)
def test_sampling_parameters_survive(params):
    out = pb.inference.SamplingParams()
    inference.fill_sampling(out, params)
    assert inference.read_sampling(through_bytes(out)) == params


def test_absent_sampling_parameters_mean_the_defaults():
    assert inference.read_sampling(pb.inference.SamplingParams()) == SamplingParams(max_tokens=0)


@WIRE
@given(generate_fields)
def test_generate_request_survives(fields):
    message = through_bytes(inference.generate_request_to_proto(**fields))
    assert inference.generate_request_from_proto(message, 1 << 24) == fields


def test_generate_fields_are_the_routers_generate_request():
    names = {field.name for field in structs.fields(requests.GenerateRequest)}
    of_faces = {
        "tenant",
        "owner",
        "prompt_name",
        "call",
        "too_large",
        "traceparent",
        "operation",
        "max_tokens_unasked",
    }  # which no message says
    said = set(inference.GenerateFields.__annotations__)
    assert of_faces <= names and not of_faces & said
    assert names - of_faces == said


def test_the_least_request_has_a_model_and_a_prompt_and_gets_the_defaults():
    fields = inference.generate_request_from_proto(pb.inference.GenerateRequest(model="m", text="hi"), 1 << 24)
    request = requests.GenerateRequest(**fields)
    assert request == requests.GenerateRequest(model="m", prompt="hi", params=SamplingParams(max_tokens=0))


@WIRE
@given(started)
def test_started_survives(update):
    assert inference.update_from_proto(through_bytes(inference.started_to_proto(update))) == update


@WIRE
@given(choice_deltas())
def test_choice_delta_survives(update):
    assert inference.update_from_proto(through_bytes(inference.choice_delta_to_proto(update))) == update


@WIRE
@given(finished)
def test_finished_survives(update):
    assert inference.update_from_proto(through_bytes(inference.finished_to_proto(update))) == update


@pytest.mark.parametrize(
    ("view", "routers"),
    [
        (inference.LogprobEntryView, requests.LogprobEntry),
        (inference.TokenLogprobsView, requests.TokenLogprobInfo),
        (inference.StartedView, requests.Started),
        (inference.ChoiceDeltaView, requests.ChoiceDelta),
        (inference.UsageView, requests.Usage),
        (inference.FinishedView, requests.Finished),
    ],
    ids=lambda cls: cls.__name__,
)
def test_what_a_client_reads_has_the_fields_of_what_the_router_says(view, routers):
    assert view.__struct_fields__ == routers.__struct_fields__


def test_the_routers_own_updates_can_be_written():
    entry = requests.LogprobEntry(5, "é", b"\xc3", -1.5)
    delta = requests.ChoiceDelta(1, "x", (5,), (requests.TokenLogprobInfo(entry, (entry,), 3),), None, 7)
    view = inference.update_from_proto(through_bytes(inference.choice_delta_to_proto(delta)))
    assert structs.asdict(view.logprobs[0].chosen) == structs.asdict(entry)
    assert (view.choice, view.text, view.token_ids, view.stop_reason) == (1, "x", (5,), 7)


def test_a_client_skips_an_update_of_a_newer_version():
    assert inference.update_from_proto(pb.inference.GenerateResponse()) is None


@WIRE
@given(text.filter(bool), text, st.booleans(), token_ids)
def test_tokenize_and_detokenize_survive(model, some_text, flag, ids):
    request = tokenizing.tokenize_request_to_proto(model=model, text=some_text, add_special_tokens=flag)
    assert inference.tokenize_request_from_proto(through_bytes(request)) == {
        "model": model,
        "text": some_text,
        "add_special_tokens": flag,
    }
    assert tokenizing.tokenize_response_from_proto(through_bytes(inference.tokenize_response_to_proto(ids))) == ids
    back = tokenizing.detokenize_request_to_proto(model=model, token_ids=ids, skip_special_tokens=flag)
    assert inference.detokenize_request_from_proto(through_bytes(back), 1 << 24) == {
        "model": model,
        "token_ids": ids,
        "skip_special_tokens": flag,
    }
    assert tokenizing.detokenize_response_from_proto(inference.detokenize_response_to_proto(some_text)) == some_text


def test_special_tokens_are_added_and_skipped_unless_the_client_says_no():
    assert inference.tokenize_request_from_proto(pb.inference.TokenizeRequest(model="m"))["add_special_tokens"]
    assert inference.detokenize_request_from_proto(pb.inference.DetokenizeRequest(model="m"), 1 << 24)[
        "skip_special_tokens"
    ]


def test_list_of_models_survives():
    models = (inference.ModelInfo("a", 4096), inference.ModelInfo("b", 0))
    message = through_bytes(inference.list_models_response_to_proto(models))
    assert inference.list_models_response_from_proto(message) == models
