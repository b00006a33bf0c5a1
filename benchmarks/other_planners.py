"""What other tools answer to the questions of the map in `beyond/planner`: does a model fit, in which form, how fast?

    python -m venv tools
    tools/bin/pip install llmfit moe-fit sparkfit hf-mem modelinfo-cli llmscan modelscout-llm
    python benchmarks/other_planners.py tools/bin

It asks each tool by its own command line, without a network, and writes `data/planners/answers.csv`: an answer a row,
with the command behind it. These are the tools' answers; nothing is measured here. Machines are described as far as a
tool's options go. moe-fit reads the index of a GGUF file, so a file is made that has nothing but an index.
"""

import argparse
import json
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import pandas as pd

from toolkit.machines.hardware import profile
from toolkit.machines.machine import Profile
from toolkit.models.architectures import ARCHITECTURES, ModelShape
from toolkit.planner.elsewhere import OF_DRAM, answers_file

MACHINES = ("endor-rtx4080", "flash-m1-max", "hermes-rtx4090", "corm-rtx3090ti", "phone-like")
MODELS = {  # as llmfit names them
    "opt-6.7b": "facebook/opt-6.7b",
    "opt-30b": "facebook/opt-30b",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "NousResearch/Llama-2-70b-hf",
    "falcon-40b": "tiiuae/falcon-40b",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "deepseek-moe-16b": "deepseek-ai/deepseek-moe-16b-base",
}
GIB, CONTEXT, SECONDS = 2**30, 512, 60
REFUSALS = {  # a question that shows why the tool does not answer here
    "hf-mem": ["hf-mem", "--model-id", MODELS["llama2-7b"]],
    "modelinfo-cli": ["modelinfo", MODELS["llama2-7b"]],
    "modelscout-llm": ["modelscout", "plan", "llama 2 7b"],
    "llmscan": ["llmscan", "explain", "llama2-7b"],
}


class Tools:
    """The commands of an environment, and the versions of its packages."""

    def __init__(self, folder: Path):
        self.folder = folder
        packages = distributions(path=[str(next((folder.parent / "lib").glob("python*/site-packages")))])
        self.versions = {package.metadata["Name"].lower(): package.version for package in packages}

    def ask(self, *command: object) -> subprocess.CompletedProcess:
        """What a command prints."""
        program, *options = map(str, command)
        environment = {"NO_COLOR": "1", "COLUMNS": "300", "PATH": "/usr/bin:/bin", "HOME": str(self.folder.parent)}
        settings = {"env": environment, "cwd": self.folder.parent, "timeout": SECONDS}  # moe-fit writes beside it
        return subprocess.run([str(self.folder / program), *options], **settings, capture_output=True, text=True)

    def row(self, tool: str, asked: list, **answer: object) -> dict[str, object]:
        """An answer, with its tool, the version and the command; temporary folders are left out of the command."""
        words = [Path(word).name if isinstance(word, Path) else str(word) for word in asked]
        return {"tool": tool, "version": self.versions[tool], **answer, "command": " ".join(words)}


def llmfit(tools: Tools, model: str, machine: Profile, folder: Path) -> dict[str, object]:
    """It takes memory sizes of a machine with a GPU, and a whole profile of one with a single memory."""
    dram = machine.dram.capacity_bytes / GIB
    if machine.unified:
        rates = dict.fromkeys(("gpu_memory_bandwidth_gbps", "ddr_bandwidth_gbps"), machine.dram.bandwidth_gb_s)
        hardware = {"total_ram_gb": round(dram, 2), "unified_memory": True, **rates}
        file = folder / f"{machine.id}.json"
        file.write_text(json.dumps({"schema_version": 1, "name": machine.id, "hardware": hardware}))
        where = ["--profile", file]
    else:
        where = ["--memory", f"{machine.device.capacity_bytes / GIB:.0f}G", "--ram", f"{dram:.0f}G"]
    command = ["llmfit", "--max-context", CONTEXT, *where, "info", MODELS[model], "--json"]
    found = json.loads(tools.ask(*command).stdout)["models"][0]
    fits = found["fit_level"] != "Too Tight"
    speed = dict.fromkeys(("low_per_s", "high_per_s"), found["estimated_tps"] if fits else None)
    answer = {"fits": fits, "form": found["best_quant"], "memory_gb": found["memory_required_gb"], **speed}
    return tools.row("llmfit", command, **answer, answer=f"{found['fit_level']}, {found['run_mode']}")


