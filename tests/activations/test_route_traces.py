"""Files of routing traces: the real ones, round trips, and what is refused."""

import lzma

import numpy as np
import pytest
import torch

from toolkit.activations.route_traces import (
    ROUTE_TRACES,
    RouteTrace,
    load_route_trace,
    read_route_trace,
    write_route_trace,
)
from toolkit.activations.trace import Trace, pack
from toolkit.errors import UserError

GOOD = """# route_trace v1
# model=/phone/tiny.gguf arch=tiny n_layer=2 n_expert=4 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=120 dense_bytes=8
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.75,0,100
0,0,0,0,1,1,0.25,0,100
0,1,1,0,0,1,0.5,1,0
0,1,1,0,1,0,0.5,0,100
0,1,1,1,0,2,0.875,0,120
0,1,1,1,1,3,0.125,1,0
"""


def written(folder, text=GOOD, name="trace.csv"):
    path = folder / name
    path.write_bytes(lzma.compress(text.encode()) if name.endswith(".xz") else text.encode())
    return path


def same(one, other):
    assert one.trace.model == other.trace.model
    assert one.trace.units == other.trace.units
    assert all(map(torch.equal, one.trace.bits, other.trace.bits))
    assert all(map(torch.equal, one.trace.weights, other.trace.weights))
    for name in ("turn", "decoding", "per_token", "expert_bytes", "dense_bytes", "architecture"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.xz"])
def test_worked_example_and_round_trip(tmp_path, name):
    """The prompt's token lacks layer 1, as the last layer of a prompt does; the decoded token has both."""
    found = read_route_trace(written(tmp_path, name=name))
    assert found.trace.model == "tiny.gguf"
    assert found.trace.active(0)[0].int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]
    assert found.trace.active(1)[0].int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert found.trace.weights[0][0].tolist() == [[0, 0.25, 0, 0.75], [0.5, 0.5, 0, 0]]
    assert (found.turn.tolist(), found.decoding.tolist()) == ([0, 0], [False, True])
    assert (found.per_token, found.expert_bytes, found.dense_bytes) == (2, (100, 120), (7, 8))
    write_route_trace(tmp_path / f"again.{name}", found)
    same(read_route_trace(tmp_path / f"again.{name}"), found)


@pytest.mark.parametrize("name", ROUTE_TRACES)
def test_the_real_ones(name, tmp_path):
    found = load_route_trace(name)
    layers, used = {"qwen3": (48, 6), "gemma": (30, 6), "gpt": (36, 2)}[name.split("-")[0]]
    assert (found.trace.layers, found.per_token, found.trace.units[0]) == (layers, used, 128)
    for layer in range(layers):
        counts = found.trace.active(layer)[0].sum(-1)
        assert (counts[torch.from_numpy(found.decoding)] == used).all()
        assert set(counts.tolist()) <= {0, used}
    assert len(found.decoding) - found.decoding.sum() == {"qwen3": 28, "gemma": 29, "gpt": 85}[name.split("-")[0]]
    if name == "gpt-oss-120b":
        write_route_trace(tmp_path / "again.csv.xz", found)
        same(read_route_trace(tmp_path / "again.csv.xz"), found)


