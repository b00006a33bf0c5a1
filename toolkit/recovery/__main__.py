"""Make sparse versions or mixtures of experts: `python -m toolkit.recovery smollm2-135m --out data/models`."""

import argparse
import os
import sys
from pathlib import Path

from toolkit.errors import UserError, run_command


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 if all is well, 2 for bad input, 130 when interrupted."""
    options = _parser().parse_args(arguments)
    return run_command(
        lambda: MAKERS[options.form](options), stopped="stopped; the same command goes on at the last step kept"
    )


def make(options: argparse.Namespace) -> None:
    """Make each version, evaluate it and write its folder."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.quality import LOCAL_TASKS, load_tokens
    from toolkit.recovery import sparse

    recipe = _recipe(options)
    folders = {share: options.out / recipe.name(share) for share in recipe.zeros}
    _check(options, folders)
    model, tokenizer = load_model(recipe.model, fast_dtype())
    model.to(options.device)
    tokens, evaluation = (load_tokens(recipe.corpus, tokenizer, split) for split in ("calibration", "evaluation"))
    tasks = tuple(LOCAL_TASKS) if options.tasks else ()
    limits = {"windows": options.evaluation_windows, "task_limit": options.task_limit}
    on = sparse.Evaluation(evaluation, tokenizer, tasks=tasks, **limits)
    dense = None
    for made in sparse.recover(recipe, model, tokens):
        dense = dense or on.of(model)
        quality = on.table(model, dense, made)
        sparse.write(folders[made.zeros], model, recipe, made, quality, on)
        print(f"{folders[made.zeros]}:\n{quality.round(3).to_string(index=False)}", flush=True)


def make_split(options: argparse.Namespace) -> None:
    """Split a model into experts, distil them, evaluate the mixture and write its folder."""
    from toolkit.recovery import split

    ranks = {"rank": options.rank, "down_rank": options.down_rank}
    recipe = split.Splitting(
        options.model, **ranks, corpus=options.corpus, training=_training(options, warm_up=10, keep_every=10)
    )
    folder = options.out / f"{Path(options.model).name}-moe-split"
    model, (tokens, evaluation) = _opened(options, folder, recipe.corpus)
    windows, limit = split.FITTED_ON.draw(tokens), options.evaluation_windows
    fitted = split.split_parts(model, windows, recipe.sizes)
    parts, curve = split.distilled(recipe, model, tokens, fitted)
    table = split.quality(model, windows, evaluation, fitted, parts, recipe.sizes, limit)
    split.write(folder, model, recipe, parts, curve, table, limit)
    print(f"{folder}:\n{table.round(3).to_string(index=False)}", flush=True)


def make_upcycled(options: argparse.Namespace) -> None:
    """Upcycle a model to a Mixtral, evaluate it and write its folder."""
    import torch

    from toolkit.models.upcycled import as_mixtral
    from toolkit.recovery import upcycling

    recipe = upcycling.Upcycling(
        options.model, rank=options.rank, training=_training(options, warm_up=10, keep_every=10)
    )
    folder = options.out / f"{Path(options.model).name}-moe-upcycled"
    model, texts = _opened(options, folder, *recipe.corpora)
    parts, curve = upcycling.upcycle(recipe, model, texts[::2])
    parts = upcycling.rounded(parts)
    mixtral = as_mixtral(model, parts, torch.bfloat16)
    by_text, limit = dict(zip(recipe.corpora, texts[1::2], strict=True)), options.evaluation_windows
    table = upcycling.perplexity_by_text({"dense": model, "upcycled": mixtral}, by_text, limit)
    loads = upcycling.routing(mixtral, by_text, limit)
    summary = upcycling.routing_summary(loads)
    upcycling.write(folder, model, recipe, parts, curve, (table, loads, summary), limit)
    print(f"{folder}:\n{table.round(3).to_string(index=False)}\n{summary.round(3).to_string(index=False)}", flush=True)


MAKERS = {"sparse": make, "split": make_split, "upcycled": make_upcycled}


def _opened(options: argparse.Namespace, folder: Path, *corpora: str):
    """The dense model, and the calibration and evaluation tokens of each corpus in turn."""
    from toolkit.models import fast_dtype, load_model
    from toolkit.quality import load_tokens

    _check(options, {0.0: folder})
    model, tokenizer = load_model(options.model, fast_dtype())
    texts = [load_tokens(corpus, tokenizer, split) for corpus in corpora for split in ("calibration", "evaluation")]
    return model, texts


def _training(options: argparse.Namespace, **others: int):
    from toolkit.recovery.training import Training

    names = ("steps", "batch", "sequence_length", "learning_rate", "seed")
    return Training(**{name: getattr(options, name) for name in names}, **others)


def _recipe(options: argparse.Namespace):
    from toolkit.recovery.sparse import Recipe

    later = options.later_steps or options.steps
    more = {name: getattr(options, name) for name in ("rank", "down_rank", "activation", "start", "corpus")}
    return Recipe(options.model, tuple(options.zeros), **more, training=_training(options), later_steps=later)


def _check(options: argparse.Namespace, folders: dict[float, Path]) -> None:
    """Refuse what could not be had, written or run, before the work."""
    import torch

    from toolkit.quality import check_corpus

    check_corpus(options.corpus)
    for name in ("evaluation_windows", "task_limit"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if not options.out.is_dir():
        raise UserError(f"--out {options.out}: expected a folder that is there, such as data/models")
    if taken := [folder for folder in folders.values() if os.path.lexists(folder)]:
        raise UserError(f"{taken[0]} exists already: name another place with --out, or remove it first")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"--device {options.device}: torch sees no CUDA device here; leave --device out for the CPU")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m toolkit.recovery", description=__doc__)
    parser.add_argument("model", help="smollm2-135m, a folder in Hugging Face's layout, or an id on the hub")
    form = "adapters for thresholds, an FFN split into experts, or a Mixtral upcycled from the model (default: sparse)"
    parser.add_argument("--form", choices=MAKERS, default="sparse", help=form)
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
    parser.add_argument("--no-tasks", dest="tasks", action="store_false", help="do not evaluate the local tasks")
    parser.add_argument("--task-limit", type=int, help="only so many items of each task (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
