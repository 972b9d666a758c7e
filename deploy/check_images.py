"""`make check-images`: deploy files against published schemas, and the images' install steps in a clean environment.

Runs in an environment of its own (requirements/images.lock), so the validators' needs do not meet ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from rich.console import Console

from deploy.dockerfile import BadDockerfile, StageRun, parse_stages
from deploy.errors import DeployError

ROOT = Path(__file__).parent.parent
IMAGES = ("gateway", "worker", "worker-cuda")
# What must and must not be there in an installed image, as Python that fails otherwise.
PROOFS = {
    "gateway": "import gateway.app, snapshot_store.cli, importlib.util as u; assert u.find_spec('numpy') is None",
    "worker": "import workers.celery_app, workers.service, gpu.cpu",
    "worker-cuda": (
        "import workers.celery_app, workers.service, gpu.cuda.load\n"
        "from gpu.cuda.programs import ProgramCompiler\n"
        "from gpu.cuda.rows import PUBLISH\n"
        "ProgramCompiler('sm_90a').compile_verbose(PUBLISH, {})"
    ),
}
DATA = """
from importlib.resources import files
assert any(path.name.endswith(".lua") for path in (files("workers.turns") / "lua").iterdir())
assert (files("deploy") / "redis" / "control.conf").is_file()
"""
_KEDA = """
import sys, yaml
from cloudcoil.models.keda import v1alpha1
for document in yaml.safe_load_all(open(sys.argv[1])):
    v1alpha1.ScaledObject.model_validate(document)
"""


def main() -> None:
    """Run every check; exits 1 with the first that fails."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvalet-images-") as scratch:
        try:
            for line in [*check_schemas(Path(scratch) / "tools"), *check_installs(Path(scratch))]:
                console.print(f"[green]ok[/] {line}", highlight=False)
        except DeployError as error:
            console.print(f"[red]failed[/] {error}", highlight=False, markup=True)
            sys.exit(1)


def check_schemas(tools: Path) -> list[str]:
    """Validate compose, Kubernetes and KEDA files. Returns what was checked. Raises BadDockerfile."""
    venv.create(tools, with_pip=True)
    python = str(tools / "bin" / "python")
    _call([python, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", str(ROOT / "requirements/images.lock")])
    checked = []
    compose = ROOT / "deploy/compose.yaml"
    _call([str(tools / "bin/check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(compose)])
    checked.append("compose.yaml against the compose specification")
    for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml")):
        if path.name == "scaling.yaml":
            _call([python, "-c", _KEDA, str(path)])
        else:
            _call([str(tools / "bin/kubernetes-validate"), "--strict", "--quiet", str(path)])
        checked.append(f"kubernetes/{path.name}")
    return checked


def check_installs(scratch: Path) -> list[str]:
    """Run the build stage of every image and prove what it installed. Raises BadDockerfile."""
    tracked = _call(["git", "-C", str(ROOT), "ls-files"]).splitlines()
    environment = _clean_environment(scratch)
    checked = []
    for image in IMAGES:
        root = scratch / image
        stages = parse_stages((ROOT / f"deploy/docker/{image}.Dockerfile").read_text())
        StageRun(root, ROOT, tracked, environment).run(stages[0], timeout_s=900.0)
        bin_dir = root / "opt" / "kvalet" / "bin"
        for code in (PROOFS[image], DATA):
            _call([str(bin_dir / "python"), "-c", code], environment)
        _call([str(bin_dir / "kvalet"), "--version"], environment)
        checked.append(f"docker/{image}.Dockerfile installs and imports")
    return checked


def _clean_environment(scratch: Path) -> dict[str, str]:
    """Nothing of ours but how to reach the package index: HOME is empty and `python` is the base interpreter."""
    bin_dir = scratch / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "python").symlink_to(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    home = scratch / "home"
    home.mkdir()
    passed = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTPS_"))}
    return {"PATH": f"{bin_dir}:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8", "PYTHONSAFEPATH": "1", **passed}


def _call(command: list[str], environment: dict[str, str] | None = None) -> str:
    result = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BadDockerfile(f"{' '.join(command)[:300]}\n{(result.stdout + result.stderr)[-2000:]}")
    return result.stdout


if __name__ == "__main__":
    main()
