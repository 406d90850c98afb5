"""Edit notebooks as text and execute them reproducibly.

  python tools/nb.py show  nbs/00_core.ipynb            # print as percent text
  python tools/nb.py edit  nbs/00_core.ipynb            # write .nbwork/00_core.py
  python tools/nb.py apply .nbwork/00_core.py           # write it back to nbs/00_core.ipynb (ids and outputs kept)
  python tools/nb.py run   [nbs/00_core.ipynb ...] [--flags "cuda slow"]   # execute in place, save outputs
  python tools/nb.py check [nbs/*.ipynb]                # clean? unique ids? no stray error outputs?
"""
import argparse, copy, os, shutil, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBS, WORK = ROOT/"nbs", ROOT/".nbwork"
KERNEL = {"display_name": "python3", "language": "python", "name": "python3"}
ENV = dict(PYTHONHASHSEED="0", TZ="UTC", COLUMNS="100", TERM="dumb", NO_COLOR="1",
           MPLBACKEND="module://matplotlib_inline.backend_inline")

def norm(nb):
    "Only what must be committed: no counts, no timings, fixed kernelspec, fixed key order (same form as nbdev_clean)"
    from nbdev.clean import clean_nb
    from nbdev.config import get_config
    cfg = get_config()
    nb.metadata.pop("jupytext", None); nb.metadata["kernelspec"] = dict(KERNEL)
    for c in nb.cells: c.metadata.pop("lines_to_next_cell", None)
    clean_nb(nb, allowed_metadata_keys=cfg.allowed_metadata_keys.split(),
             allowed_cell_metadata_keys=cfg.allowed_cell_metadata_keys.split(), clean_ids=cfg.clean_ids)
    return nb

def load(p):
    import nbformat
    return nbformat.read(p, as_version=4)

def save(nb, p):
    import nbformat
    nb = norm(nb); nbformat.validate(nb)
    txt = nbformat.writes(nb)
    if not txt.endswith("\n"): txt += "\n"
    if not Path(p).exists() or Path(p).read_text(encoding="utf-8") != txt: Path(p).write_text(txt, encoding="utf-8")

def to_text(p):
    import jupytext
    nb = load(p); nb.metadata.pop("jupytext", None)
    nb.metadata.jupytext = {"notebook_metadata_filter": "-all", "cell_metadata_filter": "tags,-all"}
    return jupytext.writes(nb, fmt="py:percent")

def apply(txt_path, nb_path=None):
    import jupytext
    from jupytext.combine import combine_inputs_with_outputs
    txt_path = Path(txt_path); nb_path = Path(nb_path or NBS/(txt_path.stem + ".ipynb"))
    new = jupytext.read(txt_path, fmt="py:percent")
    if nb_path.exists():
        old = load(nb_path)
        src = {c.id: c.source for c in old.cells}
        new = combine_inputs_with_outputs(new, old, fmt="py:percent")
        for c in new.cells:   # an edited cell must not keep the outputs of its old text
            if c.cell_type == "code" and src.get(c.id) != c.source: c.outputs = []
    new.nbformat, new.nbformat_minor = 4, 5
    save(new, nb_path)

def run(p, flags=(), timeout=1800, allow_errors=False):
    "Execute with nbclient in a fresh kernel, honouring `#| eval: false` and the tst_flags of settings.ini"
    from nbclient import NotebookClient
    from nbdev.config import get_config
    from nbdev.process import extract_directives
    from fastcore.basics import AttrDict
    skip = set(get_config().tst_flags.split()) - set(flags)
    def skipped(c):
        d = extract_directives(AttrDict(source=c.source), remove=False)
        return d.get("eval:", [""])[0].lower() == "false" or bool(skip & d.keys())
    class Client(NotebookClient):
        async def async_execute_cell(self, cell, cell_index, *a, **kw):
            if cell.cell_type == "code" and skipped(cell): return cell    # keeps the stored outputs
            return await super().async_execute_cell(cell, cell_index, *a, **kw)
    nb = load(p)
    if nb.cells and nb.cells[0].cell_type == "raw" and "skip_exec: true" in nb.cells[0].source: return   # as nbdev_test does
    nb.metadata["kernelspec"] = dict(KERNEL)
    old, tmp = os.environ.copy(), tempfile.mkdtemp(); os.environ.update(ENV)
    try:
        from jupyter_client import AsyncKernelManager
        # unix sockets: no TCP ports, no "TCP without encryption" warning; `ip` must be an absolute path prefix
        km = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{tmp}/k")
        client = Client(nb, km=km, timeout=timeout, record_timing=False, allow_errors=allow_errors, kernel_name="python3",
                        coalesce_streams=True, resources={"metadata": {"path": str(Path(p).parent)}})
        client.owns_km = True    # we made the manager, but nbclient should shut the kernel down
        client.execute()
    finally:
        os.environ.clear(); os.environ.update(old); shutil.rmtree(tmp, ignore_errors=True)
    save(nb, p)

def check(paths):
    bad = []
    for p in paths:
        raw = Path(p).read_text(encoding="utf-8"); nb = load(p)
        ids = [c.id for c in nb.cells]
        if len(ids) != len(set(ids)): bad.append(f"{p}: repeated cell ids")
        for c in nb.cells:
            for o in c.get("outputs", []):
                if o.output_type == "error" and "raises" not in c.metadata.get("tags", []): bad.append(f"{p}#{c.id}: stored error {o.ename}")
        import nbformat
        txt = nbformat.writes(norm(copy.deepcopy(nb))); txt += "" if txt.endswith("\n") else "\n"
        if txt != raw: bad.append(f"{p}: not clean (run `python tools/nb.py clean`)")
    print("\n".join(bad) or f"{len(paths)} notebooks clean"); return 1 if bad else 0

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("cmd", choices="show edit apply run clean check".split()); ap.add_argument("paths", nargs="*")
    ap.add_argument("--flags", default=""); a = ap.parse_args()
    os.chdir(ROOT)
    paths = [Path(p) for p in a.paths] or sorted(p for p in NBS.rglob("[0-9]*.ipynb") if ".ipynb_checkpoints" not in p.parts)
    if a.cmd == "show": [print(to_text(p)) for p in paths]
    elif a.cmd == "edit":
        WORK.mkdir(exist_ok=True)
        for p in paths: (WORK/(p.stem + ".py")).write_text(to_text(p), encoding="utf-8"); print(WORK/(p.stem + ".py"))
    elif a.cmd == "apply": [apply(p) for p in paths]
    elif a.cmd == "run":
        for p in paths: print("run", p, flush=True); run(p, a.flags.split())
    elif a.cmd == "clean": [save(load(p), p) for p in paths]
    elif a.cmd == "check": sys.exit(check(paths))

if __name__ == "__main__": main()
