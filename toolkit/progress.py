"""Progress bars of long work: plain text on stderr, so that terminals and the sweep's log show them.

with progress("pruning by wanda", len(blocks), "blocks") as bar:
    for block in blocks:
        ...
        bar.update()

In JupyterLab they go to stdout: a cleared bar on stderr leaves a pink area there. `TOOLKIT_PROGRESS=0` turns them off,
as does tqdm's own `TQDM_DISABLE=1`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm  # not tqdm.auto: its widgets end in the report as broken text

SWITCH = "TOOLKIT_PROGRESS"
TERMINAL_S, ELSEWHERE_S = 0.2, 5  # seconds between updates; each is a message of a notebook's kernel, a line of a log
DELAY_S = 1  # shorter work shows nothing

_told: set[str] = set()
_only = threading.Lock()  # whoever holds it shows the bar; bars inside this one, or beside it, stay silent


def has_front_end() -> bool:
    """Whether a person looks at this cell: the program that runs it takes questions of the kernel to its user.

    JupyterLab and editors do. papermill and nbconvert, which only run cells, say with each cell that they do not.
    """
    ipython = sys.modules.get("IPython")  # without it there is no kernel
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    return kernel is not None and bool(kernel.get_parent("shell").get("content", {}).get("allow_stdin"))


class _Bar(tqdm):
    monitor_interval = 0  # no thread of its own beside what is timed


@contextlib.contextmanager
def progress(description: str, total: int | None, unit: str) -> Iterator[tqdm]:
    """Show a bar for the work of the `with` block, such as `pruning by wanda: 12/30 blocks`.

    `total` counts units (None: not known beforehand); call `update(n)` on the bar after every n of them. In a terminal
    the finished bar stays. Elsewhere it is cleared, so that a notebook keeps none.
    """
    shown = _only.acquire(blocking=False)
    off = {} if shown and os.environ.get(SWITCH) != "0" else {"disable": True}  # without it TQDM_DISABLE decides
    sink = sys.stdout if has_front_end() else sys.stderr
    terminal = sink.isatty()
    counted = "{n_fmt}" if total is None else "{n_fmt}/{total_fmt}"
    shape = "" if total is None else "|{bar:20}| "
    clock = "[{elapsed}]" if total is None else "[{elapsed}<{remaining}]"
    try:
        with _Bar(
            desc=description,
            total=total,
            bar_format=f"{{desc}}: {counted} {unit} {shape}{clock}",
            file=sink,
            mininterval=TERMINAL_S if terminal else ELSEWHERE_S,
            miniters=1,
            delay=DELAY_S,
            leave=terminal,
            **off,
        ) as bar:
            yield bar
    finally:
        if shown:
            _only.release()


def tell(text: str) -> None:
    """Print a line on stderr, above a progress bar if there is one."""
    tqdm.write(text, file=sys.stderr)


def tell_once(text: str) -> None:
    """The same, once a process; notebooks and those who turn bars off do not get it."""
    if text not in _told and os.environ.get(SWITCH) != "0" and "ipykernel" not in sys.modules:
        _told.add(text)
        tell(text)
