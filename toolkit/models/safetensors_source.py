"""The tensors of a folder in Hugging Face's layout, a few at a time, by the names and in the forms of transformers.

transformers has rules by which the tensors of files become those of its models: other names, experts that become one
tensor. Its own loader applies them here to the tensors of one block.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from toolkit import hub
from toolkit.errors import UserError
from toolkit.models.on_demand import TensorSource, block_prefixes, put


class SafetensorsSource(TensorSource):
    """The tensors of safetensors files in a model's types. `outline` is tied as the files are.

    `missing` and `unexpected` are the names that the files lack, and those that the model has no place for. Raises
    `UserError` for tensors of other shapes than the model's.
    """

    def __init__(self, files: Collection[str | Path], outline: nn.Module, dtype: torch.dtype):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        rules = get_model_conversion_mapping(outline, None, None)
        plan = outline._get_dtype_plan(dtype)
        self._settings = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=rules)
        self._blocks = [f"{prefix}." for prefix in block_prefixes(outline)]
        self.outline, self._files, shapes = outline, {}, {}
        self._names = outline.state_dict()
        for path in files:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    self._files[key] = path
                    shapes[key] = torch.empty_like(file.get_tensor(key), device="meta")  # a view that nobody reads
        self._targets = {key: self._target(key) for key in shapes}
        self._keys: dict[str, list[str]] = {}
        for key, target in self._targets.items():
            self._keys.setdefault(self._group(target), []).append(key)
        self.missing, self.unexpected = self._tried(shapes)

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """These tensors: views of the files, unless a rule or another type makes new ones."""
        groups = dict.fromkeys(map(self._group, names))
        keys = [key for group in groups for key in self._keys.get(group, ()) if self._targets[key] in names]
        before = self.outline.state_dict(keep_vars=True)
        self._fill(self.outline, {key: self._piece(key) for key in keys}, self._settings)
        filled = self.outline.state_dict(keep_vars=True)
        put(self.outline, {name: before[name] for name in names})
        return {name: filled[name].detach() for name in names}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Some rows of a matrix."""
        key = next(key for key in self._keys[self._group(name)] if self._targets[key] == name)
        return self._piece(key)[start:stop].to(self.outline.get_parameter(name).dtype)

    def _piece(self, key: str):
        # opened anew: memory that a caller has changed goes with the last tensor of its opening
        return safe_open(self._files[key], framework="pt").get_slice(key)

    def _group(self, target: str) -> str:
        """The block that a tensor belongs to; its own name outside of blocks."""
        return next((block for block in self._blocks if target.startswith(block)), target)

    def _target(self, key: str) -> str:
        """The name of the (first) tensor that one of the files becomes, as transformers' loader finds it."""
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        names, prefix = self._names, self.outline.base_model_prefix
        rules = [
            [it for it in self._settings.weight_mapping if isinstance(it, kind)]
            for kind in (WeightRenaming, WeightConverter)
        ]
        target = rename_source_key(key, rules[0], rules[1], prefix, names)[0]
        if target not in names and key in names:
            target = rename_source_key(key, [], [], prefix, names)[0]
        return target

    def _fill(self, model: nn.Module, pieces: Mapping[str, object], settings: object):
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        with hub.quiet():
            return convert_and_load_state_dict_in_model(model, dict(pieces), settings)[0]

    def _tried(self, shapes: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """The names of tensors that are missing and unexpected, from a trial without memory."""
        model = copy.deepcopy(self.outline)
        report = self._fill(model, shapes, replace(self._settings, device_map={"": "meta"}))
        if report.mismatched_keys:
            name, has, wants = min(report.mismatched_keys)
            raise UserError(f"its tensor {name} is {_told(has)}, and its config.json describes {_told(wants)}")
        self._untie(set(report.missing_keys))
        model.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
        model._adjust_missing_and_unexpected_keys(report)
        return sorted(report.missing_keys), sorted(report.unexpected_keys)

    def _untie(self, missing: set[str]) -> None:
        """Give tied tensors places of their own where the files hold each, with different values."""
        tied = self.outline.all_tied_weights_keys
        for one, other in list(tied.items()):
            if missing.isdisjoint((one, other)):
                pair = [self.tensors([name])[name] for name in (one, other)]
                if not torch.equal(*pair):
                    put(self.outline, {one: torch.empty_like(pair[0], device="meta")})
                    del tied[one]


def _told(shape: Collection[int]) -> str:
    return " × ".join(map(str, shape))
