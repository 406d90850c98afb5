"""miniengine: a mini LLM inference engine that is also a book. `LLM(...)` works offline, `miniengine serve` is the server."""
__version__ = "0.1.0"

_where = dict(LLM="engine", Engine="engine", AsyncEngine="engine", RequestOutput="engine", CompletionOutput="engine",
              EngineConfig="config", ModelConfig="config", SamplingParams="config", RequestError="config")
__all__ = list(_where)


def __getattr__(name):
    "Load a public name at its first use: `import miniengine` alone stays free of torch (the scheduler's tests rely on it)"
    if name not in _where: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    return getattr(import_module(f".{_where[name]}", __name__), name)
