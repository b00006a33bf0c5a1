"""The main job: every notebook, headless, into `results/`.

`plan` decides the parameters of each notebook and which results are stale. `Snakefile` and `execute` run notebooks,
`driver` watches them. `grid` has combinations of parameters, `profiles` the ways to a cluster. `__main__` is the
command line that `papermill_runs.sh` calls. `lab` opens JupyterLab.
"""

import sys

# jsonschema, which nbformat imports, would make a parser for addresses of this package: a second for each notebook
sys.modules.setdefault("rfc3987_syntax", None)
