"""What a client may get wrong: it is refused by name, with the numbers, before any server hears of it."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.types.errors import InvalidRequest, UnknownModel
from tests.router.conftest import NORMAL, Cluster
from tests.router.fake_server import answer


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ("hi", {"model": "other"}, UnknownModel, "'tiny' is"),
        ("", {}, InvalidRequest, "empty"),
        ((), {}, InvalidRequest, "empty"),
        ((1, 257), {}, InvalidRequest, "257"),
        ("\ud800", {}, InvalidRequest, "surrogate"),
        ("x" * 512, {}, InvalidRequest, "512"),
        ("x" * 500, {"max_tokens": 13}, InvalidRequest, "513 in all; the model's context holds 512"),
        ("hi", {"max_tokens": -1}, InvalidRequest, "max_tokens"),
        ("hi", {"temperature": -1.0}, InvalidRequest, "temperature"),
        ("hi", {"deadline_s": 0.0}, InvalidRequest, "deadline_s"),
        ("hi", {"deadline_s": float("nan")}, InvalidRequest, "deadline_s"),
        ("hi", {"seed": -1}, InvalidRequest, "seed"),
        ("hi", {"cache_salt": "x" * 1025}, InvalidRequest, "cache_salt has 1025 characters; at most 1024"),
        ("hi", {"priority": 1001}, InvalidRequest, "priority is 1001; it must be from -1000 to 1000"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    cluster: Cluster, prompt: str, params: dict[str, object], error: type[Exception], says: str
) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(error, match=says):
        await cluster.ask(prompt, **params)
    assert not cluster.servers["p0"].started


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", r"prompt\[3\] is empty"),
        ("\ud800", r"prompt\[3\] has half of a surrogate pair"),
        ((1, 257), r"prompt\[3\] has token 257"),
        ("x" * 512, r"prompt\[3\] has 512 tokens; the model's context holds 512 tokens"),
        ("x" * 511, r"prompt\[3\] has 511 tokens and max_tokens is 8, 519 in all"),
    ],
)
async def test_a_wrong_prompt_of_several_is_named(cluster: Cluster, prompt: Any, says: str) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match=says):
        await cluster.ask(prompt, prompt_name="prompt[3]")


@pytest.mark.parametrize(
    ("biases", "says"),
    [
        (((5, 1.0), (6, 1.0), (5, 2.0)), "logit_bias names token 5 more than once"),
        (((5, 1.0), (6, 101.0)), "logit_bias of token 6 is 101.0; it must be between -100.0 and 100.0"),
    ],
)
async def test_a_bias_that_is_refused_is_named(cluster: Cluster, biases: Any, says: str) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match=says):
        await cluster.ask(logit_bias=biases)


async def test_a_number_that_nobody_asked_for_is_what_fits(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    found = await cluster.ask("x" * 500, max_tokens=16, min_tokens=16, ignore_eos=True, max_tokens_unasked=True)
    assert len(found.token_ids[0]) == 12
    found = await cluster.ask("x" * 400, max_tokens=16, ignore_eos=True, max_tokens_unasked=True)
    assert len(found.token_ids[0]) == 16
    with pytest.raises(InvalidRequest, match="the model's context holds 512 tokens, and at least one must be left"):
        await cluster.ask("x" * 512, max_tokens=16, max_tokens_unasked=True)


async def test_an_answer_that_the_face_could_not_hold_is_refused_once_all_else_is_in_order(cluster: Cluster) -> None:
    await cluster.up(NORMAL)
    with pytest.raises(InvalidRequest, match="the model's context holds 512 tokens"):
        await cluster.ask("hi", max_tokens=511, too_large="too much")
    with pytest.raises(InvalidRequest, match="too much"):
        await cluster.ask("hi", max_tokens=510, too_large="too much")
    assert not cluster.servers["p0"].started


async def test_what_no_pool_can_hold_is_refused_with_both_numbers(cluster: Cluster) -> None:
    await cluster.up(NORMAL, hello={"d0": {"max_tokens_in_pool": 20}})
    with pytest.raises(InvalidRequest, match=r"21 in all; the servers can hold 20"):
        await cluster.ask("hi", max_tokens=19)
    got = await cluster.ask("hi", max_tokens=0)
    assert got.text[0] == answer(0, 18)