def test_a_trace_of_ours_as_turns(tmp_path):
    weights = torch.rand(2, 3, 5)
    active = torch.zeros(2, 3, 5, dtype=torch.bool).scatter_(-1, weights.topk(2).indices, True)
    trace = Trace(
        "ours", "text", torch.ones(2, 3, dtype=torch.int32), (5,), (pack(active),), "expert", None, (weights * active,)
    )
    write_route_trace(tmp_path / "ours.csv", RouteTrace.of(trace, expert_bytes=64, prompt=1, architecture="split"))
    found = read_route_trace(tmp_path / "ours.csv")
    assert found.turn.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.decoding.tolist() == [False, True, True] * 2
    assert torch.equal(found.trace.active(0)[0], active.reshape(6, 5))
    torch.testing.assert_close(found.trace.weights[0][0], (weights * active).reshape(6, 5))
    uneven = Trace(
        "ours", "text", trace.tokens, (5,), (pack(weights > 0.5),), "expert", None, (weights * (weights > 0.5),)
    )
    with pytest.raises(UserError, match="experts: expected one number"):
        RouteTrace.of(uneven, expert_bytes=64)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("v1", "v2", "expected '# route_trace v1'"),
        ("# route_trace v1\n", "", "begins with"),
        ("n_expert=4 ", "", "header line"),
        ("n_layer=2", "n_layer=3", "header lines of 2 layers; expected 0 to 2"),
        ("n_layer=2", "n_layer=-2", "n_layer=-2; expected a whole number"),
        ("n_layer=2", "n_layer=" + "9" * 30, "expected a whole number"),
        ("n_expert_used=2", "n_expert_used=5", "5 experts a token of 4"),
        ("layer=1 expert", "layer=0 expert", "header lines of 2 layers"),
        ("dense_bytes=8", "dense_bytes=x", "dense_bytes=x"),
        ("turn,phase", "phase,turn", "columns"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,4,0.75", "row 1: expert is 4; expected 0 to 3"),
        ("0,0,0,0,0,3,0.75", "0,0,0,2,0,3,0.75", "row 1: layer is 2; expected 0 to 1"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,2,3,0.75", "row 1: slot is 2; expected 0 to 1"),
        ("0,0,0,0,0,3,0.75", "0,2,0,0,0,3,0.75", "phase is 2"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,3,nan", "cannot be read as a route trace"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,3,inf", "weight is inf"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,3,-1", "weight is -1"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,3,much", "cannot be read as a route trace"),
        ("0,0,0,0,0,3,0.75", "0,0,0,0,0,3.5,0.75", "cannot be read as a route trace"),
        ("0,0,0,0,0,3,0.75,0,100", "0,0,0,0,0,3,0.75,0,100,5", "cannot be read as a route trace"),
        ("0,0,0,0,0,3,0.75,0,100", "0,0,0,0,0,3", "cannot be read as a route trace"),
        ("0,0,0,0,0,3,0.75,0,100", "99999999999999999999,0,0,0,0,3,0.75,0,100", "cannot be read as a route trace"),
        ("0,0,0,0,1,1,", "0,0,0,0,0,1,", "slot 0 twice at turn 0, step 0, layer 0"),
        ("0,0,0,0,1,1,", "0,0,0,0,1,3,", "expert 3 twice at turn 0, step 0, layer 0"),
        ("0,0,0,0,1,1,0.25,0,100\n", "", "1 experts at turn 0, step 0, layer 0; expected 2, or no rows"),
        ("0,1,1,1,", "0,0,1,1,", "two phases"),
        (GOOD[GOOD.index("0,0,0,0,0") :], "", "no rows"),
        ("n_expert=4", "n_expert=999999999", "too many to hold"),
    ],
)  # fmt: skip
def test_what_is_refused_with_the_files_name(tmp_path, old, new, words):
    path = written(tmp_path, GOOD.replace(old, new, 2 if old == "0,1,1,1," else 1))
    with pytest.raises(UserError, match=words) as caught:
        read_route_trace(path)
    assert str(path) in str(caught.value)


def test_damaged_files(tmp_path):
    whole = lzma.compress(GOOD.encode())
    path = tmp_path / "trace.csv.xz"
    for data in (whole[:-8], whole[:40] + b"?" + whole[41:], b"", b"no xz"):
        path.write_bytes(data)
        with pytest.raises(UserError, match="route trace"):
            read_route_trace(path)
    (tmp_path / "binary.csv").write_bytes(bytes(range(256)))
    for name in ("binary.csv", "missing.csv", "."):
        with pytest.raises(UserError, match="cannot be read"):
            read_route_trace(tmp_path / name)
    with pytest.raises(UserError, match="unknown route trace"):
        load_route_trace("mixtral")


def test_any_damaged_byte_is_refused_or_read(tmp_path):
    """No damage ends in another error than `UserError`."""
    random = np.random.default_rng(0)
    path = tmp_path / "trace.csv"
    ends = set()
    for _ in range(150):
        data = bytearray(GOOD.encode())
        for place in random.integers(0, len(data), random.integers(1, 4)):
            data[place] = (
                random.integers(0, 256) if random.random() < 0.3 else ord(random.choice(list("0123456789,.=-\n#")))
            )
        path.write_bytes(bytes(data))
        try:
            read_route_trace(path)
            ends.add("read")
        except UserError:
            ends.add("refused")
    assert ends == {"read", "refused"}
