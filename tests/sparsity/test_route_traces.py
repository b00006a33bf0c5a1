"""Files of routing traces: a worked example, the real ones, and what is refused."""

import lzma

import pytest

from toolkit.sparsity.route_traces import ROUTE_TRACES, load_route_trace, read_route_trace

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


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.xz"])
def test_worked_example(tmp_path, name):
    """The prompt's token lacks layer 1, as the last layer of a prompt does; the decoded token has both."""
    found = read_route_trace(written(tmp_path, name=name))
    assert (found.model, found.corpus, found.unit, found.units) == ("tiny.gguf", name, "expert", (4, 4))
    assert found.tokens.tolist() == [[-1, -1]]
    assert found.active(0)[0].int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0]]
    assert found.active(1)[0].int().tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert found.weights[0][0].tolist() == [[0, 0.25, 0, 0.75], [0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("name", ROUTE_TRACES)
def test_the_real_ones(name):
    found = load_route_trace(name)
    layers, used = {"qwen3": (48, 6), "gemma": (30, 6), "gpt": (36, 2)}[name.split("-")[0]]
    assert found.units == (128,) * layers
    for layer in range(layers):
        assert set(found.active(layer)[0].sum(-1).tolist()) <= {0, used}
