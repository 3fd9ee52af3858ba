"""The report of a run: report.html, one file that needs no network, and a short form for the terminal.

Keeps true: it draws any run folder, also of a run that has just begun or was killed; all text of the run is escaped.
Reads what is on disk only; waits for nothing.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.core.tokens import Counted
from rollart.core.tokens import Text as Said
from rollart.core.types import Trajectory
from rollart.observe.accounts import short_reason
from rollart.observe.charts import histogram, learning_chart, lines_chart, split_bar
from rollart.observe.ledger_view import LedgerView
from rollart.observe.metrics import read_metrics
from rollart.observe.run_folder import RunFolder, atomic_write
from rollart.observe.status import ledger_table, right, run_state
from rollart.observe.summary import summarise

STAGES = ("open", "generate", "environment", "score")
SAMPLES = 2
"""Held-out tasks shown per domain, before and after."""
LONG = 1500
"""Characters of one message that are shown."""


@dataclass(frozen=True)
class RunView:
    """All that the report shows, read once."""

    folder: RunFolder
    state: str
    summary: dict[str, Any]
    lines: list[dict[str, Any]]
    ledger: LedgerView

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def last(self) -> int:
        """The newest version, for the charts' axis."""
        return max((line["version"] for line in self.lines), default=0)


def write_report(run_path: str | Path) -> Path:
    """Write report.html into the run folder and return its path."""
    page = report_page(run_path)
    atomic_write(RunFolder(run_path).report, page)
    return RunFolder(run_path).report


def report_page(run_path: str | Path) -> bytes:
    """The report as one HTML page; nothing is written."""
    folder = RunFolder(run_path)
    with LedgerView(folder.database) as ledger:
        view = RunView(folder, run_state(run_path), summarise(run_path), read_metrics(folder.metrics), ledger)
        parts = (_header, _headline, _learning, _staleness, _time, _environments, _rewards, _weights, _ledger, _samples,
                 _config)
        body = "".join(part(view) for part in parts)
    style = resources.files(__package__).joinpath("report.css").read_text()
    page = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>RollArt: {escape(folder.path.name)}</title>'
            f"<style>{style}</style></head><body><main>{body}</main></body></html>\n")
    return page.encode(errors="replace")


def _header(view: RunView) -> str:
    mood = "good" if view.state.startswith(("finished", "running")) else "warn"
    state = view.state.split(";")[0]
    started = view.ledger.meta("started_at")
    when = time.strftime("%d %B %Y, %H:%M", time.localtime(started)) if started else ""
    name = view.folder.path.resolve().name
    return (f'<header><h1>{escape(name)}</h1><span class="pill {mood}">{escape(state)}</span>'
            f'<span class="note">{when}</span></header>')


def _headline(view: RunView) -> str:
    s, out = view.summary, []
    for i, (name, domain) in enumerate(s["domains"].items()):
        before, after = domain["eval_before"], domain["eval_after"]
        change = f"<i>{_percent(before)} →</i> {_percent(after)}" if after is not None else _percent(before)
        note = f"held-out success, {domain['eval_tasks']} tasks" if domain["eval_tasks"] else "not evaluated"
        if domain["eval_tasks"]:
            known = [_range(domain[f"eval_{end}_interval"]) for end in ("before", "after")]
            note += f"; 95 % intervals {' → '.join(filter(None, known))}"
        if domain["eval_change"] is not None:
            note += f"; change {_change(domain)} points"
        out.append(f'<div class="card"><h3><span class="dot c{i % 6}"></span>{escape(name)}</h3>'
                   f'<div class="change">{change}</div><div class="note">{note}</div></div>')
    bound = s["staleness"]["bound"]
    tiles = [
        (f"{s['steps']:,}", "optimizer steps"), (_duration(s["wall_seconds"]), "wall time"),
        (f"{s['ledger']['trained']:,}", f"trajectories trained, of {s['ledger']['dispatched']:,}"),
        (f"{_share(s['tokens']['generated'], s['wall_seconds']):,.0f}", "sampled tokens per second"),
        (f"{s['trainer_idle_fraction']:.0%}", "trainer waited"),
        (f"{s['staleness']['max']} of {'?' if bound is None else bound}", "largest staleness, and its bound"),
        (f"{_share(s['tokens']['wasted'], s['tokens']['generated']):.1%}", "of sampled tokens taught nothing"),
        (f"{s['weights']['exposed_fraction']:.1%}", "of the time generation stood still for new weights")]
    boxes = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
                    for value, name in tiles)
    return f'<div class="grid-cards">{"".join(out)}</div><div class="tiles">{boxes}</div>'


def _section(title: str, lead: str, body: str) -> str:
    return f'<section><h2>{escape(title)}</h2><p class="lead">{escape(lead)}</p>{body}</section>'


