"""`rollart reward serve | package | try`: a reward function on its own, apart from any run."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rollart.cli_base import clear_errors, console
from rollart.core.errors import ConfigError, ScorerFailed
from rollart.core.types import Score
from rollart.rewards.contract import RewardRequest, checked, from_json, request_of, to_json
from rollart.rewards.domains import reward_function
from rollart.rewards.settings import RewardSettings

reward_app = typer.Typer(no_args_is_help=True, help="Serve, package or try a reward function.")
Function = Annotated[str, typer.Argument(metavar="MODULE:FUNC", help="A reward function; the current folder counts.")]
SHOWN = 10
"""Differences that `try` prints."""


@reward_app.command()
def serve(
    function: Function,
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 8080,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    elastic: Annotated[bool, typer.Option("--elastic", help="On the local elastic platform instead.")] = False,
    max_instances: Annotated[int, typer.Option(min=1, help="With --elastic: processes at most.")] = 8,
    idle_seconds: Annotated[float, typer.Option(help="With --elastic: idle instances end after.")] = 10.0,
) -> None:
    """Serve it under functions-framework, as a cloud does, or with --elastic by processes that scale from zero."""
    with clear_errors():
        _here()
        reward_function(function)
        if elastic:
            command = ["-m", "rollart.backends.serverless.platform", function, "--host", host, "--port", str(port),
                       "--max-instances", str(max_instances), "--idle-seconds", str(idle_seconds)]
        else:
            command = _framework(function, host, port)
    os.execv(sys.executable, [sys.executable, *command])


def _framework(function: str, host: str, port: int) -> list[str]:
    from rollart.backends.serverless.package import entry

    try:
        import functions_framework  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("reward serve needs functions-framework: pip install 'rollart[serverless]', or serve with "
                          "python -m rollart.rewards.server") from None
    source = Path(tempfile.mkdtemp(prefix="rollart-reward-")) / "main.py"
    source.write_text(entry(function))
    console.print(f"serving {function} at http://{host}:{port} (Ctrl-C ends it)")
    return ["-m", "functions_framework", "--target", "reward", "--source", str(source), "--host", host,
            "--port", str(port)]


@reward_app.command()
def package(
    function: Function,
    target: Annotated[str, typer.Option(help="cloud-run, knative, lambda or function-compute.")],
    out: Annotated[Path | None, typer.Option(help="New folder; default: reward-TARGET.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in one instance at a time.")] = 1,
    seconds: Annotated[int, typer.Option(min=1, help="Deadline of a request.")] = 60,
) -> None:
    """Write a folder that deploys as it is: source, requirements, entry point, the platform's file, README."""
    from rollart.backends.serverless.package import write_package

    with clear_errors():
        _here()
        folder = out or Path(f"reward-{target}")
        files = write_package(function, target, folder, concurrency=concurrency, seconds=seconds)
    console.print(f"{len(files)} files in {folder}; how to deploy them: {folder / 'README.md'}")


@reward_app.command(name="try")
def try_out(
    function: Function,
    source: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run folder, or requests as JSON (one, a "
                                             "list, or one a line).")],
    where: Annotated[str, typer.Option(help="As reward.where in a recipe: in_process, elastic, a URL, ...")] =
    "in_process",
    save: Annotated[Path | None, typer.Option(help="Write requests with both scores here, one a line.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Score recorded trajectories and compare with the scores they had."""
    with clear_errors():
        _here()
        recorded = _recorded(source)
        try:
            settings = RewardSettings(where=where)
        except ValueError as error:
            raise ConfigError(f"--where: {error}") from None
        results = asyncio.run(_scored(function, [request for request, _ in recorded], settings))
        rows = [(request, before, after) for (request, before), after in zip(recorded, results, strict=True)]
        if save:
            save.write_text("".join(json.dumps(_row(*row)) + "\n" for row in rows))
    _show(rows, as_json)
    if any(isinstance(after, str) for _, _, after in rows):
        raise SystemExit(1)


def _here() -> None:
    """The user's module is found in the current folder, in this process and those it starts."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])


def _recorded(source: Path) -> list[tuple[RewardRequest, Score | None]]:
    from rollart.observe.ledger_view import LedgerView
    from rollart.observe.run_folder import RunFolder

    if source.is_dir():
        RunFolder(source).read_config()
        with LedgerView(RunFolder(source).database) as ledger:
            out = [(request_of(t, RewardSettings().score_seconds), t.score) for t in ledger.recorded()]
        if not out:
            raise ConfigError(f"{source} has no recorded trajectory yet")
        return out
    try:
        text = source.read_text()
        plain = json.loads(text) if source.suffix != ".jsonl" else [json.loads(x) for x in text.splitlines() if x]
        items = plain if isinstance(plain, list) else [plain]
        return [(from_json(item), _score(item.get("score"))) for item in items]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"{source} is no file of reward requests: {error}") from None


def _score(plain: Any) -> Score | None:
    return None if plain is None else checked(Score(plain["value"], bool(plain.get("success", False))))


async def _scored(function: str, requests: list[RewardRequest], settings: RewardSettings) -> list[Score | str]:
    """A score for each request, or why there is none."""
    from rollart.backends.scorers import open_scorers

    scorers = await open_scorers(dict.fromkeys(sorted({r.domain for r in requests}), function), settings)
    room = asyncio.Semaphore(settings.call.concurrency)

    async def one(request: RewardRequest) -> Score | str:
        async with room:
            try:
                return await scorers.score_request(request)
            except ScorerFailed as failed:
                return str(failed)

    try:
        return list(await asyncio.gather(*(one(request) for request in requests)))
    finally:
        await scorers.close()


def _row(request: RewardRequest, before: Score | None, after: Score | str) -> dict[str, Any]:
    new = {"error": after} if isinstance(after, str) else {"value": after.value, "success": after.success,
                                                           "parts": dict(after.parts), "reason": after.reason}
    old = before and {"value": before.value, "success": before.success}
    return {**to_json(request), "score": old, "new": new}


def _show(rows: list[tuple[RewardRequest, Score | None, Score | str]], as_json: bool) -> None:
    both = [(r, b, a) for r, b, a in rows if b is not None and isinstance(a, Score)]
    changed = [(r, b, a) for r, b, a in both if a.value != b.value]
    values = [a.value for _, _, a in rows if isinstance(a, Score)]
    failed = [(r, a) for r, _, a in rows if isinstance(a, str)]
    figures = {"trajectories": len(rows), "scored": len(values), "failed": len(failed), "changed": len(changed),
               "mean": sum(values) / len(values) if values else None,
               "mean_before": sum(b.value for _, b, _ in both) / len(both) if both else None}
    if as_json:
        typer.echo(json.dumps(figures))
        return
    table = Table("trajectory", "domain", "before", "now", "why", title="changed or without a score",
                  title_justify="left")
    for request, before, after in changed[:SHOWN]:
        table.add_row(request.id, request.domain, f"{before.value:.3f}", f"{after.value:.3f}", after.reason)
    for request, why in failed[:SHOWN]:
        table.add_row(request.id, request.domain, "", "-", why)
    if table.row_count:
        console.print(table)
    mean = "-" if figures["mean"] is None else f"{figures['mean']:.4f}"
    old = "-" if figures["mean_before"] is None else f"{figures['mean_before']:.4f}"
    console.print(f"{len(values)} of {len(rows)} scored, {len(failed)} failed, {len(changed)} changed; mean {mean}, "
                  f"before {old}")
