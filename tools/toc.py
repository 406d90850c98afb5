"""Write the chapter list of _quarto.yml from nbs/ (Quarto's book.chapters takes no globs); `--check` only compares."""
import re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = [(0, "Overview"), (1, "Memory and time"), (4, "The model"), (9, "The engine"), (13, "Serving"), (15, "Benchmarks"), (17, "Outgrowing it"), (90, "In short"), (95, "Reference")]

def chapters():
    "The lines between `chapters:` and the next top-level key: parts begin at the notebook numbers of PARTS"
    out, part = ["    - index.qmd"], None
    for p in sorted((ROOT/"nbs").glob("[0-9]*.ipynb")):
        name = [t for n, t in PARTS if n <= int(re.match(r"\d+", p.name)[0])][-1]
        if name != part: out += [f'    - part: "{name}"', "      chapters:"]
        out.append(f"        - nbs/{p.name}"); part = name
    return "\n".join(out) + "\n"

def main():
    f = ROOT/"_quarto.yml"; old = f.read_text(encoding="utf-8")
    head, rest = old.split("  chapters:\n", 1)
    new = head + "  chapters:\n" + chapters() + "\n" + rest[rest.index("format:"):]
    if "--check" in sys.argv:
        if new != old: sys.exit("_quarto.yml doesn't list the notebooks in nbs/: run `make toc`")
    elif new != old: f.write_text(new, encoding="utf-8")

if __name__ == "__main__": main()
