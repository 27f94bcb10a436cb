"""The configurations that come with the package, named without a path: `methods/dynamo`, and their problems."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """`configs`: inside an installed package, beside the package in a checkout."""
    package = Path(__file__).parents[1]
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def names() -> list[str]:
    return sorted(file.relative_to(folder()).with_suffix("").as_posix() for file in folder().rglob("*.yaml"))


def path(name: str) -> Path | None:
    """The file of `methods/dynamo`, `methods/dynamo.yaml` or, as the documentation of a checkout names it,
    `configs/methods/dynamo.yaml`; of a method also `dynamo`. None where no such file is shipped."""
    name = name.removeprefix("configs/").removesuffix(".yaml")
    return next((folder() / f"{known}.yaml" for known in (name, f"methods/{name}") if known in names()), None)


def problems(source: str) -> Path:
    """The file `source`; where there is none, the shipped one of this name, with or without `configs/`."""
    own, ours = Path(source), folder() / source.removeprefix("configs/")
    return ours if ours.is_file() and not own.is_file() else own


def listing() -> str:
    """A line for each: its name and the first line of its comment."""
    lines = []
    for name in names():
        first = (folder() / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"{name:34} {first.removeprefix('#').strip() if first.startswith('#') else ''}".rstrip())
    return "\n".join(lines)
