"""The main job: every notebook, headless, into `results/`.

`catalogue` says which notebooks there are, `plan` with which parameters and what is stale, `Snakefile` and `execute`
run them, `driver` watches, `__main__` is the command line that `papermill_runs.sh` calls.
"""
