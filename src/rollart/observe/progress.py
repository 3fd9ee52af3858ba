"""What a person sees while a run is under way: one live panel in a terminal, one line a step elsewhere.

Keeps true: it only reads events; a run without it is the same run. The panel never has more lines than the terminal,
nor longer ones, so that it is drawn over itself and nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rollart.core import events as ev
from rollart.core.types import EvalResult
from rollart.observe.accounts import Accounts
from rollart.terminal import Terminal

SMOOTH = 0.7
"""How much of the smoothed success stays at each step."""
WIDE = 70
"""Columns from which on the panel has bars and the first evaluation beside the last."""
NARROW = 38
"""Columns from which on it has intervals."""


class ProgressView:
    """A journal subscriber. Use as a context manager around the run."""

    def __init__(self, console: Terminal, title: str, bound: int) -> None:
        self._console, self._bound = console, bound
        self._title = self._note = title
        self._begin("starting", 0)
        self._success: dict[str, float] = {}
        self._held_out: defaultdict[str, list[EvalResult]] = defaultdict(list)
        self._line: dict[str, str] = {}
        self._accounts: Accounts | None = None
        self._last_generated = 0
        self._last_step = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4) if console.live else None

    def watch(self, accounts: Accounts) -> ProgressView:
        """Read the ledger's running counts, for tokens and failures."""
        self._accounts = accounts
        return self

    def earlier(self, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Of a run that goes on: what its ledger has of them (`LedgerView.evaluations`)."""
        for e in evaluations:
            self._held_out[e["domain"]].append(EvalResult(e["domain"], e["version"], e["tasks"], e["success"],
                                                          e["reward"], interval=e["interval"]))

    def __enter__(self) -> ProgressView:
        if not self._live:
            self._say(self._title)
        self.resume()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.pause()

    def pause(self) -> None:
        """Leave the terminal as it was found; the panel stays as the last thing printed."""
        if self._live:
            self._live.stop()

    def resume(self) -> None:
        if self._live:
            self._live.start(refresh=True)

    def preparing(self, what: str, step: int, steps: int, loss: float | None) -> None:
        """A stage before the run: its step, number of steps and, where it has one, its loss."""
        if self._doing != what:
            self._begin(what, steps)
        self._done = step
        figure = "" if loss is None else f"loss {loss:.3f}"
        self._note = figure or self._title
        if not self._live and loss is not None and (step % max(1, steps // 10) == 0 or step == steps):
            self._say(f"{what} {step}/{steps}: {figure}")

    def note(self, text: str) -> None:
        """Something that a person should know now."""
        self._note = text
        if not self._live:
            self._say(text)

    def on(self, at: float, event: ev.Event) -> None:
        match event:
            case ev.RunStarted(version=version, steps=steps):
                self._begin("training", steps, version)
                self._last_step = time.monotonic()
                if self._accounts:
                    self._last_generated = self._accounts.token_totals()["generated"]
                self._note = "evaluating the first weights beside the first steps" if not version else "resumed"
            case ev.BatchTaken(staleness=staleness, waited=waited):
                mean = sum(staleness) / len(staleness) if staleness else 0.0
                self._line["staleness"] = f"{mean:.2f} mean, {max(staleness, default=0)} max, bound {self._bound}"
                self._line["waited"] = f"{waited:.2f} s for a batch"
            case ev.WeightsLive(version=version, seconds=seconds):
                self._line["weights live"] = f"version {version}, generation stood still {seconds * 1000:.0f} ms"
            case ev.EvalEnded(version=version, results=results):
                for result in results:
                    self._held_out[result.domain].append(result)
                self._note = f"held out: version {version}, with 95 % intervals"
                if not self._live:
                    self._say(f"held out at version {version}: "
                              + ", ".join(f"{r.domain} {with_interval(r)}" for r in results))
            case ev.Noted(text=text):
                self.note(text)
            case ev.StepEnded():
                self._stepped(event)

    def _stepped(self, event: ev.StepEnded) -> None:
        for domain, success in event.successes.items():
            before = self._success.get(domain, success)
            self._success[domain] = SMOOTH * before + (1 - SMOOTH) * success
        self._done = event.version
        now = time.monotonic()
        if self._accounts:
            generated = self._accounts.token_totals()["generated"]
            rate = (generated - self._last_generated) / max(1e-9, now - self._last_step)
            self._line["sampled"] = f"{rate:,.0f} tokens/s"
            self._last_generated, self._last_step = generated, now
        self._line["step"] = f"{event.report.seconds:.2f} s for {event.report.tokens:,} tokens"
        self._line["slots"] = ", ".join(f"{n} {name}" for name, n in event.slots.items())
        if not self._live:
            shown = "  ".join(f"{domain} {value:.2f}" for domain, value in sorted(event.successes.items()))
            self._say(f"step {event.version}: {shown}  |  staleness {self._line.get('staleness', '-')}  |  "
                      f"{self._line['step']} after {self._line.get('waited', '-')}")

    def _begin(self, what: str, steps: int, done: int = 0) -> None:
        self._doing, self._of, self._done, self._first, self._began = what, steps, done, done, time.monotonic()

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    # ---- the panel

    def _render(self) -> RenderableType:
        return self.panel(*self._console.size)

    def panel(self, width: int, height: int) -> RenderableType:
        """At most `height` - 1 lines of at most `width` - 1 columns. What matters less goes first."""
        room = height - 2  # the first line, and the one of the cursor
        note = self._note_lines(width, 3 if room > 10 else 2 if room > 5 else 1)
        domains = self._domain_lines(width)
        facts = [Text.assemble((f"{name:13}", "dim"), value) for name, value in self._line.items()]
        room -= len(note)
        if len(domains) > room:
            left_out = len(domains) - max(1, room - 1)
            domains = [*domains[:max(1, room - 1)], Text(f"and {left_out} more", "dim")][:max(0, room)]
        lines = [self._top(width), *domains, *facts[:max(0, room - len(domains))], *note]
        for line in lines:
            line.truncate(width - 1, overflow="ellipsis")
        return Group(*lines)

    def _top(self, width: int) -> Text:
        """What is done, how far it is, since when, and how long it still takes at this pace."""
        gone = time.monotonic() - self._began
        new = self._done - self._first
        left = f" left {_clock(gone / new * (self._of - self._done))}" if new > 0 else ""
        count = f" {self._done}/{self._of}" if self._of else ""
        head, tail = f"{self._doing}{count} ", f" {_clock(gone)}{left}"
        bar = width - 1 - len(head) - len(tail)
        share = self._done / self._of if self._of else 0.0
        return Text.assemble((head, "bold"), *(_bar(share, bar) if bar >= 5 and self._of else ()), tail)

    def _domain_lines(self, width: int) -> list[Text]:
        names = sorted({*self._success, *self._held_out})
        if not names:
            return []
        longest = max(4, *map(len, names))
        column = min(longest, max(10, width - (54 if width >= WIDE else 28)))
        bar = min(20, width - column - 43) if width >= WIDE else 0
        head = f"{'task':{column}}  {'rollout':{max(bar + 6, 7)}}  held out"
        out = [Text(head, "bold")]
        for name in names:
            value, held = self._success.get(name), self._held_out[name]
            shown = [*(_bar(value, bar) if bar > 0 and value is not None else [" " * max(bar, 0)]),
                     "  " if bar > 0 else "", "    " if value is None else f"{value:.2f}"]
            text = Text.assemble(f"{name[:column]:{column}}  ", *shown)
            text.pad_right(column + 4 + max(bar + 6, 7) - len(text))
            out.append(text.append(_held(held, width)))
        return out

    def _note_lines(self, width: int, most: int) -> list[Text]:
        shown = [self._note] if self._note == self._title else [self._note, self._title][:most]
        wrapped = Text(shown[0], "dim").wrap(self._console, width - 1)
        first = list(wrapped)[:most] or [Text("")]
        return [*first, *(Text(rest, "dim") for rest in shown[1:most + 1 - len(first)])]


def with_interval(result: EvalResult) -> str:
    """`0.72 (0.60-0.82)`: success and its 95 % interval over tasks."""
    low, high = result.interval
    return f"{result.success:.2f} ({low:.2f}-{high:.2f})"


def _held(results: Sequence[EvalResult], width: int) -> str:
    if not results:
        return ""
    before = f"{results[0].success:.2f} > " if len(results) > 1 and width >= WIDE else ""
    return before + (with_interval(results[-1]) if width >= NARROW else f"{results[-1].success:.2f}")


def _bar(share: float, width: int) -> Iterable[tuple[str, str]]:
    full = round(width * min(1.0, max(0.0, share)))
    return ("█" * full, "green"), ("·" * (width - full), "dim")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
