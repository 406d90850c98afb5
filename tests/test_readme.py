"""The README and the hero picture say what the result files say."""
import json
import re
import subprocess
import sys
from pathlib import Path

import test_package
from test_package import code_lines

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/"bench"))
import hero  # noqa: E402
import report  # noqa: E402


def test_readme_is_what_the_results_say():
    r = subprocess.run([sys.executable, ROOT/"tools/readme_tables.py", "--check"], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def test_hero_is_what_the_results_say():
    assert (ROOT/"assets/hero.svg").read_text(encoding="utf-8") == hero.svg(), "python bench/hero.py"


def test_readme_marks_are_in_pairs_and_the_picture_comes_first():
    text = (ROOT/"README.md").read_text(encoding="utf-8")
    assert len(re.findall("<!-- results: ", text)) == len(re.findall("<!-- end -->", text)) > 5
    assert 0 < text.index("assets/hero.svg") < text.index("## Quickstart")


def test_lines_are_counted_as_the_package_test_counts_them():
    for p in (ROOT/"miniengine").glob("*.py"):
        src = p.read_text(encoding="utf-8")
        assert report.code_lines(src) == code_lines(src), p.name


def test_the_size_in_the_title_is_that_of_the_engine_as_the_package_test_defines_it():
    assert report.ENGINE == test_package.ENGINE and report.SURFACE == test_package.SURFACE


def test_results_that_are_missing_are_said_to_be_missing():
    assert report.read("nothing/here.json") is None
    assert report.switched({"miniengine": {}}, "eager") is None
    assert report.ablation_table({"miniengine": {}}) == ""


def test_a_block_cache_finds_what_arithmetic_says():
    a, b = tuple(range(40)), tuple(range(40)) + tuple(range(100, 120))
    assert report.replay(((0, a), (1, b)), 16) == {0: (40, 0), 1: (60, 32)}


def test_each_term_of_the_glossary_stands_once_and_in_order():
    cells = json.loads((ROOT/"nbs/95_glossary.ipynb").read_text(encoding="utf-8"))["cells"]
    terms = re.findall(r"^\*\*(.+)\*\*\n:", "".join("".join(c["source"]) + "\n" for c in cells), re.M)
    keys = [t.lower().replace("-", " ") for t in terms]
    assert len(terms) > 30 and keys == sorted(set(keys))


def test_blog_has_the_length_of_a_blog_post():
    cells, text = json.loads((ROOT/"nbs/90_blog.ipynb").read_text(encoding="utf-8"))["cells"], []
    for c in cells:
        if c["cell_type"] == "markdown": text.append("".join(c["source"]))
        for o in c.get("outputs", []): text.append("".join(o.get("data", {}).get("text/markdown", [])))
    prose = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", "\n\n".join(text), flags=re.S), flags=re.M)
    assert 2500 <= len(prose.split()) <= 4000, len(prose.split())
