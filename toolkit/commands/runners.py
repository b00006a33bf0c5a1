"""How `run` runs a folder, by what it holds. Nothing here imports torch, which takes seconds, before all is checked."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.commands.compare import compare
from toolkit.commands.text import generate, generate_timed, opened
from toolkit.errors import UserError
from toolkit.offload import early_checks

Budgets = Mapping[str, int | None]


@dataclass(frozen=True)
class Runner:
    """How folders of one kind are run.

    `absent` gives the options that the kind does not have, as they are typed, and whether they were given; `why` says
    what the folder is, and what to do. `run` gets the kind, checks what needs no torch to be seen, imports what it
    needs, and prints the text as it comes.
    """

    run: Callable[[Namespace, str, Budgets], None]
    absent: Callable[[Namespace], Mapping[str, object]] = lambda options: {}
    why: str = ""

    def __call__(self, options: Namespace, kind: str, budgets: Budgets) -> None:
        """Check the options and run. Raises `UserError` for an option that this kind of folder does not have."""
        for name in [name for name, value in self.absent(options).items() if value]:
            raise UserError(f"{name}: {options.folder} {self.why}")
        self.run(options, kind, budgets)


def _run_checkpoint(options: Namespace, kind: str, budgets: Budgets) -> None:
    from toolkit.interchange.reading import load_dense_model, load_tokenizer

    model, tokenizer = load_dense_model(options.folder), load_tokenizer(options.folder)
    generate(options, model, tokenizer, model.config)


CHECKPOINT = Runner(
    _run_checkpoint,
    lambda options: {
        "--compare": options.compare,
        "--draft": options.draft,
        "--format": options.format,
        "--dram": options.dram,
        "--device-memory": options.device_memory,
        "--weights packed": options.weights == "packed",
        "--device": options.device != "cpu",
    },
    "is a checkpoint, which is loaded whole on the CPU; pack endor for it",
)


def _held_neurons(model) -> str:
    stores = [ffn.store for ffn in model.strategy.ffns]
    share = sum(store.num_used for store in stores) / sum(store.residency.units for store in stores)
    hot = sum(int(mask.sum()) for mask in model.strategy.hot) / sum(map(len, model.strategy.hot))
    on_device = f"{hot:.0%} of the neurons on the device, " if model.device.tier == "device" else ""
    return f"{on_device}{share:.0%} of the neurons in DRAM ({model.mode} reads); {_held_bytes(model)}"


def _held_bytes(model) -> str:
    held = [f"{budget.used_bytes / 1e6:.1f} MB {budget.tier}" for budget in model.budgets.values() if budget.used_bytes]
    return f"{' and '.join(held)} held"


def _held_experts(model) -> str:
    caches = [ffn.slots.cache for ffn in model.strategy.ffns]
    room = sum(cache.slots for cache in caches) / sum(cache.experts for cache in caches)
    needed, late = (sum(getattr(cache.of_experts, name) for cache in caches) for name in ("needed", "late"))
    held = model.budgets["dram"].used_bytes / 1e6
    hits = f"{1 - late / max(needed, 1):.0%} of the experts were there when needed"
    return f"DRAM for {room:.0%} of the experts ({model.mode} reads), {hits}; {held:.1f} MB DRAM held"


def _of_parts(held: Callable[..., str], holds: str, *but: str) -> Runner:
    """The runner of folders whose parts are read as tokens need them. They have no option of layers but some."""

    def run(options: Namespace, kind: str, budgets: Budgets) -> None:
        with opened(options, None, budgets) as (model, draft):
            generate_timed(options, model, held, draft)

    def absent(options: Namespace) -> Mapping[str, object]:
        return {name: value for name, value in _of_whole_layers(options).items() if name not in but}

    return Runner(run, absent, f"holds {holds}, which the CPU reads and uses; leave it out")


def _of_whole_layers(options: Namespace) -> Mapping[str, object]:
    """Options that only layers that are streamed whole have."""
    return {
        "--compare": options.compare,
        "--weights": options.weights,
        "--device-memory": options.device_memory,
        "--device": options.device != "cpu",
        "--reader kvikio": options.reader == "kvikio",
        "--policy": options.policy != "pipelined",
    }


def _run_layers(options: Namespace, form: str, budgets: Budgets) -> None:
    if options.device == "cpu" and budgets["dram_bytes"] is not None:
        early_checks.check_dram(options.folder, form, options.policy, budgets["dram_bytes"])
    if options.compare:
        compare(options, form, budgets)
        return
    with opened(options, lambda: method_of(form, options.weights, options.device), budgets) as (model, draft):
        generate_timed(options, model, _held_layers, draft)


def method_of(form: str, weights: str | None, device: str) -> str:
    """The name that `toolkit.policies.methods` has for it. Raises `UserError` for a format without a product."""
    from toolkit.formats import READABLE
    from toolkit.policies.methods import PACKED

    if weights is None:
        weights = "packed" if form in READABLE and READABLE[form].multiplied_packed and device == "cpu" else "decoded"
    if weights == "decoded":
        return form
    with_product = [name for name, known in READABLE.items() if known.has_matvec]
    if form not in with_product:
        raise UserError(
            f"--weights packed: {form} has no product of its own, only {', '.join(with_product)}; leave --weights out"
        )
    return f"{form}{PACKED}"


def _held_layers(model) -> str:
    where = model.placement
    on_device = f"{where.device} layers on the device, " if model.device.tier == "device" else ""
    tiers = f"{on_device}{where.dram} layers in DRAM, {where.storage} on disk ({model.mode} reads)"
    return f"{tiers}; {_held_bytes(model)}"


LAYERS = Runner(_run_layers)


# by the kind of folder: the variant that it holds, as in `STRATEGIES` of `toolkit.offload.model`; others hold layers
RUNNERS: dict[str, Runner] = {
    "checkpoint": CHECKPOINT,
    "bundled": _of_parts(_held_neurons, "neurons", "--device", "--device-memory"),
    "experts": _of_parts(_held_experts, "experts"),
}


def kind_of(folder: Path, form: str | None = None) -> str:
    """What a folder holds: "checkpoint", or the variant that is run.

    Raises `UserError` for a folder that nothing runs, or a format that it does not have.
    """
    if (folder / "config.json").is_file() and not (folder / "index.json").is_file():
        return "checkpoint"
    return early_checks.format_to_run(folder, form)
