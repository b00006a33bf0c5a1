import json

from toolkit.evidence.meta import Meta, read_meta


def test_a_file_that_is_damaged_or_foreign_says_nothing(tmp_path):
    for content in ("", "{half", "[]", '{"another": 2}'):
        (tmp_path / "meta.json").write_text(content)
        assert read_meta(tmp_path) == Meta()


def test_commit_and_machine_in_words(tmp_path):
    found = {"git": "0123456789abcdef", "git_dirty": True, "cpu": "A CPU", "memory_gb": 24.6, "gpu": None}
    (tmp_path / "meta.json").write_text(json.dumps(found))
    meta = read_meta(tmp_path)
    assert (meta.commit, meta.machine) == ("0123456789 with uncommitted changes", "A CPU, 25 GB of memory, no GPU")
