"""An id that a model lacks is refused in one line that names its token."""

from argparse import Namespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from toolkit.commands.text import prompt_of
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.storage.packing import pack_model
from toolkit.vocabulary import check_vocabulary

WORDS = 17
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
UNKNOWN = r"^token '<pad>' \(id 17\) is unknown to the model, which has ids 0 to 16: take another token, or the token"


@pytest.fixture(scope="module")
def tokenizer():
    """Its last token was added later."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0")
    made.add_special_tokens({"pad_token": "<pad>"})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A packed model of `WORDS` words with that tokenizer."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SIZES)).eval().requires_grad_(False)
    folder = tmp_path_factory.mktemp("vocabulary") / "packed"
    pack_model(model, folder, name="tiny", tokenizer=tokenizer)
    return folder


@pytest.mark.parametrize(("ids", "named"), [([[3, 17]], "17"), ([-1, 5], "-1")])
def test_the_id_is_named(ids, named):
    with pytest.raises(UserError, match=f"^token id {named}"):
        check_vocabulary(torch.tensor(ids), WORDS)


def test_run_refuses_the_prompt(tokenizer):
    options = Namespace(folder="folder", prompt="5 <pad> 7", max_new_tokens=3)
    with pytest.raises(UserError, match=UNKNOWN):
        prompt_of(options, tokenizer, LlamaConfig(vocab_size=WORDS, **SIZES))


def test_an_opened_model_refuses_it(folder, tokenizer):
    """In a text and as a single token; and the model goes on afterwards."""
    with OffloadedModel.open(folder, "endor_packed") as ours, torch.no_grad():
        for use in (ours.model, lambda ids: ours.generate(ids, max_new_tokens=2, do_sample=False)):
            with pytest.raises(UserError, match=UNKNOWN):
                use(torch.tensor([[5, WORDS, 7]]))
        cache = ours.model(torch.tensor([[5, 7]]), use_cache=True).past_key_values
        for ids in ([[WORDS]], [[-1]]):
            with pytest.raises(UserError, match="is unknown to the model"):
                ours.model(torch.tensor(ids), past_key_values=cache)
        assert ours.model(torch.tensor([[WORDS - 1]]), past_key_values=cache).logits.isfinite().all()
