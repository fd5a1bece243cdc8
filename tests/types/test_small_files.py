"""JSON that others wrote, read within bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.types.errors import ConfigError
from disagg.types.small_files import json_object

PATH = Path("config.json")


@pytest.mark.parametrize("text", [r'{"eos": "\ud800"}', r'{"\uDFFF": 1}', r'{"a": [{"b": "x\uD83Dy"}]}'])
def test_half_of_a_surrogate_pair_is_no_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json has half of a surrogate pair"):
        json_object(text.encode(), PATH)


def test_a_whole_pair_is_a_character() -> None:
    assert json_object(rb'{"a": "\ud83d\ude00"}', PATH) == {"a": "\U0001f600"}
