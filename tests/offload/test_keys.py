"""Keys: what they depend on, and what they must not depend on."""

from __future__ import annotations

import inspect

import pytest
from msgspec.structs import replace

from disagg.messages.layout import LayerGroup
from disagg.offload import keys
from disagg.offload.keys import Scope, page_key, parse_path, part_path, read_path, span_path
from tests.offload.pages import FULL, SCOPES, STATE, WINDOW, chain

SCOPE = Scope("weights", "float32", 16, (FULL, WINDOW), "salt")
OTHERS = {
    "weights": replace(SCOPE, weights="other"),
    "dtype": replace(SCOPE, dtype="bfloat16"),
    "page tokens": replace(SCOPE, page_tokens=8),
    "a layer group": replace(SCOPE, groups=(FULL, STATE)),
    "heads": replace(SCOPE, groups=(replace(FULL, kv_heads=3), WINDOW)),
    "salt": replace(SCOPE, salt="other"),
}


@pytest.mark.parametrize("what", sorted(OTHERS))
def test_another_root_means_other_keys_for_equal_tokens(what: str) -> None:
    other, tokens = OTHERS[what], list(range(64))
    assert not set(chain(SCOPE, tokens)) & set(chain(other, tokens))
    assert SCOPE.group_root(0) != other.group_root(0)
    assert SCOPE.place != other.place


def test_one_page_has_a_key_of_its_own_in_every_group() -> None:
    [page, *_] = chain(SCOPE, list(range(64)))
    assert len({page_key(SCOPE.group_root(g), page) for g in range(2)}) == 2


def test_tenants_of_a_model_share_its_folder_and_nothing_else() -> None:
    one, other = SCOPE.place.split("/"), OTHERS["salt"].place.split("/")
    assert one[:2] == other[:2] and one[2] != other[2]


def test_no_tp_size_no_rank_and_no_server_name_can_get_into_a_key() -> None:
    """Nothing that makes a name takes such a thing, and a rank's share of a group is not what names are made of."""
    taken = {name for f in (span_path, part_path, read_path, page_key) for name in inspect.signature(f).parameters}
    taken |= set(Scope.__struct_fields__)
    assert taken == {
        *("folder", "first_hash", "first_key", "draw", "head_start", "head_stop", "root", "page_hash"),
        *("weights", "dtype", "page_tokens", "groups", "salt"),
    }
    assert SCOPES["full"].groups[0].kv_heads == 12


def test_paths_are_taken_apart_as_they_were_made_and_others_are_nobodys() -> None:
    [first, *_] = chain(SCOPE, list(range(64)))
    for path, kind in (
        (span_path(SCOPE.place, first), keys.SPANS),
        (read_path(SCOPE.place, first), keys.READS),
        (part_path(SCOPE.place, first, 7, 0, 12), keys.PARTS),
    ):
        place = parse_path(path)
        assert place is not None and (place.kind, place.name, place.folder) == (kind, first.hex(), SCOPE.place)
    for path in ("", "v1/clock", "v2/" + span_path(SCOPE.place, first)[3:], span_path(SCOPE.place, first) + ".x"):
        assert parse_path(path) is None
    assert parse_path(part_path(SCOPE.place, first, 7, 0, 12).replace("parts", "spans")) is None


def test_what_says_how_layers_lie_is_in_the_key() -> None:
    """Whatever a layer group gets as a new field changes keys, since another meaning of the bytes must not be read."""
    for field in LayerGroup.__struct_fields__:
        assert f'"{field}"' in keys._text(WINDOW)
