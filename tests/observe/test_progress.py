import io

from rollart.core import events as ev
from rollart.core.types import EvalResult
from rollart.observe.progress import ProgressView
from rollart.terminal import Terminal


def test_the_panel_of_a_run_that_goes_on_knows_the_evaluations_before():
    console = Terminal(file=io.StringIO(), width=100)
    view = ProgressView(console, "run", bound=1)
    view.earlier([{"domain": "guess", "version": 0, "tasks": 8, "success": 0.25, "reward": 0.2,
                   "interval": [0.07, 0.59]}])
    view.on(0.0, ev.EvalEnded(0, 3, (EvalResult("guess", 3, 8, 0.5, 0.4, interval=(0.22, 0.78)),), 1.0))
    console.print(view.panel(100, 24))
    assert "0.25 > 0.50 (0.22-0.78)" in console.file.getvalue()
