"""The workers that ship: one process of each role, made from the recipe inside that process.

Subclass one, override `build` or a method, and name the subclass in the recipe's [cluster.workers].

Keeps true: the worker's part is the same that runs in one process without Ray. `spec` holds plain data: `recipe` (as
`to_json` gives it), `model` and `reference` (a folder that every node sees, or the files of one), and by role `id`,
`pool`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollart.config.recipe import Recipe, from_tables
from rollart.core.errors import ConfigError, EnvironmentFailed, ScorerFailed
from rollart.core.ports import Environment
from rollart.core.types import (
    Action,
    Completion,
    GenerateRequest,
    Manifest,
    Observation,
    Score,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryId,
    Version,
)
from rollart.distributed.api import Role, Worker, register
from rollart.parts import make_engine, make_environments, make_trainer
from rollart.policy import Policy, load_policy
from rollart.rewards.contract import RewardRequest


class _Recipe(Worker):
    """What all of them share."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.recipe: Recipe = from_tables(spec["recipe"])

    def policy(self, name: str = "model") -> Policy:
        """The model called so in the spec. Raises ConfigError where this node does not see its folder."""
        return load_policy(unpack(self.spec[name]), self.recipe)


class EmbeddedEngineWorker(_Recipe):
    """An engine of small models, on a thread of this process."""

    role: ClassVar[Role] = Role.ACTOR_GEN

    def build(self) -> Any:
        from rollart.backends.weights import open_reader

        return make_engine(self.spec["id"], self.spec["pool"], self.recipe, self.policy(),
                           open_reader(self.recipe.weights))

    async def start(self) -> None:
        self.engine = self.build()
        self.engine.start()

    async def close(self) -> None:
        await self.engine.close()

    @register(mode="execute_all")
    async def generate(self, request: GenerateRequest) -> Completion:
        return await self.engine.generate(request)

    @register(mode="execute_all")
    async def suspend(self) -> None:
        await self.engine.suspend()

    @register(mode="execute_all")
    async def load_weights(self, manifest: Manifest) -> None:
        await self.engine.load_weights(manifest)

    @register(mode="execute_all")
    async def resume(self) -> None:
        await self.engine.resume()

    @register(mode="execute_all")
    async def release(self, trajectory: TrajectoryId) -> None:
        self.engine.release(trajectory)

    def stats(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.engine.stats())


class LearnerWorker(_Recipe):
    """The learner, whole in one process."""

    role: ClassVar[Role] = Role.ACTOR_TRAIN

    def build(self) -> Any:
        from rollart.backends.weights import open_writer

        reference = self.policy("reference").model if "reference" in self.spec else None
        return make_trainer(self.recipe, self.policy(), reference, open_writer(self.recipe.weights))

    async def start(self) -> None:
        self.trainer = self.build()

    async def close(self) -> None:
        self.trainer.close()

    @register(mode="execute_all")
    async def step(self, batch: TrainBatch) -> StepReport:
        return await self.trainer.step(batch)

    @register(mode="execute_all")
    async def publish(self, version: Version) -> Manifest:
        return await self.trainer.publish(version)

    @register(mode="execute_all")
    async def retire(self, manifest: Manifest) -> None:
        await self.trainer.retire(manifest)

    @register(mode="execute_all")
    async def save(self, folder: str) -> None:
        await self.trainer.save(Path(folder))

    @register(mode="execute_all")
    async def load(self, folder: str) -> Version:
        await self.trainer.load(Path(folder))
        return self.trainer.version


class EnvironmentsWorker(_Recipe):
    """Many environments on one node, each in a process of its own."""

    role: ClassVar[Role] = Role.ENVIRONMENT

    def build(self) -> Any:
        return make_environments(self.recipe)

    async def start(self) -> None:
        self.pool = self.build()
        self._open: dict[int, Environment] = {}
        self._numbers = itertools.count(1)

    async def close(self) -> None:
        await self.pool.close()

    async def open(self, task: Task) -> tuple[int, Observation]:
        """Opens one; returns its number and the first observation."""
        environment = await self.pool.open(task)
        number = next(self._numbers)
        self._open[number] = environment
        return number, await environment.first()

    async def step(self, number: int, action: Action) -> Observation:
        if number not in self._open:
            raise EnvironmentFailed(f"environment {number} is closed")
        return await self._open[number].step(action)

    async def close_one(self, number: int) -> None:
        if environment := self._open.pop(number, None):
            await environment.close()

    def stats(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.pool.stats())


class RewardWorker(_Recipe):
    """The domains' reward functions, in this process, one call at a time in each thread."""

    role: ClassVar[Role] = Role.REWARD

    async def start(self) -> None:
        from rollart.rewards.domains import reward_function

        named = self.recipe.reward.functions
        self.functions = {d: reward_function(named.get(d, self.recipe.domain(d).reward)) for d in self.recipe.domains}

    def score(self, request: RewardRequest) -> Score:
        """Raises ScorerFailed, whatever the function raised."""
        from rollart.rewards.contract import call

        try:
            return call(self.functions[request.domain], [request])[0]
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is a failed score
            raise ScorerFailed(f"{request.id}: score in domain {request.domain}: {type(error).__name__}: {error}"
                               ) from None


def pack(folder: Path) -> dict[str, bytes]:
    """The files of a model folder, to be sent to nodes that do not see it."""
    return {f.name: f.read_bytes() for f in sorted(folder.iterdir()) if f.is_file()}


def unpack(model: str | Mapping[str, bytes]) -> Path:
    """A folder on this node. Raises ConfigError where it is named and not here."""
    if isinstance(model, str):
        if not Path(model).is_dir():
            raise ConfigError(f"{model} is not on this node: put the model and the run folder on a file system that "
                              "every node mounts at the same path")
        return Path(model)
    digest = hashlib.blake2b(b"".join(model.values()), digest_size=8).hexdigest()
    target = Path(tempfile.gettempdir()) / f"rollart-model-{digest}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as part:
            made = Path(part) / "model"
            made.mkdir()
            for name, content in model.items():
                (made / name).write_bytes(content)
            try:
                made.rename(target)
            except OSError:
                pass  # another process was faster
    return target
