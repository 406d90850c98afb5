"""The one plot style of the book: `style` gives a figure its look, `line`/`bar` draw the common ones, `show` stores it.

`glass` and `tracks` draw a recorded step trace.

Every chapter draws through this file, so that all pictures read alike, also in black and white: series differ by dash, marker and
hatching as well as by colour, and every axis names its unit. It belongs to the notebooks and isn't part of the package:

    from figs import line, show
    show(line({"paged": (x, y), "contiguous": (x, y2)}, title="Sequences that fit", x="memory (GiB)", y="sequences"), "fig-fit")
"""
import gzip
import json
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

COLORS = ["#1f4e79", "#c55a11", "#4f7a28", "#7f7f7f", "#7030a0", "#000000"]
DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"]
MARKERS = ["circle", "square-open", "diamond", "triangle-up-open", "x", "cross"]
PATTERNS = ["", "/", ".", "x", "-", "+"]
GRID = "#dddddd"

_axis = dict(showline=True, linecolor="black", mirror=True, ticks="outside", gridcolor=GRID, zeroline=False, automargin=True)
pio.templates["book"] = go.layout.Template(layout=dict(
    colorway=COLORS, font=dict(family="Helvetica, Arial, sans-serif", size=13), xaxis=_axis, yaxis=_axis,
    title=dict(x=0.01, xanchor="left", font=dict(size=16)), legend=dict(bordercolor=GRID, borderwidth=1),
    height=380, margin=dict(l=70, r=20, t=50, b=60)))
pio.templates.default = "book"   # a figure made without `style` looks right too; far smaller in the page than plotly's own template


class Fig:
    "A plotly figure shown as text/html with a fixed id, so that running the notebook again gives the same bytes"
    def __init__(self, fig, name): self.fig, self.name = fig, name

    def _repr_mimebundle_(self, include=None, exclude=None):
        # "plot-": a Quarto label may carry the same name, and two elements with one id would make plotly draw into the wrong one
        html = self.fig.to_html(full_html=False, include_plotlyjs="cdn", div_id=f"plot-{self.name}",
                                config=dict(responsive=True, displayModeBar=False))
        return {"text/html": html, "text/plain": f"<plotly figure {self.name}>"}


def style(fig, title=None, x=None, y=None, **layout):
    "Title and axis titles of `fig`, the latter *with their unit*; more `layout` goes to plotly as it is. Returns `fig`"
    fig.update_layout(**layout)
    if title: fig.update_layout(title_text=title)
    else: fig.update_layout(margin_t=20)
    if x: fig.update_xaxes(title_text=x)
    if y: fig.update_yaxes(title_text=y)
    return fig


def mark(i, filled=False):
    "How series number `i` is drawn: keyword arguments for `go.Scatter` (or for `go.Bar` with `filled=True`)"
    c = COLORS[i % len(COLORS)]
    if filled: return dict(marker=dict(color=c, line=dict(color="black", width=1), pattern=dict(shape=PATTERNS[i % len(PATTERNS)], solidity=0.4)))
    return dict(line=dict(color=c, dash=DASHES[i % len(DASHES)], width=2), marker=dict(symbol=MARKERS[i % len(MARKERS)], size=8, color=c))


def line(series, title=None, x=None, y=None, log_x=False, log_y=False, **kw):
    "Lines with markers from `{name: (xs, ys)}`; a logarithmic x axis is ticked at the values measured"
    fig = go.Figure([go.Scatter(x=list(xs), y=list(ys), name=name, mode="lines+markers", **mark(i))
                     for i, (name, (xs, ys)) in enumerate(series.items())])
    if log_x: fig.update_xaxes(type="log", tickvals=sorted({v for xs, _ in series.values() for v in xs}))
    if log_y: fig.update_yaxes(type="log")
    return style(fig, title, x, y, showlegend=len(series) > 1, **kw)


