"""One attempt of one call: bytes to a function and its bytes back, over HTTP or to Lambda.

Keeps true: an answer above its limit is not read; cancelling an attempt frees its connection; no secret is in an error.
Waits for the function, at most the seconds that the caller states.
"""

from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from rollart.core.errors import ConfigError
from rollart.rewards.settings import CallSettings

if TYPE_CHECKING:
    import httpx


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
    """A function's URL. Raises ConfigError where httpx is not installed or the token is not there."""

    def __init__(self, url: str, settings: CallSettings) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError("rewards behind a URL need httpx: pip install 'rollart[serverless]'") from None
        self.name, self._url = url, url
        self._limit = int(settings.answer_mb * 1_000_000)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if settings.token_env:
            if not os.environ.get(settings.token_env):
                raise ConfigError(f"reward.call.token_env names {settings.token_env}: set that environment variable")
            headers["Authorization"] = f"Bearer {os.environ[settings.token_env]}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=settings.concurrency)
        self._client = httpx.AsyncClient(limits=limits, headers=headers, timeout=None, follow_redirects=False)
        self._httpx = httpx

    async def send(self, body: bytes, key: str, seconds: float) -> Reply:
        try:
            async with asyncio.timeout(seconds):
                async with self._client.stream("POST", self._url, content=body,
                                               headers={"Idempotency-Key": key}) as answer:
                    return Reply(answer.status_code, await self._read(answer), _seconds(answer.headers))
        except TimeoutError:
            raise Broken(f"no answer within {seconds:g} s") from None
        except (self._httpx.TransportError, self._httpx.StreamError) as error:
            raise Broken(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None
        except self._httpx.InvalidURL as error:
            raise ConfigError(f"{self._url} is not a URL: {error}") from None

    async def _read(self, answer: httpx.Response) -> bytes:
        out = bytearray()
        async for part in answer.aiter_raw():
            out += part
            if len(out) > self._limit:
                raise TooLarge(f"its answer is above reward.call.answer_mb = {self._limit / 1e6:g}")
        return bytes(out)

    async def close(self) -> None:
        await self._client.aclose()


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
        plain = json.loads(payload)
    except ValueError:
        return 200  # told apart where it is read
    error = plain.get("error") if isinstance(plain, dict) else None
    return STATUS.get(error.get("kind", ""), 500) if isinstance(error, dict) else 200


def _seconds(headers: Any) -> float:
    """Retry-After in seconds; dates and nonsense are 0."""
    try:
        return max(0.0, min(float(headers.get("Retry-After", 0)), 60.0))
    except ValueError:
        return 0.0
