import pandas as pd

from tests.notebook_code import functions_of
from toolkit.machines.machine import Links, Memory, Profile, Source, Storage

decoding_pays = functions_of("endor/tab_e2e").decoding_pays


def unpacked(decode_s: float, compute_s: float) -> pd.DataFrame:
    """A measured pass over 24 dense GB, half of it read at 3 GB/s: in 4 s."""
    seconds = {"read": 4.0, "decode": decode_s, "compute": compute_s}
    stages = pd.DataFrame({"stage": [*seconds], "seconds": [*seconds.values()], "nbytes": [12e9, 24e9, 24e9]})
    labels = {"method": "endor", "policy": "sequential", "mapping": "storage", "evidence": "measured"}
    return stages.assign(gb_s=stages["nbytes"] / 1e9 / stages["seconds"], **labels)


def theirs(decode_gb_s: float) -> Profile:
    dram = Memory("cpu", 1e10, 50.0, decode_gb_s={"endor": decode_gb_s})
    sources = {"dram.decode_gb_s.endor": Source("assumed", "a guess")}
    return Profile("theirs", "toy", None, Storage("disk", 1e12, 2.0), dram, None, Links(2.0), sources=sources)


def test_decoding_pays_by_hand():
    """Packed bytes are half of the dense ones: a disk of 3 GB/s asks for 6 GB/s either way."""
    found = decoding_pays(unpacked(decode_s=3.0, compute_s=0.75), theirs(decode_gb_s=3.0))
    assert found.loc["this-machine"].to_dict() == {
        "decode_gb_s": 8,
        "cpu_gb_s": 6.4,
        "read_gb_s": 3,
        "pays_sequential_gb_s": 6,
        "pays_pipelined_gb_s": 6,
        "pays": True,
        "hides": True,
        "basis": "measured",
    }
    assert found.loc["theirs", ["cpu_gb_s", "pays_sequential_gb_s"]].tolist() == [3, 4]
    assert found.loc["theirs", ["pays", "hides", "basis"]].tolist() == [False, False, "assumed"]


def test_decoding_hides_only_together_with_the_product():
    """Both run on the same cores: 3 s and 2 s are longer than a read of 4 s."""
    found = decoding_pays(unpacked(decode_s=3.0, compute_s=2.0), theirs(decode_gb_s=5.0))
    assert found["pays"].tolist() == [True, True]
    assert found["hides"].tolist() == [False, True]