def bar(series, title=None, x=None, y=None, stacked=False, **kw):
    "Bars from `{name: (labels, heights)}`, side by side or stacked"
    fig = go.Figure([go.Bar(x=list(xs), y=list(ys), name=name, **mark(i, filled=True)) for i, (name, (xs, ys)) in enumerate(series.items())])
    return style(fig, title, x, y, showlegend=len(series) > 1, barmode="stack" if stacked else "group", **kw)


def show(fig, name):
    """Show a plotly figure under the fixed name `name`, unique in the book; put it last in a cell.

    For a captioned, numbered figure that text can point at with `@fig-fit`, start the cell with
    `#| label: fig-fit` and `#| fig-cap: "..."`; the same `name` may be used here.
    """
    return Fig(fig, name)


# --- pictures of a step trace (chapter 12d): what `/debug/trace` or `miniengine serve --trace FILE` wrote ---

def read_trace(path):
    "A trace file, compressed or not"
    data = Path(path).read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def boxes(fig, kinds, row=1):
    "Horizontal boxes `{name: [(track, begin, length, text), ...]}` in subplot `row`; prompt chunks stand out by their height"
    for name, some in kinds.items():
        y, base, x, text = zip(*some)
        i = ("decode", "prompt chunk", "waiting").index(name)
        fig.add_bar(orientation="h", y=y, base=base, x=x, name=name, hovertext=text, hoverinfo="text", row=row, col=1,
                    width=0.75 if name == "prompt chunk" else 0.35, **mark(i, filled=True))


