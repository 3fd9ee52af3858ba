"""A reference server of RollArt's HTTP protocol, with the standard library only: find a number by higher and lower.

    python examples/http_environment.py 8000

Three calls, JSON both ways, each by POST:
    /open   {"seed": 7, ...arguments of the recipe}   -> {"episode": ID, "text": first observation}
    /step   {"episode": ID, "action": TEXT}           -> {"text", "reward", "done", "truncated", "valid", "success"}
    /close  {"episode": ID}                           -> {}
Only `episode`, `text` and `done` are required. A status of 400 or above fails the episode; it is never a reward.
"""

import itertools
import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

EPISODES = {}
NUMBERS = itertools.count()


def open_episode(seed, highest=10):
    secret = random.Random(seed).randint(1, highest)
    episode = str(next(NUMBERS))
    EPISODES[episode] = {"secret": secret, "left": 5}
    return {"episode": episode, "text": f"Find a number from 1 to {highest}. You have 5 guesses."}


def step(episode, action):
    state = EPISODES[episode]
    found = re.search(r"\d+", action)
    state["left"] -= 1
    if found and int(found[0]) == state["secret"]:
        return {"text": "yes", "reward": 1.0, "done": True, "success": True}
    hint = "a number, please" if not found else "higher" if int(found[0]) < state["secret"] else "lower"
    return {"text": hint, "reward": 0.0, "done": state["left"] == 0, "valid": bool(found), "success": False}


def close(episode):
    EPISODES.pop(episode, None)
    return {}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = 200, {"/open": open_episode, "/step": step, "/close": close}[self.path](**body)
        except (KeyError, TypeError, ValueError) as error:
            status, answer = 400, {"error": repr(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
