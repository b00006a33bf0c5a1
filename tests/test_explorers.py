"""The explorers: their cells run here without a front end, controls are moved, and sentence and figure are checked.

Tiny models with random weights stand in for the real ones; the sweep runs the explorers on those.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from toolkit import models, paths, quality
from toolkit.evidence.catalogue import read_cells
from toolkit.evidence.interactive import STILL
from toolkit.machines.hardware import profile
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.cutting import ENTRY, cut_for_good
from toolkit.models.plain import plain
from toolkit.residency.policies import RESIDENCIES, Lru

FOLDER = paths.root() / "notebooks" / "explore"
SIZES = {"hidden_size": 192, "intermediate_size": 256, "num_attention_heads": 3, "num_key_value_heads": 3}
WORDS = 50


def run(name):
    """The names that the code cells of an explorer define."""
    names = {"__name__": name}
    for cell in read_cells(FOLDER / f"{name}.ipynb"):
        if cell.kind == "code":
            exec(compile(cell.source, name, "exec"), names)
    return SimpleNamespace(**names)


def moved(view, **values):
    """The sentence after controls were moved, all at once."""
    with view.together():
        for name, value in values.items():
            view.controls[name].value = value
    return view.sentence


def labels(figure):
    """Titles of all axes and all other text on them."""
    return " | ".join(
        axes.get_title(loc="left") + "".join(text.get_text() for text in axes.texts) for axes in figure.axes
    )


@pytest.fixture(scope="module")
def timeline():
    """With a machine of DRAM and a disk in the place of this one, which would be measured."""
    here = replace(profile("endor-rtx4080"), id="this-machine", title="a CPU", device=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.machines.probe.probe", lambda fresh: here)
        return run("timeline").view


@pytest.fixture
def in_memory(timeline):
    """OPT-1.3B in the memory of an H200, whose profile has bandwidths and nothing else."""
    return moved(timeline, machine="h200", model="opt-1.3b", method="dense", bits=16, policy="sequential", path="host")


def seconds(sentence):
    return 1 / float(sentence.split(" tokens/s, modelled")[0].strip("*"))


def test_a_token_in_memory_takes_its_bytes_over_the_bandwidth(timeline, in_memory):
    parameters = ARCHITECTURES["opt-1.3b"].parameters
    nbytes = 2 * (parameters["attention"] + parameters["ffn"] + parameters["embedding"])  # the head is tied
    assert seconds(in_memory) == pytest.approx(nbytes / 4800e9, rel=0.01)
    assert "24 layers in GPU memory, 0 in DRAM, 0 on disk" in in_memory
    assert "0.00 GB read from disk" in in_memory
    assert seconds(moved(timeline, device_gb_s=2000)) == pytest.approx(nbytes / 2000e9, rel=0.01)


def test_the_software_s_own_time_grows_with_the_layers(timeline, in_memory):
    """A layer of OPT-1.3B has 12 · 2048² weights, 0.1007 GB: 9.3209 ms a GB are 0.94 ms, not OPT-66B's 19."""
    sentence = moved(timeline, machine="endor-rtx4080")
    assert "*Rest:* 0.94 ms a layer, the own time of Hugging Face Accelerate, from the paper's models" in sentence
    parameters = ARCHITECTURES["opt-1.3b"].parameters
    nbytes = 2 * (parameters["attention"] + parameters["ffn"] + parameters["embedding"])
    assert seconds(sentence) == pytest.approx(nbytes / 716.8e9 + 24 * 0.938e-3, rel=0.01)
    assert "*Rest:* 19 ms a layer" in moved(timeline, model="opt-66b")
    assert "*Rest:*" not in moved(timeline, machine="hermes-rtx4090", model="opt-1.3b")  # it waits for no DIMM
    assert "*Rest:*" not in moved(timeline, machine="corm-rtx3090ti")  # fitted to mixtures
    assert "*Rest:* 2.7 ms a layer" in moved(timeline, model="mixtral-8x7b", dram_gb=300.0)


def test_no_more_than_all_bytes_of_the_ffns_fit(timeline, in_memory, monkeypatch):
    monkeypatch.setitem(timeline.draw.__globals__, "gantt", lambda *_, **__: None)  # no figure is looked at
    shares = []
    for model in (name for name, shape in ARCHITECTURES.items() if shape.experts):
        for method in ("dense", "endor", "neurons"):
            for device_gb in (15, 80):
                sentence = moved(timeline, model=model, method=method, device_gb=device_gb)
                shares += [int(share) for share in re.findall(r"(\d+)% of the FFNs' bytes fit", sentence)]
    assert len(shares) > 5
    assert max(shares) <= 100


def test_layers_that_do_not_fit_are_read_from_the_disk(timeline, in_memory):
    """A layer takes 100.7 MB, the embedding 206. So 1 GB holds 6 layers and a buffer beside it, or 8 and a buffer."""
    sentence = moved(timeline, device_gb=1, dram_gb=1)
    assert "6 layers in GPU memory, 8 in DRAM, 10 on disk" in sentence
    assert "1.01 GB read from disk" in sentence
    assert seconds(sentence) > 1.007 / 6.9 + 1.812 / 63  # over the links
    assert "but GPU, GB 1; DRAM, GB 1" in sentence
    assert "Two of its layers, weight by weight (modelled)" in labels(timeline.figure)


