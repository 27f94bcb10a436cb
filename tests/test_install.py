"""A wheel has all that the checkout has."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_a_wheel_has_all_that_the_checkout_has(tmp_path):
    """And works beside Hugging Face's `kernels`, from the root of the repository too."""
    pytest.importorskip("pip")
    source, site = tmp_path / "source", tmp_path / "site"  # a build in the tree would leave files there
    for name in ("configs", "dynamo_megatron", "kernels", "launcher"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(site)
    assert not (site / "kernels").exists()
    installed = site / "dynamo_megatron"
    for folder in ("configs", "dynamo_megatron", "kernels", "launcher"):
        to = installed if folder == "dynamo_megatron" else installed / folder
        for file in (source / folder).rglob("*"):
            if file.suffix in (
                (".yaml", ".jsonl") if folder == "configs" else (".py", ".sh", ".json", ".js", ".css", ".html")
            ):
                assert (to / file.relative_to(source / folder)).is_file(), file
    for folder in installed.joinpath("rollout", "servers").glob("sglang_[cf]*"):  # sglang_models is no plugin
        plugins = [point.name for d in metadata.distributions(path=[str(folder)]) for point in d.entry_points]
        assert plugins and all((folder / f"{plugin}.py").is_file() for plugin in plugins)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("get_kernel = print\n")
    program = (
        "import kernels, dynamo_megatron.kernels as ours\n"
        "assert hasattr(kernels, 'get_kernel') and callable(ours.token_stats)\n"
        "assert ours.__file__.startswith(__import__('os').environ['PYTHONPATH']), ours.__file__\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT, env=environment, check=True)
    words = ["train", "grpo", "model.path=none", "data.source=d", "output_dir=o", "optimzer=1", "--print-config"]
    command = [sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "unknown key optimzer" in done.stderr, done.stderr
