"""Where the model of a run comes from, and how it speaks: a folder, or a small one that is warm-started.

Keeps true: a warm start is made once for all that it depends on, and kept in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollart.config.recipe import Recipe
from rollart.core.clock import draw
from rollart.core.errors import ConfigError
from rollart.core.tokens import Counted, floats, ids, join
from rollart.core.types import Completion, Finish
from rollart.envs.demonstrations import Demonstration, demonstrations

if TYPE_CHECKING:
    from rollart.backends.torch.chat import Chat
    from rollart.backends.torch.shapes import ModelConfig
    from rollart.backends.torch.transformer import Transformer

Progress = Callable[[str, int, int, float | None], None]
"""Called with what is done, its step, the number of steps, and the loss where there is one."""


@dataclass
class Policy:
    """A model and how it speaks. `folder` has it, unless it was made on the spot; then the model is read when used."""

    config: ModelConfig
    chat: Chat
    folder: Path | None = None
    made: Transformer | None = None

    @property
    def model(self) -> Transformer:
        """Raises ConfigError where the folder holds no whole model."""
        from rollart.backends.torch.checkpoint import load_model

        if self.made is None:
            assert self.folder is not None
            self.made = load_model(self.folder)
        return self.made


def load_policy(folder: Path, recipe: Recipe) -> Policy:
    """From a Hugging Face checkpoint folder, with the recipe's way to chat. Raises ConfigError."""
    from rollart.backends.torch.chat import load_chat
    from rollart.backends.torch.checkpoint import load_config

    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist: set model.path to a Hugging Face checkpoint folder")
    return Policy(load_config(folder), load_chat(folder, recipe.chat), folder)


def first_policy(recipe: Recipe, progress: Progress = lambda *_: None) -> Policy:
    """The model that a new run starts from: a folder, or the small one, warm-started if the recipe says so.

    Warm starts are kept in the user's cache folder, under all that they depend on.
    """
    from rollart.backends.torch import warm_start as warm
    from rollart.backends.torch.chat import ByteChat
    from rollart.backends.torch.checkpoint import save_model
    from rollart.backends.torch.threads import available
    from rollart.backends.torch.transformer import small_model

    def base() -> Policy:
        if recipe.model.path:
            return load_policy(Path(recipe.model.path), recipe)
        model = small_model(recipe.model.small, draw(recipe.seed, "model"))
        return Policy(model.config, ByteChat(), made=model)

    if recipe.warm_start is None:
        return base()
    if recipe.model.path and not Path(recipe.model.path).is_dir():
        return base()  # says that it does not exist
    key = _warm_key(recipe)
    found = warm.cached(cache_folder(), key)
    if found is None:
        policy = base()
        context_tokens(recipe, policy)  # what does not fit together is said before minutes of imitation
        _check_cache()
        warm.imitate(policy.model, _imitation(recipe, policy.chat, progress), recipe.warm_start, len(available()),
                     lambda step, steps, loss: progress("warm start", step, steps, loss))
        try:
            found = warm.store(cache_folder(), key, lambda folder: save_model(policy.model, folder, policy.chat))
        except OSError:  # the disk is full by now: this run has it all the same
            return policy
    return load_policy(found, recipe)


def context_tokens(recipe: Recipe, policy: Policy) -> int:
    """The longest trajectory in tokens. Raises ConfigError where model, chat and settings do not fit together."""
    model, needed = policy.config, policy.chat.vocabulary_size
    if model.vocabulary < needed:
        raise ConfigError(f"the chat has {needed} token ids, the model {model.vocabulary}: raise its vocabulary")
    context = recipe.rollout.context_tokens or recipe.engine.context_tokens or model.context_tokens
    if context > model.context_tokens:
        raise ConfigError(f"a context of {context} tokens was asked for, the model has {model.context_tokens}: lower "
                          "rollout.context_tokens or engine.context_tokens")
    held = recipe.engine.context_tokens or model.context_tokens
    if held > recipe.engine.kv_tokens:
        raise ConfigError(f"engine.kv_tokens must hold one whole context of {held} tokens; got "
                          f"{recipe.engine.kv_tokens}: raise it, or lower engine.context_tokens")
    return context