def _learning(view: RunView) -> str:
    if not view.steps:
        return _section("Success", "No step has ended yet.", "")
    domains, results, cards = list(view.summary["domains"]), view.ledger.evaluations(), []
    for i, name in enumerate(domains):
        train = [(s["version"], s["successes"][name]) for s in view.steps if name in s["successes"]]
        mine = [e for e in results if e["domain"] == name]
        chart = learning_chart(f"success of {name}", train, [(e["version"], e["success"]) for e in mine],
                               [e["interval"] for e in mine], i % 6, view.last)
        cards.append(f'<div class="card"><h3><span class="dot c{i % 6}"></span>{escape(name)}</h3>{chart}</div>')
    return _section("Success over steps", "Line: running mean of the training batches, with single batches behind it. "
                    "Points: held-out tasks, at one pinned version each, with 95 % intervals.", _cards(cards))


def _staleness(view: RunView) -> str:
    stale = view.summary["staleness"]
    if not stale["histogram"]:
        return ""
    bars = {int(age): n for age, n in stale["histogram"].items()}
    left = histogram("staleness of trained trajectories", bars, stale["bound"])
    pick = {name: [(s["version"], s["slots"][name]) for s in view.steps if name in s["slots"]]
            for name in ("open", "ready", "training")}
    right = lines_chart("slots by state", pick, view.last)
    lead = (f"Versions between a trajectory's oldest token and the step that trained it: {stale['mean']:.2f} on "
            f"average, {stale['max']} at most. Slots: groups that are sampled, that are complete and wait, and whose "
            "weights are not live yet.")
    return _section("Staleness and slots", lead, _cards([
        f'<div class="card"><h3>Trained trajectories by staleness</h3>{left}</div>',
        f'<div class="card"><h3>Groups after each step</h3>{right}{_legend(list(pick), 3)}</div>']))


def _time(view: RunView) -> str:
    means, wall = view.ledger.stage_seconds(), view.summary["wall_seconds"]
    if not means:
        return ""
    scale = max(sum(stages.values()) for stages in means.values())
    names = [*STAGES, *sorted({stage for stages in means.values() for stage in stages} - set(STAGES))]
    rows = "".join(
        f"<span>{escape(domain)}</span>"
        f"{split_bar([(n, stages.get(n, 0.0), f'c{i % 6}') for i, n in enumerate(names)], scale)}"
        f'<span class="note">{sum(stages.values()):.2f} s</span>' for domain, stages in means.items())
    busy, idle = sum(s["seconds"] for s in view.steps), view.summary["trainer_idle_fraction"] * wall
    other = max(0.0, wall - busy - idle)
    parts = [("training", busy, "c0"), ("waiting for a batch", idle, "idle"),
             ("evaluation, weights, start", other, "c5")]
    legend = "".join(f'<span><i class="dot {class_}"></i>{name} {_duration(seconds)}</span>'
                     for name, seconds, class_ in parts)
    trainer = (f'<div class="rows"><span>trainer</span>{split_bar(parts, max(wall, busy + idle))}'
               f'<span class="note">{_duration(wall)}</span></div><div class="legend">{legend}</div>')
    lead = "Mean seconds of a trajectory by stage, and the trainer's whole run."
    return _section("Where the time went", lead, _cards([
        f'<div class="card"><h3>A trajectory</h3><div class="rows">{rows}</div>{_legend(names, 0)}</div>',
        f'<div class="card"><h3>The trainer</h3>{trainer}</div>']))


