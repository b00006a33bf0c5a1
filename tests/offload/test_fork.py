"""A forked child has none of the threads that read for a model: it is refused at once, and opens the folder itself."""

import multiprocessing
import os

import pytest
import torch

from tests.offload.conftest import pruned
from toolkit.errors import UserError
from toolkit.offload.model import OffloadedModel
from toolkit.storage.neuron_packing import Neurons
from toolkit.storage.packing import Linears, pack_model

PROMPT = torch.tensor([[5, 17, 3, 44, 8, 1]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
LAYOUTS = {"layers": (Linears(("endor",)), "endor_packed"), "neurons": (Neurons(), None)}
SECONDS = 60  # after which it hangs


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_refused_and_can_open_for_itself(tmp_path, kind):
    layout, method = LAYOUTS[kind]
    pack_model(pruned("llama"), tmp_path / "packed", layout, "tiny")

    def child():
        for use in (lambda: model.generate(PROMPT, **GREEDY), lambda: model.model(PROMPT)):
            with pytest.raises(UserError, match=f"opened in process {os.getppid()}, which forked this one: open its"):
                use()
        model.close()
        with OffloadedModel.open(tmp_path / "packed", method) as own:
            assert torch.equal(own.generate(PROMPT, **GREEDY), text)

    with OffloadedModel.open(tmp_path / "packed", method) as model:
        text = model.generate(PROMPT, **GREEDY)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(SECONDS)
        process.kill()
        assert process.exitcode == 0
        assert torch.equal(model.generate(PROMPT, **GREEDY), text)
