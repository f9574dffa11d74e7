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
from chart_rendering import (  # type: ignore[import-not-found]
    ChartTemplates,
    schema_faults,
)

from actors.runtime.errors import BadSettings
from actors.runtime.settings import Settings, load

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


def merged(under: Any, given: Any) -> Any:
    """One value over another, as Compose merges them: mappings by key, and lists one after the
    other."""
    if isinstance(under, dict) and isinstance(given, dict):
        both = {**under, **given}
        return {key: merged(under.get(key), given.get(key)) for key in both}
    if isinstance(under, list) and isinstance(given, list):
        return under + [each for each in given if each not in under]
    return under if given is None else given


def composed(deploy: Path, *names: str) -> dict[str, Any]:
    """The project that several files make, with what their services extend."""
    project: dict[str, Any] = {}
    for name in names:
        found = yaml.safe_load((deploy / name).read_text())
        for service, own in found["services"].items():
            if (extended := own.pop("extends", None)) is not None:
                file = yaml.safe_load((deploy / extended["file"]).read_text())
                base = file["services"][extended["service"]]
                # Compose takes nothing as a base that depends on other services.
                assert "depends_on" not in base
                found["services"][service] = merged(base, own)
        project = merged(project, found)
    return project


@pytest.fixture(params=[False, True], ids=["whole", "roles"])
def project(deploy: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return composed(deploy, "compose.yaml", *["compose.roles.yaml"] * request.param)


def test_compose_names_secrets_and_volumes_that_there_are(
    deploy: Path, project: dict[str, Any]
) -> None:
    services = project["services"]
    assert services.keys() >= {"penstock", "postgres", "s3", "jaeger"}
    published, mounted = [], []
    for name, service in services.items():
        assert set(service.get("secrets", ())) <= project["secrets"].keys(), name
        mounted += [each.split(":")[0] for each in service.get("volumes", ())]
        assert set(service.get("depends_on", ())) <= services.keys()
        # Nothing is reached from other machines unless somebody chooses so.
        assert all(each.startswith("127.0.0.1:") for each in service.get("ports", ()))
        published += [each.split(":")[1] for each in service.get("ports", ())]
        assert "image" in service or (deploy / service["build"] / "Dockerfile").exists()
        if "image" in service:
            assert re.search(r":\S*\d", service["image"]), "a version, not what is newest"
    # Of two processes each has its own.
    assert sorted(mounted) == sorted(project["volumes"])
    assert len(published) == len({*published})


def settings_in(services: dict[str, Any]) -> dict[str, Settings]:
    """What each process of Penstock is told by its variables, which have to be settings."""
    found = {}
    for name, service in services.items():
        variables = {
            key: value
            for key, value in service.get("environment", {}).items()
            if key.startswith("PENSTOCK_")
        }
        assert {setting_of(key) for key in variables} <= SETTINGS
        if "build" in service:
            found[name] = load(environment=variables)
    return found


def test_processes_in_compose_are_one_service(project: dict[str, Any]) -> None:
    told = settings_in(project["services"])
    for name, settings in told.items():
        service = project["services"][name]
        secrets = {f"/run/secrets/{each}" for each in service["secrets"]}
        assert {
            settings.tls_certificate,
            settings.tls_key,
            settings.tls_authority,
            settings.token_file,
            *([settings.cluster_token_file] if settings.role else ()),
        } <= secrets
        assert settings.otlp == "http://jaeger:4318"
        # A host that the stores and the controller know.
        if settings.role == "replica":
            assert settings.cluster_advertise == name
            assert not service.get("ports")
        else:
            assert settings.listen == "0.0.0.0:6874"
    assert len({(each.blob_url, each.consensus_url, each.identity) for each in told.values()}) == 1
    roles = sorted((each.role, each.standby) for each in told.values())
    whole, divided = [("", False)], [("controller", True)] * 2 + [("replica", False)] * 2
    assert roles == (whole if len(told) == 1 else divided)


# -- the chart -------------------------------------------------------------------------------------

URLS = {"blob_url": "s3://bucket/penstock", "consensus_url": "postgresql://penstock@db/state"}
OTHER_VALUES: dict[str, Any] = {
    "secretEnvironment": ["buckets", "database"],
    "settings": {"spark_driver_memory": "4g", "retain_history_ms": "60000"},
    "nodeSelector": {"disk": "fast"},
    "tolerations": [{"key": "only", "operator": "Exists"}],
    "podAnnotations": {"a": "b"},
    "persistence": {"size": "1Gi", "storageClassName": "fast"},
    "ports": {
        "client": 6874, "postgres": 0, "connect": 15002, "metrics": 9464,
        "cluster": 7000, "storage": 7001,
    },
}  # fmt: skip
STANDING_BY: dict[str, Any] = {"settings": URLS, "standbys": 1}
ROLES: dict[str, Any] = {
    "settings": URLS,
    "roles": {"enabled": True, "replicas": 3, "tokens": {"secretName": "of the cluster"}},
}
CASES: dict[str, dict[str, Any]] = {
    "as given": {},
    "others": OTHER_VALUES,
    "standing by": STANDING_BY,
    "roles": ROLES,
    "roles and others": {**OTHER_VALUES, **ROLES, "standbys": 2},
}


def chart(deploy: Path, name: str) -> Any:
    text = (deploy / "helm" / "penstock" / name).read_text()
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def over(defaults: Any, given: Any) -> Any:
    """Values over the chart's own, as Helm puts them: mappings by key, all else whole."""
    if not (isinstance(defaults, dict) and isinstance(given, dict)):
        return given
    return {
        **defaults,
        **{key: over(defaults.get(key), value) for key, value in given.items()},
    }


@pytest.fixture(params=list(CASES.values()), ids=list(CASES))
def values(deploy: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = over(chart(deploy, "values.yaml"), request.param)
    return found


class ChartObjects:
    """What the chart makes of some values."""

    def __init__(self, deploy: Path, values: dict[str, Any]) -> None:
        made = ChartTemplates(deploy / "helm" / "penstock" / "templates").render(values)
        self.sets = {
            each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "StatefulSet"
        }
        self.services = {
            each["metadata"]["name"]: each["spec"] for each in made if each["kind"] == "Service"
        }
        assert len(made) == len(self.sets) + len(self.services)

    def container(self, name: str) -> dict[str, Any]:
        found: dict[str, Any]
        [found] = self.sets[name]["template"]["spec"]["containers"]
        return found

    def settings(self, name: str) -> Settings:
        """What the pods of one set are told, the first one's name put in."""
        given = {
            each["name"]: each.get("value", f"{name}-0") for each in self.container(name)["env"]
        }
        assert all(isinstance(value, str) for value in given.values())
        pod = given.pop("POD_NAME", "")
        assert {setting_of(key) for key in given} <= SETTINGS
        return load(
            environment={key: text.replace("$(POD_NAME)", pod) for key, text in given.items()}
        )


@pytest.fixture
def made(deploy: Path, values: dict[str, Any]) -> ChartObjects:
    return ChartObjects(deploy, values)


def test_the_chart_has_this_version(deploy: Path, root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    about = chart(deploy, "Chart.yaml")
    assert (about["apiVersion"], about["name"], about["appVersion"]) == ("v2", "penstock", version)
    assert chart(deploy, "values.yaml")["image"]["tag"] == version


def test_values_fit_their_schema(deploy: Path, values: dict[str, Any]) -> None:
    schema = chart(deploy, "values.schema.json")
    assert schema_faults(values, schema) == []
    # Every value is described.
    assert values.keys() == schema["properties"].keys() - {"global"}


def test_wrong_values_do_not_fit_their_schema(deploy: Path) -> None:
    schema, values = chart(deploy, "values.schema.json"), chart(deploy, "values.yaml")
    changes: tuple[dict[str, Any], ...] = (
        {"unknown": 1},
        {"identity": ""},
        {"tls": {}},
        {"settings": {"workers": 4}},
        {"ports": {**values["ports"], "client": 80}},
        {"service": {"type": "Other", "annotations": {}}},
        {"image": {**values["image"], "more": "x"}},
        {**ROLES, "roles": {**ROLES["roles"], "replicas": 0}},
        {**ROLES, "roles": {**ROLES["roles"], "enabled": "yes"}},
        {**STANDING_BY, "standbys": True},
        {**STANDING_BY, "standbys": -1},
    )
    for wrong in changes:
        assert schema_faults({**values, **wrong}, schema), wrong


@pytest.mark.parametrize("changed", [STANDING_BY, ROLES], ids=["standing by", "roles"])
def test_several_processes_without_stores_by_url_are_refused(
    deploy: Path, changed: dict[str, Any]
) -> None:
    schema = chart(deploy, "values.schema.json")
    for name in URLS:
        for wrong in ({}, {name: ""}):
            settings = {**{key: url for key, url in URLS.items() if key != name}, **wrong}
            values = {**chart(deploy, "values.yaml"), **changed, "settings": settings}
            [fault] = schema_faults(values, schema)
            assert fault.startswith("values.settings")
            assert name in fault
    # As the service itself would.
    for variables in ({"PENSTOCK_STANDBY": "true"}, {"PENSTOCK_ROLE": "controller"}):
        with pytest.raises(BadSettings):
            load(environment=variables)


def test_the_chart_makes_the_pods_that_its_values_name(
    made: ChartObjects, values: dict[str, Any]
) -> None:
    roles, standbys = values["roles"], values["standbys"]
    pods = {name: each["replicas"] for name, each in made.sets.items()}
    if roles["enabled"]:
        assert pods == {"blue-controller": 1 + standbys, "blue-replica": roles["replicas"]}
    else:
        assert pods == {"blue": 1 + standbys}
    for name, each in made.sets.items():
        # A pod that is not ready keeps no other one from starting.
        assert each["podManagementPolicy"] == "Parallel"
        strategy = each.get("updateStrategy", {}).get("type", "RollingUpdate")
        assert made.settings(name).standby == (name != "blue-replica" and standbys > 0)
        assert strategy == ("OnDelete" if made.settings(name).standby else "RollingUpdate")
        assert made.settings(name).role == name.partition("-")[2]


def test_services_reach_the_pods_that_they_are_for(
    made: ChartObjects, values: dict[str, Any]
) -> None:
    """Clients reach the controller alone, and the controller each replica by its name."""
    labels = {name: each["template"]["metadata"]["labels"] for name, each in made.sets.items()}
    for name, each in made.sets.items():
        assert each["selector"]["matchLabels"] == labels[name]
    clients = made.services.pop("blue")
    reached = [name for name in labels if clients["selector"].items() <= labels[name].items()]
    assert reached == [name for name in labels if name != "blue-replica"]
    assert not clients.get("publishNotReadyAddresses")
    ports = {each["name"]: each["containerPort"] for each in made.container(reached[0])["ports"]}
    inner = ("cluster", "storage")
    assert ports == {
        name: port for name, port in values["ports"].items() if port and name not in inner
    }
    assert {each["targetPort"] for each in clients["ports"]} == ports.keys()
    assert made.services.keys() == made.sets.keys() & {"blue-replica"}
    for service in made.services.values():
        [name] = [name for name in labels if service["selector"].items() <= labels[name].items()]
        assert name == "blue-replica"
        assert service["clusterIP"] == "None"
        # It is dialled before it is ready, and by a name that one wildcard of a certificate covers.
        assert service["publishNotReadyAddresses"] is True
        assert made.sets[name]["serviceName"] == name
        settings = made.settings(name)
        assert settings.cluster_advertise == "blue-replica-0.blue-replica.lab.svc"
        assert settings.cluster_listen == f"0.0.0.0:{values['ports']['cluster']}"
        assert settings.storage_listen == f"0.0.0.0:{values['ports']['storage']}"
        open_ports = {each["name"] for each in made.container(name)["ports"]}
        assert open_ports == {each["targetPort"] for each in service["ports"]}
        assert open_ports == {*inner, "metrics"}


def test_each_pod_of_the_chart_starts(made: ChartObjects, values: dict[str, Any]) -> None:
    for name, stateful in made.sets.items():
        container, settings = made.container(name), made.settings(name)
        if settings.role != "replica":
            assert settings.listen == f"0.0.0.0:{values['ports']['client']}"
        assert settings.metrics_listen == f"0.0.0.0:{values['ports']['metrics']}"
        # What is mounted is there, and holds the files that the settings name: other machines may
        # reach the listeners only with TLS and tokens.
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        pod = stateful["template"]["spec"]
        claims = [each["metadata"]["name"] for each in stateful["volumeClaimTemplates"]]
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert mounts.keys() == {*claims, *volumes}
        assert settings.state_dir.startswith(mounts["state"])
        assert settings.token_file == mounts["tokens"] + "/tokens"
        for file in (settings.tls_certificate, settings.tls_key, settings.tls_authority):
            assert file.startswith(mounts["tls"] + "/")
        assert volumes["tls"]["secret"]["secretName"] == values["tls"]["secretName"]
        if settings.role:
            assert settings.cluster_token_file == mounts["cluster"] + "/tokens"
            secret = values["roles"]["tokens"]["secretName"]
            assert volumes["cluster"]["secret"]["secretName"] == secret
        probes = {each: container[f"{each}Probe"]["httpGet"] for each in ("liveness", "readiness")}
        assert {each: probe["path"] for each, probe in probes.items()} == {
            "liveness": "/healthz",
            "readiness": "/readyz",
        }
        assert all(
            (each["scheme"], each["port"]) == ("HTTPS", "metrics") for each in probes.values()
        )
        assert pod["securityContext"]["runAsNonRoot"] is True
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
