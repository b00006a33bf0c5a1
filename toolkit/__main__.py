"""The command line without notebooks: `python -m toolkit pack` and `python -m toolkit run`."""

import argparse
import re
import sys
import time
from functools import partial
from pathlib import Path

from toolkit.errors import UserError

SPARSE_BITMASK = "sparse-bitmask"  # compressed-tensors' layout: a folder for other programs, which `run` does not read
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 if all is well, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was left behind", file=sys.stderr)
        return 130
    return 0


def pack(options: argparse.Namespace) -> None:
    """Prune a model and write it packed."""
    from toolkit.errors import unknown
    from toolkit.formats import FORMATS
    from toolkit.pruning import load_pruned
    from toolkit.quantization.smoothed import load_smoothed

    for name in options.format:
        if name not in (choices := [*FORMATS, SPARSE_BITMASK]):
            raise unknown("format", name, choices)
    if SPARSE_BITMASK in options.format and len(options.format) > 1:
        raise UserError(f"--format {SPARSE_BITMASK} makes a folder of its own: pack the other formats into another one")
    if options.int8 and SPARSE_BITMASK in options.format:
        raise UserError(f"--int8: {SPARSE_BITMASK} has no place for scales; pack endor, zstd or dense instead")
    if options.out.exists():
        raise UserError(f"--out {options.out}: exists already; name a folder that does not")
    print(f"{options.model}: pruning by {options.method} (kept, if it was done before)", file=sys.stderr)
    calibration = {"corpus": options.corpus, "windows": options.windows, "sequence_length": options.sequence_length}
    dtype = options.dtype and _dtype(options.dtype)
    load = load_smoothed if options.int8 else load_pruned
    model, tokenizer, *_ = load(
        options.model, options.method, sparsity=options.sparsity, pattern=options.pattern, dtype=dtype, **calibration
    )
    _write(options, model, tokenizer)
    print(f"{options.out}: " + "; ".join(_sizes(options.out, model)))


