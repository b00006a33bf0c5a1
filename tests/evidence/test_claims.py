import pytest

from toolkit.errors import UserError
from toolkit.evidence import claims

RECORD = {
    "id": "x-1",
    "figure": "toy/fig1",
    "kind": "prediction",
    "quantity": "size over dense",
    "value": 0.5,
    "unit": "ratio",
    "conditions": "half",
    "section": "4.1",
}


def test_a_broken_file_is_refused_with_its_name_and_record(publish):
    for records, words in (
        ([{name: value for name, value in RECORD.items() if name != "section"}], "section"),
        ([RECORD | {"kind": "guess"}], "guess"),
        ([RECORD, RECORD], "x-1"),
        ([RECORD | {"valeu": 3}], "valeu"),
        ([RECORD | {"beside": "x-2"}, RECORD | {"id": "x-2", "figure": "toy/fig2"}], "x-1: beside is 'x-2'"),
        ([RECORD | {"stand_in": {"format": "csr"}}], "x-1: a stand_in"),
        ([RECORD | {"bound": "up_to"}], "x-1: a number `up_to`"),
        ([RECORD | {"same_as": "x-2"}, RECORD | {"id": "x-2", "kind": "input"}], "x-1: same_as is 'x-2'"),
    ):
        publish(*records)
        with pytest.raises(UserError, match=rf"toy\.yaml.*{words}"):
            claims.claims("toy")
