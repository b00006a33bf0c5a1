"""Files that keep a state, altered at random and signed again: predictors, adapters, kernels.

    HOSTILE_CASES=6000 python -m pytest tests/hostile -k states

Each case is refused with a `UserError` of one line that names the file, or what it holds can be used: it has finite
numbers only, and is saved and loaded again as the same. Kernels whose files cannot be used are compiled anew.
"""

import copy
import os
import pickle
import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from mutations import WILD_VALUES, alter_file, garbled, main, one_line
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from toolkit import tensor_files
from toolkit.errors import UserError
from toolkit.kernels.engine import compiled
from toolkit.models import adapters
from toolkit.models.cutting import thresholds_of
from toolkit.models.ffn import FFN
from toolkit.predictors import STORED, load_predictors, save_predictors
from toolkit.predictors.low_rank import LowRank
from toolkit.predictors.own_weights import FewBits, Gate
from toolkit.predictors.predictor import Context
from toolkit.recovery.distillation import fresh

HIDDEN, NEURONS, LAYERS, WORDS = 32, 48, 2, ["1", "2", *STORED, "relu", "silu"]


def model() -> nn.Module:
    """A tiny decoder, the same each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=LAYERS, initializer_range=0.2)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def expect_finite(tensors: Iterable[torch.Tensor]) -> None:
    """No NaN and no infinity got through."""
    assert all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())


def expect_same(one: Path, other: Path) -> None:
    """Two files hold the same."""
    (about, tensors), (said, found) = (tensor_files.read(path, lambda metadata: None) for path in (one, other))
    assert about == said
    assert all(torch.equal(tensors[name], found[name]) for name in tensors)


class State(ABC):
    """A kind of file: a sound one, and what uses it."""

    def __init__(self, folder: Path):
        self.path = folder / "state"

    @abstractmethod
    def make(self, rng: random.Random) -> None:
        """Write a sound file."""

    def alter(self, rng: random.Random) -> None:
        """Alter it."""
        alter_file(self.path, rng, WORDS)

    @abstractmethod
    def use(self) -> None:
        """Load it and use what it holds. Raises `UserError` if that is refused."""

    def attack(self, rng: random.Random) -> str:
        """Try a case, and say how it ended."""
        self.make(rng)
        self.alter(rng)
        try:
            self.use()
        except UserError as error:
            one_line(error, names=str(self.path))
            return "refused"
        return "used"


class PredictorFiles(State):
    """Predictors of every kind that a file keeps, and a layer without one."""

    @cached_property
    def kinds(self) -> list:
        """One of each, with a gate and without."""
        generator = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        up, gate = nn.Linear(HIDDEN, NEURONS), nn.Linear(HIDDEN, NEURONS, bias=False)
        down = nn.Linear(NEURONS, HIDDEN)
        return [
            LowRank(0.0, draw(4, HIDDEN).bfloat16(), draw(NEURONS, 4).bfloat16(), draw(NEURONS).bfloat16()),
            Gate(0.1, draw(NEURONS, HIDDEN), draw(NEURONS).abs(), "silu"),
            FewBits.of(FFN.of(up, down), "relu", 0.2),
            FewBits.of(FFN.of(gate, down, gate), "silu", 0.2),
        ]

    def make(self, rng):
        save_predictors(self.path, "toy", [*rng.sample(self.kinds, LAYERS), None])

    def use(self):
        found = load_predictors(self.path, "toy")
        for layer, predictor in enumerate(found):
            if predictor is not None:
                expect_finite([*predictor.tensors.values(), torch.tensor(predictor.limit, dtype=torch.float64)])
                neurons, hidden = predictor.shape
                ones = predictor.predict(Context(layer, (torch.ones(hidden),)))
                assert predictor.scores(torch.ones(2, hidden)).shape == (2, neurons)
                assert not len(ones) or 0 <= ones[0] <= ones[-1] < neurons
        save_predictors(again := self.path.with_name("again"), "toy", found)
        save_predictors(other := self.path.with_name("other"), "toy", load_predictors(again, "toy"))
        expect_same(again, other)


class AdapterFiles(State):
    """Adapters of a model."""

    @cached_property
    def base(self) -> nn.Module:
        """The dense model."""
        return model()

    def make(self, rng):
        lows = fresh(self.base, 2, 2).differences
        lows = {name: adapters.LowRankDifference(low.left + 0.01, low.right) for name, low in lows.items()}
        found = adapters.Adapters(lows, torch.tensor([0.1, 0.3]), rng.choice(["relu", None]))
        adapters.save(self.path, self.base, found, {"model": "toy"})

    def use(self):
        merged, before = copy.deepcopy(self.base), self.base.state_dict()
        try:
            adapters.merge(merged, self.path)
        except UserError:
            assert all(torch.equal(value, before[name]) for name, value in merged.state_dict().items())
            raise
        assert thresholds_of(merged) is not None
        expect_finite(merged.state_dict().values())


class Kernels(State):
    """Compiled kernels. Whatever lies in their place, they give the same results."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        os.environ["TOOLKIT_CACHE_DIR"] = str(folder)

    @staticmethod
    def kernel(number: int):
        """One of two kernels, as a process that has just begun has it."""
        return compiled.compiled(_twice if number else _thrice)

    @cached_property
    def sound(self) -> dict[int, tuple[Path, bytes]]:
        """The files of both kernels."""
        before, found = set(), {}
        for number in (0, 1):
            assert self.kernel(number)(2.0) == 6.0 - 2 * number
            (new,) = {*compiled._folder().glob("_*-*")} - before
            before.add(new)
            found[number] = new, new.read_bytes()
        return found

    def make(self, rng):
        for path, content in self.sound.values():
            path.write_bytes(content)

    def alter(self, rng):
        path, content = self.sound[0]
        kind = rng.choice(["garbled", "value", "other"])
        if kind == "garbled":
            path.write_bytes(garbled(content, rng))
        elif kind == "other":
            path.write_bytes(self.sound[1][1])
        else:
            path.write_bytes(compiled.signed(path, pickle.dumps(rng.choice(WILD_VALUES))))

    def use(self):
        kernel = self.kernel(0)
        assert kernel(2.0) == 6.0
        assert kernel(np.float64(3.0)) == 9.0


def _twice(x):
    return x + x


def _thrice(x):
    return x + x + x


_twice.__module__ = _thrice.__module__ = compiled.__name__  # kernels of other packages are not kept

# of thirty cases, so many are of a kind
STATES = {PredictorFiles: 13, AdapterFiles: 16, Kernels: 1}


class Cases:
    """Kinds of files in turn."""

    def __init__(self, folder: Path):
        self.kinds = {kind: kind(folder) for kind in STATES}

    def __call__(self, case: int, rng: random.Random) -> str:
        """Try a case, and say how it ended."""
        (kind,) = rng.choices([*STATES], [*STATES.values()])
        return f"{kind.__name__} {self.kinds[kind].attack(rng)}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        main(Cases(Path(place)))
