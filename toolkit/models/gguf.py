"""A GGUF file as an ordinary float32 model in Hugging Face's layout."""

from pathlib import Path

from toolkit.models.hub import NO_CODE


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model in `gguf` to `folder`: config, tokenizer and every weight, dequantised to float32.

    transformers marks the config of a model that came from GGUF as quantised and refuses to save it, so the weights
    move to a fresh model of the same config.
    """
    import torch
    import transformers

    origin = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    options = {}
    if hasattr(transformers, "GgufConfig"):  # versions without this argument always dequantise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**origin, dtype=torch.float32, **options, **NO_CODE)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.name_or_path = ""  # what is kept names no path of this machine
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **NO_CODE)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**origin, **NO_CODE)
    tokenizer.save_pretrained(folder)
