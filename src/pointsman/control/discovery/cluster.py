"""The API server of a Kubernetes cluster, spoken to as a service account or with a kubeconfig.

`kubernetes_asyncio` finds it and proves who asks; only its connection is used, since its objects cost more than they
give. It comes with the extra `k8s`, and is loaded with the first request. Whatever goes wrong is a `Gap`. Credentials
are read anew after they were refused, and after the server could not be asked: a token that was rotated is no reason to
fail twice.
"""

import asyncio
import importlib.util
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pointsman.control.discovery.reflection import Gap, refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aiohttp import ClientResponse, ClientTimeout
    from kubernetes_asyncio.client import ApiClient

__all__ = ["ApiServer", "KubernetesMissing"]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the credentials of its account."""

NO_NAMESPACE = "default"
"""The namespace of those who are in none."""

SERVICE_HOST = "KUBERNETES_SERVICE_HOST"
"""The environment variable that every pod has."""

CONNECT_S = 30.0
"""How long it may take to find the API server and its credentials."""

UNAUTHORIZED = 401

REFUSAL = 4096
"""How much is read of an answer that refuses, in bytes."""


class KubernetesMissing(Exception):
    """The extra `k8s` is not installed."""


class ApiServer:
    """The API server that KUBECONFIG names, or that of the cluster that we run in, or that of `~/.kube/config`.

    `namespace` is that of our pod, `default` outside a cluster. Raises KubernetesMissing.
    """

    def __init__(
        self, environ: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
    ) -> None:
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise KubernetesMissing(
                "discovery in Kubernetes needs an extra: pip install 'pointsman[k8s]'"
            )
        self._environ = environ
        self._account = account
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        try:
            self.namespace = (account / "namespace").read_text().strip()
        except OSError:
            self.namespace = NO_NAMESPACE

    async def get(self, path: str, query: Mapping[str, str], limit_s: float) -> bytes:
        """Return the body of an answer, within a limit in seconds. Raises Gap where its status is not 200."""
        from aiohttp import ClientTimeout

        async with self._answer(path, query, ClientTimeout(total=limit_s)) as answer:
            return await answer.read()

    async def watch(
        self, path: str, query: Mapping[str, str], limit_s: float, silence_s: float
    ) -> AsyncGenerator[bytes]:
        """Yield b"" when the answer has begun, then its lines.

        Raises Gap where it breaks off, takes longer than `limit_s`, or brings nothing for `silence_s`.
        """
        from aiohttp import ClientTimeout

        timeout = ClientTimeout(total=limit_s, sock_connect=silence_s, sock_read=silence_s)
        async with self._answer(path, query, timeout) as answer:
            yield b""
            while line := await answer.content.readline():
                if not line.endswith(b"\n"):
                    raise Gap("a watch was cut off in the middle of an event")
                yield line

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    @asynccontextmanager
    async def _answer(
        self, path: str, query: Mapping[str, str], timeout: "ClientTimeout"
    ) -> "AsyncIterator[ClientResponse]":
        from aiohttp import ClientError

        answer = await self._ask(path, query, timeout)
        try:
            if answer.status != 200:
                if answer.status == UNAUTHORIZED:
                    await self.close()
                said = refusal(await answer.content.read(REFUSAL))
                raise Gap(f"{answer.status} {answer.reason}: {said}", answer.status)
            yield answer
        except TimeoutError:
            raise Gap("an answer of the API server stopped in the middle") from None
        except (ClientError, OSError, ValueError) as error:
            raise Gap(f"an answer of the API server broke off: {error}") from None
        finally:
            answer.close()

    async def _ask(
        self, path: str, query: Mapping[str, str], timeout: "ClientTimeout"
    ) -> "ClientResponse":
        from aiohttp import ClientError
        from kubernetes_asyncio.config import ConfigException

        try:
            client = await self._connected()
            answer: ClientResponse = await client.call_api(
                path,
                "GET",
                query_params=list(query.items()),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
                _preload_content=False,
                _request_timeout=timeout,
            )
        except TimeoutError:
            await self.close()
            raise Gap("the API server does not answer in time") from None
        except (ClientError, ConfigException, OSError, ValueError) as error:
            await self.close()
            raise Gap(f"the API server cannot be asked: {error}") from None
        return answer

    async def _connected(self) -> "ApiClient":
        # A plug-in that fetches credentials may hang, and whoever waits for the lock waits for it too.
        async with asyncio.timeout(CONNECT_S), self._connecting:
            if self._client is None:
                # It has a module for each of some hundred kinds of object, which takes seconds to load.
                await asyncio.to_thread(importlib.import_module, "kubernetes_asyncio.client")
                self._client = await self._new_client()
            return self._client

    async def _new_client(self) -> "ApiClient":
        from kubernetes_asyncio.client import ApiClient, Configuration
        from kubernetes_asyncio.config import load_incluster_config, load_kube_config

        configuration = Configuration()
        if "KUBECONFIG" not in self._environ and SERVICE_HOST in self._environ:
            load_incluster_config(  # type: ignore[no-untyped-call]
                configuration,
                token_filename=self._account / "token",
                cert_filename=self._account / "ca.crt",
                environ=self._environ,
            )
        else:
            file = self._environ.get("KUBECONFIG", "~/.kube/config")
            await load_kube_config(config_file=file, client_configuration=configuration)
        return ApiClient(configuration)