def lane_name(n):
    "A, B, ... Z, AA, ... as on the page"
    return (lane_name((n - 1)//26) + chr(65 + (n - 1) % 26)) if n else ""


def glass(report, first=1, last=10**9, parts=("lanes", "tokens", "blocks"), title=None):
    "Steps `first` to `last` of a trace as the page draws them: lanes of the requests, tokens per step under the budget, blocks"
    steps = [s for s in report["steps"] if first <= s["step"] <= last]
    fig = make_subplots(rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=0.06,
                        row_heights=[2.2 if p == "lanes" else 1 for p in parts])
    prompts, lanes = {r["lane"]: r["prompt"] for r in report["requests"]}, set()
    def prefill(row): return row[2] > 1 or row[1] < prompts.get(row[0], 0)
    for k, part in enumerate(parts, 1):
        x = [s["step"] for s in steps]
        if part == "lanes":
            kinds, marks, queued = {"decode": [], "prompt chunk": [], "waiting": []}, {"preempted": [], "ended": []}, {}
            for s in steps:
                t = s["step"] - 0.5
                queued |= dict.fromkeys([*s["queued"], *s["preempted"]], t)
                for lane, cached in s["admitted"]:
                    if (since := queued.pop(lane, None)) is not None and since < t: kinds["waiting"].append((lane, since, t - since, "waiting"))
                for row in s["rows"]:
                    kinds["prompt chunk" if prefill(row) else "decode"].append((row[0], t, 1, f"step {s['step']}: tokens {row[1]} to {row[1] + row[2]}"))
                    lanes.add(row[0])
                marks["preempted"] += [(s["step"], lane) for lane in s["preempted"]]
                marks["ended"] += [(t, lane) for lane, _ in s["finished"]]
            kinds["waiting"] += [(lane, t, x[-1] + 0.5 - t, "waiting") for lane, t in queued.items()]
            lanes |= set(queued)
            y = {lane: i for i, lane in enumerate(sorted(lanes))}
            boxes(fig, {name: [(y[b[0]], *b[1:]) for b in some] for name, some in kinds.items() if some}, k)
            for (name, pts), symbol in zip(marks.items(), ("x", "line-ns-open")):
                pts = [(x, y[lane]) for x, lane in pts if lane in y]
                if pts: fig.add_scatter(x=[p[0] for p in pts], y=[p[1] for p in pts], mode="markers", name=name, row=k, col=1,
                                        marker=dict(symbol=symbol, size=12, color="black", line_width=3 if name == "ended" else 1))
            fig.update_yaxes(title_text="request", autorange="reversed", tickvals=list(y.values()), ticktext=[lane_name(n) for n in y], row=k, col=1)
        elif part == "tokens":
            of = {"decode": [sum(r[2] for r in s["rows"] if not prefill(r)) for s in steps], "prompt chunk": [sum(r[2] for r in s["rows"] if prefill(r)) for s in steps]}
            base = [0]*len(x)
            for i, (name, y) in enumerate(of.items()):
                fig.add_bar(x=x, y=y, base=base, name=name, showlegend="lanes" not in parts, row=k, col=1, width=1, **mark(i, filled=True))
                base = y
            if max(s["tokens"] for s in steps) > report["budget"]/5: fig.add_scatter(x=[x[0] - 0.5, x[-1] + 0.5], y=[report["budget"]]*2, mode="lines", name="budget", line=dict(color="black", dash="dot"), row=k, col=1)
            fig.update_yaxes(title_text="tokens", row=k, col=1)
        else:
            usable = report["num_blocks"] - 1
            for i, (name, y) in enumerate({"held": [usable - s["free"] for s in steps], "findable": [s["known"] for s in steps]}.items()):
                fig.add_scatter(x=x, y=y, mode="lines", line_shape="hv", name=f"blocks {name}", row=k, col=1, fill="tozeroy" if i == 0 else None,
                                line=mark(i)["line"])
            fig.update_yaxes(title_text="blocks", range=[0, usable*1.05], row=k, col=1)
    fig.update_xaxes(title_text="step", row=len(parts), col=1)
    height = 140*len(parts) + 14*len(lanes) + 90
    fig.update_layout(barmode="overlay", bargap=0, height=height, margin=dict(t=80 if title else 60, b=50),
                      legend=dict(orientation="h", y=1 + 8/(height - 110), yanchor="bottom"))
    return style(fig, title, margin_t=90) if title else fig


TRACK = dict(step="#bcd0e4", launch="#bcd0e4", decode="#bcd0e4", prefill="#f2c9a8", waiting="#ffffff", pack="#d5e3c6", commit="#d5e3c6")


def tracks(events, begin=0.0, end=None, most=99, title=None):
    "Chrome trace events between two times (ms) as Perfetto shows them: a row for each track (of requests the `most` newest), a box for each event"
    events = events["traceEvents"]
    name = {(x["pid"], x["tid"]): x["args"]["name"] if x["pid"] == 1 else f"request {lane_name(x['tid'])}" for x in events if x["name"] == "thread_name"}
    kinds, end = {}, end or max(x["ts"] + x.get("dur", 0) for x in events)/1e3
    for x in events:
        if x["ph"] == "X" and x["ts"]/1e3 < end and (x["ts"] + x["dur"])/1e3 > begin:
            since, until = max(begin, x["ts"]/1e3), min(end, (x["ts"] + x["dur"])/1e3)
            text = x["name"] if until - since > 0.012*len(x["name"])*(end - begin) else ""   # what fits into the box
            box = name[x["pid"], x["tid"]], since - begin, until - since, text, f"{x['name']}: {x['dur']/1e3:.2f} ms"
            kinds.setdefault(x["name"].split()[0], []).append(box)
    order = [n for n in name.values() if any(n == box[0] for some in kinds.values() for box in some)]
    order = order[:2] + order[2:][-most:]
    kinds = {k: kept for k, some in kinds.items() if (kept := [box for box in some if box[0] in order])}
    fig = make_subplots(rows=1, cols=1)
    for kind, some in sorted(kinds.items()):
        y, base, x, text, dur = zip(*some)
        fig.add_bar(orientation="h", y=y, base=base, x=x, text=text, hovertext=dur, hoverinfo="text", width=0.8, textposition="inside",
                    insidetextanchor="middle", textangle=0, constraintext="none", textfont=dict(color="black", size=11),
                    marker=dict(color=TRACK.get(kind, "#ffffff"), line=dict(color="black", width=0.5)))
    fig.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    fig.update_xaxes(range=[0, end - begin])
    return style(fig, title, x="time (ms)", barmode="overlay", height=100 + 30*len(order), showlegend=False)
