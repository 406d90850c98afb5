"Packaging metadata lives in settings.ini (shared with nbdev); this file only maps it onto setuptools."
import shlex
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup, find_packages

here = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])  # nbdev's own parser also uses '=' only
ini.read(here/"settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]

def words(key):
    "One item per line; a one-line value is split on blanks instead"
    v = cfg.get(key, "")   # test for the newline before stripping: a list of one item starts with one too
    return [o.strip() for o in v.splitlines() if o.strip()] if "\n" in v else shlex.split(v)

# every `<name>_requirements = ...` key becomes the extra `<name>`
extras = {k[:-len("_requirements")].replace("_", "-"): words(k) for k in cfg if k.endswith("_requirements")}
extras["all"] = sorted({r for v in extras.values() for r in v})

lib = cfg["lib_path"]
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here/"README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    keywords=cfg["keywords"].split(),
    packages=find_packages(include=[lib, f"{lib}.*"]),
    include_package_data=True,
    python_requires=f">={cfg['min_python']}",
    install_requires=words("requirements"),
    extras_require=extras,
    entry_points={
        "console_scripts": words("console_scripts"),
        # lets nbdev's doc links resolve `symbols` of this package
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
    project_urls={k: cfg["git_url"] + p for k, p in {"Source": "", "Changelog": "/blob/main/CHANGELOG.md"}.items()},
    classifiers=[  # no license here: pyproject.toml has it as an SPDX expression
        "Development Status :: 3 - Alpha",
        "Environment :: Console", "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers", "Intended Audience :: Education", "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: {v}" for v in ("3", "3 :: Only", "3.11", "3.12", "3.13")),
        "Topic :: Scientific/Engineering :: Artificial Intelligence", "Typing :: Typed",
    ],
    zip_safe=False,
)
