"""Runs AirLLM on the CPU for `toolkit.measure.airllm`, beside this environment's torch and transformers.

    python airllm_driver.py PACKAGES CHECKPOINT SHARDS THREADS

PACKAGES is the folder that has `airllm`. Each line on stdin is a request: `{"tokens": [7], "first": true}` takes these
tokens through the model, after those before unless they are the first of a text. The answer has `seconds` of the pass,
`read_bytes`, `likeliest`, the token that would come next, and `held_bytes`, the most memory that the process has taken
so far beyond what it took when its packages were imported. The pages of SHARDS are dropped before each pass.
"""

import json
import os
import sys
import time


def main() -> None:
    """Load the model and answer requests until stdin ends."""
    packages, checkpoint, shards, threads = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what AirLLM prints must not come between the answers
    sys.path.append(packages)
    import torch
    from airllm import AutoModel as AirLLM  # its checkpoint is one that `toolkit.measure.airllm` wrote

    torch.set_num_threads(int(threads))
    imported, past = memory_bytes("VmRSS"), None
    model = AirLLM.from_pretrained(checkpoint, device="cpu", layer_shards_saving_path=shards)
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        drop_pages(shards)
        before, begun_s = read_bytes(), time.perf_counter()
        with torch.no_grad():
            past = None if request["first"] else past
            output = model(torch.tensor([request["tokens"]]), past_key_values=past, use_cache=True)
        seconds, past = time.perf_counter() - begun_s, output.past_key_values
        reply = {"seconds": seconds, "read_bytes": read_bytes() - before}
        reply |= {"likeliest": int(output.logits[0, -1].argmax()), "held_bytes": memory_bytes("VmHWM") - imported}
        answers.write(json.dumps(reply) + "\n")
    answers.flush()
    os._exit(0)  # its threads need not be waited for


def drop_pages(folder: str) -> None:
    """Remove a folder's files from the page cache."""
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(place, name), os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def memory_bytes(name: str) -> int:
    """A size of this process in memory, as /proc/self/status calls it."""
    with open("/proc/self/status") as lines:
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def read_bytes() -> int:
    """The bytes that this process has had read from disks so far."""
    with open("/proc/self/io") as counters:
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))


if __name__ == "__main__":
    main()
