"""GGUF files that run as they are, against transformers' model with the same weights decoded."""

from dataclasses import replace
from math import prod

import pytest
import torch
import transformers
from gguf_files import CASES, WORDS, write
from gguf_twins import TWINS, write_twin

from tests.offload.conftest import in_parts
from toolkit.errors import UserError
from toolkit.formats.twins import random_blocks
from toolkit.hub import NO_CODE
from toolkit.models.gguf import read
from toolkit.models.gguf_header import read_header
from toolkit.offload.linear import MOST_VECTORS
from toolkit.offload.model import OffloadedModel
from toolkit.offload.options import Demand
from toolkit.offload.placement import LayerMap
from toolkit.storage.gguf_store import GgufStore

TOKENS = (torch.arange(40) * 37 % WORDS)[None]
EXACT = 1e-4  # of the logits' standard deviation, with weights decoded
ROUNDED = 0.05  # of it, with vectors of 8 bits: the median token
LONG = MOST_VECTORS + 1  # tokens whose weights are decoded
WIDE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
KINDS = {  # blocks of 32 elements, of 256, and of one; `tests/formats/test_ggml.py` has every type
    "llama": "Q4_K",
    "granitemoe, shared": "Q8_0",
    "gpt-oss": "MXFP4",
    "phi3": "Q5_K",
    "qwen2moe": "Q5_0",
    "command-r": "IQ4_XS",
    "starcoder2": "F16",
}
MIXTURES = [name for name in CASES if CASES[name].fields.get("num_experts_per_tok")]
ALIKE = ("llama", "gpt-oss")


def logits(model):
    """Logits [tokens, vocabulary] of a long prompt, of a few tokens, and of one token after the other."""
    return in_parts(model, TOKENS, (LONG, 4, *[1] * (TOKENS.shape[1] - LONG - 4)))[0].float()


def difference(found, expected):
    """The largest one, in standard deviations of the logits."""
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", ["llama", "granitemoe, shared"])
def test_prompts_make_a_few_rows_dense_at_a_time(tmp_path, monkeypatch, name):
    """Also rows that are stored in another order, or in two tensors."""
    original = CASES[name].model()
    write(original, CASES[name], file := tmp_path / "model.gguf")
    monkeypatch.setattr("toolkit.storage.file_ops.PIECE_BYTES", 7 * 64 * 4)
    with OffloadedModel.open(file) as opened:
        assert difference(logits(opened.model), logits(original)) < EXACT
        decoded = [it.nbytes for it in opened.timeline.spans if it.stage == "decode"]
    assert decoded
    assert max(decoded) <= 7 * 64 * 4


def random_file(name, kind, file):
    """A file whose matrices are random blocks, and transformers' model with what they decode to.

    Its sizes are such that rows are whole blocks of 256.
    """
    wide = {key: 256 for key in CASES[name].fields if key.endswith("intermediate_size")}
    case = replace(CASES[name], fields=dict(CASES[name].fields) | WIDE | wide)

    def quantise(kind, array):
        *outer, rows, columns = array.shape
        count = rows * prod(outer)
        blocks = random_blocks(kind, count, columns, seed=count, deviation=columns**-0.5)
        return blocks.data.numpy().reshape(*outer, rows, -1)

    write(case.model(), case, file, kind, quantise=quantise)
    found, _ = read(read_header(file), torch.float32)
    model = transformers.AutoModelForCausalLM.from_config(found.config, dtype=torch.float32, **NO_CODE).eval()
    model.load_state_dict(found.state_dict())
    return model


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_blocks_of_each_type_give_the_logits_of_what_they_decode_to(tmp_path, name, kind):
    """Decoded to the last digits, multiplied up to vectors of 8 bits; from disk the same as in memory."""
    expected = logits(random_file(name, kind, file := tmp_path / "model.gguf"))
    if name not in MIXTURES:
        with OffloadedModel.open(file, "gguf") as opened:
            assert difference(logits(opened.model), expected) < EXACT
    with OffloadedModel.open(file) as opened:
        found = logits(opened.model)
        layers = len(opened.placement.tiers) if opened.placement else 0
    error = (found - expected)[LONG:].square().mean(1).sqrt() / expected.std()
    assert float(error.median()) < ROUNDED
    assert bool((error > 0).all()) or kind in ("F16", "BF16")
    nothing = {"placement": LayerMap(0, 0, layers)} if layers else {"demand": Demand(window=0)}
    with OffloadedModel.open(file, **nothing) as opened:
        assert torch.equal(logits(opened.model), found)


@pytest.mark.parametrize("name", ALIKE)
def test_the_least_memory_gives_the_same_logits(tmp_path, name):
    """Nothing stays: layers, or experts, come from the disk again and again, of several files."""
    original = CASES[name].model()
    write(original, CASES[name], tmp_path / "model.gguf", pieces=7)
    file = sorted(tmp_path.glob("*.gguf"))[-1]
    with OffloadedModel.open(file) as whole:
        layers = len(whole.placement.tiers) if whole.placement else 0
        nothing = {"placement": LayerMap(0, 0, layers)} if layers else {"demand": Demand(window=0)}
        with OffloadedModel.open(file, **nothing) as opened:
            found = logits(opened.model)
            assert torch.equal(found, logits(whole.model))
            assert difference(found, logits(original)) < EXACT
            assert sum(it[2] for it in opened.timeline.nearest() if it[0] == "read") > whole.store.ops_bytes
            assert opened.tokenizer.decode(opened.tokenizer("the he")["input_ids"]) == "the he"


@pytest.mark.parametrize("name", ["llama2-7b", "gpt-oss-20b"])
def test_a_twin_of_a_large_model_runs(tmp_path, monkeypatch, name):
    """Here with few columns: types, shapes and order are those of the file that is timed."""
    small = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    twin = TWINS[name]
    case = replace(twin.case, fields=dict(twin.case.fields) | small)
    monkeypatch.setitem(TWINS, name, replace(twin, case=case))
    write_twin(name, file := tmp_path / "twin.gguf")
    kinds = {tensor.kind for tensor in read_header(file).tensors.values()}
    assert kinds == {"F32", *(("Q4_K", "Q6_K") if twin.mixed else ("MXFP4", "Q8_0"))}
    with OffloadedModel.open(file) as opened:
        found = logits(opened.model)
    assert bool(found.isfinite().all())
    assert float(found.std()) > 0.1


def test_nothing_is_written(tmp_path, monkeypatch):
    """Neither beside the file nor into the toolkit's cache."""
    monkeypatch.setenv("TOOLKIT_CACHE_DIR", str(tmp_path / "cache"))
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    with OffloadedModel.open(file) as opened:
        logits(opened.model)
    written = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*") if path.is_file()}
    assert written <= {("model.gguf",), ("cache", "compiled"), ("cache", "measured")}


def test_what_cannot_run_as_it_is_says_what_can(tmp_path):
    write(CASES["llama"].model(), CASES["llama"], file := tmp_path / "model.gguf")
    header = read_header(file)
    kinds = {name: replace(tensor, kind="Q1_0") for name, tensor in header.tensors.items() if "attn_q." in name}
    with pytest.raises(UserError, match=r"'blk.0.attn_q.weight' has type Q1_0"):
        GgufStore.of(replace(header, tensors=header.tensors | kinds))
    moved = {name: replace(tensor, offset=tensor.offset + 1) for name, tensor in header.tensors.items()}
    with pytest.raises(UserError, match=r"lies at byte \d+; expected a multiple of 8"):
        GgufStore.of(replace(header, tensors=moved))
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(UserError, match="cut short"):
        OffloadedModel.open(file)
