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
from typing import Any

import anyio
import pytest

from actors import Service, Settings
from actors.testing.drawn_settings import draw_for_test
from actors.testing.engine import in_memory_engine
from actors.testing.patience import PROGRAM_S

NAME = "penstock-views"
IMPORT_NAMES = {
    "google-crc32c": "google_crc32c",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "pyjwt": "jwt",
    "zstandard": "zstandard",
}
"""Modules of distributions that have another name."""
HIDING = """
import sys

class HiddenModules:
    def find_spec(self, name, path=None, target=None):
        if name in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, HiddenModules())
"""
CLIENT_PROGRAM = """
import asyncio
from actors import Client

async def main():
    async with await Client.connect(sys.argv[1]) as client:
        await client.create_table("t", {"n": "bigint"}, primary_key=["n"])
        await client.create_materialized_view("v", "SELECT n + 1 AS n FROM t")
        time = await client.insert("t", [{"n": 1}])
        print((await client.peek("v", as_of=time)).to_pylist())

asyncio.run(main())
"""
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
    assert "penstock = actors.doors.commands:main" in wheel.read(entries).decode()


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
    assert {"server", "postgres", "delta", "connect", "jwt", "tpch"} <= named


def test_the_project_file_and_the_locks_agree(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    assert project["name"] == NAME
    for lock in (root / "requirements").glob("*.txt"):
        for name in re.findall(r"(?:via|#  ) ([\w-]+) \(pyproject", lock.read_text()):
            assert name == NAME, lock


def requirements_of(project: dict[str, Any]) -> dict[str, set[str]]:
    """The distributions that the client and each extra require, by the extra's name."""
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: {re.split(r"[\[<>=!]", each)[0] for each in listed}
        for extra, listed in lists.items()
    }


def test_users_get_ranges_and_each_lower_bound_is_tried(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lowest = dict(
        re.findall(r"^([\w-]+)==([\w.]+)", (root / "requirements/lowest.txt").read_text(), re.M)
    )
    for extra in ("", "server", "connect", "postgres", "delta", "jwt"):
        listed = project["optional-dependencies"][extra] if extra else project["dependencies"]
        for each in listed:
            # Older releases of Spark are tried by `make matrix`.
            if each.startswith("pyspark"):
                continue
            found = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)(?:,<[\d.]+)?", each)
            assert found, f"{each}: not a range with a lower bound"
            tried = lowest[found[1]].split(".")
            bound = found[2].split(".")
            assert tried[: len(bound)] == bound, f"{each}: requirements/lowest.txt has {tried}"


def client_alone(root: Path) -> str:
    """The first lines of a program that sees the client's packages only, not the service's."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = requirements_of(project)
    hidden = set().union(*wanted.values()) - wanted[""]
    modules = sorted(IMPORT_NAMES.get(name, name.replace("-", "_")) for name in hidden)
    return HIDING.format(modules=modules)


async def test_the_client_alone_reads_a_view(tmp_path: Path, root: Path) -> None:
    program = client_alone(root) + CLIENT_PROGRAM
    settings = draw_for_test(Settings(state_dir=str(tmp_path / "state"), listen="127.0.0.1:0"))
    async with Service(settings, engine=in_memory_engine()) as service:
        command = [sys.executable, "-c", program, service.address]
        ran = await anyio.run_process(command, check=False)
    assert (ran.stdout.decode(), ran.stderr.decode()) == ("[{'n': 2}]\n", "")


def test_without_the_service_the_command_says_what_to_install(root: Path) -> None:
    program = client_alone(root) + "\nfrom actors.doors.commands import main; main()"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "pip install 'penstock-views[server]'" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    program = client_alone(root) + "\nimport actors; actors.Service"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'penstock-views[server]'" in ran.stderr.splitlines()[-1]


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