def sparkfit(tools: Tools, model: str, machine: Profile, folder: Path) -> dict[str, object] | None:
    """It plans for one memory, so machines with a GPU of their own are not asked about."""
    if not machine.unified:
        return None
    shape = ARCHITECTURES[model]
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "kv-heads": shape.key_value_heads}
    weights = sum(shape.parameters.values())
    sizes |= {"head-dim": shape.head_size, "params": f"{weights / 1e9:.2f}", "context": CONTEXT}
    if shape.experts:
        idle = (shape.experts - shape.experts_per_token) / (shape.experts + shape.shared_experts)
        sizes["active"] = f"{(weights - idle * shape.parameters['experts']) / 1e9:.2f}"
    total = machine.dram.capacity_bytes / 1e9
    sizes |= {"total-mem": total, "bandwidth": machine.dram.bandwidth_gb_s}
    sizes |= {
        "os-reserve": f"{(1 - OF_DRAM) * total:.2f}",
        "framework": 0,
    }  # what our plans leave, for the same question
    command = ["sparkfit", "advise", "--json"]
    for name, value in sizes.items():
        command += [f"--{name}", value]
    ways = json.loads(tools.ask(*command).stdout)
    best = next((way for way in ways if way["fits"]), ways[-1])
    speed = dict.fromkeys(("low_per_s", "high_per_s"), best["tok_s"] if best["fits"] else None)
    form = best["quant"].upper()
    answer = {"fits": best["fits"], "form": form, "memory_gb": best["used_gb"], **speed}
    return tools.row("sparkfit", command, **answer, answer=f"{best['headroom_gb']:.1f} GB left")


def moe_fit(tools: Tools, model: str, machine: Profile, folder: Path) -> dict[str, object] | None:
    """It plans for mixtures of experts, by the memories and the disk."""
    shape = ARCHITECTURES[model]
    if not shape.experts:
        return None
    file = folder / f"{model}-q4_0.gguf"
    write_index(shape, file)
    graphics = 0 if machine.unified else machine.device.capacity_bytes / 1e9
    command = ["moefit", "plan", file, "--json", "--context", CONTEXT, "--ram-gb", machine.dram.capacity_bytes / 1e9]
    command += ["--vram-gb", graphics, "--disk", "."]
    read = machine.links.storage_to_dram_gb_s
    command += ["--read-gb-s", read] if read else ["--no-measure"]
    found = json.loads(tools.ask(*command).stdout)
    plan = found.get("placement", found)
    speed = [
        each if each and each < float("inf") else None for each in plan["tokens_per_second_estimate"] or (None,) * 2
    ]
    told = plan["reason"] or f"reads {plan['streamed_per_token_gb']:.2f} GB a token from the disk"
    answer = {"fits": plan["fits"], "form": "Q4_0", "memory_gb": plan["model_gb"]}
    return tools.row("moe-fit", command, **answer, low_per_s=speed[0], high_per_s=speed[1], answer=told)


def write_index(shape: ModelShape, file: Path) -> None:
    """A GGUF file of Q4_0 tensors without the tensors: sizes and names alone."""
    writer, kind = gguf.GGUFWriter(file, "llama"), gguf.GGMLQuantizationType.Q4_0
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_value_heads)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.experts_per_token)
    matrices = {"token_embd": (shape.vocabulary, shape.hidden), "output": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        matrices |= {f"blk.{layer}.attn_{name}": size for name, size in shape.attention.items()}
        width, kinds = (shape.dense_ffn, "") if layer < shape.dense_layers else (shape.ffn, "_exps")
        sizes = {"gate": (width, shape.hidden), "up": (width, shape.hidden), "down": (shape.hidden, width)}
        for name, size in sizes.items():
            stacked = (shape.experts, *size) if kinds else size
            matrices[f"blk.{layer}.ffn_{name}{kinds}"] = stacked
            if kinds and shape.shared_experts:
                rows, columns = (each * shape.shared_experts if each == width else each for each in size)
                matrices[f"blk.{layer}.ffn_{name}_shexp"] = (rows, columns)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    for name, size in matrices.items():
        *others, columns = size
        writer.add_tensor_info(f"{name}.weight", size, "float32", prod(others) * columns // block * nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def answers(tools: Tools, folder: Path) -> Iterator[dict[str, object]]:
    """Every answer to every question that a tool can be asked, then why the others give none."""
    for tool in (llmfit, moe_fit, sparkfit):
        for name in MACHINES:
            for model in MODELS:
                found = tool(tools, model, profile(name), folder)
                if found is not None:
                    yield found | {"model": model, "profile": name}
    for tool, command in REFUSALS.items():
        told = tools.ask(*command)
        lines = [line.strip(" │") for line in (told.stderr + told.stdout).splitlines() if any(map(str.isalpha, line))]
        yield tools.row(tool, command, answer=lines[-1])


def main() -> None:
    """Ask, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", type=Path, help="the folder of the tools' commands")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        table = pd.DataFrame(answers(Tools(options.tools.absolute()), Path(folder)))
    columns = ["tool", "version", "model", "profile", "fits", "form", "memory_gb", "low_per_s", "high_per_s"]
    table[[*columns, "answer", "command"]].to_csv(answers_file(), index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
