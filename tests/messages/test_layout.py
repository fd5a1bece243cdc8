"""The fingerprint by which servers pair: the same in every version that can exchange KV with this one."""

from __future__ import annotations

from disagg.messages.layout import KV_FORMAT, Fingerprint, GroupKind, LayerGroup, StatePart

STATES = LayerGroup.of_states(
    "states", (2,), (StatePart("conv", (3, 8), "float32"), StatePart("ssm", (8, 16), "float32"))
)
GROUPS = (
    LayerGroup("full", (0, 3), 2, 64, "bfloat16"),
    LayerGroup("window", (1,), 2, 64, "bfloat16", GroupKind.WINDOW, window=512),
    STATES,
)


def test_equal_layouts_have_the_digest_that_they_had_in_the_versions_before() -> None:
    """If this fails, servers of this version pair with none before it: a rolling upgrade would need a second cluster."""
    assert Fingerprint(KV_FORMAT, "weights", 16, 64, GROUPS).digest() == "ad66a413751006b9efbd6f7b44d71de9"


def test_whatever_differs_in_the_layout_differs_in_the_digest() -> None:
    base = Fingerprint(KV_FORMAT, "weights", 16, 64, GROUPS)
    others = [
        Fingerprint(KV_FORMAT + 1, "weights", 16, 64, GROUPS),
        Fingerprint(KV_FORMAT, "other", 16, 64, GROUPS),
        Fingerprint(KV_FORMAT, "weights", 32, 64, GROUPS),
        Fingerprint(KV_FORMAT, "weights", 16, 128, GROUPS),
        Fingerprint(KV_FORMAT, "weights", 16, 64, GROUPS[:2]),
    ]
    assert len({each.digest() for each in (base, *others)}) == 1 + len(others)
