"""`python -m toolkit notebooks`: list the notebooks, or copy them to work in."""

import argparse
import os
from pathlib import Path

from toolkit.evidence.catalogue import PRESETS, explorers, listing, notebooks
from toolkit.evidence.copies import copy_notebooks, write_contents
from toolkit.files import make_folder


def add_parser(commands, **style) -> None:
    """Add the command and its options to the commands of a parser; `style` goes to `add_parser` there."""
    parser = commands.add_parser(
        "notebooks", help="list the notebooks, or copy them to work in", description=run.__doc__, **style
    )
    parser.set_defaults(command=run)
    parser.add_argument("--copy", type=Path, metavar="DIR", help="copy them into this folder, beside their contents")
    parser.add_argument("--preset", default="quick", choices=PRESETS, help="of the copies (default: quick)")


def run(options: argparse.Namespace) -> None:
    """List the notebooks with their questions, or copy them into a folder.

    A copy that was changed is left as it is. Results of a copy go to `results/lab/` of the checkout or, without a
    checkout, to `results/lab/` beside the copies. `TOOLKIT_RESULTS_DIR` names another place.
    """
    books = explorers() | notebooks()
    if options.copy is None:
        print(listing(books))
        return
    folder = make_folder(options.copy)
    for line in copy_notebooks(folder, options.preset):
        print(line)
    contents = os.path.relpath(write_contents(folder, options.preset, {}))
    command = f"OMP_WAIT_POLICY=passive jupyter lab {contents}"  # torch may be imported before the toolkit there
    print(f"{len(books)} notebooks, preset {options.preset}; open them: {command}")
