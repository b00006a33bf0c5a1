"""One file in several places of a disk: how far the place alone moves the speed of reading it.

    python benchmarks/disk_places.py [--folder DIR] [--file-mib 648] [--places 4] [--repetitions 7] [--markdown]

The files have the same bytes and are read whole, in turns, by the same reader into the same memory (648 MiB: ENDOR's
largest matrix, dense). Turns of one place differ by what the machine does meanwhile; medians of two places differ by
where they lie, which no repetition takes away. Writes results/benchmarks/disk_places.json.
"""

import argparse
import sys
import time
from pathlib import Path

import fio
import numpy as np
import pandas as pd
import reports

from toolkit.files import check_space, scratch_folder
from toolkit.machines.machine import GB
from toolkit.machines.probe import MIB
from toolkit.storage.buffers import aligned_buffer
from toolkit.storage.chunks import Chunks
from toolkit.storage.direct import StoredFile
from toolkit.storage.readers import READERS


def main() -> int:
    """Read and compare; 0."""
    options = _options()
    nbytes = options.file_mib * MIB
    with scratch_folder(options.folder) as folder:
        check_space(folder, options.places * nbytes)
        places = [folder / f"place-{number}" for number in range(1, options.places + 1)]
        for path in places:
            fio.write_file(path, nbytes)
        rates = _rates(places, nbytes, options.repetitions)
    table = rates.agg(["median", "min", "max"]).T.rename_axis("place").reset_index()
    medians = table["median"]
    print(_markdown(table) if options.markdown else table.to_string(index=False, float_format="{:.3f}".format))
    print(f"the fastest place over the slowest: {medians.max() / medians.min():.3f}")
    settings = {"file_mib": options.file_mib, "repetitions": options.repetitions}
    report = {"load_per_core": reports.load_per_core(), "settings": settings, "rows": table.to_dict("records")}
    reports.save("disk_places", report | {"raw": rates.to_dict("records")})
    return 0


def _rates(places: list[Path], nbytes: int, repetitions: int) -> pd.DataFrame:
    """GB/s, a row a turn and a column a place; one turn before them warms up."""
    chunks = {path.name: Chunks(path.name, *np.array([[0], [nbytes], [0]])) for path in places}
    target, rows = aligned_buffer(nbytes), []
    with READERS["threads"]({path.name: StoredFile.of(path) for path in places}) as reader:
        for _ in range(1 + repetitions):
            row = {}
            for name, whole in chunks.items():
                began_s = time.perf_counter()
                reader.read([whole], target)
                row[name] = nbytes / (time.perf_counter() - began_s) / GB
            rows.append(row)
    return pd.DataFrame(rows[1:])


def _markdown(table: pd.DataFrame) -> str:
    head = "| place | GB/s, median | lowest | highest |\n| --- | ---: | ---: | ---: |"
    lines = [f"| {name} | {middle:.2f} | {low:.2f} | {high:.2f} |" for name, middle, low, high in table.to_numpy()]
    return "\n".join([head, *lines])


def _options() -> argparse.Namespace:
    parser = reports.disk_parser(__doc__, repetitions=7)
    parser.add_argument("--file-mib", type=int, default=648)
    parser.add_argument("--places", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
