"""pyproject.toml, the links in manylora/ and the folders must tell the same story."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from manylora.config import environment

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
PARTS = ("adapters", "benchmarks", "engine", "kernels", "memory", "registry", "server")


def test_each_part_is_linked_into_the_package_and_mapped_to_its_folder() -> None:
    assert SETTINGS["package-dir"] == {f"manylora.{part}": part for part in PARTS}
    links = {path.name: path for path in (ROOT / "manylora").iterdir() if path.is_symlink()}
    assert sorted(links) == sorted(PARTS)
    for name, link in links.items():
        assert link.readlink() == Path("..") / name


def test_every_folder_with_modules_is_a_package() -> None:
    lonely = {
        path.parent
        for part in (*PARTS, "manylora")
        for path in (ROOT / part).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert lonely == set()


HINT = re.compile(
    r"(?:pip3? install|uv add|uv tool install|uvx|pipx install|pipx run)"
    r"(?: +-[\w-]+(?: +https?://\S+)?)* +[\"']?([^\s\"'`]+)"
)
"""A command that installs, and what it names first."""
OTHERS = {
    ("deploy/Dockerfile", "torch"),  # of PyTorch's own index
    ("scripts/setup", "torch"),
    ("scripts/clients", "uv"),
    ("scripts/clients", "$environment/bin/python"),  # options, and then a list with hashes
    ("deploy/Dockerfile", "/src[${EXTRAS}]"),
    ("scripts/setup", "--disable-pip-version-check)"),  # options, and then packages of this list
    ("scripts/setup", ".venv/bin/python"),
    ("scripts/setup", "$what"),
    ("scripts/wheel", "$wheel"),
    ("manylora/launch/up.py", "manylora[{extra}]"),  # tests/launch/test_up.py
}
"""Other things that a file may install."""


def hints() -> Iterator[tuple[str, str]]:
    """Files of the product, its docs and its deployment, each with what it says to install."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        path = ROOT / name
        if not name.startswith("tests/") and path.is_file() and not path.is_symlink():
            yield from (
                (name, found[1]) for found in HINT.finditer(path.read_text(errors="ignore"))
            )


def test_what_is_to_be_installed_is_ours_and_has_its_extras() -> None:
    """Most short names belong to somebody on PyPI, whose code would run on the reader's machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = set[str]()
    wrong = set[tuple[str, str]]()
    for file, what in hints():
        package, _, extras = re.split(r"[<>=!~;]", what)[0].rstrip("].,:)").partition("[")
        named |= set(extras.split(",")) - {""}
        is_ours = package in (project["name"], ".") and set(extras.split(",")) <= {
            *project["optional-dependencies"],
            "",
        }
        if not is_ours and not {(file, what), (file, package)} & OTHERS:
            wrong.add((file, what))
    assert wrong == set()
    assert {"quant", "s3", "postgres", "cluster", "ray", "triton"} <= named


def printed(code: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_no_part_is_importable_by_its_bare_name() -> None:
    assert (
        printed(
            f"import importlib.util as i; print([part for part in {PARTS} if i.find_spec(part)])"
        )
        == "[]"
    )


def test_light_modules_do_not_bring_torch() -> None:
    names = (
        "cli",
        "registry.registry",
        "adapters.checkpoint.reader",
        "engine.execution.memory_plan",
    )
    modules = ", ".join(["manylora", *(f"manylora.{name}" for name in names)])
    assert printed(f"import sys, {modules}; print('torch' in sys.modules)") == "False"


def test_a_cpu_serves_without_triton(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert not [line for line in project["dependencies"] if line.startswith("triton")]
    assert extras["triton"][0].startswith("triton>=")
    assert "manylora[cluster,postgres,quant,s3,triton]" in extras["dev"]
    (tmp_path / "triton.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n"
    )
    code = (
        "import sys, manylora.cli.serve, manylora.server.app, manylora.engine.process.worker\n"
        "from manylora import LLM\n"
        "with LLM(sys.argv[1], device='cpu', memory_gib=0.05, host_gib=0.05, threads=1) as llm:\n"
        "    adapter = llm.load_adapter(sys.argv[2])\n"
        "    print(len(llm.generate(['Hello', 'Hello'], None, [None, adapter])))\n"
        "sys.exit('triton' in sys.modules)\n"
    )
    demo = ROOT / "manylora" / "demo"
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        str(demo / "manylora-demo"),
        str(demo / "adapters" / "pirate"),
    ]
    env = {**environment(), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


MODULES = {
    "pickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "shelve",
    "marshal",
    "joblib",
    "jsonpickle",
    "runpy",
    "code",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *(
        "torch.load",
        "np.load",
        "numpy.load",
        "yaml.load",
        "yaml.unsafe_load",
        "yaml.full_load",
        "os.system",
    ),
    *("os.popen", "send_pyobj", "recv_pyobj", "from_string", "subprocess.getoutput"),
}
FLAGS = {"allow_pickle", "trust_remote_code", "shell"}


def what_runs_code(tree: ast.AST) -> Iterator[str]:
    """Every place that turns data into code, or loads a format that can."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in CALLS
            )
        elif isinstance(node, ast.Call):
            yield from _of_call(node)


def _of_call(call: ast.Call) -> Iterator[str]:
    called = ast.unparse(call.func)
    if called in BUILTINS or called in CALLS or called.rsplit(".", 1)[-1] in CALLS:
        yield called
    if called.endswith("import_module") and not isinstance(
        call.args[0], ast.Constant | ast.JoinedStr
    ):
        yield ast.unparse(call)
    if called in ("text", "sqlalchemy.text", "exec_driver_sql") and any(
        isinstance(a, ast.JoinedStr) for a in call.args
    ):
        yield ast.unparse(call)
    for keyword in call.keywords:
        if keyword.arg in FLAGS and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            yield f"{called}({keyword.arg}=...)"


def test_no_source_deserialises_or_executes_what_it_reads() -> None:
    """No pickle and no relatives of it in the product: neither files nor messages may run code."""
    files = [path for part in (*PARTS, "manylora") for path in (ROOT / part).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in files
        for word in what_runs_code(ast.parse(path.read_text()))
    ]
    assert len(files) > 150
    own_modules = [
        "benchmarks/http/stepped_server.py: runpy",
        "manylora/__init__.py: import_module(_MODULES[name])",
        "manylora/launch/child.py: runpy",
    ]
    assert found == own_modules, "those that the command line or a table names"


@pytest.mark.parametrize(
    "source",
    [
        *(
            "import pickle",
            "from pickle import loads",
            "import pickle as p",
            "eval('1')",
            "torch.load(f)",
        ),
        *(
            "from torch import load",
            "np.load(f)",
            "AutoModel.from_pretrained(f, trust_remote_code=True)",
        ),
        *(
            "sock.recv_pyobj()",
            "importlib.import_module(name)",
            "text(f'SELECT {name}')",
            "run(line, shell=True)",
        ),
    ],
)
def test_what_runs_code_is_seen(source: str) -> None:
    assert list(what_runs_code(ast.parse(source)))
