"""The distribution: the wheel that is built, what it says of itself, and by which name."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from actors.testing.patience import PROGRAM_S

NAME = "penstock-views"
EXTRAS = re.compile(r"pip install '?([\w.-]+)\[([\w,]+)\]'?")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel of this tree, without a network."""
    root = Path(__file__).resolve().parents[2]
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=PROGRAM_S)
    (made,) = folder.iterdir()
    assert made.name.startswith(f"{NAME.replace('-', '_')}-")
    return zipfile.ZipFile(made)


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile, root: Path) -> None:
    found = metadata_of(wheel)
    assert found["Name"] == NAME
    assert found["Author"]
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE"]
    assert "Programming Language :: Python :: 3.11" in found.get_all("Classifier", [])
    # a file of readers' machines is no URL: only what all can open may stand there
    urls = [text.partition(", ")[2] for text in found.get_all("Project-URL", [])]
    assert all(url.startswith("https://") for url in urls)
    assert str(found.get_payload()) == (root / "README.md").read_text()
    (licence,) = [name for name in wheel.namelist() if name.endswith("licenses/LICENSE")]
    assert wheel.read(licence) == (root / "LICENSE").read_bytes()


def test_the_wheel_holds_all_that_is_imported(wheel: zipfile.ZipFile, root: Path) -> None:
    inside = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    packages = (root / "src" / "actors", root / "examples" / "flights" / "penstock_flights")
    ours = {
        str(path.relative_to(package.parent))
        for package in packages
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == ours
    assert "actors/py.typed" in inside
    (entries,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "penstock = actors.doors.commands.cli:main" in wheel.read(entries).decode()


def test_no_text_names_another_distribution(wheel: zipfile.ZipFile, root: Path) -> None:
    extras = set(metadata_of(wheel).get_all("Provides-Extra", []))
    texts = [
        *root.glob("*.md"),
        *root.glob("docs/**/*.md"),
        *(root / "src").rglob("*.py"),
        *(root / "examples").rglob("*.py"),
    ]
    named: set[str] = set()
    for path in texts:
        text = path.read_text()
        assert not re.search(r"pip install '?penstock(?!-views)", text), path
        for name, wanted in EXTRAS.findall(text):
            if name.startswith("penstock"):
                assert set(wanted.split(",")) <= extras, (path, wanted)
                named |= set(wanted.split(","))
    assert {"postgres", "delta", "connect", "jwt", "tpch"} <= named


def test_the_project_file_and_the_locks_agree(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    for lock in (root / "requirements").glob("*.txt"):
        for name in re.findall(r"(?:via|#  ) ([\w-]+) \(pyproject", lock.read_text()):
            assert name == NAME, lock


def test_a_client_loads_no_part_of_the_service() -> None:
    """Messages of its protocol, transport and Arrow; no compute functions before the first use."""
    script = "import sys, actors.doors.client; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    modules = set(ran.stdout.split())
    names = [name.split(".")[1:3] for name in modules if name.startswith("actors.")]
    loaded = {".".join(parts) for parts in names if len(parts) == 2}
    folders = {"doors.client", "model.plan", "model.protocol", "runtime.transport"}
    files = "errors frames msgpack_bounds progress settings spans telemetry"
    assert loaded == folders | {f"runtime.{name}" for name in files.split()}
    protocols = {name for name in modules if name.startswith("actors.model.protocol.")}
    assert not protocols & {"actors.model.protocol.compute", "actors.model.protocol.storage"}
    assert not modules & {"pyarrow.compute", "pyspark", "uvloop", "obstore", "sqlglot", "typer"}
