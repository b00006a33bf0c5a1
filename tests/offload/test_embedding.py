"""Input embeddings on disk: the same logits, to the bit, and their bytes are in no budget."""

import pytest
import torch

from tests.families import FAMILIES, load_family
from toolkit.offload.embedding import StoredEmbedding
from toolkit.offload.model import OffloadedModel
from toolkit.storage.direct import ChangedError
from toolkit.storage.packing import pack_model

IDS = torch.tensor([[5, 96, 0, 5, 41, 7]])
OWN_HEAD = "Gemma3, own head"  # its embedding multiplies the rows


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Folders and models by family, packed when they are asked for first."""
    made = {}

    def of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("packed")
            kind, settings = FAMILIES["Gemma3"]
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(FAMILIES, OWN_HEAD, (kind, settings | {"tie_word_embeddings": False}))
                made[family] = folder / "packed", load_family(family, folder / "model", torch.bfloat16)
            pack_model(made[family][1], folder / "packed")
        return made[family]

    return of


@pytest.mark.parametrize("family", ["GPT-NeoX", OWN_HEAD])
def test_logits_are_those_of_the_embedding_in_memory(packed, family, one_thread):
    folder, model = packed(family)
    with OffloadedModel.open(folder, "endor") as opened, torch.no_grad():
        assert isinstance(opened.model.get_input_embeddings(), StoredEmbedding)
        assert torch.equal(opened.model(IDS).logits, model(IDS).logits)
        stored = sum(run.nbytes for run in opened.store.index.rest)
        embedding = model.get_input_embeddings().weight.nbytes
        assert opened.budgets["dram"].taken["rest"] <= stored - embedding


@pytest.mark.parametrize("family", ["Gemma3", "OPT, as 350m", "Falcon, with biases"])
def test_the_heads_own_matrix_stays_in_memory(packed, family, one_thread):
    folder, model = packed(family)
    with OffloadedModel.open(folder, "endor") as opened, torch.no_grad():
        assert not isinstance(opened.model.get_input_embeddings(), StoredEmbedding)
        assert torch.equal(opened.model(IDS).logits, model(IDS).logits)


def test_a_shard_that_changes_meanwhile_is_noticed(packed, tmp_path, one_thread):
    model = load_family("Qwen2", tmp_path / "model", torch.bfloat16)
    pack_model(model, tmp_path / "packed")
    with OffloadedModel.open(tmp_path / "packed") as opened, torch.no_grad():
        name = "model.embed_tokens.weight"
        shard = next(run.shard for run in opened.store.index.rest if run.name == name)
        file = tmp_path / "packed" / shard
        file.write_bytes(file.read_bytes()[::-1])
        with pytest.raises(ChangedError, match="while it was in use"):
            opened.model(IDS)
