import pandas as pd
import pytest

from toolkit.machines.hardware import profile, profiles
from toolkit.machines.null_model import links_only, with_null_model
from toolkit.models.workload import Workload
from toolkit.papers.endor.tables import operation_table

MATRIX_GB = 2 * 9216 * 36864 / 1e9


@pytest.fixture(scope="module")
def tables() -> list[pd.DataFrame]:
    return with_null_model(operation_table, profile("endor-rtx4080"), Workload("opt-66b"), ["fc1"])


def test_bytes_over_links_are_all_its_time(tables):
    """Dense fc1: 0.6795 GB at 2.548 GB/s into DRAM, at 10.19 GB/s to the GPU."""
    null = tables[1].query("method == 'dense' and path == 'host'").set_index("stage")["seconds"]
    assert null["read"] == pytest.approx(MATRIX_GB / 2.548)
    assert null["copy"] == pytest.approx(MATRIX_GB / 10.19)
    assert null["total"] == pytest.approx(null["read"] + null["copy"])
    assert null["compute"] == 0


def test_every_profile_has_one():
    for machine in profiles().values():
        null = links_only(machine)
        assert null.links.storage_to_dram_gb_s == machine.links.storage_to_dram_gb_s
        assert (null.links.storage_to_dram_fixed_s, null.software, null.device.bandwidth_gb_s) == (
            0,
            None,
            float("inf"),
        )
        assert not machine.storage or null.storage.read_gb_s(4096, 32) == pytest.approx(machine.storage.bandwidth_gb_s)
        assert (null.dram is None) == (machine.dram is None)