def test_experts_and_neurons_read_what_a_token_needs_and_lacks(timeline, in_memory):
    shape = ARCHITECTURES["mixtral-8x7b"]
    expert_bytes = 2 * sum(rows * columns for rows, columns in shape.ffn_matrices.values())
    sentence = moved(timeline, model="mixtral-8x7b", device_gb=30.0, dram_gb=30.0, found=0.5)
    assert f"{32 * 2 * 0.5 * expert_bytes / 1e9:.2f} GB read from disk" in sentence
    sentence = moved(timeline, model="opt-6.7b", method="neurons", device_gb=8.0, dram_gb=1.0, sparsity=0.9, found=0.75)
    ffn_bytes = 2 * ARCHITECTURES["opt-6.7b"].parameters["ffn"]
    assert f"{0.1 * 0.25 * ffn_bytes / 1e9:.2f} GB read from disk" in sentence


def test_every_machine_model_and_method_gives_a_number_or_a_reason(timeline, in_memory):
    for machine in timeline.controls["machine"].options:
        assert "modelled" in moved(timeline, machine=machine), machine
    for model in timeline.controls["model"].options:
        assert "modelled" in moved(timeline, model=model), model
    for method in timeline.controls["method"].options:
        sentence = moved(timeline, method=method)
        assert "modelled" in sentence or "**Not possible:** the size of format 'zstd'" in sentence, method


class Tokenizer:
    """A letter is a token."""

    def __call__(self, words, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([[ord(letter) % WORDS for letter in words]], dtype=torch.long))

    def decode(self, token):
        return chr(97 + int(token) % 26)


def dense(layers=3, **settings):
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": WORDS, "num_hidden_layers": layers, "initializer_range": 0.2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **settings)).eval().requires_grad_(False)


@pytest.fixture
def tiny(monkeypatch, one_thread):
    """Tiny models in place of the real ones."""

    def load(name, dtype=torch.float32):
        if "moe" in name:
            torch.manual_seed(0)
            sizes = SIZES | {
                "vocab_size": WORDS,
                "num_hidden_layers": 3,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            }
            return plain(MixtralForCausalLM(MixtralConfig(**sizes))).eval().requires_grad_(False), Tokenizer()
        model = dense(**({ENTRY: [0.5] * 3} if "sparse" in name else {}))
        cut_for_good(model)
        return model, Tokenizer()

    monkeypatch.setattr(models, "load_model", load)
    monkeypatch.setattr(models, "fast_dtype", lambda: torch.float32)
    monkeypatch.setattr(quality, "load_tokens", lambda corpus, tokenizer, split: torch.arange(600) * 7 % WORDS)


def test_neurons_and_experts_of_a_sentence(tiny, monkeypatch):
    monkeypatch.setitem(RESIDENCIES, "of_ones_own", Lru)
    explorer = run("neurons_and_experts")
    view = explorer.view
    _, samples = explorer.recorded("neurons", explorer.text.value, explorer.more.value)
    for layer in (0, 2):
        sentence, active = moved(view, layer=layer), samples.active(layer)
        assert f"a token uses {active.sum(1).float().mean():,.0f} of 256 neurons" in sentence
        assert f"Layer {layer}: neurons" in labels(view.figure)
    named = explorer.foretold("neurons", explorer.text.value, explorer.more.value, 2, "copy_last")
    assert (named[1:] == active[:-1].numpy()).all()
    assert (named[0] == active[0].numpy()).all()
    assert "All layers: share that fires" in labels(view.figure)
    everything = moved(view, memory=1.0, window=32)
    assert "memory for 256 neurons" in everything
    first_used = torch.cummax(active.int(), 0).values.diff(dim=0).sum(1).float().mean()
    for policy in ("lru", "belady", "of ones own"):
        assert f"{policy} {first_used:,.1f}" in everything  # with room for all, a neuron is loaded once


def test_bits_of_a_matrix(tiny):
    explorer = run("bits")
    view = explorer.view
    weight, _ = explorer.linears()[2, "gate_proj"]
    sentence = moved(view, layer=2, op="gate_proj", form="fp16, dense", row=1.0)
    assert f"{2 * 192 * 192:,} bytes, 16.00 bits a weight; outputs are off by 0.0" in sentence
    piece, _ = explorer.piece("smollm2-135m", 2, "gate_proj", 1.0, 0)
    assert torch.equal(piece, weight[64:, :192])
    assert "0% zeros" in labels(view.figure)
    sentence = moved(view, form="int4, rtn")
    assert f"{(4 + 32 / 64) * 192 * 192 / 8 + 8:,.0f} bytes, 4.50 bits a weight" in sentence
    assert "packed 4.00" in labels(view.figure)
    assert "**Not possible:** not 2:4" in moved(view, form="fp16, two_four")
    assert "2:4 zeros by magnitude" in moved(view, zeros=0.5, pattern="2:4")
    assert "9.00 bits a weight" in view.sentence
    assert "50% zeros" in labels(view.figure)


KNOWN_MACHINE = """
from dataclasses import replace
from toolkit.machines import probe
from toolkit.machines.hardware import profile
probe.probe = lambda fresh: replace(profile("endor-rtx4080"), id="this-machine", title="a CPU", device=None)
"""  # else this one would be measured


def test_without_a_front_end_there_is_a_picture_and_a_line():
    """As nbconvert and papermill run a notebook."""
    book = nbformat.read(FOLDER / "timeline.ipynb", as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(KNOWN_MACHINE))
    NotebookClient(book, kernel_name="python3", timeout=120).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert [output.output_type for output in outputs] == ["display_data"] * 3
    assert outputs[0].data["text/markdown"] == STILL
    assert "tokens/s, modelled" in outputs[1].data["text/markdown"]
    assert outputs[2].data["image/png"]
    assert not any("widget" in kind for output in outputs for kind in output.data)
