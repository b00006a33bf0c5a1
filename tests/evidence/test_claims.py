import pytest

from toolkit import paths
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


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{k: v for k, v in RECORD.items() if k != "section"}], "section"),
        ([{k: v for k, v in RECORD.items() if k != "kind"}], "kind"),
        ([RECORD | {"kind": "guess"}], "guess"),
        ([RECORD | {"unit": "furlong"}], "furlong"),
        ([RECORD, RECORD], "x-1"),
        ([RECORD | {"valeu": 3}], "valeu"),
        ([RECORD | {"beside": "x-9"}], "x-1: beside is 'x-9'; expected an id of its figure"),
        ([RECORD | {"beside": "x-2"}, RECORD | {"id": "x-2", "figure": "toy/fig2"}], "x-1: beside is 'x-2'"),
        ([RECORD | {"stand_in": {"format": "csr"}}], "x-1: a stand_in"),
        ([RECORD | {"bound": "up_to"}], "x-1: a number `up_to`"),
        ([RECORD | {"same_as": "x-9"}], "x-1: same_as is 'x-9'"),
        ([RECORD | {"same_as": "x-2"}, RECORD | {"id": "x-2", "kind": "input"}], "x-1: same_as is 'x-2'"),
        ([RECORD | {"same_as": "x-2"}, RECORD | {"id": "x-2", "same_as": "x-1"}], "x-1: same_as is 'x-2'"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_record(publish, records, words):
    publish(*records)
    with pytest.raises(UserError, match=rf"toy\.yaml.*{words}"):
        claims.claims("toy")


def test_the_projects_own_claims_are_valid():
    files = sorted((paths.root() / "data" / "claims").glob("*.yaml"))
    assert files
    for file in files:
        assert len(claims.claims(file.stem))
