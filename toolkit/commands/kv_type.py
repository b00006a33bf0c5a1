"""The option `--kv-type`: the type of keys and values in the cache of a GGUF file that runs without torch."""

from argparse import ArgumentParser

from toolkit.registry import Registry


def add_kv_type(parser: ArgumentParser) -> None:
    """Add it to a command's options."""
    kinds = "of a GGUF file, the type of keys and values: q8_0 takes half the memory of bf16"
    default = "bf16, of models below 1 billion weights f32"
    names = {"choices": Registry("toolkit.offload.variant:KV_TYPES"), "metavar": "NAME"}
    parser.add_argument("--kv-type", help=f"{kinds} (default: {default})", **names)
