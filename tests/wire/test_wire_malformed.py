"""What no sender may say is refused with the field's name; what a newer version adds is tolerated."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.messages.channel import MAX_FRAME_MESSAGES, Frame
from disagg.messages.legs import LoadReport, ServerState
from disagg.types.errors import InvalidRequest, ProtocolError
from disagg.wire import inference, pb, peer, server
from disagg.wire.fields import Undecodable
from disagg.wire.server import MAX_LEG_TOKENS

KEY = pb.server.LegKey(request_id="r", attempt=1, trunk=0)


def router_frame(**message):
    return pb.server.RouterFrame(number=1, messages=[pb.server.RouterMessage(**message)])


def server_frame(**message):
    return pb.server.ServerFrame(number=1, messages=[pb.server.ServerMessage(**message)])


def link_frame(**message):
    return pb.peer.LinkFrame(number=1, messages=[pb.peer.LinkMessage(**message)])


def start_leg(**changes):
    fields = {
        "key": KEY,
        "token_ids": [1, 2],
        "num_prompt": 2,
        "params": pb.inference.SamplingParams(max_tokens=1),
        "peer": pb.server.PeerRef(name="d"),
        "deadline_s": 1.0,
    }
    fields |= changes
    return router_frame(start_leg=pb.server.StartLeg(**{k: v for k, v in fields.items() if v is not None}))


def test_the_least_start_leg_is_taken():
    assert server.router_frame_from_proto(start_leg()).messages[0].params.max_tokens == 1


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (start_leg(key=None), "StartLeg.key is missing"),
        (start_leg(key=pb.server.LegKey(attempt=1)), "StartLeg.key.request_id is empty"),
        (start_leg(params=None), "StartLeg.params is missing"),
        (start_leg(params=pb.inference.SamplingParams()), "StartLeg.params.max_tokens is missing"),
        (start_leg(peer=None), "StartLeg.peer is missing"),
        (start_leg(num_prompt=3), "StartLeg.num_prompt is 3, but there are 2 tokens"),
        (start_leg(tenant="x" * 257), "StartLeg.tenant has 257 characters; at most 256 are allowed"),
        (start_leg(deadline_s=float("nan")), "StartLeg.deadline_s is nan"),
        (start_leg(deadline_s=float("inf")), "StartLeg.deadline_s is inf"),
        (router_frame(abort_leg=pb.server.AbortLeg()), "AbortLeg.key is missing"),
        (router_frame(), r"RouterFrame.messages\[0\] of frame 1 is of no kind that this version knows"),
        (
            pb.server.RouterFrame(messages=[pb.server.RouterMessage(abort_leg=pb.server.AbortLeg(key=KEY))]),
            "RouterFrame.number is 0",
        ),
        (pb.server.RouterFrame(hello=pb.server.RouterHello()), "RouterHello.router_name is empty"),
        (
            pb.server.RouterFrame(
                number=1, hello=pb.server.RouterHello(router_name="r", router_incarnation="i", stream_id="s")
            ),
            "RouterFrame.hello comes with a frame",
        ),
    ],
)
def test_a_malformed_router_frame_is_refused_by_field(message, names):
    with pytest.raises(ProtocolError, match=names):
        server.router_frame_from_proto(message)


def tokens(**changes):
    fields = {"key": KEY, "token_ids": [1, 2]} | changes
    return server_frame(leg_tokens=pb.server.LegTokens(**fields))


def table(**columns):
    return pb.server.LogprobTable(**columns)


def below(**fields: Any) -> pb.server.TierUpdate:
    return pb.server.TierUpdate(tier=pb.server.TIER_HOST, update=pb.server.KvUpdate(**fields))


def server_hello(**changes):
    fields = {
        "name": "p",
        "role": pb.server.ROLE_PREFILL,
        "load": pb.server.LoadReport(state=pb.server.SERVER_STATE_READY),
    }
    fields |= changes
    return pb.server.ServerFrame(hello=pb.server.ServerHello(**{k: v for k, v in fields.items() if v is not None}))


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (server_frame(leg_tokens=pb.server.LegTokens()), "LegTokens.key is missing"),
        (tokens(finish=9), "LegTokens.finish is 9, which this version does not know"),
        (tokens(logprobs=table(chosen=[0.0])), "LogprobTable.chosen has 1 rows for 2 tokens"),
        (tokens(logprobs=table(chosen=[0.0, 0.0], top_counts=[1])), "LogprobTable.top_counts has 1 rows for 2"),
        (tokens(logprobs=table(chosen=[0.0, 0.0], top_ids=[1])), "LogprobTable.top_counts is missing"),
        (
            tokens(logprobs=table(chosen=[0.0, 0.0], top_counts=[1, 1], top_ids=[1, 2], top_logprobs=[0.0])),
            "LogprobTable.top_logprobs has 1 rows where top_counts promises 2",
        ),
        (server_frame(leg_end=pb.server.LegEnd(key=KEY)), "LegEnd.outcome is missing"),
        (server_frame(leg_end=pb.server.LegEnd(key=KEY, outcome=77)), "LegEnd.outcome is 77"),
        (
            server_frame(
                leg_end=pb.server.LegEnd(
                    key=KEY, outcome=1, timeline=[pb.inference.TimelineEvent(end_unix_s=float("nan"))]
                )
            ),
            "TimelineEvent.end_unix_s is nan",
        ),
        (server_frame(), r"ServerFrame.messages\[0\] of frame 1 is of no kind"),
        (pb.server.ServerFrame(load=pb.server.LoadReport()), "LoadReport.state is missing"),
        (pb.server.ServerFrame(load=pb.server.LoadReport(state=50)), "LoadReport.state is 50"),
        (
            pb.server.ServerFrame(load=pb.server.LoadReport(state=pb.server.SERVER_STATE_READY, store=9)),
            "LoadReport.store is 9",
        ),
        (server_hello(name=""), "ServerHello.name is empty"),
        (server_hello(role=0), "ServerHello.role is missing"),
        (server_hello(role=4), "ServerHello.role is 4"),
        (server_hello(load=None), "ServerHello.load is missing"),
        (server_hello(files=[pb.server.ModelFile()] * 65), "ServerHello.files has 65 entries; at most 64"),
        (server_hello(note="x" * 4097), "ServerHello.note has 4097 characters; at most 4096"),
        (
            server_hello(version=pb.server.Version(oldest_protocol=2)),
            "Version.oldest_protocol is 2, above protocol, which is 0",
        ),
        (
            server_hello(version=pb.server.Version(software="x" * 257)),
            "Version.software has 257 characters; at most 256",
        ),
        (pb.server.ServerFrame(attached=pb.server.AttachReply()), "ServerFrame.hello is missing"),
        (
            pb.server.ServerFrame(kv=pb.server.KvUpdate(stored=[b"a", b"b"], stored_groups=[0])),
            "KvUpdate.stored_groups has 1 entries for 2 of stored",
        ),
        (
            pb.server.ServerFrame(below=below(stored=[b"a"], stored_groups=[])),
            "KvUpdate.stored_groups has 0 entries for 1 of stored",
        ),
        (server_hello(storage="x" * 257), "ServerHello.storage has 257 characters; at most 256"),
        (
            pb.server.ServerFrame(
                load=pb.server.LoadReport(
                    state=pb.server.SERVER_STATE_READY, loads=pb.server.LoadCosts(host_token_s=float("nan"))
                )
            ),
            "LoadCosts.host_token_s is nan",
        ),
        (
            pb.server.ServerFrame(
                load=pb.server.LoadReport(
                    state=pb.server.SERVER_STATE_READY, loads=pb.server.LoadCosts(storage_token_s=-1.0)
                )
            ),
            "LoadCosts.storage_token_s is -1.0; nothing is brought in less than no time",
        ),
        (
            pb.server.ServerFrame(kv=pb.server.KvUpdate(removed_groups=[1])),
            "KvUpdate.removed_groups has 1 entries for 0 of removed",
        ),
        (
            pb.server.ServerFrame(kv=pb.server.KvUpdate(stored=[b"a", b"b"], stored_groups=[0, 2**31 - 1])),
            "KvUpdate.stored_groups has a layer group 2147483647; at most 4096",
        ),
        (
            pb.server.ServerFrame(kv=pb.server.KvUpdate(removed=[b"a" * 65], removed_groups=[0])),
            "KvUpdate.removed has a name of 65 bytes; at most 64",
        ),
    ],
)
def test_a_malformed_server_frame_is_refused_by_field(message, names):
    with pytest.raises(ProtocolError, match=names):
        server.server_says_from_proto(message)


@pytest.mark.parametrize(
    "kind",
    [
        field.name
        for field in pb.peer.LinkMessage.DESCRIPTOR.oneofs_by_name["kind"].fields
        if "key" in field.message_type.fields_by_name
    ],
)
def test_every_link_message_about_a_leg_needs_its_key(kind):
    message = pb.peer.LinkFrame(number=1, messages=[pb.peer.LinkMessage()])
    body = getattr(message.messages[0], kind)
    body.SetInParent()
    with pytest.raises(ProtocolError, match=f"{body.DESCRIPTOR.name}.key is missing"):
        peer.link_frame_from_proto(message)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (link_frame(), r"LinkFrame.messages\[0\] of frame 1 is of no kind"),
        (
            link_frame(offer_pieces=pb.peer.OfferPieces(key=KEY, pieces=[pb.peer.Piece(layer_stop=1)])),
            "Piece.token_stop is 0; it must be above token_start 0",
        ),
        (
            link_frame(want_pieces=pb.peer.WantPieces(key=KEY, pieces=[pb.peer.Piece(layer_start=2, layer_stop=1)])),
            "Piece.layer_stop is 1; it must be above layer_start 2",
        ),
        (link_frame(open_ring=pb.peer.OpenRing()), "OpenRing.segment_bytes is 0"),
        (
            link_frame(first_tokens=pb.peer.FirstTokens(key=KEY, tokens=[pb.peer.FirstToken(logprobs=table())])),
            "LogprobTable.chosen has 0 rows for 1 tokens",
        ),
        (link_frame(first_tokens=pb.peer.FirstTokens(key=KEY, tokens=[pb.peer.FirstToken(finish=8)])), "finish is 8"),
        (pb.peer.LinkFrame(hello=pb.peer.LinkHello(name="d")), "LinkHello.generation is empty"),
    ],
)
def test_a_malformed_link_frame_is_refused_by_field(message, names):
    with pytest.raises(ProtocolError, match=names):
        peer.link_frame_from_proto(message)


def generate(**fields):
    return pb.inference.GenerateRequest(**({"model": "m", "text": "hi"} | fields))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (generate(model=""), "model"),
        (pb.inference.GenerateRequest(model="m"), "prompt"),
        (generate(sampling=pb.inference.SamplingParams(max_tokens=0)), "max_tokens"),
        (generate(sampling=pb.inference.SamplingParams(max_tokens=-3)), "max_tokens"),
        (generate(deadline_ms=0), "deadline_ms"),
        (generate(deadline_ms=-1), "deadline_ms"),
        (generate(deadline_ms=2**63 - 1), "deadline_ms"),
        (generate(slo_ttft_ms=0), "slo_ttft_ms"),
        (generate(slo_ttft_ms=10**9 + 1), "slo_ttft_ms"),
        (generate(session_id="s" * 257), "session_id"),
    ],
)
def test_a_malformed_generate_request_is_the_clients_fault_and_names_the_field(message, param):
    with pytest.raises(InvalidRequest, match=param) as caught:
        inference.generate_request_from_proto(message, 1 << 24)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["min_tokens", "top_k", "logprobs", "n"])
def test_a_negative_parameter_reaches_validation_as_it_is(name):
    sampling = pb.inference.SamplingParams(max_tokens=5, **{name: -2})
    params = inference.generate_request_from_proto(generate(sampling=sampling), 1 << 24)["params"]
    with pytest.raises(InvalidRequest, match=f"{name} is -2"):
        params.validate(vocab_size=10)


@pytest.mark.parametrize(
    ("read", "message", "param"),
    [
        (inference.tokenize_request_from_proto, pb.inference.TokenizeRequest(), "model"),
        (
            lambda message: inference.detokenize_request_from_proto(message, 10),
            pb.inference.DetokenizeRequest(),
            "model",
        ),
        (inference.abort_request_from_proto, pb.inference.AbortRequest(), "request_id"),
        (inference.abort_request_from_proto, pb.inference.AbortRequest(request_id="r"), "abort_token"),
    ],
)
def test_other_calls_name_the_missing_field(read, message, param):
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("delta", "names"),
    [
        (
            pb.inference.ChoiceDelta(token_ids=[1], logprobs=[pb.inference.TokenLogprobs()]),
            "TokenLogprobs.chosen is missing",
        ),
        (
            pb.inference.ChoiceDelta(logprobs=[pb.inference.TokenLogprobs()]),
            "ChoiceDelta.logprobs has 1 entries for 0 tokens",
        ),
        (pb.inference.ChoiceDelta(finish=5), "ChoiceDelta.finish is 5"),
    ],
)
def test_a_client_refuses_a_malformed_delta(delta, names):
    with pytest.raises(ProtocolError, match=names):
        inference.update_from_proto(pb.inference.GenerateResponse(delta=delta))


def test_fields_of_a_newer_version_are_ignored():
    unknown_field = b"\xfa\x7f\x03new"  # field 2047, length-delimited
    frame = Frame(3, 2, ())
    message = pb.server.ServerFrame.FromString(
        server.server_says_to_proto(server.ServerSays(frame)).SerializeToString() + unknown_field
    )
    assert server.server_says_from_proto(message) == server.ServerSays(frame)


def test_a_message_of_a_kind_out_of_a_newer_version_is_not_skipped_silently():
    newer_kind = b"\xfa\x7f\x03new"
    message = pb.server.ServerFrame(number=4)
    message.messages.append(pb.server.ServerMessage.FromString(newer_kind))
    with pytest.raises(ProtocolError, match=r"messages\[0\] of frame 4"):
        server.server_says_from_proto(message)


def test_no_server_says_of_itself_that_it_is_dead():
    load = LoadReport(ServerState.DEAD, 0, 0, 0, 0, 0, 0)
    with pytest.raises(KeyError):
        server.server_says_to_proto(server.ServerSays(Frame(0, 0, ()), load))


# ---- bounds before anything is read


def test_a_frame_of_too_many_messages_is_refused_before_they_are_read():
    frame = pb.server.RouterFrame(number=1)
    frame.messages.extend([pb.server.RouterMessage()] * (MAX_FRAME_MESSAGES + 1))  # of no kind, were they read
    with pytest.raises(ProtocolError, match=f"RouterFrame.messages are 8193; at most {MAX_FRAME_MESSAGES} may be"):
        server.router_frame_from_proto(frame)


@pytest.mark.parametrize("field", ["router_name", "router_incarnation", "stream_id", "server_name"])
def test_names_of_routers_are_short(field):
    texts = {"router_name": "r", "router_incarnation": "i", "stream_id": "s", field: "x" * 257}
    with pytest.raises(ProtocolError, match=f"RouterHello.{field} has 257 characters; at most 256 may be"):
        server.router_frame_from_proto(pb.server.RouterFrame(hello=pb.server.RouterHello(**texts)))


@pytest.mark.parametrize("field", ["name", "generation", "incarnation", "fingerprint", "host_id", "server_id"])
def test_names_of_peers_are_short(field):
    texts = {"name": "d", "generation": "g", "incarnation": "i", field: "x" * 257}
    with pytest.raises(ProtocolError, match=f"LinkHello.{field} has 257 characters; at most 256 may be"):
        peer.link_frame_from_proto(pb.peer.LinkFrame(hello=pb.peer.LinkHello(**texts)))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"token_ids": [1] * (MAX_LEG_TOKENS + 1)}, "StartLeg.token_ids are 4194305; at most 4194304 may be"),
        ({"choices": range(65)}, "StartLeg.choices has 65 entries; at most 64 may be"),
        ({"cache_salt": "x" * 1025}, "StartLeg.cache_salt has 1025 characters; at most 1024 may be"),
    ],
)
def test_what_a_leg_holds_is_bounded(fields, says):
    leg = pb.server.StartLeg(
        key=KEY, params=pb.inference.SamplingParams(max_tokens=1), peer=pb.server.PeerRef(name="d"), **fields
    )
    with pytest.raises(ProtocolError, match=says):
        server.router_frame_from_proto(
            pb.server.RouterFrame(number=1, messages=[pb.server.RouterMessage(start_leg=leg)])
        )


@pytest.mark.parametrize(
    "read", [server.router_frame_from_proto, server.server_says_from_proto, peer.link_frame_from_proto]
)
def test_what_cannot_be_decoded_is_refused_in_words(read):
    with pytest.raises(ProtocolError, match="what came is no such message"):
        read(Undecodable("what came is no such message"))


def test_a_tier_that_only_newer_servers_know_is_not_heard_and_no_fault() -> None:
    says = server.server_says_from_proto(pb.server.ServerFrame(below=pb.server.TierUpdate(tier=7)))
    assert says.kv is None
