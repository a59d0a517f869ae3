"""The files of deploy/ and cluster.yaml: valid for the tools that read them, closed to the world, and alike."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from raytrain_bert.command import parse_command
from raytrain_bert.config.sweep import SweepConfig

ROOT = Path(__file__).parents[2]
LAUNCHER = ["cluster.yaml", "deploy/cluster-gcp.yaml", "deploy/cluster-onprem.yaml"]
PINNED = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))
    return content


def train_flags(command: str) -> list[str]:
    """The flags of a train command; `#` and line ends as a shell has them."""
    words = command.replace("\\\n", " ").split()
    return words[words.index("raytrain_bert.train") + 1 :]


@pytest.mark.parametrize("name", LAUNCHER)
def test_rays_launcher_accepts_it(name: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load(name))
    validate_config(config)
    if name != "deploy/cluster-onprem.yaml":
        gpu = config["available_node_types"]["gpu"]
        assert (gpu["min_workers"], gpu["max_workers"]) == (0, 2)
        assert config["available_node_types"]["head"]["resources"]["GPU"] == 0


def test_the_schema_refuses_a_misspelt_key() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    with pytest.raises(ValidationError):
        validate_config(prepare_config({**load("cluster.yaml"), "max_wrokers": 2}))


@pytest.mark.parametrize("name", LAUNCHER)
def test_nothing_listens_to_the_world_and_all_nodes_have_the_token(name: str) -> None:
    config = load(name)
    (head,) = (command for command in config["head_start_ray_commands"] if "ray start" in command)
    (worker,) = (command for command in config["worker_start_ray_commands"] if "ray start" in command)
    assert "--dashboard-host=127.0.0.1" in head
    assert "RAY_AUTH_MODE=token" in head
    assert "RAY_AUTH_MODE=token" in worker
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert "disabled" not in (ROOT / name).read_text(encoding="utf-8")
    # What the head opens is what Ray opens by itself: port 22, and all ports between the nodes.
    assert "IpPermissions" not in str(config)


def test_versions_are_those_that_are_tested() -> None:
    assert ray.__version__ == PINNED
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in [*LAUNCHER, "deploy/Dockerfile"]]
    images = [version for text in texts for version in re.findall(r"rayproject/ray:([\d.]+)-", text)]
    assert len(images) == 5
    assert set(images) == {PINNED}
    for name in ("rayjob", "raycluster"):
        spec = load(f"deploy/kuberay/{name}.yaml")["spec"]
        assert spec.get("rayClusterSpec", spec)["rayVersion"] == PINNED


@pytest.mark.parametrize("name", ["rayjob", "raycluster"])
def test_kuberay_manifests_hold_together(name: str) -> None:
    manifest = load(f"deploy/kuberay/{name}.yaml")
    assert manifest["apiVersion"] == "ray.io/v1"
    cluster = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert cluster["authOptions"] == {"mode": "token"}
    claim = load("deploy/kuberay/storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"shared": "/mnt/shared", "shm": "/dev/shm"}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert set(volumes) == set(mounts)
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_rayjob_asks_for_the_gpus_that_it_has_and_goes_on_after_a_failure() -> None:
    spec = load("deploy/kuberay/rayjob.yaml")["spec"]
    call = parse_command("train", "", train_flags(spec["entrypoint"]))
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert call.config.scaling.num_workers == workers["replicas"] * gpus
    assert call.config.output.storage_path.startswith("/mnt/shared/")
    assert call.auto_resume
    assert spec["backoffLimit"] > 0
    assert isinstance(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"], dict)


def test_the_slurm_script_is_valid_and_its_command_too(tmp_path: Path) -> None:
    script = ROOT / "deploy" / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    text = script.read_text(encoding="utf-8")
    command = re.search(r"python -m raytrain_bert\.train .*?--auto-resume", text, re.DOTALL)
    assert command is not None
    known = command[0].replace("$((nodes * gpus))", "8").replace('"$SLURM_SUBMIT_DIR/runs"', str(tmp_path))
    call = parse_command("train", "", train_flags(known.replace('"$SLURM_JOB_NAME"', "bbc_news")))
    assert (call.config.scaling.num_workers, call.config.scaling.address, call.auto_resume) == (8, "auto", True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_the_slurm_script() -> None:
    subprocess.run(["shellcheck", ROOT / "deploy" / "slurm.sbatch"], check=True)


def test_the_runtime_environment_is_one_of_rays_and_leaves_time_to_save() -> None:
    from ray.runtime_env import RuntimeEnv

    environment = load("runtime_env.yaml")
    assert RuntimeEnv(**environment).to_dict() == environment
    assert int(environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert {".git", ".venv", "runs"} <= set(environment["excludes"])


def test_commands_in_the_comments_are_understood() -> None:
    for name in [*LAUNCHER, "deploy/kuberay/raycluster.yaml"]:
        text = re.sub(r"\s*\\\n#\s*", " ", (ROOT / name).read_text(encoding="utf-8"))
        for verb, words in re.findall(r"raytrain-bert submit (train|tune) (.*)", text):
            root = {"root": SweepConfig, "resumable": ("sweep",)} if verb == "tune" else {}
            flags = [str(ROOT / word) if word.startswith("experiments/") else word for word in words.split()]
            assert parse_command(verb, "", flags, **root).config.output.storage_path == "/mnt/shared/runs"  # type: ignore[arg-type]
