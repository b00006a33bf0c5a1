"""A GGUF file beside llama.cpp in whole processes: six prompts, and prompts of 128, 2,000 and 8,000 tokens.

    python benchmarks/contexts.py qwen2.5-coder-1.5b --limits 800                     # six short prompts, five turns
    python benchmarks/contexts.py FILE.gguf --limits 1000 1600 --contexts 128 2000 8000 --turns 2
    python benchmarks/contexts.py FILE.gguf --limits 1000 --contexts 2000 32000 --kv-type q8_0 --alone --turns 1

Both sides run the same file in a memory cgroup of each limit without swap, in turns, a new process each time
(`toolkit.measure.processes`); llama.cpp at its best. A long prompt is the beginning of a corpus's text for evaluation.
`first_s` is from the start of the process until the first token, so that it has the prompt in it; `tokens_per_s` is of
the tokens after it; `peak_mb` is memory that belongs to no file. Numbers are medians, with the range of turns. Writes
results/benchmarks/contexts.json. It needs root, or a delegated cgroup: status 77 without.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import reports
from limited import SKIPPED

import toolkit as tk
from toolkit.commands.kv_type import add_kv_type
from toolkit.interchange.reading import load_tokenizer
from toolkit.measure import llama_cpp
from toolkit.measure.memory_group import missing
from toolkit.measure.processes import OurRun, table, take_turns
from toolkit.planner.bench import AS_IS, rivals_of
from toolkit.quality.corpora import load_tokens

PROMPTS = (
    "def quicksort(xs):",
    "class Stack:\n    def __init__(self):",
    "The library of Alexandria was",
    "In 1969, the first human being",
    "Question: Why is the sky blue?\nAnswer:",
    "User: How do I read a file line by line in Python?\nAssistant:",
)
LLAMA_CPP = "llama.cpp"
SHOWN = ["way", "verdict", "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "first_s", "read_mb", "peak_mb"]


def prompts_of(file: Path, contexts: list[int], corpus: str) -> dict[str, str]:
    """The prompts by name: texts of so many tokens, or the six short ones."""
    if not contexts:
        return {text.splitlines()[0]: text for text in PROMPTS}
    tokenizer = load_tokenizer(file)
    ids = load_tokens(corpus, tokenizer, "evaluation").tolist()
    return {f"{count} tokens": tokenizer.decode(ids[:count]) for count in contexts}


def race(file: Path, options: argparse.Namespace) -> Iterator[pd.DataFrame]:
    """A table for each limit and prompt."""
    kv_type = ["--kv-type", options.kv_type] if options.kv_type else []
    ours, prompts = OurRun(AS_IS, file, kv_type), prompts_of(file, options.contexts, options.corpus)
    ours.warm_up(next(iter(prompts.values())), options.limits[-1] * 10**6)  # long prompts have kernels of their own
    for limit in options.limits:
        for name, prompt in prompts.items():
            # new ones: the best way to load a file may be another with this prompt
            rivals = [] if options.alone else rivals_of(LLAMA_CPP, file)
            for rival in rivals:
                rival.loads = options.loads
            contestants, sure = [ours, *rivals], dict.fromkeys((AS_IS, LLAMA_CPP), float("inf"))  # all make all tokens
            rounds = take_turns(contestants, limit * 10**6, prompt, options.turns, options.tokens, sure)
            found = table(rounds).assign(limit_mb=limit, prompt=name)
            print(f"\n{limit} MB, {name}\n" + found[[*SHOWN, "disturbed", "note"]].to_string(index=False), flush=True)
            yield found


def ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Our speed over llama.cpp's, and its time to the first token over ours, a row a limit and prompt."""
    ours, rival = (rows[rows["way"] == way].set_index(["limit_mb", "prompt"]) for way in (AS_IS, LLAMA_CPP))
    found = {"speed": ours["tokens_per_s"] / rival["tokens_per_s"], "first": rival["first_s"] / ours["first_s"]}
    return pd.DataFrame(found).reset_index()


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name that has a GGUF file, or a GGUF file")
    parser.add_argument("--limits", nargs="+", type=int, default=[800], help="of memory, in MB")
    parser.add_argument("--contexts", nargs="*", type=int, default=[], help="tokens of long prompts")
    parser.add_argument("--corpus", default="wiki-slice", help="whose text long prompts are (default: wiki-slice)")
    add_kv_type(parser)  # ours; llama.cpp's are F16
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--loads", nargs="+", default=list(llama_cpp.LOADS), choices=[*llama_cpp.LOADS])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="generated in a turn, at most")
    options = parser.parse_args()
    if reason := missing():
        print(f"skipped: {reason}")
        return SKIPPED
    file = Path(tk.models.gguf_file(options.model))
    rows = pd.concat(race(file, options), ignore_index=True)
    if LLAMA_CPP in set(rows["way"]):
        print("\nthis toolkit over llama.cpp\n" + ratios(rows).round(2).to_string(index=False))
    settings = vars(options) | {"load_per_core": reports.load_per_core()}
    reports.save("contexts", {"settings": settings, "rows": rows.to_dict("records")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
