"""Which files were taken: each once, whatever the times and the stops; told in bounded bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.connectors.sources import file_listing
from actors.connectors.sources.file_listing import (
    RECENT_MAX,
    FoundFile,
    IngestedFiles,
    ListingScope,
    allowed,
    allowed_roots,
    first_batch,
    hash_of,
    scan,
    unchanged,
)
from actors.connectors.sources.source import POSITION_BYTES_MAX
from actors.runtime.errors import InvalidUsage
from actors.runtime.settings import Settings
from suite_lanes import examples  # type: ignore[import-not-found]


def file(name: str, modified: int, changed: int | None = None, size: int = 1) -> FoundFile:
    at = modified if changed is None else changed
    return FoundFile(modified, hash_of(name), name, f"/in/{name}", size, at)


def place(folder: Path, *, roots: Path | None = None, **more: object) -> ListingScope:
    return ListingScope(str(folder), (str(roots or folder),), **more)  # type: ignore[arg-type]


def put(folder: Path, name: str, at: int, text: str = "x") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(at, at))
    return path


def names(files: object) -> list[str]:
    return [found.name for found in files]  # type: ignore[attr-defined]


@given(st.data())
@settings(max_examples=examples(150))
def test_each_file_is_taken_once_and_none_is_lost_unsaid(data: st.DataObject) -> None:
    """Against a model that remembers all: files come with any time, are taken in batches, and the
    position goes through its text between them."""
    recent_max = data.draw(st.integers(2, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_listing, "RECENT_MAX", recent_max)
        folder: list[FoundFile] = []
        taken, looked, done, late = IngestedFiles(), 0, set[str](), set[str]()
        for round_ in range(data.draw(st.integers(1, 8))):
            for number in range(data.draw(st.integers(0, 4))):
                modified = data.draw(st.integers(0, 20))
                # An inode changes when its file comes in: later than any look before.
                folder.append(file(f"{round_}-{number}", modified, 100 + round_))
            verdicts = {found.name: taken.verdict(found, looked) for found in folder}
            looked = max([looked, *(found.inode_changed_ns for found in folder)])
            late |= {name for name, verdict in verdicts.items() if verdict == "late"}
            new = sorted(found for found in folder if verdicts[found.name] == "new")
            assert not {found.name for found in new} & (done | late)
            batch = new[: data.draw(st.integers(0, len(new)))]
            taken = taken.plus(batch, looked)
            done |= {found.name for found in batch}
            if data.draw(st.booleans()):
                taken = IngestedFiles.of(taken.position())
            assert len(taken.recent) <= recent_max
            pending = {found.name for found in new} - done
            told = done | late | pending
            assert told == {found.name for found in folder}


def test_a_position_is_bounded() -> None:
    taken = IngestedFiles().plus([file(f"{n:05}" * 40, n) for n in range(3 * RECENT_MAX)], 1 << 62)
    text = taken._replace(exports=("rows",)).position()
    assert len(text.encode()) <= POSITION_BYTES_MAX
    assert IngestedFiles.of(text) == taken._replace(exports=("rows",))
    assert taken.verdict(file("new", 10 * RECENT_MAX), 0) == "new"
    assert taken.verdict(file("old", 0, changed=5), 5) == "taken"
    assert taken.verdict(file("old", 0, changed=6), 5) == "late"


def test_what_was_taken_and_changed_is_told() -> None:
    taken = IngestedFiles().plus([file("a", 5)], 5)
    assert taken.verdict(file("a", 5), 5) == "taken"
    assert taken.verdict(file("a", 7), 5) == "changed"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"low_ns":"x"}'])
def test_a_position_that_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage, match="invalid position"):
        IngestedFiles.of(text)
    broken = IngestedFiles().plus([file("a", 5)], 5).position().replace('"recent":"', '"recent":"A')
    with pytest.raises(InvalidUsage, match="invalid position"):
        IngestedFiles.of(broken)


def test_a_folder_is_listed_in_order_without_what_is_no_data(tmp_path: Path) -> None:
    for number, name in enumerate(["c.csv", "a.csv", "b.json", ".hidden.csv", "_part.csv"]):
        put(tmp_path, name, 100 - number)
    put(tmp_path, "below/d.csv", 7)
    put(tmp_path, "_delta_log/e.csv", 8)
    (tmp_path / "folder.csv").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    found = scan(place(tmp_path, pattern="*.csv"), IngestedFiles(), 0)
    assert names(found.new) == ["a.csv", "c.csv"]
    deep = scan(place(tmp_path, pattern="*.csv", recursive=True), IngestedFiles(), 0)
    assert names(deep.new) == ["below/d.csv", "a.csv", "c.csv"]
    assert found.looked_ns >= max(f.inode_changed_ns for f in found.new)


def test_links_count_by_where_they_lead(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    put(inside, "real.csv", 1)
    secret = put(outside, "secret.csv", 2)
    (inside / "link.csv").symlink_to(secret)
    (inside / "fine.csv").symlink_to(inside / "real.csv")
    (inside / "gone.csv").symlink_to(tmp_path / "nothing")
    (inside / "folder").symlink_to(outside)
    found = scan(place(inside, recursive=True), IngestedFiles(), 0)
    assert sorted(names(found.new)) == ["fine.csv", "real.csv"]
    assert sorted(found.refused) == ["folder", "gone.csv", "link.csv"]


def test_only_folders_below_the_roots_are_allowed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "database").mkdir()
    roots = allowed_roots(Settings(source_dirs=f"{data}{os.pathsep}{tmp_path / 'more'}"))
    assert allowed(str(data), roots) == str(data)
    assert allowed(str(data / "x" / ".."), roots) == str(data)
    (data / "up").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "database", data / "..", data / "up", Path("/etc/passwd")):
        with pytest.raises(InvalidUsage, match="source_dirs"):
            allowed(str(path), roots)
    with pytest.raises(InvalidUsage, match="source_dirs"):
        allowed(str(data), allowed_roots(Settings()))


def test_a_file_that_changes_is_seen(tmp_path: Path) -> None:
    first, second = put(tmp_path, "a", 5), put(tmp_path, "b", 6)
    files = scan(place(tmp_path), IngestedFiles(), 0).new
    assert unchanged(files) is None
    put(tmp_path, "b", 6, "longer")
    assert unchanged(files) == str(second)
    first.unlink()
    assert unchanged(files) == str(first)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5), st.integers(1, 100))
def test_a_batch_has_at_least_one_file_and_no_more_than_fit(
    sizes: list[int], files_max: int, bytes_max: int
) -> None:
    files = [file(str(n), n, size=size) for n, size in enumerate(sizes)]
    batch = first_batch(files, files_max, bytes_max)
    assert list(batch) == files[: len(batch)]
    assert min(1, len(files)) <= len(batch) <= files_max
    assert len(batch) <= 1 or sum(found.size for found in batch) <= bytes_max
    if len(batch) < min(files_max, len(files)):
        assert sum(found.size for found in files[: len(batch) + 1]) > bytes_max
