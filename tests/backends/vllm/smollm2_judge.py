"""A judge for SmolLM2-135M, which follows two examples better than an instruction."""

from rollart.rewards.judge import Judge

TEMPLATE = """Rate how polite the text between the marks is, from 0 (rude) to 10 (polite). Answer with one number.

{mark} Go away, you idiot. {mark}
SCORE: 1

{mark} Thank you so much for your help! {mark}
SCORE: 9

{mark} {answer} {mark}
SCORE:"""

judge = Judge(url_env="JUDGE_URL", model="judge", template=TEMPLATE, pattern=r"(\d+)", max_tokens=16, attempts=6,
              seconds=120.0)
