#!/usr/bin/env python3
"""Quarto `ipynb-filters` script: notebook JSON on stdin -> stdout.

Quarto reads every leading `#| ...` line of a cell as YAML, so nbdev's bare directives (`#| export`, `#| hide`, ...)
would corrupt the page. This drops them, drops `hide`/`default_exp` cells, and labels exported cells with their module.
Standard library only; never runs code; never touches the file on disk.
"""
import json, re, sys

DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(.*?)\s*$")
DROP = {"hide", "default_exp"}

def split(src):
    "`(quarto_option_lines, {directive: args}, code)` of a code cell"
    opts, dirs, lines = [], {}, src.splitlines(True)
    while lines and (m := DIRECTIVE.match(lines[0])):
        body = m.group(1); lines.pop(0)
        if re.match(r"[\w-]+\s*:\s*\S", body): opts.append(f"#| {body}\n")       # `key: value` belongs to Quarto
        elif body: dirs[body.rstrip(":").split()[0]] = body.rstrip(":").split()[1:]
    return opts, dirs, "".join(lines)

def main():
    sys.stdin.reconfigure(encoding="utf-8"); sys.stdout.reconfigure(encoding="utf-8")
    nb = json.load(sys.stdin); cells, mod = [], None
    for c in nb["cells"]:
        if c["cell_type"] != "code": cells.append(c); continue
        src = c["source"] if isinstance(c["source"], str) else "".join(c["source"])
        opts, dirs, code = split(src)
        if "default_exp" in dirs and dirs["default_exp"]: mod = dirs["default_exp"][0]
        if DROP & dirs.keys(): continue
        exp = next((dirs[k] for k in ("export", "exports", "exporti") if k in dirs), None)
        if exp is not None and not any(o.startswith("#| filename:") for o in opts):
            to = (exp[0] if exp else mod) or ""
            opts.insert(0, f'#| filename: "miniengine/{to.replace(".", "/")}.py"\n')
        if code.lstrip().startswith("show_doc("): opts += ["#| echo: false\n"]
        c["source"] = ("".join(opts) + code).splitlines(True); cells.append(c)
    nb["cells"] = cells
    json.dump(nb, sys.stdout, ensure_ascii=False, indent=1)

if __name__ == "__main__": main()
