"""The predicted memory of a way, beside the memory that the runtime takes for a folder packed that way."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, OPTConfig, OPTForCausalLM

from tests.families import load_family
from toolkit.models.architectures import ARCHITECTURES
from toolkit.models.plain import plain
from toolkit.models.shape_of import shape_of
from toolkit.offload.budget import BudgetError
from toolkit.offload.model import OffloadedModel
from toolkit.planner import sizes, stand_ins
from toolkit.planner.rates import TIMED
from toolkit.planner.target import open_target
from toolkit.planner.ways import EXPERTS, NEURONS, STREAMED, WHOLE, ZEROS, PlannedWay, ways
from toolkit.storage.direct import whole_blocks
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512}
EXPERT_SIZES = {"intermediate_size": 512, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
RUN = [
    way for way in (*ways(False, ZEROS[:1]), *ways(True)) if way.runs_here and (way.kind, way.head) != (STREAMED, WHOLE)
]
OURS = {way.name: way for way in (*TIMED, *RUN)}
CLOSE = 0.06  # of the bytes that are needed: blocks of small tensors, and the random number of outliers of SpQR
TOKENS = torch.arange(256) * 7 % SIZES["vocab_size"]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=704, tie_word_embeddings=True))
    opt = OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=1024, word_embed_proj_dim=256))
    mixture = MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERT_SIZES))
    made = {"llama": llama, "opt": opt, "mixture": mixture}
    return {name: plain(model).bfloat16().eval().requires_grad_(False) for name, model in made.items()}


def folders(tmp_path, models, way: PlannedWay):
    """The models that a way is for, packed, with their shapes: one of each FFN where no format makes a difference."""
    dense = ("llama", "opt") if way.stored.format == "dense" else ("llama",)
    for name in ("mixture",) if way.kind == EXPERTS else dense:
        stand_ins.pack(models[name], way, tmp_path / name, TOKENS)
        yield shape_of(models[name]), tmp_path / name


@pytest.mark.parametrize("name", OURS)
def test_what_a_plan_lets_through_is_not_refused_and_what_it_leaves_out_would_be(name, models, tmp_path):
    way = OURS[name]
    method = way.method if way.kind == STREAMED else None
    for shape, folder in folders(tmp_path, models, way):
        needed = sizes.footprint(shape, way).needed_bytes
        with OffloadedModel.open(folder, method, dram_bytes=needed, verify=False) as model:
            assert model.budgets["dram"].used_bytes <= needed
        with pytest.raises(BudgetError) as refused:
            OffloadedModel.open(folder, method, dram_bytes=1000, verify=False)
        assert needed == pytest.approx(refused.value.needed_bytes, rel=CLOSE)
        store = Store.open(folder)
        stored = store.layer(0, store.variants[0])
        if way.kind == EXPERTS:
            assert {run.nbytes for run in stored.ops.values()} == {sizes.expert_bytes(shape, way)}
        elif way.kind == NEURONS:
            assert stored.nbytes == shape.ffn * whole_blocks(sizes.neuron_bytes(shape))
        else:
            assert sizes.layer_bytes(shape, way) == pytest.approx(stored.nbytes, rel=0.02)


@pytest.mark.parametrize("family", ["GPT-2", "Phi-3", "JetMoE", "Mamba"])
def test_the_memory_of_other_families_is_known_beforehand(family, tmp_path):
    model = load_family(family, tmp_path / "model", torch.bfloat16)
    shape = open_target(str(tmp_path / "model")).shape
    pack_model(model, tmp_path / "store", Linears(("dense",)))
    with pytest.raises(BudgetError) as refused:
        OffloadedModel.open(tmp_path / "store", "dense_packed", dram_bytes=1000, verify=False)
    assert sizes.footprint(shape, OURS["dense"]).needed_bytes == pytest.approx(refused.value.needed_bytes, rel=0.02)


def test_a_layer_of_llama2_7b_by_hand():
    # 4 × 4096² + 3 × 4096 × 11008 = 202,375,168 weights; int8 rows have a scale of two bytes
    shape = ARCHITECTURES["llama2-7b"]
    assert sizes.layer_bytes(shape, OURS["dense"]) == 2 * 202_375_168
    rows = 4 * 4096 + 2 * 11008 + 4096
    assert sizes.layer_bytes(shape, OURS["int8"]) == pytest.approx(202_375_168 + 2 * rows, abs=7 * 4096)
    assert sizes.head_bytes(shape) == 2 * 32000 * 4096
