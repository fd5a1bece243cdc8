"""Which pods are servers, and what is believed of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.discovery.faults import MAX_LINES, MAX_SHOWN, Faults
from disagg.discovery.found import Found
from disagg.discovery.pods import DELETED, NOT_READY, fault_of, found_in, has_ended
from tests.discovery.fake_api import pod


def test_a_ready_pod_is_a_server_under_its_own_name() -> None:
    assert found_in(pod("decode-0", ip="10.1.2.3", port=7001)) == Found(
        name="decode-0", role="decode", address="10.1.2.3:7001", uid="uid-decode-0"
    )
    found = found_in(pod("p", "prefill", ip="fd00::1"))
    assert found is not None and found.address == "[fd00::1]:7000"


def test_a_port_has_the_name_grpc_or_is_the_only_one() -> None:
    made = pod("d", port=7001)
    ports = made["spec"]["containers"][0]["ports"]
    ports.append({"name": "metrics", "containerPort": 9000})
    found = found_in(made)
    assert found is not None and found.address.endswith(":7001")
    del ports[0]["name"]
    assert found_in(made) is None, "one of two"
    del ports[1]
    found = found_in(made)
    assert found is not None and found.address.endswith(":7001")


def test_nothing_new_is_sent_to_a_pod_that_is_not_ready_or_is_being_deleted() -> None:
    found = found_in(pod("d", ready=False))
    assert found is not None and found.held == NOT_READY
    leaving = pod("d")
    leaving["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    found = found_in(leaving)
    assert found is not None and found.held == DELETED
    unsaid = pod("d")
    del unsaid["status"]["conditions"]
    found = found_in(unsaid)
    assert found is not None and found.held == NOT_READY


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("podIP", ""),
        ("podIP", None),
        ("phase", "Failed"),
        ("phase", "Succeeded"),
        ("role", "router"),
        ("role", None),
        ("containerPort", 0),
        ("containerPort", 65536),
        ("containerPort", "7000"),
    ],
)
def test_other_pods_are_no_servers(part: str, value: object) -> None:
    made = pod("d")
    port = made["spec"]["containers"][0]["ports"][0]
    {"podIP": made["status"], "phase": made["status"], "role": made["metadata"]["labels"]}.get(part, port)[
        "disagg/role" if part == "role" else part
    ] = value
    assert found_in(made) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"role": "admin"}, "its label disagg/role is 'admin'; of a server it must be one of prefill, decode, mixed"),
        ({"role": "x" * 5000}, "(5000 characters); of a server"),
        ({"port": 0}, "the containerPort of its server is 0; it must be from 1 to 65535"),
        ({"port": 999999}, "is 999999; it must be from 1 to 65535"),
        ({"port": "7000"}, "is '7000'; it must be"),
        ({"port": {"a": 1}}, "is a dict; it must be"),
        ({"ip": "not an ip\r\nx"}, r"its status.podIP is 'not an ip\r\nx'; it must be an IP address"),
    ],
)
def test_what_is_meant_to_be_a_server_and_cannot_be_one_is_told_why(change: dict[str, Any], said: str) -> None:
    made = pod("d", **change)
    assert found_in(made) is None and said in fault_of(made)
    made["status"]["phase"] = "Succeeded"
    assert fault_of(made) == "", "it is over"


def test_a_server_without_a_port_of_its_own_is_told_what_that_is() -> None:
    made = pod("d")
    container = made["spec"]["containers"][0]
    container["ports"] = []
    assert fault_of(made).startswith(
        "no port of its containers can be where its server listens; one must have the name grpc"
    )
    container["ports"] = [{"containerPort": 1}, {"containerPort": 2}]
    assert fault_of(made).startswith("2 ports of its containers can be where")
    container["ports"][0]["name"] = "grpc"
    assert fault_of(made) == "" and found_in(made) is not None


@pytest.mark.parametrize("role", [None, "router", "test"])
def test_pods_that_are_not_meant_to_be_servers_are_passed_over(role: str | None) -> None:
    made = pod("r", ip="")
    made["metadata"]["labels"]["disagg/role"] = role
    made["spec"]["containers"][0]["ports"] = []
    assert fault_of(made) == ""


def test_a_pod_that_is_no_server_yet_has_no_fault() -> None:
    assert fault_of(pod("d", ip="")) == fault_of(pod("d", ready=False)) == fault_of({}) == ""


names_of_pods = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["one", "two"]))


@given(st.lists(names_of_pods, max_size=8))
def test_each_fault_is_said_when_it_comes_and_not_again_while_it_is_there(pictures: list[dict[str, str]]) -> None:
    faults, before = Faults(), dict[str, str]()
    for now in pictures:
        assert faults.found(now) == [f"{name}: {why}" for name, why in now.items() if before.get(name) != why]
        assert faults.now == now
        before = now


def test_many_faults_are_said_in_a_few_lines() -> None:
    faults, many = Faults(), {f"p{n}": "wrong" for n in range(1000)}
    lines = faults.found(many)
    assert len(lines) == MAX_LINES and lines[-1] == f"{1000 - MAX_LINES + 1} more, which are not listed"
    assert faults.found(many) == [] and len(faults.now) == MAX_SHOWN


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_pod_is_an_error(data: st.DataObject) -> None:
    made = pod("d")
    where: Any = made
    while True:
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        if not isinstance(where[key], dict | list) or not where[key] or data.draw(st.booleans()):
            break
        where = where[key]
    where[key] = data.draw(anything)
    found = found_in(made)
    assert found is None or (found.name and found.address)
    assert has_ended(made, "uid-d") in (True, False)
    assert len(fault_of(made)) < 500 and not (found and fault_of(made))


def test_a_pod_has_ended_when_it_is_gone_another_or_over() -> None:
    assert has_ended(None, "uid-d") and has_ended(pod("d"), "uid-of-before")
    assert not has_ended(pod("d"), "uid-d")
    leaving = pod("d", ready=False)
    leaving["metadata"]["deletionTimestamp"] = "2026-11-23T00:00:00Z"
    assert not has_ended(leaving, "uid-d"), "its containers may still run"
    over = pod("d")
    over["status"]["phase"] = "Failed"
    assert has_ended(over, "uid-d")
