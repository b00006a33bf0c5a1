"""A tiny random model with a chat template, packed; its words are numbers, and it ends its turns now and then."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.families import WORDS, write_tokenizer
from toolkit.interchange.reading import load_tokenizer
from toolkit.storage.packing import Linears, pack_model

START, END = WORDS, WORDS + 1
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role | length }} {{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>9 {% endif %}"
)
LAST_ANSWER = (  # earlier answers are left out, as thoughts are
    "{% for message in messages %}{% if loop.last or message.role == 'user' %}<|im_start|>{{ message.content }}"
    "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def make(folder: Path, template: str | None = TEMPLATE) -> tuple[torch.nn.Module, Path]:
    """The model in memory, and the folder that it is packed in."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS + 2, initializer_range=0.5, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight[END] *= 2
    model.lm_head.weight[START] = 0
    folder.mkdir(parents=True)
    write_tokenizer(folder)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    kind = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = {START: "<|im_start|>", END: "<|im_end|>"}
    tokens["added_tokens"] = [{"id": number, "content": name} | kind for number, name in names.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    # with an unknown word "0" in it, "60" would be two tokens
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": names[END]})
    )
    if template:
        (folder / "chat_template.jinja").write_text(template)
    pack_model(model, folder / "packed", Linears(("dense",)), "tiny", tokenizer=load_tokenizer(folder))
    return model, folder / "packed"


def answer(model: torch.nn.Module, tokens: Sequence[int], most: int, ends: Sequence[int] = (END,)) -> list[int]:
    """The likeliest tokens after others, without a cache: those before the first that ends a turn."""
    text = list(tokens)
    while len(text) < len(tokens) + most:
        token = int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax())
        if token in ends:
            break
        text.append(token)
    return text[len(tokens) :]


def text_of(tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """The text that the tokens add to a prompt."""
    special = {"skip_special_tokens": True}
    return tokenizer.decode([*prompt, *tokens], **special)[len(tokenizer.decode(prompt, **special)) :]
