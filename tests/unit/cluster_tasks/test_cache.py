"""What a node has of a repository's folder that is handed on in parts; tests/integration hands it on between nodes."""

from pathlib import Path

from cluster_tasks.cache import PART, Entry, Receiver, entries


def test_a_file_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    node, entry = Receiver(str(tmp_path)), Entry("models--a/blobs/x", 5)
    assert node.missing([entry]) == [entry]
    node.write(entry, 0, b"abc")
    assert node.missing([entry]) == [entry], "a part of it"
    assert [path.name for path in (tmp_path / "models--a/blobs").iterdir()] == [f"x{PART}"]
    node.write(entry, 3, b"de")
    assert node.missing([entry]) == []
    assert (tmp_path / entry.path).read_bytes() == b"abcde"


def test_a_file_of_another_size_is_missing_and_begun_anew(tmp_path: Path) -> None:
    node, entry = Receiver(str(tmp_path)), Entry("models--a/blobs/x", 2)
    node.write(Entry(entry.path, 4), 0, b"long")
    node.write(Entry(entry.path, 4), 0, b"lo")  # cut short, after which the node is given another file
    assert node.missing([entry]) == [entry]
    node.write(entry, 0, b"ok")
    assert (tmp_path / entry.path).read_bytes() == b"ok"


def test_links_come_after_the_files_that_they_lead_to(tmp_path: Path) -> None:
    folder = tmp_path / "one/models--a"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs/x").write_text("abc")
    (folder / "a-link").symlink_to("blobs/x")
    found = list(entries(folder))
    assert found == [Entry("models--a/blobs/x", 3), Entry("models--a/a-link", 0, "blobs/x")]
    node = Receiver(str(tmp_path / "two"))
    node.write(found[0], 0, b"abc")
    node.link(found[1])
    assert node.missing(found) == [] and (tmp_path / "two/models--a/a-link").read_text() == "abc"
