"""Files for deployment: the image's steps, compose, the chart, the unit. No daemon is needed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from chart_rendering import render, schema_faults  # type: ignore[import-not-found]

from actors.settings import Settings, load

SETTINGS = {field.name for field in msgspec.structs.fields(Settings)}


def setting_of(variable: str) -> str:
    return variable.removeprefix("PENSTOCK_").lower()


@pytest.fixture
def deploy(root: Path) -> Path:
    return root / "deploy"


# -- the image -------------------------------------------------------------------------------------


def steps(root: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, continued lines joined."""
    text = "\n".join(
        line for line in (root / "Dockerfile").read_text().splitlines() if line[:1] != "#"
    )
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def test_what_the_image_copies_is_there_and_is_not_ignored(root: Path) -> None:
    ignored = (root / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copies = [text.split() for name, text in steps(root) if name == "COPY"]
    sources = [each for words in copies if words[0] != "--from=build" for each in words[:-1]]
    assert sources
    for each in sources:
        assert (root / each).exists(), each
        assert each.split("/")[0] in kept, each


def test_the_image_installs_as_make_does(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    [flags] = re.findall(r"^PIP := \S+ -m pip install (.*)$", makefile, re.MULTILINE)
    [hashed] = re.findall(r"^HASHED := \$\(PIP\) (.*)$", makefile, re.MULTILINE)
    runs = [shlex.split(text) for name, text in steps(root) if name == "RUN"]
    installs = [words for words in runs if words[1:4] == ["-m", "pip", "install"]]
    files = []
    for words in installs:
        assert {*flags.split()} <= {*words}
        if words[-1] != ".":
            assert {*hashed.split()} <= {*words}
        files += [words[at + 1] for at, word in enumerate(words) if word == "--requirement"]
    # The tools that build come first, then all that the program needs, then itself.
    assert files[:2] == ["requirements/build.txt", "requirements/base.txt"]
    assert installs[-1][-1] == "."
    copied = {word for name, text in steps(root) if name == "COPY" for word in text.split()}
    assert {*files} <= copied


def test_no_step_of_the_image_goes_against_the_hashes(root: Path) -> None:
    """What pip would refuse: a requirement without a version or a hash."""
    for name, text in steps(root):
        for file in re.findall(r"--requirement (\S+)", text) if name == "RUN" else ():
            for block in re.split(r"\n(?=\S)", (root / file).read_text()):
                if block and not block.startswith("#"):
                    assert "==" in block.splitlines()[0], (file, block)
                    assert "--hash=sha256:" in block, (file, block)


def test_the_image_runs_without_rights_and_is_asked_for_its_health(root: Path) -> None:
    last = max(at for at, (name, _) in enumerate(steps(root)) if name == "FROM")
    final = steps(root)[last:]
    named = dict(final)
    assert all("python:3.11-slim-bookworm" in text for name, text in steps(root) if name == "FROM")
    assert named["USER"] == "10001:10001"
    runs = " ".join(text for name, text in final if name == "RUN")
    assert "openjdk-17-jre-headless" in runs
    assert "--owner 10001" in runs
    assert json.loads(named["ENTRYPOINT"]) == ["tini", "--", "penstock"]
    assert json.loads(named["CMD"]) == ["serve"]
    variables = dict(word.split("=", 1) for word in named["ENV"].split())
    ours = {name: value for name, value in variables.items() if name.startswith("PENSTOCK_")}
    assert {setting_of(name) for name in ours} <= SETTINGS
    settings = load(environment=ours)
    command = json.loads(named["HEALTHCHECK"].partition("CMD ")[2])
    assert f"http://{settings.metrics_listen}/healthz" in command[-1]
    compile(command[-1], "healthcheck", "exec")


# -- compose ---------------------------------------------------------------------------------------


def test_compose_names_settings_secrets_and_volumes_that_there_are(deploy: Path) -> None:
    found = yaml.safe_load((deploy / "compose.yaml").read_text())
    services = found["services"]
    assert services.keys() >= {"penstock", "postgres", "s3", "jaeger"}
    for name, service in services.items():
        assert set(service.get("secrets", ())) <= found["secrets"].keys(), name
        assert {each.split(":")[0] for each in service.get("volumes", ())} <= found[
            "volumes"
        ].keys()
        assert set(service.get("depends_on", ())) <= services.keys()
        # Nothing is reached from other machines unless somebody chooses so.
        assert all(each.startswith("127.0.0.1:") for each in service.get("ports", ()))
        assert "image" in service or (deploy / service["build"] / "Dockerfile").exists()
        if "image" in service:
            assert re.search(r":\S*\d", service["image"]), "a version, not what is newest"
    ours = services["penstock"]["environment"]
    variables = {name: value for name, value in ours.items() if name.startswith("PENSTOCK_")}
    assert {setting_of(name) for name in variables} <= SETTINGS
    settings = load(environment=variables)
    assert settings.otlp == "http://jaeger:4318"
    secrets = {f"/run/secrets/{name}" for name in services["penstock"]["secrets"]}
    assert {
        settings.tls_certificate,
        settings.tls_key,
        settings.tls_authority,
        settings.token_file,
    } <= secrets


# -- the chart -------------------------------------------------------------------------------------

OTHER_VALUES: dict[str, Any] = {
    "secretEnvironment": ["buckets", "database"],
    "settings": {"spark_driver_memory": "4g", "retain_history_ms": "60000"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "only", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "persistence": {"size": "1Gi", "storageClassName": "fast"},
    "ports": {"client": 6874, "postgres": 0, "connect": 15002, "metrics": 9464},
}


def chart(deploy: Path, name: str) -> Any:
    text = (deploy / "helm" / "penstock" / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def test_the_chart_has_this_version(deploy: Path, root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    about = chart(deploy, "Chart.yaml")
    assert (about["apiVersion"], about["name"], about["appVersion"]) == ("v2", "penstock", version)
    assert chart(deploy, "values.yaml")["image"]["tag"] == version


def test_values_fit_their_schema_and_wrong_ones_do_not(deploy: Path) -> None:
    schema, values = chart(deploy, "values.schema.json"), chart(deploy, "values.yaml")
    assert schema_faults(values, schema) == []
    assert schema_faults({**values, **OTHER_VALUES}, schema) == []
    # Every value is described.
    assert values.keys() == schema["properties"].keys() - {"global"}
    changes: tuple[dict[str, Any], ...] = (
        {"unknown": 1},
        {"identity": ""},
        {"tls": {}},
        {"settings": {"workers": 4}},
        {"ports": {**values["ports"], "client": 80}},
        {"service": {"type": "Other", "annotations": {}}},
        {"image": {**values["image"], "more": "x"}},
    )
    for wrong in changes:
        assert schema_faults({**values, **wrong}, schema), wrong


@pytest.mark.parametrize("changed", [{}, OTHER_VALUES], ids=["as given", "others"])
def test_the_chart_makes_a_service_that_starts(deploy: Path, changed: dict[str, Any]) -> None:
    values = {**chart(deploy, "values.yaml"), **changed}
    folder = deploy / "helm" / "penstock" / "templates"
    made = {path.name: render(path.read_text(), values) for path in sorted(folder.iterdir())}
    stateful, service = made["statefulset.yaml"], made["service.yaml"]
    assert (stateful["kind"], service["kind"]) == ("StatefulSet", "Service")
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"] == "blue"
    assert stateful["spec"]["replicas"] == 1
    pod = stateful["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    [container] = pod["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {name: port for name, port in values["ports"].items() if port}
    assert {each["targetPort"] for each in service["spec"]["ports"]} == ports.keys()
    # The settings are known, and other machines may reach the listeners only with TLS and tokens.
    given = {each["name"]: each["value"] for each in container["env"]}
    assert all(isinstance(value, str) for value in given.values())
    assert {setting_of(name) for name in given} <= SETTINGS
    settings = load(environment=given)
    assert settings.listen == f"0.0.0.0:{ports['client']}"
    assert settings.metrics_listen == f"0.0.0.0:{ports['metrics']}"
    # What is mounted is there, and holds the files that the settings name.
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    claims = [each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]]
    volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
    assert mounts.keys() == {*claims, *volumes}
    assert settings.state_dir.startswith(mounts["state"])
    assert settings.token_file.startswith(mounts["tokens"] + "/")
    for file in (settings.tls_certificate, settings.tls_key, settings.tls_authority):
        assert file.startswith(mounts["tls"] + "/")
    assert volumes["tls"]["secret"]["secretName"] == values["tls"]["secretName"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    assert all((each["scheme"], each["port"]) == ("HTTPS", "metrics") for each in probes.values())
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert len(container.get("envFrom", ())) == len(values["secretEnvironment"])


# -- the unit --------------------------------------------------------------------------------------


def test_the_unit_is_one_and_is_hardened(deploy: Path, tmp_path: Path) -> None:
    text = (deploy / "penstock.service").read_text()
    [command] = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = shlex.split(command)
    assert words[0].endswith("/penstock")
    assert words[1] == "serve"
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    # The program need not be installed here: any that is there stands for it.
    unit = tmp_path / "penstock.service"
    unit.write_text(text.replace(words[0], sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    exposed = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert exposed.returncode == 0, exposed.stdout
