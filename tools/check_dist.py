"""What sdist and wheel must and must not contain: `check_dist.py dist/*.tar.gz dist/*.whl`."""
import re, sys, tarfile, zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = {f"miniengine/{p.name}" for p in (ROOT/"miniengine").iterdir() if p.suffix in (".py", ".html", ".typed")}
SDIST = MODULES | {"settings.ini", "setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md"} | {
    f"deploy/{p.name}" for p in (ROOT/"deploy").iterdir() if p.is_file()}

def names(path):
    "File names in an sdist (without its top folder) or in a wheel (without its metadata), and the metadata"
    if path.endswith(".whl"):
        z = zipfile.ZipFile(path)
        return {n for n in z.namelist() if ".dist-info/" not in n}, z.read(next(n for n in z.namelist() if n.endswith("METADATA"))).decode()
    t = tarfile.open(path)
    return {m.name.split("/", 1)[1] for m in t.getmembers() if m.isfile()}, t.extractfile(next(m for m in t.getmembers() if re.fullmatch("[^/]*/PKG-INFO", m.name))).read().decode()

def problems(path):
    "What is wrong with a distribution"
    have, meta = names(path)
    want = MODULES if path.endswith(".whl") else SDIST
    extra = {n for n in have - want if not re.match(r"miniengine\.egg-info/|setup\.cfg|PKG-INFO|MANIFEST\.in", n)}
    out = [f"{path}: without {n}" for n in sorted(want - have)] + [f"{path}: should not contain {n}" for n in sorted(extra)]
    for field in ("License-Expression: Apache-2.0", "Classifier: Typing :: Typed", "Requires-Python: >=3.11", *(f"Provides-Extra: {e}" for e in "gpu bench book ray dev".split())):
        if f"\n{field}\n" not in meta: out.append(f"{path}: metadata without {field!r}")
    return out

if __name__ == "__main__":
    found = [p for path in sys.argv[1:] for p in problems(path)]
    if found: sys.exit("\n".join(found))
    print("sdist and wheel hold what they should:", *(f"{Path(p).name} ({len(names(p)[0])} files)" for p in sys.argv[1:]))
