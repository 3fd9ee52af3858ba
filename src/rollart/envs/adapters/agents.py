"""Adapters of asynchronous libraries that drive their agent: verifiers (0.1.x), and MCP tool servers.

Keeps true: the library's own loop runs the episode, in an event loop that runs during our calls only; where it asks its
model, the agent reads the messages that are new and its action is the answer. Tool calls are written as tags
(envs/tool_calls.py), and the tools are listed before the first turn.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
import shlex
import signal
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rollart.core.errors import ConfigError
from rollart.core.types import Message, Task
from rollart.envs.adapters.foreign import Foreign, ForeignSettings, Reply, Session, library
from rollart.envs.tool_calls import parse

Ask = Callable[[Reply], Coroutine[Any, Any, str]]
"""Awaited by a library that asks its agent: shows what is new, gives the agent's action."""


class Driven(Session):
    """A session over `env`, a coroutine function that asks the agent and returns the last reply."""

    def __init__(self, env: Callable[[Ask], Coroutine[Any, Any, Reply]], task: Task) -> None:
        super().__init__(env, task)
        self._loop = asyncio.new_event_loop()
        self._answer: asyncio.Future[str] = self._loop.create_future()
        self._story = self._loop.create_task(env(self._ask))

    def reset(self) -> Reply:
        self._asked: asyncio.Future[Reply] = self._loop.create_future()
        self._loop.run_until_complete(asyncio.wait([self._story, self._asked], return_when=asyncio.FIRST_COMPLETED))
        return self._story.result() if self._story.done() else self._asked.result()

    def step(self, text: str) -> Reply:
        self._answer.set_result(text)
        return self.reset()

    def close(self) -> None:
        self._story.cancel()
        self._loop.run_until_complete(asyncio.wait([self._story]))
        self._loop.close()

    async def _ask(self, reply: Reply) -> str:
        self._answer = self._loop.create_future()
        self._asked.set_result(reply)
        return await self._answer


def tool_list(tools: list[Any]) -> str:
    """What the agent reads about tools with name, description and parameters (a JSON schema)."""
    lines = [f"<{tool.name}>{json.dumps({key: str(kind.get('type', 'any')) for key, kind in names.items()})}"
             f"</{tool.name}> {tool.description or ''}".rstrip()
             for tool in tools for names in [dict(tool.parameters.get("properties", {}))]]
    return "\n".join(["Tools, called so:", *lines]) if lines else ""


@functools.lru_cache(maxsize=16)
def _load(id: str, arguments: str) -> Any:
    """The environment of verifiers, once a process; it may not keep the signals that it takes."""
    taken = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return library("verifiers", "verifiers").load_environment(id, **json.loads(arguments))
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


class Verifiers(Foreign):
    """id: the environment's package, as `vf.load_environment` takes it. Payload: `row` of its data set."""

    name = "verifiers"
    Session = Driven

    def check(self) -> None:
        library("verifiers", "verifiers")
        self.make()

    def make(self) -> Any:
        return _load(self.settings.id, json.dumps(dict(self.settings.arguments), sort_keys=True))

    def problem(self, rng: random.Random) -> dict[str, Any]:
        return {"row": rng.randrange(len(self.make().get_dataset()))}

    def session(self, task: Task) -> Session:
        env = self.make()

        async def story(ask: Ask) -> Reply:
            agent = _agent(ask)
            state = await env.run_rollout(env.get_dataset()[task.payload["row"]], agent, "agent", {})
            if state["error"]:
                raise RuntimeError(f"{self.settings.id}: {state['error']!s:.300}")
            last = _texts((state["completion"] or [])[agent.seen - len(state["prompt"]):])
            return Reply(last, state["reward"], True, bool(state["is_truncated"]))

        return Driven(story, task)


