"""A folder that deploys a reward function as it is: source, entry point, platform's own file, README.

Keeps true: the folder needs nothing from where it was made: it carries the user's module (or its package), the few
standard-library-only files of RollArt that serve it, and a requirements.txt beside them if the user has one; the
function is loaded once before anything is written. Waits for nothing.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import rollart
from rollart.core.errors import ConfigError
from rollart.rewards.domains import REWARDS, reward_function

TARGETS = ("cloud-run", "knative", "lambda", "function-compute")
SERVING = ("__init__.py", "core/__init__.py", "core/errors.py", "core/foreign.py", "core/tokens.py", "core/types.py",
           "rewards/__init__.py", "rewards/contract.py", "rewards/domains.py", "rewards/handler.py",
           "rewards/judge.py", "rewards/mix.py", "rewards/server.py")
"""What serves a function: standard library only; a test imports them alone."""

_TARGETS = Path(__file__).with_name("targets")
"""By target, what its packages hold besides: texts with the values of `write_package` in braces."""


def entry(function: str) -> str:
    """main.py: `handler` for events (Lambda, Function Compute), `reward` for functions-framework."""
    return (_TARGETS / "common" / "main.py.in").read_text().format(function=function)


def write_package(function: str, target: str, folder: Path, *, concurrency: int = 1, seconds: int = 60) -> list[str]:
    """Write the folder; returns its files. Raises ConfigError."""
    if target not in TARGETS:
        raise ConfigError(f"--target must be one of {', '.join(TARGETS)}; got {target!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder: name a new one with --out")
    if getattr(reward_function(function), "executes_output", False):
        raise ConfigError(f"reward {function} runs what the model wrote; this needs a sandbox, and a package has none")
    module = "" if function in REWARDS else function.partition(":")[0]
    name = re.sub(r"[^a-z0-9]+", "-", function.lower()).strip("-")[:60]
    values = {"function": function, "name": name, "concurrency": concurrency, "seconds": seconds,
              "port": 9000 if target == "function-compute" else 8080}
    folder.mkdir(parents=True, exist_ok=True)
    own = Path(rollart.__file__).parent
    for file in SERVING:
        _copy(own / file, folder / "rollart" / file)
    requirements = _copy_module(module, folder) if module else ""
    (folder / "requirements.txt").write_text(requirements)
    for kind in ("common", target, *(() if target == "lambda" else ("container",))):
        for text in (_TARGETS / kind).iterdir():
            (folder / text.name.removesuffix(".in")).write_text(text.read_text().format(**values))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _copy_module(module: str, folder: Path) -> str:
    """The user's module, or the whole top-level package that it is in; returns their requirements.txt."""
    top = module.partition(".")[0]
    if top == "rollart" or top in sys.stdlib_module_names:
        if top == "rollart":
            return ""
        raise ConfigError(f"{module} is a module of Python itself, not of yours")
    if (folder / top).exists() or top in ("main", "requirements"):
        raise ConfigError(f"a module named {top} would hide the package's own: rename it")
    file = importlib.import_module(top).__file__
    if file is None:
        raise ConfigError(f"{top} has no source to package: give the package an __init__.py")
    source = Path(file)
    if source.name == "__init__.py":
        shutil.copytree(source.parent, folder / top, ignore=shutil.ignore_patterns("__pycache__", ".*", "*.pyc"))
        beside = source.parent.parent
    else:
        _copy(source, folder / source.name)
        beside = source.parent
    needs = beside / "requirements.txt"
    return needs.read_text() if needs.exists() else ""


def _copy(source: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
