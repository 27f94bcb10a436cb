"""A wheel, an editable install and pytest from the root import the same dynamo_megatron.kernels."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_editable_install_and_pytest_import_the_trees_kernels():
    from dynamo_megatron import kernels

    assert Path(kernels.__file__) == ROOT / "kernels" / "__init__.py"
    command = [sys.executable, "-P", "-c", "import dynamo_megatron.kernels as k; print(k.__file__)"]
    seen = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert seen == kernels.__file__


def test_no_file_imports_a_top_level_kernels():
    # Runs and git remove folders at any time.
    others = {"runs", *(entry.name for entry in ROOT.iterdir() if entry.name.startswith("."))}
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in others]
    for file in [file for folder in folders for file in folder.rglob("*.py")]:
        if file != Path(__file__):
            assert "\nimport kernels" not in file.read_text(encoding="utf-8"), file


IMPORTED = """
import sys
from dynamo_megatron import cli
cli.main(sys.argv[1:])
files = {name.partition(".")[0]: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
print(*(name for name, file in files.items() if "site-packages" in file))
"""


def package(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-")


def test_the_interpreter_of_launch_nemo_has_what_the_command_imports(tmp_path):
    """Up to nemo-run itself, which the trainer's interpreter lacks."""
    (tmp_path / "config.yaml").write_text("{model: {path: model}, data: {source: data}, output_dir: run}")
    words = ("launch", "nemo", "config.yaml", "--venv", ".venv", "--tasks", "convert,train,eval")
    command = [sys.executable, "-P", "-c", IMPORTED, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "`make extra` sets up .venv-extra" in done.stderr, done.stderr
    lines = (ROOT / "requirements" / "extra.txt").read_text().splitlines()
    installed = [package(line) for line in lines if not line.startswith("#")]
    for name in installed:  # it grows by what each package needs, as far as this interpreter has them
        with contextlib.suppress(metadata.PackageNotFoundError):
            needs = {package(need) for need in metadata.requires(name) or () if "extra ==" not in need}
            installed += needs - set(installed)
    owners = {name: {package(owner) for owner in owners} for name, owners in metadata.packages_distributions().items()}
    missing = {name for name in done.stdout.split() if name in owners and not owners[name] & {*installed}}
    assert not missing, f"requirements/extra.txt lacks {missing}"


@pytest.mark.full
def test_a_wheel_beside_hugging_faces_kernels(tmp_path, tiny_model):
    """Both `dynamo_megatron.kernels` and Hugging Face's `kernels` work, even from the root of the repository; the
    shipped configs are named in any folder."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("no pip in this environment")
    pip = [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = tmp_path / "source"  # a build in the tree would leave files there for the next one
    for name in ("configs", "dynamo_megatron", "kernels", "launcher"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    wheel = next(tmp_path.glob("*.whl"))
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    assert not (site / "kernels").exists() and (site / "dynamo_megatron" / "kernels" / "head.py").is_file()
    assert (site / "dynamo_megatron" / "rollout" / "servers" / "sglang_cpu" / "sgl_kernel" / "__init__.py").is_file()
    stand_ins = site / "dynamo_megatron" / "rollout" / "servers" / "sglang_cpu"
    plugins = [point.name for d in metadata.distributions(path=[str(stand_ins)]) for point in d.entry_points]
    assert sorted(plugins) == ["batched_attention", "seeded_sampling"]
    assert all((stand_ins / f"{plugin}.py").is_file() for plugin in plugins)
    quantised = site / "dynamo_megatron" / "rollout" / "servers" / "sglang_fp8"
    plugins = [point.name for d in metadata.distributions(path=[str(quantised)]) for point in d.entry_points]
    assert plugins == ["no_cache_scales"] and (quantised / "no_cache_scales.py").is_file()
    assert (site / "dynamo_megatron" / "launcher" / "slurm.sh").is_file()
    shipped = {file.relative_to(ROOT) for file in (ROOT / "configs").rglob("*.yaml")}
    assert {file.relative_to(site / "dynamo_megatron") for file in site.rglob("*/configs/**/*.yaml")} == shipped
    _shipped_configs_in_an_empty_folder(site, tmp_path / "empty", tiny_model)
    subprocess.run([*pip, "install", "--target", str(site), "--no-deps", "kernels"], check=True)
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import kernels, dynamo_megatron.kernels as ours\n"
        "assert hasattr(kernels, 'get_kernel'), kernels.__file__\n"
        "assert ours.__file__.startswith(sys.path[0]) and callable(ours.token_stats), ours.__file__\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT, check=True)


def _shipped_configs_in_an_empty_folder(site: Path, folder: Path, model: Path) -> None:
    folder.mkdir()
    keys = {
        "model.path": model,
        "model.max_length": 128,
        "data.source": "reasoning_gym:chain_sum?size=4",
        "data.template": "'{prompt}'",
    }
    words = [f"{key}={value}" for key, value in (keys | {"rollout.max_new_tokens": 8, "output_dir": "run"}).items()]
    for name in ("methods/grpo", "configs/methods/grpo.yaml"):
        command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", "train", name, *words, "--print-config"]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert "kind: grpo  # methods/grpo (shipped)" in done.stdout, done.stderr
    assert not list(folder.iterdir())