def run(options: argparse.Namespace) -> None:
    """Generate text with a packed model, printed as it comes."""
    from transformers import TextStreamer, set_seed

    from toolkit.offload.model import OffloadedModel

    if not options.folder.is_dir():
        raise UserError(f"no folder {options.folder}: name one that `python -m toolkit pack` wrote")
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}: expected a whole number from 1")
    settings = {name: getattr(options, name) for name in ("method", "policy", "reader", "verify", "device")}
    budgets = {
        "dram_bytes": _bytes("--dram", options.dram),
        "device_bytes": _bytes("--device-memory", options.device_memory),
    }
    with OffloadedModel.open(options.folder, **budgets, **settings) as model:
        tokenizer = model.tokenizer
        prompt = tokenizer(options.prompt, return_tensors="pt")
        set_seed(options.seed)
        begun_s = time.perf_counter()
        tokens = model.generate(
            **prompt,
            max_new_tokens=options.max_new_tokens,
            do_sample=options.sample,
            streamer=TextStreamer(tokenizer),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        _tell(model, tokens.shape[1] - prompt["input_ids"].shape[1], time.perf_counter() - begun_s)


def _write(options: argparse.Namespace, model, tokenizer) -> None:
    from toolkit.formats import encode
    from toolkit.formats.scaled import Scaled
    from toolkit.interchange import save_model
    from toolkit.storage.packing import pack_model

    if options.format == [SPARSE_BITMASK]:
        return save_model(model, options.out, tokenizer)
    pack_one = Scaled.encode if options.int8 else encode
    made = {name: getattr(options, name) for name in ("method", "sparsity", "pattern", "int8")}
    variants = {name: partial(pack_one, name) for name in options.format}
    return pack_model(model, options.out, variants, options.model, tokenizer, made)


def _sizes(folder: Path, model) -> list[str]:
    """What was written, beside the dense weights."""
    from toolkit.models import decoder_blocks, decoder_linears
    from toolkit.storage.store import Store

    dense = sum(linear.weight.nbytes for block in decoder_blocks(model) for linear in decoder_linears(block).values())
    if not (folder / "index.json").is_file():
        packed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return [f"{packed / 1e6:.1f} MB in all; dense {sum(p.nbytes for p in model.parameters()) / 1e6:.1f} MB"]
    store, found = Store.open(folder), [f"decoder weights dense {dense / 1e6:.1f} MB"]
    for variant in store.variants:
        packed = store.nbytes(variant)
        found.append(f"{variant} {packed / 1e6:.1f} MB ({packed / dense:.1%})")
    return [*found, f"all the rest {store.rest_bytes / 1e6:.1f} MB"]


def _tell(model, tokens: int, seconds: float) -> None:
    """What was generated, how fast, and where the time went."""
    where, on_device = model.placement, model.device.tier == "device"
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    print(
        f"\n{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second; "
        + (f"{where.device} layers on the device, " if on_device else "")
        + f"{where.dram} in DRAM, {where.storage} on disk ({model.mode} reads); {' and '.join(held)} held",
        file=sys.stderr,
    )
    table = model.timeline.stages()[["stage", "seconds", "share_percent", "gb_s"]]
    print(table.to_string(index=False, float_format="{:.2f}".format), file=sys.stderr)


def _bytes(option: str, text: str | None) -> int | None:
    """A number of bytes such as 500MB or 1.5GiB. Raises `UserError` for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|)", text)
    if found is None:
        raise UserError(f"{option} {text}: expected a size such as 500MB or 1.5GiB")
    return round(float(found[1]) * UNITS[found[2]])


def _dtype(name: str):
    import torch

    from toolkit.errors import unknown

    choices = ("float32", "float16", "bfloat16")
    if name not in choices:
        raise unknown("dtype", name, choices)
    return getattr(torch, name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toolkit", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="pack | run")
    packing = commands.add_parser("pack", help="prune a model and write it packed", description=pack.__doc__)
    packing.set_defaults(command=pack)
    packing.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    packing.add_argument("--method", default="wanda", help="dense, magnitude, wanda or sparsegpt (default: wanda)")
    packing.add_argument("--sparsity", type=float, default=0.5, help="share of zeros (default: 0.5)")
    packing.add_argument("--pattern", help="N:M instead, such as 2:4")
    packing.add_argument(
        "--format",
        nargs="+",
        default=["endor"],
        help="formats side by side (default: endor), or sparse-bitmask",
    )
    packing.add_argument("--out", type=Path, required=True, help="a folder that does not exist yet")
    packing.add_argument("--dtype", help="float32, float16 or bfloat16 (default: the quickest here)")
    packing.add_argument("--int8", action="store_true", help="decoder weights in int8, smoothed by SmoothQuant first")
    packing.add_argument("--corpus", default="wiki-slice", help="calibration text (default: wiki-slice)")
    packing.add_argument("--windows", type=int, default=16, help="calibration windows (default: 16; the papers: 128)")
    packing.add_argument("--sequence-length", type=int, default=1024, help="tokens of a window (default: 1024)")
    running = commands.add_parser("run", help="generate text with a packed model", description=run.__doc__)
    running.set_defaults(command=run)
    running.add_argument("folder", type=Path, help="what pack wrote")
    running.add_argument("--prompt", required=True)
    running.add_argument("--max-new-tokens", type=int, default=40)
    running.add_argument("--dram", help="hard limit for weights and buffers, such as 500MB (default: none)")
    running.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    running.add_argument("--device-memory", help="hard limit for a GPU's memory, such as 8GB (default: most of it)")
    methods = "dense, zstd, endor_cpu, endor (default) or endor_packed"
    running.add_argument("--method", default="endor", help=methods)
    running.add_argument("--policy", default="pipelined", help="pipelined (default) or sequential")
    running.add_argument("--reader", default="threads", help="threads (default), io_uring, or kvikio for a GPU")
    running.add_argument("--no-verify", dest="verify", action="store_false", help="trust the files' checksums unread")
    running.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    running.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