def _environments(view: RunView) -> str:
    """How long they take, and what fails."""
    found = view.ledger.environments()
    if not found:
        return ""
    names = {"opened": "opened", "retries": "openings tried again", "open_p50_seconds": "open, median s",
             "open_p99_seconds": "open, 99 % s", "calls": "actions answered", "step_p50_seconds": "step, median s",
             "step_p99_seconds": "step, 99 % s", "failed": "trajectories failed"}
    head = "".join(f"<th>{name}</th>" for name in ("domain", *names.values(), "quarantined tasks"))
    rows = "".join(f"<tr><td>{escape(domain)}</td>{''.join(f'<td>{f[key]:,}</td>' for key in names)}"
                   f"<td>{escape(', '.join(f['quarantined'][:5]) or '0')}</td></tr>" for domain, f in found.items())
    return _section("Environments", "Opening and answering in training, and failures by domain. A task is quarantined "
                    "when as many of its groups have failed as rollout.task_attempts.",
                    f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>')


def _rewards(view: RunView) -> str:
    """Calls and instances over time, and what they cost."""
    total = view.summary["rewards"]
    if not total.get("calls"):
        return ""
    lines = [line for line in view.lines if line["kind"] == "rewards"]
    last = max(line["wall_seconds"] for line in lines)

    def chart(title: str, **names: str) -> str:
        series = {label: _held([(line["wall_seconds"], line["figures"][name]) for line in lines
                                if name in line["figures"]])
                  for name, label in names.items() if name in lines[-1]["figures"]}
        drawn = f"{lines_chart(title, series, last, 'seconds')}{_legend(list(series), 3)}"
        return f'<div class="card"><h3>{escape(title)}</h3>{drawn}</div>' if series else ""

    rows = "".join(f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{value:,.4g}</td></tr>"
                   for name, value in total.items() if value or name in ("failed", "instances"))
    lead = (f"{total['scored']:,.0f} of {total['calls']:,.0f} calls brought a score, half of them within "
            f"{total['latency_p50_seconds']:.3g} s, 95 % within {total['latency_p95_seconds']:.3g} s.")
    return _section("Rewards", lead, _cards([
        chart("Trajectories being scored", in_flight="all", waiting="of them not let out yet"),
        chart("Instances or reserved processes", instances="there"),
        f'<div class="card scroll"><table><tr><th>rewards of the whole run</th><th></th></tr>{rows}</table></div>']))


def _held(points: Sequence[tuple[float, float]], seconds: float = 0.5) -> list[tuple[float, float]]:
    """Samples are told when something has changed: until `seconds` before the next one a value stays what it was."""
    out: list[tuple[float, float]] = []
    for x, y in points:
        if out and out[-1][0] < x - seconds:
            out.append((x - seconds, out[-1][1]))
        out.append((x, y))
    return out


def _weights(view: RunView) -> str:
    names = {"publish_seconds": "published by the trainer", "fetch_seconds": "fetched while engines served",
             "live_seconds": "generation stood still"}
    series = {label: [(s["version"], s["weights"][key]) for s in view.steps if key in s["weights"]]
              for key, label in names.items()}
    series = {label: points for label, points in series.items() if points}
    if not series:
        return ""
    rows = "".join(f"<tr><td>{escape(label)}</td><td>{fmean(y for _, y in points):.3f}</td>"
                   f"<td>{max(y for _, y in points):.3f}</td></tr>" for label, points in series.items())
    table = f"<table><tr><th>seconds</th><th>mean</th><th>longest</th></tr>{rows}</table>"
    return _section("Weights hand-over", "From the optimizer step to engines that serve the new weights.", _cards([
        f'<div class="card">{lines_chart("seconds per hand-over", series, view.last)}{_legend(list(series), 3)}</div>',
        f'<div class="card">{table}</div>']))


def _ledger(view: RunView) -> str:
    by_domain, counts = view.ledger.by_domain(), view.summary["ledger"]
    if not by_domain:
        return ""
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in ["domain", *counts])
    body = "".join(f"<tr><td>{escape(domain)}</td>{''.join(f'<td>{n[name]:,}</td>' for name in counts)}</tr>"
                   for domain, n in by_domain.items())
    total = "".join(f"<td>{n:,}</td>" for n in counts.values())
    table = f'<table><tr>{head}</tr>{body}<tr class="sum"><td>all</td>{total}</tr></table>'
    reasons = Counter[tuple[str, str]]()
    for fate, reason, n in view.ledger.reasons():
        reasons[fate, short_reason(reason)] += n
    rows = "".join(f"<tr><td>{escape(fate)}</td><td>{escape(reason)}</td><td>{n:,}</td></tr>"
                   for (fate, reason), n in reasons.most_common(15))
    why = (f'<div class="card scroll"><h3>Why not trained</h3><table class="text"><tr><th>fate</th><th>reason</th>'
           f"<th>trajectories</th></tr>{rows}</table></div>") if rows else ""
    lead = "Dispatched = trained + filtered + stale + failed + cancelled + in flight."
    return _section("Every trajectory, once", lead, f'<div class="card scroll">{table}</div>{why}')


def _samples(view: RunView) -> str:
    out = []
    for domain in view.summary["domains"]:
        pairs = view.ledger.samples(domain, SAMPLES)
        if pairs:
            cards = [_chat(f"Before (version {v})", before) + _chat(f"After (version {w})", after)
                     for before, v, after, w in pairs]
        else:
            cards = ["".join(_chat(f"In training (step {step})", t)
                             for t, step in view.ledger.trained_samples(domain))]
        if any(cards):
            out.append(f"<h3>{escape(domain)}</h3>" + "".join(f'<div class="pair">{card}</div>' for card in cards))
    lead = ("The same held-out tasks in the first and the last evaluation; of those that were kept, the ones that were "
            "solved only afterwards come first.")
    return _section("Sample trajectories", lead, "".join(out)) if out else ""