def _agent(ask: Ask) -> Any:
    """A client of verifiers whose model is the agent."""
    clients, types = library("verifiers.clients", "verifiers"), library("verifiers.types", "verifiers")

    async def get_response(self: Any, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        new = _texts(prompt[self.seen:])
        listed = tool_list(tools or []) if not self.seen else ""
        text = await ask(Reply((Message("system", listed), *new) if listed else new))
        self.seen = len(prompt) + 1
        calls = [types.ToolCall(id=f"call{i}", name=call.name, arguments=json.dumps(dict(call.arguments)))
                 for i, call in enumerate(parse(text, "tags")) if call.name in {tool.name for tool in tools or []}]
        message = types.ResponseMessage(content=text, tool_calls=calls or None, is_truncated=False,
                                        finish_reason="tool_calls" if calls else "stop")
        return types.Response(id="rollart", created=0, model=model, message=message)

    stubs = dict.fromkeys(clients.Client.__abstractmethods__)
    return type("Agent", (clients.Client,), {**stubs, "get_response": get_response, "seen": 0})(object())


def _texts(messages: Any) -> tuple[Message, ...]:
    """Messages of verifiers as ours; parts of a content are joined."""
    out = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "\n".join(str(part.get("text", "")) for part in content)
        out.append(Message(str(message.get("role", "user")), content))
    return tuple(out)


@dataclass(frozen=True, kw_only=True)
class McpSettings(ForeignSettings):
    """id: the command that starts the server on standard input and output, or its URL (streamable HTTP).

    tasks: a file of lines `{"question": ..., "answer": ...}`; the agent calls tools and ends with `answer ...`.
    """

    tasks: str = ""


class Mcp(Foreign):
    """Payload: `question` and `answer`. Reward 1 for the answer, 0 for another one."""

    name = "mcp"
    rules = "Use the tools, one or more a turn. End with: answer X"
    Settings, Session = McpSettings, Driven

    def check(self) -> None:
        library("mcp", "mcp")
        self.rows = []
        for number, line in enumerate(Path(self.settings.tasks).read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                self.rows.append({"question": str(row["question"]), "answer": str(row["answer"])})
            except (ValueError, TypeError, KeyError):
                where = f"{self.settings.tasks}:{number}"
                raise ValueError(f'{where}: a line must be {{"question": ..., "answer": ...}}') from None

    def problem(self, rng: random.Random) -> dict[str, Any]:
        if not self.rows:
            raise ConfigError(f"domain {self.name}: {self.settings.tasks} has no tasks")
        return dict(rng.choice(self.rows))

    def session(self, task: Task) -> Session:
        return Driven(functools.partial(self._story, task), task)

    async def _story(self, task: Task, ask: Ask) -> Reply:
        mcp, id = library("mcp", "mcp"), self.settings.id
        async with AsyncExitStack() as stack:
            if id.startswith(("http://", "https://")):
                opened = library("mcp.client.streamable_http", "mcp").streamable_http_client(id)
            else:
                command, *arguments = shlex.split(id)
                opened = mcp.stdio_client(mcp.StdioServerParameters(command=command, args=arguments))
            streams = await stack.enter_async_context(opened)
            server = await stack.enter_async_context(mcp.ClientSession(*streams[:2]))
            await server.initialize()
            tools = [SimpleNamespace(name=tool.name, description=tool.description, parameters=tool.input_schema if
                                     hasattr(tool, "input_schema") else tool.inputSchema)  # versions 2 and 1
                     for tool in (await server.list_tools()).tools]
            said = Reply((Message("user", f"{task.payload['question']}\n{tool_list(tools)}"),))
            while True:
                text = await ask(said)
                if found := re.search(r"(?:^|\s)answer\s+(.+?)\s*$", text):
                    return Reply((), float(found[1] == task.payload["answer"]), True)
                calls = [call for call in parse(text, "tags") if call.name in {tool.name for tool in tools}]
                answers = [await server.call_tool(call.name, dict(call.arguments)) for call in calls]
                said = Reply(tuple(Message("tool", _said(answer)) for answer in answers) if calls else
                             (Message("user", "? call a tool, or: answer X"),), valid=bool(calls))


def _said(result: Any) -> str:
    return "\n".join(part.text for part in result.content if hasattr(part, "text"))
