"""S3 clients used bare: what a program would call that has nothing between it and the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import s3fs
from botocore.config import Config
from botocore.session import Session
from s3_server import S3Account

MISSING = "obstore is not installed, so S3 was compared without it: pip install -e '.[dev]'"


@dataclass(frozen=True)
class Client:
    """put(name, data), get(name, into): whole objects, from any thread. into: as long as the object."""

    put: Callable[[str, memoryview], object]
    get: Callable[[str, memoryview], object]


def clients(server: S3Account, connections: int) -> dict[str, Client]:
    """All that are installed, by name."""
    found = {"boto3's client (botocore)": _botocore(server, connections), "s3fs": _s3fs(server)}
    return found | ({"obstore": _obstore(server)} if find_spec("obstore") else {})


def _botocore(server: S3Account, connections: int) -> Client:
    """boto3.client("s3") makes the same one; s3fs brings botocore but not boto3."""
    client = Session().create_client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
        config=Config(max_pool_connections=connections),
    )

    def put(name: str, data: memoryview) -> None:
        client.put_object(Bucket=server.bucket, Key=name, Body=bytes(data))

    def get(name: str, into: memoryview) -> None:
        body = client.get_object(Bucket=server.bucket, Key=name)["Body"]
        done = 0
        while done < len(into):
            done += body.readinto(into[done:])

    return Client(put, get)


def _s3fs(server: S3Account) -> Client:
    fs = s3fs.S3FileSystem(**server.storage_options, use_listings_cache=False, skip_instance_cache=True)

    def get(name: str, into: memoryview) -> None:
        into[:] = fs.cat_file(f"{server.bucket}/{name}")

    return Client(lambda name, data: fs.pipe_file(f"{server.bucket}/{name}", bytes(data)), get)


def _obstore(server: S3Account) -> Client:
    import obstore
    from obstore.store import S3Store

    store: Any = S3Store(
        server.bucket,
        endpoint=server.endpoint_url,
        access_key_id=server.key,
        secret_access_key=server.secret,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def get(name: str, into: memoryview) -> None:
        into[:] = memoryview(obstore.get(store, name).bytes())

    return Client(lambda name, data: obstore.put(store, name, data, use_multipart=False), get)