def _chat(title: str, trajectory: Trajectory) -> str:
    """One episode as chat bubbles."""
    score = trajectory.score
    verdict = "no score" if score is None else ("solved" if score.success else "not solved")
    mood = "good" if score is not None and score.success else "bad"
    bubbles = [_bubble("system" if m.role == "system" else "env", m.content) for m in trajectory.start.messages]
    for turn in trajectory.turns:
        bubbles.append(_bubble("agent", turn.text))
        bubbles += [_bubble("env", m.content) for m in turn.observation.messages]
    about = f"{len(trajectory.turns)} turns, {trajectory.sampled} tokens, {trajectory.outcome}"
    about += f", reward {score.value:.2f}" if score else f": {trajectory.error}"
    return (f'<div class="card"><h3>{escape(title)} <span class="verdict {mood}">{verdict}</span></h3>'
            f'<div class="chat">{"".join(bubbles)}</div>'
            f'<div class="note">{escape(trajectory.task.id)}: {escape(about)}</div></div>')


def _bubble(kind: str, text: Said) -> str:
    shown = f"({len(text)} simulated tokens)" if isinstance(text, Counted) else text or "(nothing)"
    if len(shown) > LONG:
        shown = f"{shown[:LONG]} … ({len(shown) - LONG:,} more characters)"
    return f'<div class="bubble {kind}">{escape(shown)}</div>'


def _config(view: RunView) -> str:
    if not view.folder.config.exists():
        return ""
    config = json.dumps(view.folder.read_config(), indent=2)
    return ('<section><h2>Configuration</h2><details class="card"><summary>config.json</summary>'
            f"<pre>{escape(config)}</pre></details></section><footer>RollArt, {escape(str(view.folder.path))}</footer>")


def _cards(cards: Sequence[str]) -> str:
    return f'<div class="grid-cards">{"".join(cards)}</div>'


def _legend(names: Sequence[str], first: int) -> str:
    items = "".join(f'<span><i class="dot c{(i + first) % 6}"></i>{escape(name)}</span>'
                    for i, name in enumerate(names))
    return f'<div class="legend">{items}</div>'


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _range(interval: Sequence[float] | None) -> str:
    """In percent, `31-54`."""
    return "" if interval is None else f"{interval[0] * 100:.0f}-{interval[1] * 100:.0f}"


def _change(domain: Mapping[str, Any]) -> str:
    """In percentage points, with its interval: `+24 (+9 to +38)`."""
    if domain["eval_change"] is None:
        return ""
    low, high = domain["eval_change_interval"]
    return f"{domain['eval_change'] * 100:+.0f} ({low * 100:+.0f} to {high * 100:+.0f})"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds) // 60
    return f"{minutes} min {int(seconds) % 60:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def render_report(run_path: str | Path) -> RenderableType:
    """The terminal's form, printed at the end of a run: before and after, ledger, staleness, idle, where to look."""
    folder, s = RunFolder(run_path), summarise(run_path)
    title = Text("held-out success with 95 % intervals (change: the same tasks, in points)", "italic")
    table = Table("domain", *right("before", "after", "change", "tasks", "trained"))
    for name, domain in s["domains"].items():
        before, after = domain["eval_before"], domain["eval_after"]
        shown = [f"{_percent(value)} {known and f'({known})'}".rstrip() for value, known in (
            (before, _range(domain["eval_before_interval"])), (after, _range(domain["eval_after_interval"])))]
        better = "green" if domain["eval_change"] is not None and domain["eval_change_interval"][0] > 0 else ""
        table.add_row(name, shown[0], shown[1], Text(_change(domain), better), str(domain["eval_tasks"]),
                      f"{domain['trained']:,}")
    with LedgerView(folder.database) as ledger:
        by_domain = ledger.by_domain()
    rate = _share(s["tokens"]["generated"], s["wall_seconds"])
    bound = s["staleness"]["bound"]
    facts = Text(f"{s['steps']} steps in {_duration(s['wall_seconds'])}, {rate:,.0f} sampled tokens/s; staleness "
                 f"{s['staleness']['mean']:.2f} on average, {s['staleness']['max']} at most (bound "
                 f"{'?' if bound is None else bound}); trainer idle {s['trainer_idle_fraction']:.0%}; "
                 f"{_share(s['tokens']['wasted'], s['tokens']['generated']):.1%} of tokens wasted; "
                 f"generation stood still for new weights {s['weights']['exposed_fraction']:.1%} of the time")
    if not s["steps"]:
        facts = Text("no step has ended yet", "dim")
    parts: list[RenderableType] = [Text.assemble((f"{folder.path}  ", "bold"), run_state(run_path))]
    if s["domains"]:
        parts += [title, table]
    parts.append(facts)
    if by_domain:
        parts.append(ledger_table(by_domain, s["ledger"]))
    if folder.report.exists():
        parts.append(Text(f"report: {folder.report}", "dim"))
    return Group(*parts)
