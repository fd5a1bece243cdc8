"""Bytes that a hostile process may send in place of a message: any value in any field, what is no message, and far too much.

Made from one drawn number each: to draw every field by itself costs ten times what it costs to send the message.
"""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis.strategies as st
from google.protobuf.descriptor import Descriptor, FieldDescriptor

NUMBERS = (0, 1, 2, 3, 64, 255, 4096, 8193, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**62, 2**63, 2**64 - 1)
SIGNED = (*(-n for n in NUMBERS if n <= 2**31), *NUMBERS)
FLOATS = (0.0, -1.0, 1e-300, 3.5, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "healthy", "D", "P", "\x00", "\r\n\x1b[31mline", "é\U0001f600", "x" * 300, "y" * 70_000)
BYTES = (b"", b"agent", b"\xff" * 40, b"z" * 70_000)
F = FieldDescriptor
WIDTHS = {
    F.TYPE_INT32: (-(2**31), 2**31 - 1),
    F.TYPE_SINT32: (-(2**31), 2**31 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1),
    F.TYPE_SINT64: (-(2**63), 2**63 - 1),
    F.TYPE_UINT32: (0, 2**32 - 1),
    F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    match field.type:
        case F.TYPE_STRING:
            return random.choice(TEXTS)
        case F.TYPE_BYTES:
            return random.choice(BYTES)
        case F.TYPE_DOUBLE | F.TYPE_FLOAT:
            value = random.choice(FLOATS)
            return 1.0 if field.type == F.TYPE_FLOAT and abs(value) == 1e308 else value
        case F.TYPE_BOOL:
            return random.random() < 0.5
        case F.TYPE_ENUM:
            return random.choice([*(value.number for value in field.enum_type.values), 77])
    low, high = WIDTHS[field.type]
    return random.choice([number for number in SIGNED if low <= number <= high])


def fill(random: Random, message: Any, depth: int = 0) -> None:
    """Some of the message's fields, with whatever fits into them."""
    descriptor: Descriptor = message.DESCRIPTOR
    for field in descriptor.fields:
        if random.random() < 0.25:
            continue
        value = getattr(message, field.name)
        many = random.random() < 0.02
        if field.type == F.TYPE_MESSAGE:
            if depth > 4:
                continue
            if field.is_repeated:
                for _ in range(random.choice((0, 1, 1, 2, 3))):
                    fill(random, value.add(), depth + 1)
                if many and depth == 0:
                    value.extend([type(value.add())()] * random.choice((300, 9000)))
            else:
                value.SetInParent()
                fill(random, value, depth + 1)
        elif field.is_repeated:
            value.extend(_scalar(random, field) for _ in range(random.choice((0, 1, 2, 5))))
            if many and field.type not in (F.TYPE_STRING, F.TYPE_BYTES):
                value.extend([_scalar(random, field)] * 5000)
        else:
            setattr(message, field.name, _scalar(random, field))


def raw(random: Random, kind: Any, likely: list[bytes]) -> bytes:
    """likely: messages that are right, so that what follows them is looked at, too."""
    how = random.choice(("likely", "likely", "filled", "filled", "filled", "cut", "flipped", "noise"))
    if how == "noise":
        return random.randbytes(random.randrange(64))
    if how == "likely":
        return random.choice(likely)
    message = kind()
    fill(random, message)
    data = random.choice([message.SerializeToString(), *likely])
    if how == "filled" or not data:
        return message.SerializeToString()
    at = random.randrange(len(data))
    if how == "cut":
        return data[:at]
    return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]


def conversation(kind: Any, first: list[bytes], likely: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """What comes on one stream: most often a hello that is right, and then anything."""

    def made(seed: int) -> list[bytes]:
        random = Random(seed)
        if random.random() < 0.7:
            return [random.choice(first), *(raw(random, kind, likely) for _ in range(random.randrange(4)))]
        return [raw(random, kind, [*first, *likely]) for _ in range(random.randrange(4))]

    return st.integers(0, 2**64 - 1).map(made)
