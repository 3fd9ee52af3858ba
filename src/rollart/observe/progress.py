"""What a person sees while a run is under way: one live panel in a terminal, one line a step elsewhere.

Keeps true: it only reads events; a run without it is the same run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from rollart.core import events as ev
from rollart.observe.accounts import Accounts

SMOOTH = 0.7
"""How much of the smoothed success stays at each step."""


class ProgressView:
    """A journal subscriber. Use as a context manager around the run."""

    def __init__(self, console: Console, title: str, bound: int) -> None:
        self._console, self._bound = console, bound
        self._bar = Progress(TextColumn("[bold]{task.description}"), BarColumn(bar_width=None),
                             TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
                             TextColumn("left"), TimeRemainingColumn(), console=console)
        self._doing = ""
        self._success: dict[str, float] = {}
        self._held_out: defaultdict[str, list[float]] = defaultdict(list)
        self._line: dict[str, str] = {}
        self._accounts: Accounts | None = None
        self._last_generated = 0
        self._last_step = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4) \
            if console.is_terminal else None
        self._note = title

    def watch(self, accounts: Accounts) -> ProgressView:
        """Read the ledger's running counts, for tokens and failures."""
        self._accounts = accounts
        return self

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.start()
        else:
            self._say(self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def preparing(self, what: str, step: int, steps: int, figure: float) -> None:
        """A stage before the run: its step, number of steps and loss."""
        if self._doing != what:
            self._begin(what, steps)
        self._bar.update(self._bar.task_ids[-1], completed=step)
        self._note = f"{what}: loss {figure:.3f}"
        if not self._live and (step % max(1, steps // 10) == 0 or step == steps):
            self._say(f"{what} {step}/{steps}: loss {figure:.3f}")

    def note(self, text: str) -> None:
        """Something that a person should know now."""
        self._note = text
        if not self._live:
            self._say(text)

    def on(self, at: float, event: ev.Event) -> None:
        match event:
            case ev.RunStarted(version=version, steps=steps):
                self._begin("training", steps)
                self._last_step = time.monotonic()
                if self._accounts:
                    self._last_generated = self._accounts.token_totals()["generated"]
                self._bar.update(self._bar.task_ids[-1], completed=version)
                self._note = "evaluating the first weights beside the first steps" if not version else "resumed"
            case ev.BatchTaken(staleness=staleness, waited=waited):
                mean = sum(staleness) / len(staleness) if staleness else 0.0
                self._line["staleness"] = f"{mean:.2f} mean, {max(staleness, default=0)} max, bound {self._bound}"
                self._line["waited"] = f"{waited:.2f} s"
            case ev.WeightsLive(version=version, seconds=seconds):
                self._line["weights live"] = f"version {version}, generation stood still {seconds * 1000:.0f} ms"
            case ev.EvalEnded(version=version, results=results):
                for result in results:
                    self._held_out[result.domain].append(result.success)
                shown = ", ".join(f"{r.domain} {r.success:.2f}" for r in results)
                self.note(f"held out at version {version}: {shown}")
            case ev.Noted(text=text):
                self.note(text)
            case ev.StepEnded():
                self._stepped(event)

    def _stepped(self, event: ev.StepEnded) -> None:
        for domain, success in event.successes.items():
            before = self._success.get(domain, success)
            self._success[domain] = SMOOTH * before + (1 - SMOOTH) * success
        self._bar.update(self._bar.task_ids[-1], completed=event.version)
        now = time.monotonic()
        if self._accounts:
            generated = self._accounts.token_totals()["generated"]
            rate = (generated - self._last_generated) / max(1e-9, now - self._last_step)
            self._line["sampled tokens"] = f"{rate:,.0f}/s"
            self._last_generated, self._last_step = generated, now
        self._line["step"] = f"{event.report.seconds:.2f} s for {event.report.tokens:,} tokens"
        self._line["slots"] = ", ".join(f"{n} {name}" for name, n in event.slots.items())
        if not self._live:
            shown = "  ".join(f"{domain} {value:.2f}" for domain, value in sorted(event.successes.items()))
            self._say(f"step {event.version}: {shown}  |  staleness {self._line.get('staleness', '-')}  |  "
                      f"{self._line['step']} after {self._line.get('waited', '-')} of waiting")

    def _begin(self, what: str, steps: int) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._doing = what
        self._bar.add_task(what, total=steps)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _render(self) -> RenderableType:
        parts: list[RenderableType] = [self._bar]
        if self._success or self._held_out:
            parts.append(self._table())
        if self._line:
            facts: Any = Table.grid(padding=(0, 2))
            for name, value in self._line.items():
                facts.add_row(f"[dim]{name}[/]", value)
            parts.append(facts)
        parts.append(Text(self._note, style="dim"))
        return Group(*parts)

    def _table(self) -> Table:
        table = Table("task", "rollout success", "", "held out", box=None, padding=(0, 2))
        for domain in sorted({*self._success, *self._held_out}):
            value = self._success.get(domain)
            held = " > ".join(f"{v:.2f}" for v in self._held_out[domain])
            bar = "" if value is None else "█" * round(20 * value) + "[dim]" + "·" * (20 - round(20 * value)) + "[/]"
            table.add_row(domain, bar, "" if value is None else f"{value:.2f}", held)
        return table
