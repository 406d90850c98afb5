"""The package as a whole: its size, its docstrings, and which way its imports point."""
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"bench"))
from report import ENGINE, SURFACE, code_lines  # noqa: E402  (one definition of the count, for the test, README and blog)

PKG = ROOT/"miniengine"
LIMIT = 2000
NO_TORCH = ("kv_blocks", "scheduler", "prefix_cache", "config")
MODULES = sorted(p for p in PKG.glob("*.py") if p.stem != "_modidx")


def exports():
    "[(module, notebook)] in the order of the chapters"
    out = []
    for nb in sorted((ROOT/"nbs").glob("[0-9]*.ipynb")):
        for c in json.loads(nb.read_text(encoding="utf-8"))["cells"]:
            m = re.search(r"^#\|\s*default_exp\s+(\S+)", "".join(c["source"]), re.M)
            if m and c["cell_type"] == "code": out.append((m[1], nb.name))
    return out


def test_code_lines_counts_code_only():
    assert code_lines('"doc"\n# comment\n\nx = 1  # one\n') == 1
    assert code_lines('def f(a,\n      b):\n    """two\n    lines"""\n    return a\n') == 3
    assert code_lines('s = """a string\nthat is code"""\n') == 2


def test_engine_stays_within_2000_code_lines(capsys):
    """The engine is the modules of chapters 1 to 12 (`ENGINE`), at most 2,000 lines of code together, without blank
    lines, comments and docstrings. Shown, but not limited: the surface around it, and the harness that measures it."""
    n = {p.stem: code_lines(p.read_text(encoding="utf-8")) for p in MODULES if p.stem != "__init__"}
    parts = {"engine": ENGINE, "surface": [k for k in SURFACE if k in n]}
    parts["harness"] = sorted(set(n) - set(ENGINE) - set(SURFACE))
    total = {part: sum(n[k] for k in names) for part, names in parts.items()}
    with capsys.disabled():
        print()
        for part, names in parts.items():
            print(f"{part}: {total[part]:,} code lines{f' of {LIMIT:,}' if part == 'engine' else ''}")
            for k in names: print(f"  {k:16} {n[k]:5}")
    assert total["engine"] <= LIMIT


def test_the_engine_is_chapters_1_to_12():
    assert {m for m, nb in exports() if 1 <= int(nb[:2]) <= 12} - set(SURFACE) == set(ENGINE)


def public(tree):
    "(name, node) of each public function, class and method, including those added with @patch"
    for n in tree.body:
        if not isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or n.name.startswith("_"): continue
        yield n.name, n
        if isinstance(n, ast.ClassDef):
            for m in n.body:
                if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef)) and not m.name.startswith("_"):
                    yield f"{n.name}.{m.name}", m


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_public_names_have_docstrings(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), f"{path.name} has no docstring: the notebook's first cell needs a `> summary` line"
    bad = [name for name, n in public(tree) if not ast.get_docstring(n)]
    assert not bad, f"without docstring: {', '.join(bad)}"


def imports(path):
    "Modules of this package that `path` imports, anywhere in it"
    out = set()
    for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(n, ast.ImportFrom) and (n.level == 1 or (n.module or "").split(".")[0] == "miniengine"):
            mod = (n.module or "").removeprefix("miniengine").strip(".")
            out |= {mod.split(".")[0]} if mod else {a.name for a in n.names}
        elif isinstance(n, ast.Import):
            out |= {a.name.split(".")[1] for a in n.names if a.name.startswith("miniengine.")}
    return {o for o in out if (PKG/f"{o}.py").exists()}


def test_imports_point_to_earlier_chapters_only():
    order = {m: i for i, (m, _) in enumerate(exports())}
    bad = [f"{m} imports {o}" for m in order for o in imports(PKG/f"{m}.py") if order.get(o, 999) >= order[m]]
    assert not bad, "; ".join(bad)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_signatures_of_several_lines_have_docments(path):
    "A comment for each parameter; signatures of one line speak for themselves"
    src, bad = path.read_text(encoding="utf-8"), []
    lines = src.splitlines()
    for name, n in public(ast.parse(src)):
        args = [] if isinstance(n, ast.ClassDef) else n.args.posonlyargs + n.args.args + n.args.kwonlyargs
        if not args or args[-1].lineno == n.lineno: continue
        bad += [f"{name}: {a.arg}" for a in args if a.arg not in ("self", "cls") and "#" not in lines[a.end_lineno - 1]]
    assert not bad, f"parameters without a comment: {bad}"


def test_each_module_comes_from_one_notebook():
    mods = [m for m, _ in exports()]
    assert len(mods) == len(set(mods)), "two notebooks export the same module"
    assert set(mods) == {p.stem for p in MODULES} - {"__init__"}


def test_the_package_and_its_command_import_nothing_heavy_and_in_no_time():
    """0.3 s for `import miniengine` is the promise (2 ms on an idle machine); of three runs the best counts, since
    others may be using the machine. `miniengine --help` (tests/test_cli.py) imports no more than `miniengine.cli`."""
    heavy = "torch transformers fastapi pydantic uvicorn numpy tokenizers aiohttp plotly".split()
    code = "import sys, {0}; sys.exit(', '.join(m for m in %r if m in sys.modules) or None)" % heavy
    def seconds(name):
        r = subprocess.run([sys.executable, "-X", "importtime", "-c", code.format(name)], cwd=ROOT, text=True,
                           capture_output=True)
        assert r.returncode == 0, f"{name} imports {r.stderr.splitlines()[-1]}"
        return sum(int(m[1]) for m in re.finditer(rf"\|\s+(\d+) \| {name}$", r.stderr, re.M))/1e6
    assert min(seconds("miniengine") for _ in range(3)) < 0.3
    assert min(seconds("miniengine.cli") for _ in range(3)) < 1


def test_the_package_is_marked_as_typed_and_its_papers_agree():
    ini = {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in
           (ROOT/"settings.ini").read_text(encoding="utf-8").splitlines()) if not k.startswith("#")}
    assert (PKG/"py.typed").is_file()
    cite, log = ((ROOT/f).read_text(encoding="utf-8") for f in ("CITATION.cff", "CHANGELOG.md"))
    assert f"\nversion: {ini['version']}\n" in cite and f"\n## {ini['version']}\n" in log
    assert {"gpu", "bench", "book", "ray", "dev"} <= {k.removesuffix("_requirements") for k in ini}
    tests = (ROOT/".github/workflows/test.yml").read_text(encoding="utf-8")
    setup = (ROOT/"setup.py").read_text(encoding="utf-8")
    for minor in range(int(ini["min_python"].split(".")[1]), 14):
        assert f'"3.{minor}"' in tests and f'"3.{minor}"' in setup


@pytest.mark.parametrize("name", NO_TORCH)
def test_bookkeeping_runs_without_torch(name):
    if not (PKG/f"{name}.py").exists(): pytest.skip(f"chapter {name} isn't written yet")
    code = f"import miniengine.{name}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0, f"miniengine.{name} pulls torch in"
