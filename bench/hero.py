#!/usr/bin/env python3
"""Draw assets/hero.svg from the results: TTFT p95 and ITL p95 over the request rate, vLLM and miniengine.

    python bench/hero.py [--model 7b]

Written by hand rather than by a plotting library: a few kilobytes, no fonts inside, and colours that read on a white and on a dark page.
"""
# ruff: noqa: E401, E501
import argparse, math
from pathlib import Path

import report

INK, FAINT = "#757c86", "#757c8655"                 # about 4:1 against white and against GitHub's dark background
LOOK = {"vllm": ("#d97706", "6 4", "square", "vLLM"), "miniengine": ("#3b82f6", "", "circle", "miniengine")}
W, H, TOP, BASE, LEFT, PANEL, GAP = 860, 344, 62, 258, 58, 340, 82


def nice(top):
    "A step that cuts 0..top into four to six parts"
    for step in (s*10**e for e in range(4) for s in (1, 2, 5)):
        if top/step <= 6: return step


def panel(x0, engines, rates, key, title):
    top = max(engines[e][r][key] for e in LOOK for r in rates)*1.12
    step = nice(top)
    x = lambda r: x0 + 12 + (PANEL - 24)*(math.log2(float(r)) - math.log2(float(rates[0])))/(math.log2(float(rates[-1])) - math.log2(float(rates[0])))
    y = lambda v: BASE - (BASE - TOP)*v/top
    out = [f'<text x="{x0}" y="{TOP - 18}" class="t">{title}</text>']
    for k in range(int(top/step) + 1):
        out += [f'<line x1="{x0}" x2="{x0 + PANEL}" y1="{y(k*step):.1f}" y2="{y(k*step):.1f}" stroke="{FAINT}"/>',
                f'<text x="{x0 - 8}" y="{y(k*step) + 4:.1f}" text-anchor="end">{k*step:g}</text>']
    for r in rates: out.append(f'<text x="{x(r):.1f}" y="{BASE + 18}" text-anchor="middle">{r}</text>')
    out.append(f'<text x="{x0 + PANEL/2}" y="{BASE + 38}" text-anchor="middle">requests per second (Poisson)</text>')
    for e, (color, dash, shape, _) in LOOK.items():
        pts = [(x(r), y(engines[e][r][key])) for r in rates]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in pts)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2.5"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>")
        out += [mark(a, b, color, shape) for a, b in pts]
        a, b = pts[-1]
        out.append(f'<text x="{a - 10:.1f}" y="{b - 10:.1f}" text-anchor="end" style="fill:{color};font-weight:600">{engines[e][rates[-1]][key]:.1f}</text>')
    return out


def mark(x, y, color, shape):
    if shape == "circle": return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.2" fill="{color}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{color}"/>'


def svg(model="7b", machine="h200"):
    "The picture as text"
    engines, env = report.sweep(machine)[model], report.environment(machine)
    rates = [r for r in report.common(engines) if r != "inf"]
    v = env["versions"]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" role="img" aria-label="TTFT p95 and ITL p95 over the request rate, vLLM and miniengine">',
           f"<style>text{{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:{INK}}} .t{{font-size:15px;font-weight:600}}</style>"]
    out += panel(LEFT, engines, rates, "p95_ttft_ms", "TTFT p95 (ms): waiting for the first token")
    out += panel(LEFT + PANEL + GAP, engines, rates, "p95_itl_ms", "ITL p95 (ms): waiting for the next one")
    for i, e in enumerate(LOOK):
        color, dash, shape, name = LOOK[e]
        x = LEFT + 120*i
        out += [f'<line x1="{x}" x2="{x + 26}" y1="16" y2="16" stroke="{color}" stroke-width="2.5"' + (f' stroke-dasharray="{dash}"' if dash else "") + "/>",
                mark(x + 13, 16, color, shape), f'<text x="{x + 34}" y="20">{name}</text>']
    out.append(f'<text x="{W - 16}" y="20" text-anchor="end">lower is better</text>')
    gpu = env["machine"].split(" (")[0].split(",")[0]
    foot = (f'{report.MODELS[model]}, bf16, ShareGPT prompts, one {gpu}; vLLM {v["vllm"]}, FlashInfer {v["flashinfer"]}; one client for both, {env["date"]}',
            "All requests at once: miniengine has {:.2f}× the tokens per second and {:.2f}× the mean TTFT".format(*(report.ratio(engines, "inf", k) for k in ("output_throughput", "mean_ttft_ms"))))
    out += [f'<text x="{LEFT}" y="{H - 26 + 16*i}" style="font-size:11.5px">{t}</text>' for i, t in enumerate(foot)]
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--model", default="7b"); p.add_argument("--out", type=Path, default=report.ROOT/"assets"/"hero.svg")
    a = p.parse_args()
    a.out.write_text(svg(a.model), encoding="utf-8")


if __name__ == "__main__": main()
