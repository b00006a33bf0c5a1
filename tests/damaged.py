"""Damage to files, always the same: for each kind of file, copies that no careful writer would have made."""

import json
import random
from collections.abc import Iterator

ODD = (None, True, [], {}, [[]], "", "x" * 999, "../../odd", "\0", "\ud800", -1, 0, 1.5, 2**31, 10**400, 1e308)
WORDS = (
    "NaN",
    "-Infinity",
    "1e999",
    "9" * 400,
    "[" * 20_000,
    '{"a":' * 20_000,
    "&a [*a, *a]",
    "!!python/object:os.system {}",
)


def damaged_text(text: str, seed: int, count: int = 24) -> Iterator[tuple[str, bytes]]:
    """Words about a damage, and the damaged bytes of a text file of any kind."""
    rng, data = random.Random(seed), text.encode()
    yield "empty", b""
    yield "one zero byte", b"\0"
    yield "UTF-16", text.encode("utf-16")
    yield "a byte order mark", b"\xef\xbb\xbf" + data
    yield "Windows' ends of lines", data.replace(b"\n", b"\r\n")
    yield "twice", data + data
    for word in WORDS:
        yield f"is {word[:9]}", word.encode()
    for _ in range(count):
        place = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            yield f"cut at {place}", data[:place]
        elif kind == 1:
            yield f"no UTF-8 at {place}", data[:place] + b"\xff\xfe" + data[place:]
        elif kind == 2:
            yield f"a zero byte at {place}", data[:place] + b"\0" + data[place + 1 :]
        else:
            yield f"a part lost at {place}", data[:place] + data[place + rng.randrange(1, 40) :]


def damaged_json(value: object, seed: int, count: int = 60) -> Iterator[tuple[str, bytes]]:
    """The same for a JSON file: a key that is lost or comes twice, and values of other types or far too large."""
    rng, text = random.Random(seed), json.dumps(value, indent=1)
    yield from damaged_text(text, seed)
    places = [*_places(value)]
    for _ in range(count):
        place, odd = rng.choice(places), rng.choice(ODD)
        yield f"{_name(place)} is {str(odd)[:20]!r}", json.dumps(_changed(value, place, odd)).encode()
    for place in rng.sample(places, min(len(places), count // 4)):
        yield f"{_name(place)} is lost", json.dumps(_changed(value, place, None, lost=True)).encode()
        yield f"{_name(place)} is NaN", json.dumps(_changed(value, place, float("nan"))).encode()
    if isinstance(value, dict) and value:
        first, *_ = value
        yield f"{first} comes twice", text.replace("{", "{" + f"{json.dumps(first)}: [1],", 1).encode()


def damaged_bytes(data: bytes, seed: int, head: int, count: int = 60) -> Iterator[tuple[str, bytes]]:
    """The same for a binary file whose first `head` bytes say what follows."""
    rng = random.Random(seed)
    yield "empty", b""
    yield "longer", data + b"\0" * 99
    for _ in range(count):
        place, kind = rng.randrange(head), rng.randrange(4)
        if kind == 0:
            yield f"cut at {place}", data[:place]
        elif kind == 1:
            yield f"another byte at {place}", data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        elif kind == 2:
            yield f"ones at {place}", data[:place] + b"\xff" * 8 + data[place + 8 :]
        else:
            yield f"a part lost at {place}", data[:place] + data[place + 1 :]


def damaged_safetensors(data: bytes, seed: int, count: int = 40) -> Iterator[tuple[str, bytes]]:
    """The same for a safetensors file: also a header that is damaged as JSON, with its length put right."""
    size = 8 + int.from_bytes(data[:8], "little")
    yield from damaged_bytes(data, seed, size, count)
    for words, header in damaged_json(json.loads(data[8:size]), seed, count):
        yield f"header: {words}", len(header).to_bytes(8, "little") + header + data[size:]


def _places(value: object, at: tuple = ()) -> Iterator[tuple]:
    """The places of all values in a value, as keys and numbers on the way there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from _places(inner, (*at, key))


def _changed(value, place: tuple, odd: object, lost: bool = False):
    """A copy with another value at a place, or without what is there."""
    copy = json.loads(json.dumps(value))
    parent = copy
    for key in place[:-1]:
        parent = parent[key]
    if lost:
        del parent[place[-1]]
    else:
        parent[place[-1]] = odd
    return copy


def _name(place: tuple) -> str:
    return ".".join(map(str, place))[:60]
