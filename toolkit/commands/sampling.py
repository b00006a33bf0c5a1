"""The options that say how tokens are chosen and where a text ends."""

import argparse

from toolkit.errors import UserError
from toolkit.offload.sampling import Sampling


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how tokens are chosen and where a text ends."""
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of this share")
    parser.add_argument("--top-k", type=int, default=0, help="draw from so many tokens (default: 0, all)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends a text; may be repeated")


def sampling_of(options: argparse.Namespace) -> Sampling:
    """The settings. Raises `UserError` for one out of its range, or one that has no effect."""
    for name in ("top_p", "top_k"):
        if getattr(options, name) != getattr(Sampling, name) and not options.temperature:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {getattr(options, name)}: nothing is drawn at temperature 0; add --temperature")
    if "" in options.stop:
        raise UserError("--stop is empty: give the text that ends an answer")
    try:
        return Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    except UserError as error:
        raise UserError(f"--{str(error).replace('_', '-', 1)}") from None
