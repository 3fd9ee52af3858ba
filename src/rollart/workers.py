"""The workers that ship: one process of each role, whose part is made from the recipe inside that process.

Keeps true: the part is the same that runs in one process without Ray. `spec` is plain data: `recipe` (as `to_json`
gives it), `model` and `reference` (folders that every node sees); an engine's `id`, `pool`, a learner's `rank`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from rollart.config.recipe import Recipe, from_tables
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.ports import Environment, Prefetching
from rollart.core.types import Action, Manifest, Observation, Task
from rollart.distributed.api import Role, Worker
from rollart.parts import make_engine, make_environments, make_trainer
from rollart.policy import Policy, load_policy


class RecipeWorker(Worker):
    """What all of them share."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        super().__init__(spec)
        self.recipe: Recipe = from_tables(spec["recipe"])

    def policy(self, name: str = "model") -> Policy:
        """The model called so in the spec. Raises ConfigError where this node does not see its folder."""
        folder = Path(self.spec[name])
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not on this node: put the model and the run folder on a file system that "
                              "every node mounts at the same path")
        return load_policy(folder, self.recipe)


class EngineWorker(RecipeWorker):
    """One engine, as the core's Engine port."""

    role: ClassVar[Role] = Role.ACTOR_GEN

    def build(self) -> Any:
        from rollart.backends.weights import open_reader

        reader = open_reader(self.recipe.weights)
        return make_engine(self.spec["id"], self.spec["pool"], self.recipe, self.policy(), reader)

    async def prefetch(self, manifest: Manifest) -> None:
        if isinstance(self.part, Prefetching):
            await self.part.prefetch(manifest)


class LearnerWorker(RecipeWorker):
    """The learner, whole in one process, as the core's Trainer port."""

    role: ClassVar[Role] = Role.ACTOR_TRAIN

    def build(self) -> Any:
        from rollart.backends.weights import open_writer

        reference = self.policy("reference").model if "reference" in self.spec else None
        self._writer = open_writer(self.recipe.weights)
        return make_trainer(self.recipe, self.policy(), reference, self._writer)

    async def close(self) -> None:
        await super().close()
        self._writer.close()


class RankWorker(Worker):
    """One rank of the learner; what it is to do comes from the RankedTrainer in the driver."""

    role: ClassVar[Role] = Role.ACTOR_TRAIN

    async def start(self) -> None:
        from rollart.backends.torch.ranks import RankWorker as Rank

        self.part = Rank()

    def listen(self, host: str) -> str:
        """As other nodes reach this one."""
        import ray

        return self.part.listen(ray.util.get_node_ip_address())

    def begin(self, *arguments: Any) -> None:
        self.part.start(*arguments)


class EnvironmentsWorker(RecipeWorker):
    """Many environments on one node, each in a process of its own and known by a number."""

    role: ClassVar[Role] = Role.ENVIRONMENT

    def build(self) -> Any:
        self._open: dict[int, Environment] = {}
        self._numbers = itertools.count(1)
        return make_environments(self.recipe)

    async def open(self, task: Task) -> tuple[int, Observation]:
        """Its number and its first observation."""
        environment = await self.part.open(task)
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
