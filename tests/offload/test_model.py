import json
import shutil
from itertools import cycle

import pytest
import torch

from tests import processes
from tests.offload.conftest import FAMILIES, LAYERS, pruned
from tests.refusals import refused
from toolkit.errors import UserError
from toolkit.offload.methods import METHODS
from toolkit.offload.model import OffloadedModel
from toolkit.offload.placement import LayerMap
from toolkit.offload.ways import POLICIES
from toolkit.sparsity import load_pruned
from toolkit.storage import buffers
from toolkit.storage.direct import BLOCK_BYTES
from toolkit.storage.packing import Linears, pack_model
from toolkit.storage.store import Store

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize(("family", "policy"), zip(FAMILIES, cycle(POLICIES), strict=False))
def test_every_family_gives_the_same_logits_and_tokens_from_disk(packed, family, policy):
    model, folder = packed(family)
    with OffloadedModel.open(folder, "endor", placement=LayerMap(0, 1, LAYERS - 1), policy=policy) as ours:
        assert torch.equal(logits(ours.model), logits(model))
        assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_method_gives_the_same_tokens(packed, method, dtype):
    model, folder = packed("llama", dtype)
    with OffloadedModel.open(folder, method) as ours:
        if method != "endor_packed":  # sums in another order
            assert torch.equal(logits(ours.model), logits(model))
        single = model(PROMPT[:, :1]).logits
        torch.testing.assert_close(ours.model(PROMPT[:, :1]).logits, single, rtol=0.05, atol=0.02)
        if dtype == torch.float32:
            assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("resident", [0, 1, LAYERS])
def test_the_budget_decides_what_stays_and_is_never_exceeded(packed, monkeypatch, resident):
    monkeypatch.setattr(buffers, "HUGE_PAGE_BYTES", BLOCK_BYTES)
    model, folder = packed("llama")
    store = Store.open(folder)
    rest, layer = sum(run.nbytes for run in store.index.rest), store.layer(0, "endor").nbytes
    slots = min(2, LAYERS - resident)
    limit = rest + 70 * 48 * 4 + (resident + slots) * layer
    with OffloadedModel.open(folder, dram_bytes=limit) as ours:
        assert torch.equal(ours.generate(PROMPT, **GREEDY), model.generate(PROMPT, **GREEDY))
        assert ours.placement == LayerMap(0, resident, LAYERS - resident, spread=True)
        assert ours.budgets["dram"].used_bytes <= limit
    if resident < LAYERS:
        with OffloadedModel.open(folder, dram_bytes=limit + layer - 1) as ours:
            assert ours.placement.dram == resident


def test_code_that_a_packed_folder_names_is_never_run(packed, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever asks gets a yes
    ran, place = tmp_path / "ran", tmp_path / "store" / "model"
    shutil.copytree(packed("llama")[1], place.parent)
    (place / "custom.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Config: pass\nModel = Config\n")
    auto_map = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
    (place / "config.json").write_text(json.dumps({"model_type": "custom", "auto_map": auto_map}))
    (place / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["custom.Model", None]}}))
    with refused("code of its own"):
        OffloadedModel.open(place.parent, verify=False)
    with OffloadedModel.open(packed("llama")[1]) as ours:
        for file in ("config.json", "tokenizer_config.json"):
            shutil.copyfile(place / file, tmp_path / file)
        monkeypatch.setattr(Store, "model_folder", tmp_path)
        with refused("no tokenizer can be read"):
            ours.tokenizer  # noqa: B018
    assert not ran.exists()


def test_generation_follows_the_configuration_that_was_packed(tmp_path):
    model = pruned("llama")
    first = int(model.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1]])
    model.generation_config.eos_token_id = [first]
    pack_model(model, tmp_path / "store")
    with OffloadedModel.open(tmp_path / "store") as ours:
        assert ours.model.generation_config.eos_token_id == [first]
        assert ours.generate(PROMPT, **GREEDY).shape[1] == PROMPT.shape[1] + 1


def test_all_is_checked_before_the_store_is_read(packed, monkeypatch):
    _, folder = packed("llama")
    monkeypatch.setattr(Store, "verify", lambda *_: pytest.fail("the store was read"))
    for wrong in ({"dram_bytes": 1_000_000}, {"placement": LayerMap(0, 1, 1)}, {"method": "zstd", "dram_bytes": 1}):
        with pytest.raises(UserError):
            OffloadedModel.open(folder, **wrong)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    model, tokenizer, _ = load_pruned("smollm2-135m", "magnitude", dtype=torch.float32)
    folder = tmp_path_factory.mktemp("smollm2") / "store"
    pack_model(model, folder, Linears(("endor",)), "smollm2-135m", tokenizer)
    return model, tokenizer, folder


GROWTH = """
import json
import torch
from pathlib import Path
from transformers import AutoTokenizer
from transformers.models.llama import modeling_llama
from toolkit.formats import decode, encode
from toolkit.models import load_model
from toolkit.offload.model import OffloadedModel
from toolkit.storage.chunks import warm_up

def megabytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1e3

folder = Path("{folder}")
warm_up()
decode(encode("endor", torch.eye(64)))  # what is compiled and imported is no weight
prompt = AutoTokenizer.from_pretrained(folder / "model")("{prompt}", return_tensors="pt")
before = megabytes("VmRSS")
with OffloadedModel.open(folder, dram_bytes={limit}) as model:
    tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)
    used = model.budgets["dram"].used_bytes
Path("{told}").write_text(json.dumps([tokens.tolist(), used, megabytes("VmHWM") - before]))
"""


def test_smollm2_gives_the_same_tokens_and_its_process_grows_by_little_more_than_the_budget(smollm2, tmp_path):
    model, tokenizer, folder = smollm2
    text, told = "The library of Alexandria was", tmp_path / "told"
    quarter = sum(parameter.nbytes for parameter in model.parameters()) // 4
    assert processes.ended(GROWTH.format(folder=folder, prompt=text, limit=quarter, told=told)) == 0
    tokens, used, grown = json.loads(told.read_text())
    expected = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert tokens == expected.tolist()
    assert used <= quarter
    assert grown < quarter / 1e6 + 100  # activations, the cache of keys and values, modules imported late
    assert grown < 2 * quarter / 1e6  # so it never held the model dense


def test_text_follows_a_prompt_as_transformers_makes_it(smollm2):
    model, tokenizer, folder = smollm2
    prompt = tokenizer("The library of Alexandria was", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    with OffloadedModel.open(folder, "endor", verify=False) as ours:
        assert ours.generate_text("The library of Alexandria was", tokens=5) == tokenizer.decode(tokens)
        assert "30 layers in DRAM" in ours._repr_html_()
        assert "<th>endor</th>" in ours.store._repr_html_()
        with pytest.raises(UserError, match="makes no token"):
            ours.generate_text("", tokens=1)
