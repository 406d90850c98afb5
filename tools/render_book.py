"""Render the book without Quarto, with smalldocs (pure Python), into _book/. Exits 1 on a broken link or a missing picture.

Works on a copy in which the notebooks passed tools/quarto_filter.py, so that nbdev's directives and hidden cells are gone,
as in Quarto's pages. Cross-references (`@fig-x`) and captions are Quarto's alone: here they become plain links to the page that defines
them, and a line in italics.
plotly.js comes from the installed package, so that the plots show without a network too.
"""
import json, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KIND = {"fig": "figure", "sec": "section", "tbl": "table", "eq": "equation"}
PLOTLY = re.compile(r'<script[^>]*src="https://cdn\.plot\.ly/[^>]*></script>')
TITLE = re.compile(r"# ([^\\\n{]+?)\s*\{#(sec-[\w-]+)\}")
CAPTION = re.compile(r'^#\|\s*fig-cap:\s*"(.*)"\s*$', re.M)
LABEL = re.compile(r"(?:\{#|#\|\s*label:\s*)((?:fig|sec|tbl|eq)-[\w-]+)")

def main():
    with tempfile.TemporaryDirectory() as d:
        tmp = Path(d)
        for n in ("_quarto.yml", "index.qmd", "README.md", "LICENSE"): shutil.copy(ROOT/n, tmp)
        readme = tmp/"README.md"   # index.qmd brings the title: what tools/drop_readme_title.lua does for Quarto
        readme.write_text(re.sub(r"^# .*\n", "", readme.read_text(encoding="utf-8"), count=1), encoding="utf-8")
        shutil.copytree(ROOT/"assets", tmp/"assets")
        (tmp/"nbs").mkdir()
        texts = {p.name: p.read_text(encoding="utf-8") for p in sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))}
        where = {k: n for n, t in texts.items() for k in LABEL.findall(t)}
        title = {k: f"“{h}”" for t in texts.values() for h, k in TITLE.findall(t)}
        def link(m): return f"[{title.get(m[1], KIND[m[1].split('-')[0]])}]({where[m[1]]})" if m[1] in where else m[0]
        for n, t in texts.items():
            t = subprocess.run([sys.executable, ROOT/"tools/quarto_filter.py"], input=t, capture_output=True, text=True, check=True).stdout
            nb = json.loads(t)
            cells, nb["cells"] = nb["cells"], []
            for c in cells:
                nb["cells"].append(c)
                if c["cell_type"] == "code" and (m := CAPTION.search("".join(c["source"]))):   # smalldocs shows no captions
                    nb["cells"].append(dict(cell_type="markdown", id=f"cap-{len(nb['cells'])}", metadata={}, source=f"*{m[1]}*"))
                if c["cell_type"] == "markdown":
                    s = re.sub(r"(?<![\w`])@((?:fig|sec|tbl|eq)-\w[\w-]*)", link, "".join(c["source"]))
                    c["source"] = re.sub(r"\s*\{#(?:fig|sec|tbl|eq)-[\w-]+\}", "", s)
                for o in c.get("outputs", []):
                    if "text/html" in o.get("data", {}):
                        h = "".join(o["data"]["text/html"])
                        o["data"]["text/html"] = PLOTLY.sub('<script src="../site_libs/plotly.min.js"></script>', h)
            (tmp/"nbs"/n).write_text(json.dumps(nb), encoding="utf-8")
        smalldocs = Path(sys.executable).parent/"smalldocs"
        r = subprocess.run([smalldocs, "render", tmp], capture_output=True, text=True)
        if r.returncode: sys.exit(r.stdout + r.stderr)
        c = subprocess.run([smalldocs, "check", tmp], capture_output=True, text=True)
        bad = [o for o in (c.stdout + c.stderr).splitlines() if "broken link" in o or "missing" in o]
        if bad: sys.exit("\n".join(bad))
        from plotly.offline import get_plotlyjs
        (tmp/"_book/site_libs").mkdir(exist_ok=True)
        (tmp/"_book/site_libs/plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
        shutil.rmtree(ROOT/"_book", ignore_errors=True); shutil.copytree(tmp/"_book", ROOT/"_book")
    pages = sorted((ROOT/"_book").rglob("*.html"))
    print(f"book: {len(pages)} pages in _book/, no broken link (smalldocs; cross-reference numbers need Quarto)")

if __name__ == "__main__": main()
