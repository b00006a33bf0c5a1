"""Make sparse versions of a model, or a mixture of it: `python -m toolkit.recovery smollm2-135m --out data/models`."""

import argparse
import importlib
import os
import sys
from pathlib import Path

from toolkit.errors import UserError, run_command

FORMS = ("sparse", "upcycled")
POSITIVE = (
    *("steps", "later_steps", "batch", "sequence_length", "learning_rate", "rank", "down_rank"),
    "evaluation_windows",
)  # options


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 if all is well, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    return run_command(lambda: make(options), stopped="stopped; the same command goes on at the last step kept")


def make(options: argparse.Namespace) -> None:
    """Make each model of a form, evaluate it and write its folder. Impossible requests are refused before the work."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.quality import load_tokens

    recipe = _recipe(options)
    _check(options, recipe.names())
    model, tokenizer = load_model(recipe.model, fast_dtype())
    model.to(options.device)
    corpora = getattr(recipe, "corpora", (options.corpus,))
    texts = [load_tokens(corpus, tokenizer, split) for corpus in corpora for split in ("calibration", "evaluation")]
    maker = importlib.import_module(type(recipe).__module__).make
    maker(recipe, options.out, model, texts, options.evaluation_windows)


def _recipe(options: argparse.Namespace):
    from toolkit.recovery.sparse import Recipe
    from toolkit.recovery.training import Training
    from toolkit.recovery.upcycling import Upcycling

    chosen = lambda *names: {name: getattr(options, name) for name in names}  # noqa: E731
    pace = {} if options.form == "sparse" else {"warm_up": 10, "keep_every": 10}
    training = Training(**chosen("steps", "batch", "sequence_length", "learning_rate", "seed"), **pace)
    if options.form == "upcycled":
        return Upcycling(**chosen("model", "rank"), training=training)
    more = chosen("model", "rank", "down_rank", "corpus", "activation", "start")
    later = options.later_steps or options.steps
    return Recipe(**more, zeros=tuple(options.zeros), training=training, later_steps=later)


def _check(options: argparse.Namespace, names: list[str]) -> None:
    """Refuse names that cannot be loaded, and folders that cannot be written."""
    import torch

    from toolkit.quality import check_corpus

    check_corpus(options.corpus)
    if wrong := [name for name in POSITIVE if (value := getattr(options, name)) is not None and value <= 0]:
        raise UserError(f"--{wrong[0].replace('_', '-')} {getattr(options, wrong[0])}: expected more than 0")
    if not options.out.is_dir():
        raise UserError(f"--out {options.out}: expected a folder that is there, such as data/models")
    if taken := [options.out / name for name in names if os.path.lexists(options.out / name)]:
        raise UserError(f"{taken[0]} exists already: name another place with --out, or remove it first")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {options.device}: torch sees no CUDA device here; leave --device out for the CPU")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toolkit.recovery", description=__doc__)
    parser.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    form = "adapters for thresholds, or a Mixtral upcycled from the model (default: sparse)"
    parser.add_argument("--form", choices=FORMS, default="sparse", help=form)
    parser.add_argument("--out", type=Path, required=True, help="where a folder for each share of zeros is made")
    corpus = "whose text to train on and to evaluate on (default: wiki-slice; wikitext-2 and c4 need a hub)"
    parser.add_argument("--corpus", default="wiki-slice", help=corpus)
    shares = "shares of zeros, rising (default: 0.8 0.85 0.9)"
    parser.add_argument("--zeros", type=float, nargs="+", default=[0.8, 0.85, 0.9], help=shares)
    parser.add_argument("--steps", type=int, default=100, help="of the first training (default: 100)")
    parser.add_argument("--later-steps", type=int, help="of each other one (default: as many)")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step (default: 4)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest one (default: 0.001)")
    start = "folder of a sparse version to start from, whose ranks stay (default: differences of zero)"
    parser.add_argument("--start", help=start)
    other = "what takes the place of the model's own activation, such as relu (default: nothing)"
    parser.add_argument("--activation", help=other)
    parser.add_argument("--rank", type=int, default=24, help="of each linear's difference (default: 24)")
    parser.add_argument("--down-rank", type=int, default=80, help="of each down projection's (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="of the text's order (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or one of several GPUs as cuda:1")
    parser.add_argument("--evaluation-windows", type=int, default=6, help="of 1024 tokens, for perplexity (default: 6)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
