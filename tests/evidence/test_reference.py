from toolkit import paths
from toolkit.evidence.reference import BEGIN, END, readme_tables, reference_dir


def test_readmes_tables_are_those_of_kept_results():
    text = (paths.root() / "README.md").read_text(encoding="utf-8")
    shown = text.split(BEGIN)[1].split(END)[0].strip()
    assert shown in [readme_tables(folder) for folder in reference_dir().iterdir()]
