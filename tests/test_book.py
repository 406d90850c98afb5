"""The book: what Quarto and smalldocs only warn about is an error here."""
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NBS = sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))
KINDS = "fig|sec|tbl|eq|lst"
each_notebook = pytest.mark.parametrize("path", NBS, ids=lambda p: p.stem)


def cells(path, kind=None):
    nb = json.loads(path.read_text(encoding="utf-8"))
    return [dict(c, source="".join(c["source"])) for c in nb["cells"] if kind in (None, c["cell_type"])]


def prose(text):
    "Markdown without code fences and code spans: what is in them is no link and no reference"
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1[^\n]*$", "", text, flags=re.M | re.S)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


def pages():
    "{file: its Markdown text} of everything the book is made of"
    out = {p: "\n\n".join(c["source"] for c in cells(p, "markdown")) for p in NBS}
    for n in ("index.qmd", "README.md"): out[ROOT/n] = (ROOT/n).read_text(encoding="utf-8")
    return out


def test_quarto_lists_each_notebook_once_and_in_order():
    r = subprocess.run([sys.executable, ROOT/"tools/toc.py", "--check"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    listed = []
    for c in yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))["book"]["chapters"]:
        listed += c["chapters"] if isinstance(c, dict) else [c]
    assert listed == ["index.qmd"] + [f"nbs/{p.name}" for p in NBS]


@each_notebook
def test_opens_with_a_title_and_a_summary(path):
    first = cells(path)[0]
    if first["cell_type"] == "raw": first = cells(path)[1]
    assert first["cell_type"] == "markdown" and re.match(r"# [^\n]+\n\s*> [^\n]+", first["source"])


@each_notebook
def test_outputs_hold_no_error_and_no_plot_that_the_book_cannot_show(path):
    for c in cells(path, "code"):
        for o in c["outputs"]:
            assert o["output_type"] != "error", f"stored error {o.get('ename')} in: {c['source'][:80]}"
            kinds = set(o.get("data", {}))
            if any("plotly" in k for k in kinds):
                assert "text/html" in kinds, "a plot stored as JSON only: end the cell with show(fig, name) from figs"


@each_notebook
def test_was_executed(path):
    code = [c for c in cells(path, "code") if c["source"].strip()]
    assert not code or any(c["outputs"] for c in code), "no stored output: python tools/nb.py run"


@each_notebook
def test_exported_cells_are_short(path):
    long = [(len(c["source"].splitlines()), c["source"].splitlines()[1]) for c in cells(path, "code")
            if re.search(r"^#\|\s*export", c["source"], re.M) and len(c["source"].splitlines()) > 45]
    assert not long, f"exported cells over 45 lines, split them with @patch: {long}"


@each_notebook
def test_quarto_options_are_yaml(path):
    for c in cells(path, "code"):
        lines = []
        for s in c["source"].splitlines():
            m = re.match(r"^\s*#\s*\|\s*(.*?)\s*$", s)
            if not m: break
            assert not re.match(r"(export\w*|hide|cuda|slow|notest)\s*:", m[1]), f"no colon after a directive: {s}"
            if re.match(r"[\w-]+\s*:\s*\S", m[1]): lines.append(m[1])
        opts = yaml.safe_load("\n".join(lines)) or {}
        assert isinstance(opts, dict), lines
        if str(opts.get("label", "")).startswith("fig-"): assert opts.get("fig-cap"), f"{opts['label']} needs a fig-cap"


@each_notebook
def test_each_plot_has_a_label_and_a_caption(path):
    for c in cells(path, "code"):
        drawn = any('<div id="plot-' in "".join(o.get("data", {}).get("text/html", [])) for o in c["outputs"])
        for option in ("label: fig-", "fig-cap: "):
            assert not drawn or re.search(rf"^#\|\s*{option}", c["source"], re.M), f"no {option} in: {c['source'][:80]}"


def labels():
    found = [m for t in pages().values() for m in re.findall(rf"\{{[^}}]*#((?:{KINDS})-[\w-]+)", t)]
    label = rf"^\s*#\s*\|\s*label:\s*((?:{KINDS})-[\w-]+)"
    for p in NBS:
        for c in cells(p, "code"): found += re.findall(label, c["source"], re.M)
    return found


def test_cross_references_resolve():
    have = labels()
    twice = [k for k, n in Counter(have).items() if n > 1]
    assert not twice, f"labels used twice: {twice}"
    ref = rf"(?<![\w@])@((?:{KINDS})-\w[\w-]*)"
    used = [(p.name, r) for p, t in pages().items() for r in re.findall(ref, prose(t))]
    bad = [f"{name}: @{r}" for name, r in used if r not in have]
    assert not bad, bad


def test_plot_names_are_unique():
    n = Counter(i for p in NBS for c in cells(p, "code") for o in c["outputs"]
                for i in re.findall(r'<div id="(plot-[^"]+)"', "".join(o.get("data", {}).get("text/html", []))))
    assert not [k for k, v in n.items() if v > 1], n


def test_local_links_and_pictures_exist():
    bad = []
    for p, text in pages().items():
        text = prose(text)
        for target in re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
            if re.match(r"[a-z][a-z0-9+.-]*:|#", target): continue
            base = ROOT if target.startswith("/") else p.parent
            if not (base/target.lstrip("/").split("#")[0]).exists(): bad.append(f"{p.name}: {target}")
    assert not bad, bad
