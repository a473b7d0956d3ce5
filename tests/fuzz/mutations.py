"""Small damage to JSON, bytes and safetensors files, drawn by a `random.Random`."""

import copy
import json
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

NEST = "@nest@"  # replaced by more brackets than JSON readers accept; json.dumps could not write them
STRANGE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 10**7, 10**30, -(10**30), 0.5, -0.0, 1e-300, 1e308, math.inf,
    -math.inf, math.nan, "", " ", "0", "-1", "auto", "nan", "x" * 50_000, "\ud800", "a\nb", "a\x00b", "é\u202e",
    "../victim", "/dev/zero", "../../outside/other.safetensors", "owner/kernel", "owner/kernel@main:f", "cuda",
    "float32", "{out.x}", "`x`", "![i](x)", "</script><script>", "~nobody/x", "[/x]", "\x1b[31m", [], {}, [[]], [None],
    {"": None}, {"a": {"b": 1}}, [1, 2, 3], ["x"] * 3, [0] * 5000, NEST,
)  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a tree."""
    stack = [tree]
    while stack:
        here = stack.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, value in items:
            yield here, key
            stack.append(value)


def draw_place(random: Random, tree: Any) -> tuple[Any, Any]:
    """Return one of them; those near the root, which decide more, are drawn as often as all the others."""
    near = [(tree, key) for key in (tree if isinstance(tree, dict) else range(len(tree)))]
    return random.choice(near if random.random() < 0.5 else list(places(tree)))


def changed(random: Random, tree: Any) -> Any:
    """Return the tree with one to three small changes."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not tree:
            break
        holder, key = draw_place(random, tree)
        value = holder[key]
        kind = random.randrange(8)
        if kind < 4:
            holder[key] = copy.deepcopy(random.choice(STRANGE))
        elif kind == 4:
            del holder[key]
        elif kind == 5 and isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers = (value + 1, value - 1, -value, value * 2, value * 1000, float(value), str(value))
            holder[key] = random.choice(numbers)
        elif kind == 6 and isinstance(holder, dict):
            holder[random.choice(("extra", "../x", "", "__class__", "0", str(key) + "s"))] = holder.pop(key)
        else:
            other, there = draw_place(random, tree)
            holder[key] = copy.deepcopy(other[there])
    return tree


def to_bytes(tree: Any) -> bytes:
    text = json.dumps(tree)
    return text.replace(f'"{NEST}"', "[" * 3000 + "]" * 3000).encode()


def changed_json(random: Random, data: bytes) -> bytes:
    """Return a JSON file with small changes, mostly of its values, sometimes of its bytes."""
    kind = random.randrange(12)
    if kind == 0:
        return changed_bytes(random, data)
    if kind == 1:
        marked, deep = b"\xef\xbb\xbf" + data, b'{"a":' * 3000
        return random.choice((b"", b"[]", b"null", b"0", b'"x"', b"{}", marked, data + data, b"[" * 100_000, deep))
    if kind == 2:
        text = data.decode()
        at = text.find(":", random.randrange(len(text)))
        return (text[:at] + text[at:].replace(",", ',"format": 7,', 1)).encode()  # a name twice
    return to_bytes(changed(random, json.loads(data)))


def changed_bytes(random: Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        if not spoiled:
            break
        at, size = random.randrange(len(spoiled)), random.choice((1, 1, 4, 100, 5000))
        kind = random.randrange(6)
        if kind == 0:
            spoiled[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del spoiled[at:]
        elif kind == 2:
            del spoiled[at : at + size]
        elif kind == 3:
            spoiled[at:at] = random.randbytes(size)
        elif kind == 4:
            spoiled[at : at + size] = bytes(len(spoiled[at : at + size]))
        else:
            spoiled[at:at] = spoiled[at : at + size]
    return bytes(spoiled)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the header and the data of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def changed_header(random: Random, data: bytes) -> bytes:
    """Return a safetensors file whose header describes the same data differently."""
    header, body = split(data)
    names = [name for name in header if name != "__metadata__"]
    one, other = random.choice(names), random.choice(names)
    entry = header[one]

    def shift(by: int) -> None:
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]

    def grow() -> None:
        entry["data_offsets"][1] += 4

    dtypes = ("F4", "X", "f32", "U64", "C64", "F8_E8M0", "I64", "BOOL", 5)
    shapes = ([], [-1], [0], [2**62, 4], [1.5], "x", [True], entry["shape"][::-1])
    metadata = ([], {}, {"a": 1}, "x", None, {"format": ["pt"]}, {"f": NEST})
    changes: tuple[Callable[[], object], ...] = (
        lambda: entry.update(data_offsets=header[other]["data_offsets"]),
        lambda: shift(random.choice((-4, 4, 2**40, -(2**40)))),
        grow,
        lambda: entry.update(dtype=random.choice(dtypes)),
        lambda: entry.update(shape=random.choice(shapes)),
        lambda: header.update(__metadata__=random.choice(metadata)),
        lambda: header.update({random.choice(("", "../x", "a" * 5000, "\ud800", one + "x")): header.pop(one)}),
        lambda: header.pop(one),
        lambda: header.update(extra={"dtype": "F32", "shape": [0], "data_offsets": entry["data_offsets"][:1] * 2}),
        lambda: entry.update(more=1),
    )
    kind = random.randrange(len(changes) + 6)
    if kind < len(changes):
        changes[kind]()
        return joined(to_bytes(header), body)
    text = to_bytes(header)
    twice = text[:-1] + b"," + json.dumps({one: entry}).encode()[1:]
    length = random.choice((0, 1, len(text) - 1, len(text) + 1, 2**32, 2**63, 2**64 - 1)).to_bytes(8, "little")
    headers = (to_bytes(changed(random, header)), b"\xef\xbb\xbf" + text, b" " + text, twice)
    return random.choice((
        *(joined(head, body) for head in headers), joined(text, body + bytes(16)), joined(text, bytes(16) + body),
        length + text + body, joined(changed_bytes(random, text), body), changed_bytes(random, data),
    ))  # fmt: skip