def cache_folder() -> Path:
    """Where warm starts are kept: $ROLLART_CACHE, or rollart/ in the user's cache folder. Raises ConfigError for a user
    who has none."""
    if own := os.environ.get("ROLLART_CACHE"):
        return Path(own) / "warm_start"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart" / "warm_start"
    except RuntimeError:  # neither HOME nor an entry among the users
        raise ConfigError("a warm start is kept in a cache folder, and this user has no home: set the environment "
                          "variable ROLLART_CACHE to a folder") from None


def _check_cache() -> None:
    """Raises ConfigError where nothing can be written to the cache."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"the warm start is kept in {folder}, which cannot be written ({error.strerror}): set the "
                          "environment variable ROLLART_CACHE to a folder that can") from None


def _warm_key(recipe: Recipe) -> dict[str, Any]:
    plain = recipe.to_json()
    domains = {name: {k: v for k, v in table.items() if k not in ("weight", "latency")}
               for name, table in plain["domains"].items()}
    files = []
    if recipe.model.path:
        files = [(str(f), f.stat().st_size, f.stat().st_mtime_ns)
                 for f in sorted(Path(recipe.model.path).resolve().iterdir())]
    key = {"model": plain["model"], "files": files, "warm_start": plain["warm_start"], "domains": domains,
           "seed": recipe.seed, "code": _code_hash(recipe)}
    return json.loads(json.dumps(key))  # type: ignore[no-any-return]


def _code_hash(recipe: Recipe) -> str:
    """Of the code that a warm start depends on: players and texts of its domains, chat, model, imitation."""
    from rollart.backends.torch import chat, moe, optimizer, scoring, shapes, transformer, warm_start
    from rollart.envs import demonstrations as playing

    modules = [sys.modules[type(recipe.domain(name)).__module__] for name in recipe.domains]
    used = {str(getattr(value, "__module__", "")) for module in modules for value in vars(module).values()}
    modules += [sys.modules[name] for name in sorted(used) if name.startswith("rollart.envs.")]
    digest = hashlib.sha256()
    for module in (*modules, chat, moe, optimizer, scoring, shapes, transformer, warm_start, playing):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def _imitation(recipe: Recipe, chat: Chat, progress: Progress) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Demonstrations of every domain as (ids, mask), mask 1 on the player's actions."""
    settings = recipe.warm_start
    assert settings is not None
    sequences: list[tuple[Sequence[int], Sequence[int]]] = []
    total = sum(settings.episodes.get(name, settings.demonstrations) for name in recipe.domains)
    for name in recipe.domains:
        rate = settings.error_rates.get(name, settings.error_rate)
        count = settings.episodes.get(name, settings.demonstrations)
        levels = recipe.domains[name].levels(name)
        for level in levels:
            for episode in demonstrations(level, -(-count // len(levels)), seed=draw(recipe.seed, "demo"),
                                          error_rate=rate):
                sequences.append(_rendered(chat, episode))
                if len(sequences) % 50 == 0:
                    progress("demonstrations", len(sequences), total, None)
    return sequences


def _rendered(chat: Chat, episode: Demonstration) -> tuple[Sequence[int], Sequence[int]]:
    """A demonstration as the tokens that a rollout of the same words would have."""
    out = join(chat.prompt(episode.start.messages))
    mask = [0] * len(out)
    for i, text in enumerate(episode.actions):
        action = chat.action(text)
        said = Completion(action, floats([0.0] * len(action)), ((0, 0),), Finish.STOP)
        last = i + 1 == len(episode.actions)
        reply = ids() if last else chat.reply(said, episode.observations[i].messages)
        out = join(out, action, reply)
        mask += [1] * len(action) + [0] * len(reply)
    assert not isinstance(out, Counted)
    return out, mask
