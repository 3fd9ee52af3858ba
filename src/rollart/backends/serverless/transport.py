"""One attempt of one call: bytes to a function and its bytes back, over HTTP or to Lambda.

Keeps true: an answer above its limit is not read; cancelling an attempt frees its connection; no secret is in an error.
Waits for the function, at most the seconds that the caller states.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollart.backends.serverless.http import HttpClient, TooLong
from rollart.core.errors import ConfigError
from rollart.core.foreign import read_json
from rollart.rewards.settings import CallSettings


class Broken(Exception):
    """The attempt did not get an answer: refused, cut off, late. It may be repeated."""


class TooLarge(Exception):
    """The answer is above its limit. A repetition would not change that."""


@dataclass(frozen=True, slots=True)
class Reply:
    """status: HTTP's. retry_after: seconds that the function asked to be left alone."""

    status: int
    body: bytes
    retry_after: float = 0.0


class Transport(Protocol):
    """`key`: of the request, for platforms that keep answers. Raises Broken, TooLarge."""

    name: str

    async def send(self, body: bytes, key: str, seconds: float) -> Reply: ...
    async def close(self) -> None: ...


class HttpTransport:
    """A function's URL. Raises ConfigError for what is no URL, and where the token is not there."""

    def __init__(self, url: str, settings: CallSettings) -> None:
        self.name = url.partition("?")[0]  # what follows may be a key
        self._limit = int(settings.answer_mb * 1_000_000)
        headers = {"Content-Type": "application/json", "User-Agent": "rollart"}
        if settings.token_env:
            if not os.environ.get(settings.token_env):
                raise ConfigError(f"reward.call.token_env names {settings.token_env}: set that environment variable")
            headers["Authorization"] = f"Bearer {os.environ[settings.token_env]}"
        try:
            self._client = HttpClient(url, headers, self._limit)
        except ValueError as error:
            raise ConfigError(f"reward.where: {error}") from None

    async def send(self, body: bytes, key: str, seconds: float) -> Reply:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.post(body, {"Idempotency-Key": key} if key else {})
        except TimeoutError:
            raise Broken(f"no answer within {seconds:g} s") from None
        except TooLong:
            raise TooLarge(f"its answer is above reward.call.answer_mb = {self._limit / 1e6:g}") from None
        except asyncio.IncompleteReadError:
            raise Broken("it hung up before its answer was whole") from None
        except (OSError, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        return Reply(answer.status, answer.body, _seconds(answer.headers.get("retry-after", "")))

    async def close(self) -> None:
        self._client.close()


@dataclass
class LambdaTransport:
    """An AWS Lambda function by name or ARN; region and credentials come from the environment, as boto3 reads them."""

    function: str
    settings: CallSettings
    seconds: float
    name: str = ""
    _client: Any = None
    _threads: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"lambda:{self.function}"
        threads = min(self.settings.concurrency, 64)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="lambda")
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ModuleNotFoundError:
            raise ConfigError("rewards on Lambda need boto3: pip install 'rollart[serverless]'") from None
        try:
            self._client = boto3.client("lambda", config=Config(
                max_pool_connections=threads, retries={"total_max_attempts": 1}, read_timeout=self.seconds,
                connect_timeout=min(10.0, self.seconds)))
        except BotoCoreError as error:
            raise ConfigError(f"{self.name} cannot be called: {error}") from None

    async def send(self, body: bytes, key: str, seconds: float) -> Reply:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                return await loop.run_in_executor(self._threads, self._invoke, body)
        except TimeoutError:
            raise Broken(f"no answer within {seconds:g} s") from None

    def _invoke(self, body: bytes) -> Reply:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer = self._client.invoke(FunctionName=self.function, Payload=body)
        except ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500))
            code = error.response.get("Error", {}).get("Code", "")
            return Reply(429 if code == "TooManyRequestsException" else status, code.encode())
        except BotoCoreError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        limit = int(self.settings.answer_mb * 1_000_000)
        payload = answer["Payload"].read(limit + 1)
        if len(payload) > limit:
            raise TooLarge(f"its answer is above reward.call.answer_mb = {self.settings.answer_mb:g}")
        if answer.get("FunctionError"):  # the runtime's own error: it crashed, ran out of memory or time
            return Reply(502, payload)
        return Reply(_lambda_status(payload), payload)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lambda_status(payload: bytes) -> int:
    """Lambda has no status of its own: that of the error in the answer, as the same function has over HTTP."""
    from rollart.rewards.handler import STATUS

    try:
        plain = read_json(payload)
    except ValueError:
        return 200  # told apart where it is read
    error = plain.get("error") if isinstance(plain, dict) else None
    return STATUS.get(error.get("kind", ""), 500) if isinstance(error, dict) else 200


def _seconds(text: str) -> float:
    """Retry-After in seconds, at most a minute; dates and nonsense are 0."""
    return min(float(text), 60.0) if text.isdecimal() else 0.0
